"""The tracker against real stores: SQLite files, and MLflow servers started, killed and restarted
on the loopback.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
from matplotlib.figure import Figure
from mlflow import MlflowClient

from crossfed.platform.config.settings import TrackingSettings
from crossfed.platform.errors import CrossfedError
from crossfed.platform.serving import save
from crossfed.platform.tracking.spool import SPOOL, STATE
from crossfed.platform.tracking.tracker import replay, resolve_uri, safe_name
from tracked import free_port, history, sqlite, start


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


def test_a_model_that_cannot_be_packed_is_a_warning(out: Path) -> None:
    warnings: list[str] = []
    tracker = start(out / "run", warnings)
    tracker.model(save.save, out / "run", "A")  # no configuration, no tensors there
    tracker.finish("FINISHED")
    assert "the model of A cannot be recorded" in warnings[0]
    assert sqlite(out / "run").get_run(tracker.run_id).info.status == "FINISHED"


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
