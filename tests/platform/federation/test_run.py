"""A run from outside: what is refused leaves nothing behind, and what is finished is left alone."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from crossfed.platform.config.settings import RunConfig, build
from crossfed.platform.console import Progress, make_progress
from crossfed.platform.errors import CrossfedError
from crossfed.platform.federation.final import test_once as final_test
from crossfed.platform.federation.runs import stored_config
from crossfed.platform.layout import ENDING, RESULT
from crossfed.platform.report.recording import run_recorded


def config(
    method: str, shops: Path, out: Path, *sets: str, backend: str = "inprocess", **values: Any
) -> RunConfig:
    given = {"data": shops, "out": out, "backend": backend, "tracking.artifacts": False, **values}
    return build(f"toys:{method}", sets=sets, values=given)


def contents(folder: Path) -> dict[str, tuple[str, int]]:
    """Every file's digest and time of change."""
    return {
        str(path.relative_to(folder)): (
            hashlib.sha256(path.read_bytes()).hexdigest(),
            path.stat().st_mtime_ns,
        )
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


class Heard:
    """A quiet view that keeps its notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.view: Progress = make_progress("quiet")
        self.view.note = self.notes.append  # type: ignore[method-assign]


def no_nodes(*_: Any) -> Any:
    raise AssertionError("a finished run starts no node")


def test_a_finished_run_is_left_alone(
    shops: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = run_recorded(config("AVERAGE", shops, tmp_path), finish=final_test)
    before, heard = contents(tmp_path), Heard()
    monkeypatch.setattr("crossfed.platform.federation.run._nodes", no_nodes)
    monkeypatch.setattr("crossfed.platform.report.recording.track_beside", no_nodes)
    again = run_recorded(
        stored_config(done.run_dir), resume=done.run_dir, finish=final_test, view=heard.view
    )
    assert again.result["domains"] == done.result["domains"]
    assert contents(tmp_path) == before
    assert heard.notes == [
        f"{done.run_dir} is finished: there is nothing to resume, and nothing in it was changed."
    ]


def test_a_trial_that_never_read_the_test_split_is_not_over(shops: Path, tmp_path: Path) -> None:
    done = run_recorded(config("AVERAGE", shops, tmp_path))
    assert "test" not in done.result["domains"]["books"]
    again = run_recorded(stored_config(done.run_dir), resume=done.run_dir, finish=final_test)
    assert "test" in again.result["domains"]["books"]


def test_a_run_killed_while_its_result_was_recorded_is_recorded_again(
    shops: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its result is there, its figures and its end in MLflow are not."""

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("crossfed.platform.report.recording.record", killed)
        run_recorded(config("AVERAGE", shops, tmp_path), finish=final_test)
    (run_dir,) = (path.parent for path in tmp_path.glob(f"*/{ENDING}"))
    assert (run_dir / RESULT).is_file()
    recorded: list[Any] = []
    monkeypatch.setattr(
        "crossfed.platform.report.recording.record", lambda *given: recorded.append(given)
    )
    run_recorded(stored_config(run_dir), resume=run_dir, finish=final_test)
    assert len(recorded) == 1 and not (run_dir / ENDING).exists()


@pytest.mark.parametrize(
    ("method", "sets", "words"),
    [
        ("NO_STAGE", (), "has no stage"),
        ("AVERAGE", ("resources.gpus_per_domain=64", "resources.device=auto"), "GPU"),
        ("WHISPER", ("privacy.budget=0.001",), "budget"),
        ("AVERAGE", ("tracking.uri=http://127.0.0.1:9", "tracking.require=true"), "out of reach"),
        ("AVERAGE", ("mirror=file:///proc/nowhere",), "cannot be reached or used"),
    ],
)
def test_a_refused_run_leaves_no_directory(
    method: str, sets: tuple[str, ...], words: str, shops: Path, tmp_path: Path
) -> None:
    out = tmp_path / "runs"
    with pytest.raises(CrossfedError, match=words):
        run_recorded(config(method, shops, out, *sets))
    assert not out.exists(), [str(path) for path in out.rglob("*")]


def test_a_run_refused_by_its_cluster_leaves_no_directory_and_no_record(
    ray_cluster: None, shops: Path, tmp_path: Path
) -> None:
    out = tmp_path / "runs"
    wanted = config("AVERAGE", shops, out, "resources.cpus_per_domain=1000", backend="ray")
    with pytest.raises(CrossfedError, match="the cluster has"):
        run_recorded(wanted)
    assert not out.exists()


def test_a_run_that_failed_in_a_round_keeps_what_it_has(shops: Path, tmp_path: Path) -> None:
    with pytest.raises(CrossfedError):
        run_recorded(config("LEAK_NAN", shops, tmp_path, **{"tracking.enabled": False}))
    assert len(list(tmp_path.glob("*/config.yaml"))) == 1
