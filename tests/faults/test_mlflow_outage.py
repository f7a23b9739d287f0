"""An MLflow server that goes away in the middle of a run: everything is recorded at the end, once
each.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import requests
from mlflow import MlflowClient

from contract.test_methods import SMALL
from crossfed.platform.config.settings import build
from crossfed.platform.console import make_progress
from crossfed.platform.federation.final import test_once as final_test
from crossfed.platform.federation.rounds import Round
from crossfed.platform.federation.run import RunResult
from crossfed.platform.layout import RUN_ID
from crossfed.platform.report.recording import run_recorded
from crossfed.platform.tracking import names
from crossfed.platform.tracking.spool import SPOOL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
SELECT = "recall_at_20"
ROUNDS = 12
"""Of two stages; the server is away from the fifth to the eighth, across the stages' border."""


class Server:
    """`mlflow server` on the loopback, as README and cluster.yaml start it, with its store and
    files in a folder.
    """

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        self.folder, self.uri = folder, f"http://127.0.0.1:{port}"
        self.command = [
            sys.executable,
            "-m",
            "mlflow",
            "server",
            "--host",
            "127.0.0.1",
            "--port",
            port,
            "--workers",
            "1",
        ]
        self.command += ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db"]
        self.command += ["--artifacts-destination", str(folder / "artifacts")]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        # mlflow starts uvicorn by its name
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        env = os.environ | {
            "PATH": path,
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        }
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(
                self.command, stdout=log, stderr=log, start_new_session=True, env=env
            )
        until = time.monotonic() + 240
        while time.monotonic() < until:
            try:
                if requests.get(f"{self.uri}/health", timeout=1).ok:
                    return
            except requests.RequestException:
                time.sleep(0.2)
        raise AssertionError((self.folder / "server.log").read_text())

    def signal(self, number: int) -> None:
        assert self.process is not None
        os.killpg(self.process.pid, number)

    def stop(self) -> None:
        if self.process is not None:
            self.signal(signal.SIGTERM)
            self.process.wait(240)
            self.process = None


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    started = Server(tmp_path_factory.mktemp("server"))
    started.start()
    yield started
    if started.process is not None:
        started.signal(signal.SIGKILL)
        started.process.wait()


@dataclass
class Done:
    """A run, what it told, and its seconds without those in which the server was started again."""

    result: RunResult
    told: str
    seconds: float
    waited: list[float] = field(default_factory=list)

    @property
    def run_id(self) -> str:
        return (self.result.run_dir / RUN_ID).read_text().strip()


def run(
    shops: Path, out: Path, server: Server, at: dict[int, Callable[[], None]] | None = None
) -> Done:
    """A federation of `ROUNDS` rounds, in process; after a round, what `at` names is done."""
    config = build(
        "fedcrf",
        sets=[
            *SMALL["fedcrf"],
            f"rounds={ROUNDS // 2}",
            f"epochs={ROUNDS // 2}",
            "patience=50",
            "text.encoder=hashing:32",
        ],
        values={"data": shops, "out": out, "backend": "inprocess", "tracking.uri": server.uri},
    )
    waited: list[float] = []

    def on_round(row: Round) -> None:
        if at and row.step in at:
            began = time.monotonic()
            at[row.step]()
            waited.append(time.monotonic() - began)

    told, began = io.StringIO(), time.monotonic()
    with contextlib.redirect_stderr(told):  # where warnings go
        view = make_progress("plain", told)
        done = run_recorded(config, view=view, on_round=on_round, finish=final_test, name="run")
    return Done(done, told.getvalue(), time.monotonic() - began - sum(waited), waited)


def expected(done: Done) -> dict[str, list[tuple[int, float]]]:
    """Every metric's history, from the run's own files."""
    rows = [
        json.loads(line)
        for line in (done.result.run_dir / "history.jsonl").read_text().splitlines()
    ]
    assert len(rows) == ROUNDS
    found: dict[str, list[tuple[int, float]]] = {}
    result, stages = done.result.result, list(dict.fromkeys(row["stage"] for row in rows))
    for row in rows:
        told = names.of_round(row, SELECT, stages.index(row["stage"]) + 1, result["domains"])
        for key, value in told.items():
            found.setdefault(key, []).append((row["step"], value))
    for key, value in names.of_result(result, SELECT).items():
        if key not in found:
            found[key] = [(ROUNDS, value)]
    return found


def files(client: MlflowClient, run_id: str, folder: str | None = None) -> set[str]:
    found = set[str]()
    for entry in client.list_artifacts(run_id, folder):
        found |= files(client, run_id, entry.path) if entry.is_dir else {entry.path}
    return found


def recorded(
    client: MlflowClient, run_id: str
) -> tuple[dict[str, list[tuple[int, float]]], dict[str, Any]]:
    """Every metric's history in the store, and everything else that it holds of a run."""
    run = client.get_run(run_id)
    held = {
        key: [(m.step, m.value) for m in client.get_metric_history(run_id, key)]
        for key in run.data.metrics
    }
    passing = ("mlflow.runName", "mlflow.note.content", "mlflow.crossfed.runKey")
    models = sorted(client.get_logged_model(out.model_id).name for out in run.outputs.model_outputs)
    other = {
        "status": run.info.status,
        "params": run.data.params,
        "tags": {key: value for key, value in run.data.tags.items() if key not in passing},
        "described": "| books |" in run.data.tags["mlflow.note.content"],
        "datasets": sorted(entry.dataset.name for entry in run.inputs.dataset_inputs),
        "artifacts": files(client, run_id),
        "models": models,
    }
    return held, other


def check(client: MlflowClient, done: Done, calm: Done) -> None:
    """Everything is in the store once, and it is what the undisturbed run has there."""
    held, other = recorded(client, done.run_id)
    wanted = expected(done)
    assert wanted.keys() == {key for key in held if not key.startswith("system/")}
    assert {key: held[key] for key in wanted} == wanted
    system = [key for key in held if key.startswith("system/")]
    assert system and all(
        [step for step, _ in held[key]] == list(range(1, ROUNDS + 1)) for key in system
    )
    calm_held, calm_other = recorded(client, calm.run_id)
    assert other == calm_other and held.keys() == calm_held.keys()
    assert other["status"] == "FINISHED" and len(other["models"]) == 3 and other["described"]
    assert not (done.result.run_dir / SPOOL).exists()


@pytest.fixture(scope="module")
def calm(server: Server, shops: Path, tmp_path_factory: pytest.TempPathFactory) -> Done:
    """The same run, while the server answers."""
    done = run(shops, tmp_path_factory.mktemp("calm"), server)
    assert "out of reach" not in done.told
    check(MlflowClient(server.uri), done, done)
    return done


def test_a_server_away_for_the_middle_third(
    server: Server, calm: Done, shops: Path, tmp_path: Path
) -> None:
    done = run(shops, tmp_path, server, {ROUNDS // 3: server.stop, 2 * ROUNDS // 3: server.start})
    check(MlflowClient(server.uri), done, calm)
    assert done.told.count("is out of reach") == 1 and "connection refused" in done.told
    assert f"recorded in {server.uri}" in done.told and "wait in" not in done.told
    print(
        f"calm {calm.seconds:.1f} s, with the outage {done.seconds:.1f} s, stop and start "
        f"{done.waited}"
    )
    assert done.seconds < 1.5 * calm.seconds + 10


def test_a_server_that_hangs_for_the_middle_third(
    server: Server, calm: Done, shops: Path, tmp_path: Path
) -> None:
    """Stopped as a process: it holds the connection, and answers what it was sent once it goes
    on.
    """
    at = {
        ROUNDS // 3: lambda: server.signal(signal.SIGSTOP),
        2 * ROUNDS // 3: lambda: server.signal(signal.SIGCONT),
    }
    done = run(shops, tmp_path, server, at)
    check(MlflowClient(server.uri), done, calm)
    assert done.told.count("is out of reach") == 1 and "no answer in time" in done.told
    print(f"calm {calm.seconds:.1f} s, with a hanging server {done.seconds:.1f} s")
    assert done.seconds < 1.5 * calm.seconds + 45


def test_a_server_still_away_at_the_end(
    server: Server, calm: Done, shops: Path, tmp_path: Path
) -> None:
    done = run(shops, tmp_path, server, {ROUNDS // 3: server.stop})
    assert "entries wait in" in done.told and (done.result.run_dir / SPOOL).is_file()
    assert done.seconds < 1.5 * calm.seconds + 10

    command = [
        sys.executable,
        "-m",
        "crossfed.platform.cli.main",
        "replay",
        str(done.result.run_dir),
    ]
    away = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (
        away.returncode == 2
        and "connection refused" in away.stderr
        and "0 entries sent" in away.stdout
    )
    server.start()
    sent = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (
        sent.returncode == 0
        and "0 left, 0 refused" in sent.stdout
        and not sent.stdout.startswith("0 ")
    ), sent.stderr
    client = MlflowClient(server.uri)
    check(client, done, calm)
    before = recorded(client, done.run_id)
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 0 and again.stdout == "0 entries sent, 0 left, 0 refused.\n"
    assert recorded(client, done.run_id) == before
