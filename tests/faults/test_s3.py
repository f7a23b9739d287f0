"""A real S3-compatible server (moto's): a run is killed here and goes on there, to the numbers of
an undisturbed one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyarrow import fs

SECRET = "wJalrXUtnFEMIK7MDENGbPxRfiCYsecret"


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URI of an empty bucket; the server and the credentials are in the environment."""
    server_module = pytest.importorskip("moto.server", reason="pip install crossfed[storage-test]")
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "AKIATEST", "AWS_SECRET_ACCESS_KEY": SECRET,  # noqa: E501
        "AWS_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    fs.S3FileSystem(
        endpoint_override=f"{host}:{port}",
        scheme="http",
        region="us-east-1",
        allow_bucket_creation=True,
    ).create_dir("lab")
    yield "s3://lab/runs"
    server.stop()


def crossfed(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "crossfed.platform.cli.main", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_killed_here_goes_on_there(bucket: str, shops: Path, tmp_path: Path) -> None:
    sets = ["dim=16", "epochs=8", "batch_size=16", "patience=8"]
    args = ["lightgcn", "--data", shops, "--backend", "inprocess", "--progress", "quiet"]
    args += [part for text in sets for part in ("--set", text)]
    done = crossfed("run", *args, "--out", tmp_path / "straight")
    assert done.returncode == 0, done.stderr
    straight = json.loads(Path(done.stdout.split()[-1]).read_text())

    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    victim = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "crossfed.platform.cli.main",
            "run",
            *map(str, args),
            "--out",
            bucket,
        ],
        cwd=here,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    until = time.monotonic() + 180
    while time.monotonic() < until and not list(here.glob("runs/*/checkpoints/commit-000003")):
        time.sleep(0.02)
    victim.send_signal(signal.SIGKILL)
    said = victim.communicate()[0]
    (run_dir,) = (path.parent for path in here.glob("runs/*/config.yaml"))
    assert not (run_dir / "result.json").exists(), "the run ended before it was killed"

    resumed = subprocess.run(
        [
            sys.executable, "-m", "crossfed.platform.cli.main", "run",
            "--resume", f"{bucket}/{run_dir.name}", "--progress", "plain",
        ],
        cwd=there, capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "continuing after round" in resumed.stdout
    result = json.loads((there / "runs" / run_dir.name / "result.json").read_text())
    assert result["domains"] == straight["domains"]

    store, base = (
        fs.S3FileSystem(
            endpoint_override=os.environ["AWS_ENDPOINT_URL"].split("//")[1], scheme="http"
        ),
        "lab/runs/",
    )
    with store.open_input_stream(f"{base}{run_dir.name}/result.json") as file:
        assert json.loads(file.read())["domains"] == straight["domains"]
    for folder in (here, there):
        for path in folder.rglob("*"):
            assert path.is_dir() or SECRET.encode() not in path.read_bytes(), (
                f"{path} holds a credential"
            )
    assert SECRET not in said + resumed.stdout + resumed.stderr


@pytest.mark.slow
def test_a_bucket_that_is_not_there_is_one_sentence(
    bucket: str, shops: Path, tmp_path: Path
) -> None:
    args = ["lightgcn", "--data", shops, "--backend", "inprocess", "--progress", "quiet"]
    done = crossfed("run", *args, "--set", "mirror=s3://elsewhere/runs", "--out", tmp_path)
    assert (
        done.returncode == 2
        and "Traceback" not in done.stderr
        and len(done.stderr.splitlines()) == 1
    )
    assert "s3://elsewhere/runs/" in done.stderr and "cannot be reached or used" in done.stderr
