"""`crossfed tune` as a user meets it before anything runs: a mistake is one sentence and exit code
2.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from optuna.exceptions import StorageInternalError
from ray.tune.search import Searcher

from crossfed.platform.cli import main
from crossfed.platform.config.settings import build
from crossfed.platform.data.store import PreparedData
from crossfed.platform.errors import CrossfedError
from crossfed.tuning import search as searching
from crossfed.tuning.placement import slots
from crossfed.tuning.ray_tune import SchedulerAdapter, SearcherAdapter, StopperAdapter
from crossfed.tuning.scheduler import TrialScheduler
from crossfed.tuning.search import _kept, check, go_on, start, tune_all
from crossfed.tuning.study import Search, Study

SPACE = ["--search", "step={low: 0.1, high: 1.0}"]


@pytest.fixture
def call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], shops: Path, tmp_path: Path
) -> Any:
    def run(*words: str, out: bool = True) -> tuple[int, str]:
        argv = ["crossfed", *words, *(["--out", str(tmp_path)] if out else [])]
        monkeypatch.setattr(sys, "argv", argv)
        with pytest.raises(SystemExit) as caught:
            main.main()
        return int(caught.value.code or 0), capsys.readouterr().err

    return run


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Study, dict[str, Any]]]:
    """Studies that would go on from here."""
    found: list[tuple[Study, dict[str, Any]]] = []

    def stop(study: Study, **how: Any) -> None:
        found.append((study, how))
        raise KeyboardInterrupt

    monkeypatch.setattr(searching, "go_on", stop)
    return found


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--trials", "0"], "--trials 0 is not possible: input should be greater than 0."),
        (["--study", "a/b"], "--study 'a/b' is not possible: a name is up to 100 letters"),
        (
            ["--objective", "median"],
            "--objective 'median' is not possible: 'median' is none of mean, worst",
        ),
        (["--pruner", "none", "--grace", "2"], "A grace period needs a pruner"),
        (["--grace", "4"], "A grace period of 4 rounds leaves nothing to stop"),
        (["--reduction", "1"], "--reduction 1 is not possible"),
        (["--time-budget", "2x"], "--time-budget '2x' is no length of time"),
        (["--search", "dim=["], "--search: '[' is not a value YAML can read"),
        (["--search", "nothing=null"], "nothing is not searched and cannot be taken out"),
        (["--objective", "domain:toys"], "names no domain of this run"),
        (["--data", "/nowhere"], "/nowhere does not exist"),
        (
            ["--tracking-uri", "nonsense"],
            "'nonsense', which is no store that MLflow still supports",
        ),
    ],
)
def test_a_mistake_is_one_sentence(
    call: Any, shops: Path, tmp_path: Path, words: list[str], told: str
) -> None:
    code, err = call("tune", "toys:AVERAGE", "--data", str(shops), *SPACE, *words)
    assert code == 2
    assert err.startswith("Error: ") and told in err and err.count("\n") == 1
    assert not list(tmp_path.iterdir())  # nothing was begun


def test_options_may_come_before_the_method(call: Any, made: Any, shops: Path) -> None:
    assert call("tune", "--data", str(shops), "toys:AVERAGE", *SPACE)[0] == 130
    assert made[0][0].base.method == "toys:AVERAGE"


def test_a_study_that_is_refused_leaves_its_name_free(
    shops: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(study: Study, **how: Any) -> None:
        raise CrossfedError("the cluster is too small")

    monkeypatch.setattr(searching, "go_on", refuse)
    base = build("toys:AVERAGE", values={"data": shops, "out": tmp_path, "tracking.enabled": False})
    shared = f"sqlite:///{tmp_path / 'shared.db'}"
    for storage in (None, None, shared, shared):
        with pytest.raises(CrossfedError, match="too small"):
            start(Search(name="s", trials=2, changes={"step": [0.5]}, storage=storage), base)
        assert not (tmp_path / "s").exists()


def test_what_a_run_file_says_holds_where_no_option_says_otherwise(
    call: Any, made: Any, shops: Path, tmp_path: Path
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        f"method: toys:AVERAGE\nseed: 5\nbackend: inprocess\nout: "
        f"{tmp_path / 'own'}\ndata: {shops}\n"
    )
    code, err = call("tune", str(file), *SPACE, "--study", "s", out=False)
    study = made[0][0]
    assert (study.base.seed, study.search.seed, study.base.backend) == (5, 5, "inprocess")
    assert study.folder == tmp_path / "own/s"
    # as it can be typed
    assert code == 130 and err.endswith(f"crossfed tune resume {tmp_path / 'own/s'}\n")
    call("tune", str(file), *SPACE, "--study", "t", "--seed", "6", "--backend", "ray", out=False)
    study = made[1][0]
    assert (study.base.seed, study.search.seed, study.base.backend) == (6, 6, "ray")


def test_more_trials_are_counted_once_they_can_run(call: Any, shops: Path, tmp_path: Path) -> None:
    """An extension that is refused, here for its data, leaves the study as it was."""
    data = tmp_path / "shops"
    data.symlink_to(shops)
    study = study_on(data, tmp_path)
    data.unlink()
    code, err = call("tune", "extend", "s", "--trials", "4")
    assert code == 2 and "does not exist" in err
    assert Study.open(study.folder).search.trials == 2


def study_on(data: Path, out: Path, **given: Any) -> Study:
    base = build(
        "toys:AVERAGE",
        values={"data": data, "out": out, "tracking.enabled": False, "backend": "inprocess"},
    )
    search = Search(**{"name": "s", "trials": 2, "changes": {"step": [0.5, 0.9]}} | given)
    full, opened = check(search, base)
    return Study.create(search, full, opened.path.name, opened.fingerprint)


def test_a_study_stays_on_the_data_it_was_started_on(shops: Path, tmp_path: Path) -> None:
    study = study_on(shops, tmp_path)
    study.optuna.set_user_attr("data_fingerprint", "0" * 64)
    now = PreparedData.open(shops).fingerprint[:12]
    with pytest.raises(
        CrossfedError, match=f"was started on data 000000000000, but .* is now {now}"
    ):
        go_on(study)


def test_a_storage_that_takes_no_more_ends_the_search_in_a_sentence(
    shops: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What Tune would take for the failure of a trial, or die of: each of its calls ends the search
    instead.
    """
    study = study_on(shops, tmp_path)
    parent: Any = SimpleNamespace(run_id=None)
    desk = TrialScheduler(study, slots(study.base, ("server", "books"), 1, []), parent, print, None)
    asked = SearcherAdapter(desk).suggest("a")

    class Told:
        config = asked

    def broken(*_: object, **__: object) -> None:
        raise StorageInternalError("invalid data") from OSError("database or disk is full\nSQL: …")

    with monkeypatch.context() as context:
        context.setattr("optuna.Study.tell", broken)
        context.setattr("optuna.Trial.report", broken)
        facts = json.dumps({"domains": {"books": 0.1}, "rounds": 4, "bytes_up": 1, "seconds": 1.0})
        for call in (
            lambda: SchedulerAdapter(desk).on_trial_result(None, Told, {"step": 1, "facts": facts}),  # type: ignore[arg-type]
            lambda: SchedulerAdapter(desk).on_trial_complete(
                None, Told, {"over": True, "facts": facts}
            ),  # type: ignore[arg-type]
        ):
            desk.halt, desk.problem = None, None
            call()
            assert isinstance(desk.problem, StorageInternalError)
            assert (
                StopperAdapter(desk).stop_all()
                and SearcherAdapter(desk).suggest("b") == Searcher.FINISHED
            )
    with (
        pytest.raises(
            CrossfedError,
            match=r"could not be kept: database or disk is full; .* "
            r"resume .*/s\.$",
        ),
        _kept(study),
    ):
        raise desk.problem
    assert Study.open(study.folder).left() == 2  # the trial is open still


def test_studies_of_several_methods_are_checked_before_the_first_begins(
    shops: Path, tmp_path: Path, made: list[Any]
) -> None:
    base = build("toys:AVERAGE", values={"data": shops, "out": tmp_path, "backend": "inprocess"})
    good, bad = (
        Search(name=name, trials=2, changes=changes)
        for name, changes in (("a", {"step": [0.5]}), ("b", {}))
    )
    asked: dict[str, Any] = {"a": (good, base), "b": (bad, base)}
    with pytest.raises(CrossfedError, match="declares nothing to search"):
        tune_all(asked, tmp_path / "all", finish=None, view=None)  # type: ignore[arg-type]
    assert not made and not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"trials": 3}, "search.trials = 2, not 3"),
        ({"seeds": 2}, "search.seeds = 1, not 2"),
        ({}, "run.seed = 0, not 1"),
    ],
)
def test_a_study_goes_on_as_it_was_started_or_not_at_all(
    shops: Path, tmp_path: Path, made: list[Any], change: dict[str, int], told: str
) -> None:
    study = study_on(shops, tmp_path)
    search = study.search.model_copy(update=change)
    base = study.base.model_copy(update={"seed": 0 if change else 1})
    with pytest.raises(CrossfedError, match=told):
        tune_all({"a": (search, base)}, tmp_path / "all", finish=None, view=None)  # type: ignore[arg-type]
    assert not made
    with pytest.raises(KeyboardInterrupt):
        tune_all({"a": (study.search, study.base)}, tmp_path / "all", finish=None, view=None)  # type: ignore[arg-type]
    assert made[0][0].folder == study.folder


@pytest.mark.parametrize("content", ["rubbish", "[]", "{}", ""])
def test_a_damaged_summary_is_told(call: Any, shops: Path, tmp_path: Path, content: str) -> None:
    study = study_on(shops, tmp_path)
    (study.folder / "study.json").write_text(content)
    code, err = call("tune", "show", "s")
    assert (
        code == 2
        and (f"study.json is damaged; crossfed tune resume {study.folder} writes it again.") in err
    )


def test_the_dashboard_shows_a_study_from_its_own_storage(tmp_path: Path) -> None:
    pytest.importorskip("optuna_dashboard", reason="the extra dashboard is not installed")
    base = build("lightgcn", values={"out": tmp_path, "tracking.enabled": False})
    Study.create(Search(name="seen", trials=2), base, "shops", "f1")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = [sys.executable, "-m", "crossfed.platform.cli.main", "tune", "dashboard", "seen"]
    process = subprocess.Popen([*program, "--out", str(tmp_path), "--port", str(port)])
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            assert process.poll() is None
            try:
                seen = requests.get(f"http://127.0.0.1:{port}/api/studies", timeout=5).json()
                break
            except requests.ConnectionError:
                time.sleep(0.2)
        assert [study["study_name"] for study in seen["study_summaries"]] == ["seen"]
    finally:
        process.kill()
        process.wait()
