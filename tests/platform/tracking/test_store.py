"""The store: made once by whoever is first, whole writes under signals, away for a while."""

from __future__ import annotations

import signal
import socket
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from crossfed.platform.config.settings import TrackingSettings
from crossfed.platform.tracking import store as mlflow_store
from crossfed.platform.tracking.tracker import Tracker
from tracked import history, sqlite, start


def test_more_than_a_batch(out: Path) -> None:
    settings = TrackingSettings(system_metrics=False)
    params = {f"p{i}": i for i in range(150)} | {"long": "y" * 7000}
    tracker = Tracker.start(settings, out / "run", "many", params, {}, [])
    tracker.log({f"m{i}": float(i) for i in range(1500)}, 1)
    tracker.finish("FINISHED")
    run = sqlite(out / "run").get_run(tracker.run_id)
    assert len(run.data.params) == 151
    assert run.data.params["long"] == "y" * 6000
    assert len(run.data.metrics) == 1500


def test_resuming_a_deleted_run_opens_a_new_one(out: Path) -> None:
    first = start(out / "run")
    first.finish("KILLED")
    sqlite(out / "run").delete_run(first.run_id)
    second = start(out / "run", resume=first.run_id)
    second.finish("FINISHED")
    assert second.run_id != first.run_id
    assert (out / "run" / "mlflow_run_id").read_text().strip() == second.run_id


def test_processes_share_a_new_sqlite_store_in_silence(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from crossfed.platform.tracking.tracker import Tracker, TrackingSettings\n"
        "assert 'mlflow' not in sys.modules  # importing the tracker is light\n"
        "tracker = Tracker.start(TrackingSettings(), Path(sys.argv[1]), 'r', {}, {}, [])\n"
        "for step in range(1, 11):\n"
        "    tracker.log({'val/B/recall_at_20': step / 10}, step)\n"
        "tracker.finish('FINISHED')\n"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path / f"run{i}")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for i in range(2)
    ]
    assert [p.communicate()[0] for p in processes] == [b"", b""]
    assert [p.returncode for p in processes] == [0, 0]
    client = sqlite(tmp_path / "run0")
    [experiment] = [e for e in client.search_experiments() if e.name == "crossfed"]
    runs = client.search_runs([experiment.experiment_id])
    assert [r.info.status for r in runs] == ["FINISHED"] * 2
    assert all(
        len(client.get_metric_history(r.info.run_id, "val/B/recall_at_20")) == 10 for r in runs
    )
    assert not list(tmp_path.glob("run*/tracking-spool.jsonl"))


def test_an_interrupt_while_the_store_is_made_does_not_spoil_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted:
        def __init__(self, tracking_uri: str) -> None:
            self.file = tracking_uri.removeprefix("sqlite:///")

        def get_experiment(self, _: str) -> None:
            with sqlite3.connect(self.file) as connection:
                connection.execute("CREATE TABLE experiments (half INTEGER)")
            raise KeyboardInterrupt

    run_dir = tmp_path / "run"
    run_dir.mkdir()
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("mlflow.MlflowClient", Interrupted)
        start(run_dir)
    warnings: list[str] = []
    start(run_dir, warnings).finish("FINISHED")
    assert (
        not warnings
        and sqlite(run_dir).get_run((run_dir / "mlflow_run_id").read_text().strip()).info.status
        == "FINISHED"
    )
    assert not list(tmp_path.glob("mlflow.db.part*"))


@pytest.mark.parametrize("which", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_waits_for_the_store(
    out: Path,
    which: signal.Signals,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A signal inside a write: the write is completed, then the run is interrupted; nothing on
    stderr, nothing twice.
    """

    def interrupt(_signal: int, _frame: object) -> None:
        raise KeyboardInterrupt

    tracker = start(out)
    whole = mlflow_store.Store._metrics

    def torn(*args: Any) -> None:
        signal.raise_signal(which)
        whole(*args)

    before = signal.signal(which, interrupt)
    try:
        monkeypatch.setattr(mlflow_store.Store, "_metrics", torn)
        with pytest.raises(KeyboardInterrupt):
            tracker.log({"val/ndcg": 0.5}, step=1)
        assert signal.getsignal(which) is interrupt
    finally:
        signal.signal(which, before)
    monkeypatch.undo()
    assert not (tracker._spool.path).exists()
    tracker.finish("KILLED")
    assert history(sqlite(out), tracker.run_id or "", "val/ndcg") == [(1, 0.5)]
    assert capfd.readouterr().err == ""


def test_a_locked_sqlite_store_is_spooled_and_caught_up(out: Path) -> None:
    run_dir, warnings = out / "run", []
    start(out / "other").finish("FINISHED")  # the store exists
    blocker = sqlite3.connect(out / "mlflow.db")
    blocker.execute("BEGIN IMMEDIATE")
    began = time.monotonic()
    tracker = start(run_dir, warnings)
    assert time.monotonic() - began < 8
    tracker.log({"a": 1.0}, 1)
    blocker.rollback()
    blocker.close()
    assert "locked" in warnings[0]
    tracker.finish("FINISHED")
    assert len(warnings) == 1
    run = sqlite(run_dir).get_run(tracker.run_id)
    assert run.data.metrics["a"] == 1.0
    assert run.info.status == "FINISHED"


def test_a_clients_time_out_is_told_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that falls silent after it was found there: the client's own words are a page of
    addresses.
    """
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(8)
        with pytest.raises(MlflowException) as caught:
            MlflowClient(
                tracking_uri=f"http://127.0.0.1:{listener.getsockname()[1]}"
            ).get_experiment("0")
    assert mlflow_store.words(caught.value) == "no answer in time"
