"""The tracker against real stores: SQLite files, and MLflow servers started, killed and restarted
on the loopback.
"""

from __future__ import annotations

import json
import math
import os
import resource
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from matplotlib.figure import Figure
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from crossfed.platform.config.settings import TrackingSettings
from crossfed.platform.errors import CrossfedError
from crossfed.platform.serving import save
from crossfed.platform.tracking import store as mlflow_store
from crossfed.platform.tracking.spool import REFUSED, SPOOL, STATE
from crossfed.platform.tracking.tracker import DatasetInput, Tracker, replay, resolve_uri, safe_name

DATASETS = [DatasetInput("Beauty", "d" * 64, "synthetic", {"users": 3, "items": 4})]


def start(
    run_dir: Path, warnings: list[str] | None = None, resume: str | None = None, **settings: Any
) -> Tracker:
    warn = None if warnings is None else warnings.append
    tags = {"seed": "7"}
    return Tracker.start(
        TrackingSettings(**settings), run_dir, "a run", {"alpha": 0.1}, tags, DATASETS, resume, warn
    )


def sqlite(run_dir: Path) -> MlflowClient:
    return MlflowClient(tracking_uri=f"sqlite:///{run_dir.parent / 'mlflow.db'}")


def history(client: MlflowClient, run_id: str, name: str) -> list[tuple[int, float]]:
    return [(m.step, m.value) for m in client.get_metric_history(run_id, name)]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Server:
    """A real MLflow server on a SQLite file."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        # the application that `mlflow server` runs, without the seconds that its command line takes
        # to get there
        command = [
            sys.executable,
            "-m",
            "uvicorn",
            "--port",
            str(self.port),
            "mlflow.server.fastapi_app:app",
        ]
        store = f"sqlite:///{self.folder}/mlflow.db"
        settings = {
            "_MLFLOW_SERVER_FILE_STORE": store,
            "_MLFLOW_SERVER_REGISTRY_STORE": store,
            "_MLFLOW_SERVER_ARTIFACT_ROOT": "mlflow-artifacts:/",
            "_MLFLOW_SERVER_ARTIFACT_DESTINATION": str(self.folder / "artifacts"),
            "_MLFLOW_SERVER_SERVE_ARTIFACTS": "true",
            "MLFLOW_DISABLE_TELEMETRY": "true",
        }
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, **settings},
            )
        for _ in range(600):
            try:
                if requests.get(f"{self.uri}/health", timeout=1).ok:
                    return
            except requests.RequestException:
                time.sleep(0.1)
        raise AssertionError((self.folder / "server.log").read_text())

    def kill(self) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with its tables made, to be copied: making them takes seconds."""
    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    MlflowClient(tracking_uri=f"sqlite:///{path}").get_experiment("0")
    return path


@pytest.fixture
def out(tmp_path: Path, empty_store: Path) -> Path:
    """A folder of runs whose store exists already."""
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    return tmp_path


@pytest.fixture
def server(tmp_path: Path, empty_store: Path) -> Iterator[Server]:
    folder = tmp_path / "server"
    folder.mkdir()
    shutil.copy(empty_store, folder / "mlflow.db")
    server = Server(folder)
    yield server
    server.kill()


# Names and addresses


@pytest.mark.parametrize(
    ("name", "clean"),
    [
        ("val/Beauty/ndcg_at_20", "val/Beauty/ndcg_at_20"),
        ("ndcg@20", "ndcg_at_20"),
        ("val/Home & Kitchen/loss", "val/Home _ Kitchen/loss"),
        ("loss(α=1)", "loss_α_1_"),
        ("/a//b/../c/.", "a/b/c"),
        ("..", "unnamed"),
        ("", "unnamed"),
        ("x" * 250, "x" * 250),
    ],
)
def test_safe_name(name: str, clean: str) -> None:
    assert safe_name(name) == clean
    assert safe_name(clean) == clean


def test_safe_name_keeps_long_names_apart() -> None:
    first, second = safe_name("x" * 300 + "a"), safe_name("x" * 300 + "b")
    assert len(first) == len(second) == 250
    assert first != second


def test_resolve_uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert resolve_uri(TrackingSettings(), tmp_path) == f"sqlite:///{tmp_path}/mlflow.db"
    assert resolve_uri(TrackingSettings(uri="http://a:5000/"), tmp_path) == "http://a:5000"
    assert (
        resolve_uri(TrackingSettings(uri="sqlite:///x.db"), tmp_path)
        == f"sqlite:///{Path.cwd()}/x.db"
    )
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://b:5000")
    assert resolve_uri(TrackingSettings(), tmp_path) == "http://b:5000"
    assert resolve_uri(TrackingSettings(uri="http://a:5000"), tmp_path) == "http://a:5000"


@pytest.mark.parametrize(
    "uri", ["./mlruns", "mlruns", "file:///tmp/x", "/tmp/x", "C:\\runs", "ftp://a/b", "http:", ""]
)
def test_unusable_uri_is_refused_in_one_sentence(tmp_path: Path, uri: str) -> None:
    with pytest.raises(CrossfedError, match=r"tracking\.uri is .*sqlite:///runs/mlflow\.db"):
        start(tmp_path / "run", uri=uri)


def test_in_memory_database_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CrossfedError, match="name a file"):
        start(tmp_path / "run", uri="sqlite:///:memory:")


def test_password_is_not_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = f"http://me:secret@127.0.0.1:{free_port()}"
    with pytest.raises(ValueError, match="a password does not belong in a run's files"):
        TrackingSettings(uri=uri)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    tracker = start(tmp_path / "run", [])
    tracker.finish("FINISHED")
    assert "***@127.0.0.1" in tracker.status
    for path in (tmp_path / "run").iterdir():
        assert "secret" not in path.read_text()
    with pytest.raises(CrossfedError, match="give the URI"):
        replay(tmp_path / "run")


# A SQLite store


def test_a_run_in_sqlite(out: Path) -> None:
    run_dir = out / "one"
    tracker = start(run_dir)
    tracker.log({"val/Beauty/ndcg@20": 0.2, "train/Beauty/loss": 3.0}, 1)
    tracker.log({"val/Beauty/ndcg@20": 0.5, "train/Beauty/loss": 2.0}, 2)
    tracker.log({"val/Beauty/ndcg@20": 0.4, "train/Beauty/loss": math.inf, "bad": math.nan}, 3)
    (run_dir / "config.yaml").write_text("x: 1\n")
    tracker.artifact(run_dir / "config.yaml")
    figure = Figure()
    figure.subplots().plot([1, 2])
    tracker.figure(figure, "losses")
    tracker.describe("| domain | test |")
    tracker.finish("FINISHED", "all rounds done")

    client = sqlite(run_dir)
    assert tracker.run_id is not None
    run = client.get_run(tracker.run_id)
    assert (run_dir / "mlflow_run_id").read_text().strip() == tracker.run_id
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "a run"
    assert run.data.params == {"alpha": "0.1"}
    assert run.data.tags["seed"] == "7"
    assert run.data.tags["crossfed.reason"] == "all rounds done"
    assert run.data.tags["mlflow.note.content"] == "| domain | test |"
    assert client.get_experiment(run.info.experiment_id).name == "crossfed"
    name = "val/Beauty/ndcg_at_20"
    assert history(client, tracker.run_id, name) == [(1, 0.2), (2, 0.5), (3, 0.4)]
    assert history(client, tracker.run_id, "train/Beauty/loss") == [(1, 3.0), (2, 2.0)]
    assert "bad" not in run.data.metrics
    # nothing of the system: the run took seconds
    assert set(run.data.metrics) == {name, "train/Beauty/loss"}
    [data] = run.inputs.dataset_inputs
    assert (data.dataset.name, data.dataset.digest) == ("Beauty", "d" * 36)
    assert json.loads(data.dataset.profile) == {"users": 3, "items": 4}
    assert {a.path for a in client.list_artifacts(tracker.run_id)} == {"config.yaml", "figures"}
    assert (out / "mlartifacts" / tracker.run_id / "artifacts" / "figures" / "losses.png").is_file()
    assert "2 values were not finite" in tracker.status
    assert not (run_dir / SPOOL).exists()


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


def test_a_resumed_run_continues_the_same_run(out: Path) -> None:
    run_dir = out / "run"
    first = start(run_dir)
    for step in (1, 2, 3):
        first.log({"val/B/recall_at_20": 0.1 * step}, step)
    first.finish("KILLED", "interrupted")

    second = start(run_dir, resume=first.run_id)
    assert second.run_id == first.run_id
    assert sqlite(run_dir).get_run(first.run_id).info.status == "RUNNING"
    for step in (3, 4):  # round 3 had been recorded but not committed: it runs again
        second.log({"val/B/recall_at_20": 0.1 * step}, step)
    second.log({"val/B/recall_at_20": 0.1}, 5)
    second.finish("FINISHED")
    client = sqlite(run_dir)
    assert [s for s, _ in history(client, first.run_id, "val/B/recall_at_20")] == [1, 2, 3, 4, 5]
    assert client.get_run(first.run_id).info.status == "FINISHED"
    assert len(client.search_runs([client.get_experiment_by_name("crossfed").experiment_id])) == 1


def test_system_metrics_begin_after_a_minute(out: Path) -> None:
    tracker = start(out / "run")
    tracker.log({"a": 1.0}, 1)
    tracker._began -= 61
    tracker.log({"a": 2.0}, 2)
    tracker.finish("FINISHED")
    assert [
        step
        for step, _ in history(
            sqlite(out / "run"), tracker.run_id, "system/process_memory_megabytes"
        )
    ] == [2]


def test_a_record_of_an_earlier_version_is_continued(out: Path) -> None:
    run_dir = out / "run"
    first = start(run_dir)
    first.log({"a": 1.0}, 1)
    first.finish("KILLED")
    state = json.loads((run_dir / STATE).read_text()) | {
        "stage": "train",
        "best": {"val/B/x": 0.1},
        "model_id": None,
    }
    (run_dir / STATE).write_text(json.dumps(state))
    second = start(run_dir, resume=first.run_id)
    second.log({"a": 1.0}, 1)
    second.log({"a": 2.0}, 2)
    second.finish("FINISHED")
    assert history(sqlite(run_dir), first.run_id, "a") == [(1, 1.0), (2, 2.0)]


def test_resuming_a_deleted_run_opens_a_new_one(out: Path) -> None:
    first = start(out / "run")
    first.finish("KILLED")
    sqlite(out / "run").delete_run(first.run_id)
    second = start(out / "run", resume=first.run_id)
    second.finish("FINISHED")
    assert second.run_id != first.run_id
    assert (out / "run" / "mlflow_run_id").read_text().strip() == second.run_id


def test_a_study_is_the_parent(out: Path) -> None:
    study = start(out / "study")
    trial = start(out / "trial", parent_run_id=study.run_id)
    tags = sqlite(out / "trial").get_run(trial.run_id).data.tags
    assert tags["mlflow.parentRunId"] == study.run_id


def test_disabled_writes_nothing_but_figures(tmp_path: Path) -> None:
    tracker = start(tmp_path / "run", enabled=False)
    tracker.log({"a": 1.0}, 1)
    tracker.figure(Figure(), "empty")
    tracker.finish("FINISHED")
    assert tracker.status == "off"
    assert tracker.run_id is None
    assert [p.relative_to(tmp_path) for p in tmp_path.rglob("*") if p.is_file()] == [
        Path("run/figures/empty.png")
    ]


def test_an_absent_artifact_is_refused_and_the_rest_recorded(out: Path) -> None:
    tracker = start(out / "run")
    tracker.artifact(out / "nowhere.txt")
    tracker.log({"a": 1.0}, 1)
    tracker.finish("FINISHED")
    assert "1 entries were refused" in tracker.status
    [line] = (out / "run" / REFUSED).read_text().splitlines()
    assert "nowhere.txt is absent" in json.loads(line)["reason"]
    assert sqlite(out / "run").get_run(tracker.run_id).data.metrics["a"] == 1.0


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


def test_a_store_that_cannot_be_made_is_a_warning(out: Path) -> None:
    (out / "file").write_text("")
    warnings: list[str] = []
    tracker = start(out / "run", warnings, uri=f"sqlite:///{out}/file/mlflow.db")
    tracker.log({"a": 1.0}, 1)
    tracker.finish("FINISHED")
    assert "out of reach" in warnings[0]
    summary = replay(out / "run", f"sqlite:///{out}/mlflow.db")
    assert (summary.applied, summary.left, summary.problem) == (3, 0, None)
    assert sqlite(out / "run").get_run(summary.run_id).data.metrics["a"] == 1.0


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


def test_a_model_that_cannot_be_packed_is_a_warning(out: Path) -> None:
    warnings: list[str] = []
    tracker = start(out / "run", warnings)
    tracker.model(save.save, out / "run", "A")  # no configuration, no tensors there
    tracker.finish("FINISHED")
    assert "the model of A cannot be recorded" in warnings[0]
    assert sqlite(out / "run").get_run(tracker.run_id).info.status == "FINISHED"


def test_replay_of_an_untracked_directory(tmp_path: Path) -> None:
    with pytest.raises(CrossfedError, match="holds no tracked run"):
        replay(tmp_path)


# A server


def test_server_away_then_there_then_killed_then_restarted(tmp_path: Path, server: Server) -> None:
    # away from the start to the end of a run, which is continued while the server is still away
    late, warnings = tmp_path / "late", []
    began = time.monotonic()
    tracker = start(late, warnings, uri=server.uri)
    tracker.log({"val/B/x": 0.1}, 1)
    tracker.finish("KILLED", "interrupted")
    assert time.monotonic() - began < 8
    assert tracker.run_id is None
    resumed = start(late, warnings, uri=server.uri)
    resumed.log({"val/B/x": 0.1}, 1)
    resumed.log({"val/B/x": 0.3}, 2)
    resumed.finish("FINISHED")
    assert replay(late).problem == "connection refused"

    server.start()
    summary = replay(late)
    assert (summary.left, summary.refused, summary.problem) == (0, 0, None)
    client = MlflowClient(tracking_uri=server.uri)
    experiment = client.get_experiment_by_name("crossfed").experiment_id
    [run] = client.search_runs([experiment])
    assert run.info.run_id == summary.run_id == (late / "mlflow_run_id").read_text().strip()
    assert run.info.status == "FINISHED"
    assert history(client, run.info.run_id, "val/B/x") == [(1, 0.1), (2, 0.3)]

    # there at the start, killed in the middle
    run_dir, warnings = tmp_path / "run", []
    tracker = start(run_dir, warnings, uri=server.uri)
    assert tracker.url == f"{server.uri}/#/experiments/{experiment}/runs/{tracker.run_id}"
    (run_dir / "before.txt").write_text("b")
    tracker.artifact(run_dir / "before.txt")
    tracker.log({"val/B/x": 0.1}, 1)
    server.kill()
    began = time.monotonic()
    for step in (2, 3, 4):
        tracker.log({"val/B/x": 0.1 * step}, step)
    (run_dir / "while.txt").write_text("w")
    tracker.artifact(run_dir / "while.txt", "folder")
    assert time.monotonic() - began < 10
    assert len(warnings) == 1
    assert "connection refused" in warnings[0]
    assert tracker.url is None
    assert "entries wait" in tracker.status

    # restarted: the next round catches up
    server.start()
    tracker.finish("FINISHED")
    assert tracker.url is not None
    assert tracker.run_id is not None
    assert [s for s, _ in history(client, tracker.run_id, "val/B/x")] == [1, 2, 3, 4]
    assert {a.path for a in client.list_artifacts(tracker.run_id)} == {"before.txt", "folder"}
    assert client.get_run(tracker.run_id).info.status == "FINISHED"
    assert not (run_dir / SPOOL).exists()


def test_require_refuses_to_start_without_the_server(tmp_path: Path) -> None:
    port = free_port()
    began = time.monotonic()
    with pytest.raises(
        CrossfedError, match=f"127.0.0.1:{port} is out of reach .connection refused"
    ):
        start(tmp_path / "run", uri=f"http://127.0.0.1:{port}", require=True)
    assert time.monotonic() - began < 8


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


def test_a_server_that_never_answers_costs_seconds(tmp_path: Path) -> None:
    with socket.socket() as listener:  # accepts connections into its backlog and says nothing
        listener.bind(("127.0.0.1", 0))
        listener.listen(8)
        warnings: list[str] = []
        began = time.monotonic()
        tracker = start(
            tmp_path / "run", warnings, uri=f"http://127.0.0.1:{listener.getsockname()[1]}"
        )
        for step in range(1, 50):
            tracker.log({"a": 1.0}, step)
        assert time.monotonic() - began < 8
        assert "no answer in time" in warnings[0]
