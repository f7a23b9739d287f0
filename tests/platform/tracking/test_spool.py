"""The spool: what the store did not take waits in a file, and is applied later, once."""

from __future__ import annotations

import json
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from crossfed.platform.errors import CrossfedError
from crossfed.platform.tracking import store as mlflow_store
from crossfed.platform.tracking.spool import REFUSED, SPOOL, STATE
from crossfed.platform.tracking.tracker import replay
from tracked import free_port, history, sqlite, start


def test_an_absent_artifact_is_refused_and_the_rest_recorded(out: Path) -> None:
    tracker = start(out / "run")
    tracker.artifact(out / "nowhere.txt")
    tracker.log({"a": 1.0}, 1)
    tracker.finish("FINISHED")
    assert "1 entries were refused" in tracker.status
    [line] = (out / "run" / REFUSED).read_text().splitlines()
    assert "nowhere.txt is absent" in json.loads(line)["reason"]
    assert sqlite(out / "run").get_run(tracker.run_id).data.metrics["a"] == 1.0


def test_a_second_interrupt_ends_the_write(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that hangs cannot hold whoever presses Ctrl-C twice; what was not written waits in
    the spool.
    """
    tracker = start(out)

    def hang(*args: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("not reached")

    monkeypatch.setattr(mlflow_store.Store, "_metrics", hang)
    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # ignored in what a shell starts in the background
    try:
        with pytest.raises(KeyboardInterrupt):
            tracker.log({"val/ndcg": 0.5}, step=1)
    finally:
        signal.signal(signal.SIGINT, before)
    monkeypatch.undo()
    assert "val/ndcg" in tracker._spool.path.read_text()
    tracker.log({"val/ndcg": 0.75}, step=2)
    assert history(sqlite(out), tracker.run_id or "", "val/ndcg") == [(1, 0.5), (2, 0.75)]


def test_a_torn_last_line_costs_that_line_only(out: Path) -> None:
    tracker = start(out / "run", [], uri=f"http://127.0.0.1:{free_port()}", system_metrics=False)
    tracker.log({"a": 1.0}, 1)
    spool = out / "run" / SPOOL
    with spool.open("a") as file:
        file.write('{"op": "metr')
    tracker.log({"a": 2.0}, 2)
    tracker.finish("FINISHED")
    summary = replay(out / "run", f"sqlite:///{out}/mlflow.db")
    assert summary.left == 0
    assert history(sqlite(out / "run"), summary.run_id, "a") == [(1, 1.0), (2, 2.0)]


def test_replay_twice_changes_nothing(out: Path) -> None:
    """A kill between the store's commit and ours applies entries twice."""
    tracker = start(out / "run", [], uri=f"http://127.0.0.1:{free_port()}")
    tracker.log({"val/B/x": 1.0}, 1)
    tracker.finish("FINISHED")
    spool = out / "run" / SPOOL
    before = spool.read_text()
    first = replay(out / "run", f"sqlite:///{out}/mlflow.db")
    (out / "run" / "mlflow_run_id").unlink()
    state = json.loads((out / "run" / STATE).read_text())
    (out / "run" / STATE).write_text(json.dumps({**state, "run_id": None}))
    spool.write_text(before)
    second = replay(out / "run")
    assert second.run_id == first.run_id
    assert history(sqlite(out / "run"), first.run_id, "val/B/x") == [(1, 1.0)]


def test_a_full_disk_is_a_warning_and_is_caught_up(out: Path) -> None:
    warnings: list[str] = []
    tracker = start(out / "run", warnings, system_metrics=False)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # no file of this process may grow
    try:
        tracker.log({"a": 1.0}, 1)
        tracker.figure(Figure(), "nothing")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert any("out of reach" in text or "cannot be written" in text for text in warnings)
    tracker.log({"a": 2.0}, 2)
    tracker.finish("FINISHED")
    assert history(sqlite(out / "run"), tracker.run_id, "a") == [(1, 1.0), (2, 2.0)]
    assert "out of reach" not in tracker.status


def test_replay_of_an_untracked_directory(tmp_path: Path) -> None:
    with pytest.raises(CrossfedError, match="holds no tracked run"):
        replay(tmp_path)
