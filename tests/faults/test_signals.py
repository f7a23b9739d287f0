"""SIGTERM and SIGINT at any moment, Ray's start included: exit code 130, one sentence, the MLflow
run marked as killed.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
@pytest.mark.parametrize("seconds", [1.0, 5.0, 8.0, 11.0])
def test_a_signal_while_ray_starts(
    seconds: float, number: signal.Signals, shops: Path, tmp_path: Path
) -> None:
    from mlflow import MlflowClient

    sets = ["dim=8", "epochs=5000", "patience=5000"]
    command = [
        sys.executable,
        "-m",
        "crossfed.platform.cli.main",
        "run",
        "lightgcn",
        "--data",
        str(shops),
        "--backend",
        "ray",
    ]
    command += [part for text in sets for part in ("--set", text)] + [
        "--out",
        str(tmp_path),
        "--progress",
        "quiet",
    ]
    victim = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # a shell's background job ignores it
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    until = time.monotonic() + 120
    while time.monotonic() < until and not list(tmp_path.glob("*/mlflow_run_id")):
        time.sleep(0.05)
    time.sleep(seconds)
    victim.send_signal(number)
    out, err = victim.communicate(timeout=90)
    assert victim.returncode == 130, out + err
    assert (
        err.startswith("Interrupted. What was committed stays: crossfed run --resume")
        and len(err.splitlines()) == 1
    )
    (run_dir,) = (path.parent for path in tmp_path.glob("*/config.yaml"))
    run = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db").get_run(
        (run_dir / "mlflow_run_id").read_text().strip()
    )
    assert run.info.status == "KILLED"
