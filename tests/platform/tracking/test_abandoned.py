"""Runs and studies whose process was killed: recorded as interrupted by whoever looks next, and by
nobody before.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from mlflow import MlflowClient
from typer.testing import CliRunner

from crossfed.platform.cli import main
from crossfed.platform.config.settings import build
from crossfed.platform.tracking import abandoned
from crossfed.platform.uris import sqlite_uri

SCRIPT = """
import os, signal, sys
from crossfed.platform.config.settings import build
from crossfed.platform.report.recording import run_recorded
values = {"data": sys.argv[1], "out": sys.argv[2], "backend": "inprocess"}
def kill(row):
    os.kill(os.getpid(), signal.SIGKILL)
run_recorded(build("toys:AVERAGE", values=values), on_round=kill, name="killed")
"""


@pytest.fixture
def killed(shops: Path, tmp_path: Path) -> Path:
    """A run that was killed in its first round."""
    out = tmp_path / "runs"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(shops), str(out)], timeout=200, check=False
    )
    assert done.returncode == -signal.SIGKILL
    return out / "killed"


def status(folder: Path) -> str:
    client = MlflowClient(sqlite_uri(folder.parent / "mlflow.db"))
    return str(client.get_run((folder / "mlflow_run_id").read_text().strip()).info.status)


def test_a_killed_run_is_recorded_as_interrupted(killed: Path) -> None:
    assert status(killed) == "RUNNING"
    assert abandoned.close(killed.parent) == [killed]
    assert status(killed) == "KILLED"
    tags = (
        MlflowClient(sqlite_uri(killed.parent / "mlflow.db"))
        .get_run((killed / "mlflow_run_id").read_text().strip())
        .data.tags
    )
    assert tags["outcome"] == "interrupted" and "without a word" in tags["crossfed.reason"]
    assert abandoned.close(killed.parent) == []


def test_a_run_that_goes_on_is_left_alone(killed: Path) -> None:
    with (killed / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert abandoned.in_use(killed) and abandoned.close(killed.parent) == []
    assert status(killed) == "RUNNING" and not abandoned.in_use(killed)


def test_the_ui_says_what_was_interrupted(killed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main.os, "execv", lambda *_: None)
    shown = CliRunner().invoke(main.app, ["ui", "--out", str(killed.parent)])
    assert "interrupted: killed: its process ended without a word" in shown.output, shown.output
    assert status(killed) == "KILLED"


def test_where_there_is_no_store_nothing_is_closed(tmp_path: Path) -> None:
    assert abandoned.close(tmp_path) == [] and not list(tmp_path.iterdir())


def test_a_study_that_was_killed_says_so_when_it_is_shown(tmp_path: Path) -> None:
    from crossfed.tuning.study import Search, Study

    base = build("toys:AVERAGE", values={"out": tmp_path, "tracking.enabled": False})
    study = Study.create(Search(name="s", trials=2, changes={"dim": [2, 3]}), base, "shops", "f1")
    assert study.next() is not None and not study.over()
    told = (
        f"interrupted: nobody works on this study; crossfed tune resume {study.folder} goes "
        f"on with it"
    )
    call = ["tune", "show", str(study.folder)]
    assert told in CliRunner().invoke(main.app, call).output
    with study.locked():
        assert told not in CliRunner().invoke(main.app, call).output


def test_the_doctor_names_what_was_interrupted(killed: Path) -> None:
    from crossfed.platform.doctor import examine

    assert examine._interrupted(str(killed.parent), None).startswith(
        "interrupted: killed: its process"
    )
    assert examine._interrupted(str(killed.parent), None) == ""
    assert examine._interrupted("s3://bucket/runs", None) == ""


@pytest.mark.slow
@pytest.mark.parametrize("everybody", [False, True], ids=["group", "all"])
def test_sigterm_to_all_processes_ends_a_run_in_seconds(
    everybody: bool, shops: Path, tmp_path: Path
) -> None:
    """What `timeout` and batch systems send: to the process group, or to every process of a job."""
    import psutil

    words = ["run", "lightgcn", "--set", "dim=8", "--set", "epochs=5000", "--set", "patience=5000"]
    victim = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "crossfed.platform.cli.main",
            *words,
            "--data",
            str(shops),
            "--out",
            str(tmp_path),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    until = time.monotonic() + 250
    while time.monotonic() < until and not list(
        tmp_path.glob("*/checkpoints/commit-*/progress.json")
    ):
        time.sleep(0.1)
    began = time.monotonic()
    family = psutil.Process(victim.pid).children(recursive=True)
    os.killpg(victim.pid, signal.SIGTERM)
    for process in family if everybody else []:
        try:
            process.terminate()
        except psutil.NoSuchProcess:
            continue
    _, err = victim.communicate(timeout=60)
    assert time.monotonic() - began < 10 and victim.returncode == 130, err
    assert "Interrupted. What was committed stays: crossfed run --resume" in err
    assert not psutil.wait_procs(family, timeout=10)[1], (
        "an actor or a process of Ray outlives the run"
    )
    (run_dir,) = (path.parent for path in tmp_path.glob("*/config.yaml"))
    assert status(run_dir) == "KILLED"
