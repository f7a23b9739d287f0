"""Runs at a URI: what is copied when, and that another machine goes on to the same numbers.
`file://` stands for a store.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from crossfed.platform import uris
from crossfed.platform.config.settings import RunConfig, build
from crossfed.platform.console import make_progress
from crossfed.platform.errors import CrossfedError
from crossfed.platform.federation import mirror
from crossfed.platform.federation.mirror import Mirror
from crossfed.platform.federation.rounds import Round
from crossfed.platform.federation.runs import fetch_run, stored_config
from crossfed.platform.report.recording import run_recorded


class Stop(Exception):
    """Raised after a chosen round, in place of a crash."""


def config(
    shops: Path, out: Path, *sets: str, method: str = "AVERAGE", uri: str | None = None
) -> RunConfig:
    values = {
        "data": shops,
        "out": out,
        "backend": "inprocess",
        "tracking.enabled": False,
        "tracking.artifacts": False,
    }
    return build(f"toys:{method}", sets=["rounds=5", *sets], values=values | {"mirror": uri})


def interrupted(configuration: RunConfig, after: int = 4) -> Path:
    """The directory of a run that was interrupted before round `after` was committed."""
    started: list[Path] = []

    def stop(row: Round) -> None:
        if row.step == after:
            raise Stop

    with pytest.raises(Stop):
        run_recorded(configuration, on_round=stop, started=started.append)
    return started[0]


def numbers(run_dir: Path) -> dict[str, Any]:
    result = json.loads((run_dir / "result.json").read_text())
    history = [json.loads(line) for line in (run_dir / "history.jsonl").read_text().splitlines()]
    return {
        "history": [row | {"seconds": 0} for row in history],
        **{key: result[key] for key in ("domains", "bytes")},
    }


def resume(run_dir: Path) -> dict[str, Any]:
    run_recorded(stored_config(run_dir), resume=run_dir)
    return numbers(run_dir)


@pytest.fixture(scope="module")
def straight(shops: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The numbers of a run that nothing happens to."""
    return numbers(run_recorded(config(shops, tmp_path_factory.mktemp("straight"))).run_dir)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


def test_another_machine_goes_on_to_the_same_numbers(
    shops: Path, tmp_path: Path, store: Path, straight: dict[str, Any]
) -> None:
    here = interrupted(config(shops, tmp_path / "here", uri=store.as_uri()))
    name = here.name
    shutil.rmtree(tmp_path / "here")
    there = fetch_run(f"{store.as_uri()}/{name}/", tmp_path / "there")
    assert there == tmp_path / "there" / name and not [
        path for path in there.parent.iterdir() if path != there
    ]
    assert resume(there) == straight
    assert numbers(store / name) == straight, "the results are copied, too"
    assert {"model", "config.yaml", "data.json", "ledger.parquet"} <= {
        path.name for path in (store / name).iterdir()
    }
    assert not (store / name / ".lock").exists()


def test_only_two_commits_stay_and_the_newest_is_there(
    shops: Path, tmp_path: Path, store: Path
) -> None:
    here = interrupted(config(shops, tmp_path / "here", uri=store.as_uri()))
    for folder in (here, store / here.name):
        assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [
            "commit-000002",
            "commit-000003",
        ]


@pytest.mark.parametrize("damage", ["no manifest", "half a file", "a missing file"])
def test_a_commit_that_is_not_whole_is_not_used(
    damage: str, shops: Path, tmp_path: Path, store: Path, straight: dict[str, Any]
) -> None:
    here = interrupted(config(shops, tmp_path / "here", uri=store.as_uri()))
    newest = store / here.name / "checkpoints" / "commit-000003"
    if damage == "no manifest":
        (newest / "manifest.json").unlink()
    elif damage == "half a file":
        (newest / "books.safetensors").write_bytes((newest / "books.safetensors").read_bytes()[:40])
    else:
        (newest / "films.json").unlink()
    there = fetch_run(f"{store.as_uri()}/{here.name}", tmp_path / "there")
    assert resume(there) == straight


def test_a_run_without_a_commit_starts_from_the_beginning(
    shops: Path, tmp_path: Path, store: Path, straight: dict[str, Any]
) -> None:
    here = interrupted(config(shops, tmp_path / "here", uri=store.as_uri()), after=1)
    assert resume(fetch_run(f"{store.as_uri()}/{here.name}", tmp_path / "there")) == straight


def test_where_no_commit_is_sound_nothing_is_left_here(
    shops: Path, tmp_path: Path, store: Path
) -> None:
    here = interrupted(config(shops, tmp_path / "here", uri=store.as_uri()))
    for file in (store / here.name / "checkpoints").glob("*/games.safetensors"):
        file.write_bytes(b"")
    with pytest.raises(CrossfedError, match=r"No commit in .* is sound"):
        fetch_run(f"{store.as_uri()}/{here.name}", tmp_path / "there")
    assert list((tmp_path / "there").iterdir()) == []


def test_what_is_not_there_or_is_here_already(shops: Path, tmp_path: Path, store: Path) -> None:
    here = interrupted(config(shops, tmp_path / "here", uri=store.as_uri()))
    with pytest.raises(
        CrossfedError,
        match=r"There is no run at file://.*/none: it holds no "
        r"config\.yaml",
    ):
        fetch_run(f"{store.as_uri()}/none", tmp_path / "there")
    with pytest.raises(CrossfedError, match=r"is here already: `--resume .*` goes on with it"):
        fetch_run(f"{store.as_uri()}/{here.name}", tmp_path / "here")
    with pytest.raises(CrossfedError, match="cannot be reached or used"):
        fetch_run("gopher://host/run", tmp_path / "there")


def test_data_that_moved_are_named_once(shops: Path, tmp_path: Path, store: Path) -> None:
    copy = shutil.copytree(shops, tmp_path / "shops")
    here = interrupted(config(copy, tmp_path / "here", uri=store.as_uri()))
    copy.rename(tmp_path / "moved")
    there = fetch_run(f"{store.as_uri()}/{here.name}", tmp_path / "there")
    with pytest.raises(CrossfedError, match="does not exist"):
        run_recorded(stored_config(there), resume=there)
    run_recorded(stored_config(there, tmp_path / "moved"), resume=there)
    assert stored_config(there).data == tmp_path / "moved"


def test_a_process_that_was_left_behind_ends(shops: Path, tmp_path: Path, store: Path) -> None:
    """A driver that slept and wakes up while another machine goes on with its run."""
    started: list[Path] = []

    def taken_over(row: Round) -> None:
        if row.step == 3:
            Mirror(f"{store.as_uri()}/{started[0].name}", started[0], (), lambda _: None)

    with pytest.raises(
        CrossfedError,
        match=r"Another process \(.* on .*\) goes on with this "
        r"run .*; this one ends",
    ):
        run_recorded(
            config(shops, tmp_path / "here", uri=store.as_uri()),
            on_round=taken_over,
            started=started.append,
        )
    assert (
        sorted(path.name for path in (store / started[0].name / "checkpoints").iterdir())[-1]
        == "commit-000002"
    )


def test_a_store_that_goes_away_does_not_end_the_run(
    shops: Path, tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warned: list[str] = []
    view = make_progress("quiet")
    monkeypatch.setattr(view, "warn", warned.append)
    started: list[Path] = []

    def gone(*_: Any) -> None:
        raise OSError("the network is down")

    def cut(row: Round) -> None:
        if row.step == 2:
            monkeypatch.setattr(Mirror, "_commit", gone)

    with pytest.raises(
        CrossfedError,
        match=r"is finished here, but .* the network is down.* "
        r"copies it",
    ):
        run_recorded(
            config(shops, tmp_path / "here", uri=store.as_uri()),
            view=view,
            on_round=cut,
            started=started.append,
        )
    assert len([text for text in warned if "was not copied" in text]) == 1
    monkeypatch.undo()
    assert resume(started[0]) == numbers(store / started[0].name)


def test_what_left_under_noise_is_recorded_before_it_is_delivered(
    shops: Path, tmp_path: Path, store: Path
) -> None:
    here = interrupted(
        config(
            shops, tmp_path / "here", "privacy.noise_seed=0", method="WHISPER", uri=store.as_uri()
        )
    )
    record = (here / "releases.jsonl").read_text()
    assert len(record.splitlines()) == 4 * 3, (
        "round 4 is not committed, and what it sent has been sent"
    )
    assert (store / here.name / "releases.jsonl").read_text() == record


@pytest.mark.parametrize(
    "uri", ["s3://KEY:sEcReT@bucket/p", "s3://bucket/p?access_key=KEY&secret_key=sEcReT"]
)
def test_credentials_are_refused_and_not_repeated(uri: str, tmp_path: Path) -> None:
    for key in ("mirror", "out"):
        with pytest.raises(CrossfedError, match="holds no credentials") as told:
            build("toys:AVERAGE", sets=[f"{key}={uri}"])
        assert "sEcReT" not in str(told.value)


def test_out_may_be_a_uri() -> None:
    plain, mirrored = (
        build("toys:AVERAGE"),
        build("toys:AVERAGE", values={"out": "s3://bucket/prefix/"}),
    )
    assert mirrored.mirror == "s3://bucket/prefix" and mirrored.out == plain.out
    assert mirrored.hash() == plain.hash()
    assert (
        uris.join("s3://bucket/prefix?region=eu-west-1", "run")
        == "s3://bucket/prefix/run?region=eu-west-1"
    )
    with pytest.raises(CrossfedError, match="'bucket' is no storage URI"):
        build("toys:AVERAGE", sets=["mirror=bucket"])


def test_names_stay_in_the_runs_directory() -> None:
    assert mirror._plain("checkpoints/commit-000001/books.json")
    assert not any(map(mirror._plain, ("../x", "a/../../x", "/etc/passwd", "a//b", "./a", "")))
