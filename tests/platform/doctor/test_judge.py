"""The doctor: planted faults are found, named with their machine and a mend; a sound cluster
passes; nothing waits for ever.
"""

from __future__ import annotations

import copy
import http.server
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from crossfed.platform.cli.main import app
from crossfed.platform.doctor import probe
from crossfed.platform.doctor.judge import GIB, Finding, Wanted, can_start, judge, table

WANTED = Wanted("/mnt/shared/runs", "http://127.0.0.1:5000", "minilm", set_aside=True)
VERSIONS = {
    "crossfed": "0.1.0",
    "ray": "2.60.0",
    "torch": "2.13.0",
    "numpy": "2.4.1",
    "optuna": "5.0.0",
}


def machine(name: str, gpus: int = 0, head: bool = False, driver: bool = False) -> dict[str, Any]:
    """A sound machine; the driver runs on the head."""
    return {
        "name": name,
        "host": "head" if driver else name,
        "driver": driver,
        "head": head,
        "gpus": float(gpus),
        "python": "3.11.14",
        "packages": dict(VERSIONS),
        "source": {"hash": "abc", "path": "/x"},
        "skew": None if driver else 0.0,
        "cuda": {"build": "12.8", "devices": ["L4"] * gpus},
        "storage": {"writable": True, "same": True},
        "mlflow": {"reached": True},
        "encoder": {"name": "minilm"},
        "auth": {"mode": "token"},
        "disk": {
            "places": {
                "the runs": {"path": "/mnt/shared/runs", "free": 500 * GIB, "total": 1000 * GIB},
                "Ray's temporary files": {"path": "/tmp/ray", "free": 80 * GIB, "total": 150 * GIB},
            }
        },
        "memory": {"free": 24 * GIB, "total": 32 * GIB},
    }


def sound() -> list[dict[str, Any]]:
    return [
        machine("this process", driver=True),
        machine("head", head=True),
        machine("one", 1),
        machine("two", 1),
    ]


def test_a_sound_cluster_passes() -> None:
    found = judge(sound(), WANTED)
    assert can_start(found) and {finding.severity for finding in found} == {"ok"}
    assert [finding.subject for finding in found] == [
        "versions",
        "gpus",
        "storage",
        "mlflow",
        "encoder",
        "authentication",
        "clock",
        "disk",
        "memory",
        "actors",
        "runs",
        "placement",
    ]
    assert found[0].text == "Python 3.11.14, crossfed 0.1.0, ray 2.60.0, torch 2.13.0"
    assert found[1].text == "2, seen by Ray and by torch" and not any(
        finding.mend for finding in found
    )


def put(*path: Any, to: Any) -> Callable[[list], None]:
    def plant(rows: list) -> None:
        target: Any = rows
        for part in path[:-1]:
            target = target[part]
        target[path[-1]] = to

    return plant


def drop(*path: Any) -> Callable[[list], None]:
    def plant(rows: list) -> None:
        target: Any = rows
        for part in path[:-1]:
            target = target[part]
        del target[path[-1]]

    return plant


LONE = {"name": "two", "driver": False, "silent": "nothing within 60 s"}
FAULTS = {
    # what is planted (row 0 is the driver, 1 the head, 2 and 3 the GPU machines): severity,
    # subject, where, words
    "another torch": (
        put(3, "packages", "torch", to="2.11.0"),
        "error",
        "torch",
        "two",
        "torch 2.11.0, but 2.13.0 on this process",
    ),
    "another optuna": (
        put(2, "packages", "optuna", to="5.1.0"),
        "warning",
        "optuna",
        "one",
        "optuna 5.1.0, but 5.0.0",
    ),
    "torch not installed": (
        drop(2, "packages", "torch"),
        "error",
        "torch",
        "one",
        "torch is missing",
    ),
    "another Python": (
        put(2, "python", to="3.11.9"),
        "error",
        "python",
        "one",
        "Python 3.11.9, but 3.11.14 on this process",
    ),
    "an old crossfed": (
        put(2, "packages", "crossfed", to="0.0.9"),
        "error",
        "crossfed",
        "one",
        "crossfed 0.0.9, but 0.1.0",
    ),
    "an old checkout": (
        put(2, "source", "hash", to="old"),
        "error",
        "crossfed",
        "one",
        "files differ .* though the version",
    ),
    "no crossfed": (
        drop(3, "packages", "crossfed"),
        "error",
        "crossfed",
        "two",
        "crossfed is missing",
    ),
    "crossfed broken": (
        put(3, "source", to={"problem": "No module named 'pydantic'"}),
        "error",
        "crossfed",
        "two",
        "cannot be imported: No module",
    ),
    "a GPU that torch does not see": (
        put(3, "cuda", "devices", to=[]),
        "error",
        "gpus",
        "two",
        "Ray counts 1 GPUs, torch sees 0: its torch is built for CUDA 12.8",
    ),
    "a CPU build on a GPU machine": (
        put(3, "cuda", to={"build": None, "devices": []}),
        "error",
        "gpus",
        "two",
        "torch is a build without CUDA",
    ),
    "a GPU that Ray does not count": (
        put(1, "cuda", "devices", to=["L4"]),
        "warning",
        "gpus",
        "head",
        "torch sees 1 GPUs, Ray counts 0",
    ),
    "another CUDA": (
        put(3, "cuda", "build", to="12.6"),
        "warning",
        "gpus",
        "one, two",
        "built for CUDA 12.6 and 12.8",
    ),
    "torch broken": (
        put(2, "cuda", to={"problem": "libcudnn.so.9: cannot open"}),
        "error",
        "gpus|cuda",
        "one",
        "libcudnn",
    ),
    "unwritable storage": (
        put(2, "storage", to={"problem": "Permission denied"}),
        "error",
        "storage",
        "one",
        "Permission denied",
    ),
    "storage not there for the driver": (
        put(0, "storage", to={"problem": "Read-only file system"}),
        "error",
        "storage",
        "this process",
        "Read-only",
    ),
    "storage not shared": (
        put(3, "storage", to={"writable": None, "same": False}),
        "error",
        "storage",
        "two",
        "/mnt/shared/runs is not the same there",
    ),
    "storage that hangs": (
        put(3, "storage", to={"problem": "no answer within 45 s"}),
        "error",
        "storage",
        "two",
        "no answer",
    ),
    "no MLflow": (
        lambda rows: [
            row.update(mlflow={"reached": False, "problem": "Connection refused"}) for row in rows
        ],
        "warning",
        "mlflow",
        "this process, head, one, two",
        "5000 does not answer: Connection refused",
    ),
    "MLflow out of reach for a worker": (
        put(2, "mlflow", to={"reached": False, "problem": "timed out"}),
        "warning",
        "mlflow",
        "one",
        "answers the driver, but not there: timed out",
    ),
    "no encoder": (
        put(0, "encoder", to={"problem": "bge is not in the local cache"}),
        "error",
        "encoder",
        "this process",
        "minilm is not at hand offline",
    ),
    "no encoder on the head": (
        put(1, "encoder", to={"problem": "none"}),
        "warning",
        "encoder",
        "head",
        "not at hand",
    ),
    "no authentication": (
        lambda rows: [row["auth"].update(mode="disabled") for row in rows],
        "warning",
        "authentication",
        "head, one, two",
        "without token authentication",
    ),
    "a clock ahead": (
        put(2, "skew", to=8.0),
        "warning",
        "clock",
        "one",
        "8 s ahead of the driver's",
    ),
    "a clock far behind": (
        put(2, "skew", to=-3600.0),
        "error",
        "clock",
        "one",
        "3600 s behind the driver's",
    ),
    "a full disk": (
        put(2, "disk", "places", "Ray's temporary files", "free", to=4 * GIB),
        "error",
        "disk",
        "one",
        r"4.0 GiB \(3%\) free for Ray's temporary files in /tmp/ray",
    ),
    "a disk that fills": (
        put(2, "disk", "places", "Ray's temporary files", "free", to=9 * GIB),
        "warning",
        "disk",
        "one",
        "9.0 GiB",
    ),
    "no memory": (
        put(3, "memory", "free", to=1 * GIB),
        "error",
        "memory",
        "two",
        "1.0 of 32.0 GiB are free",
    ),
    "little memory": (
        put(3, "memory", "free", to=2 * GIB),
        "warning",
        "memory",
        "two",
        "2.0 of 32.0",
    ),
    "a machine that does not answer": (
        put(3, to=LONE),
        "error",
        "answer",
        "two",
        "does not answer: nothing within 60 s",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str) -> None:
    """Exactly one finding, of this severity, at this machine, with a mend; all other subjects stay
    well.
    """
    plant, severity, subject, where, words = FAULTS[fault]
    rows = copy.deepcopy(sound())
    plant(rows)
    found = [finding for finding in judge(rows, WANTED) if finding.severity != "ok"]
    assert len(found) == 1, found
    assert (found[0].severity, found[0].where) == (severity, where)
    assert re.fullmatch(subject, found[0].subject) and re.search(words, found[0].text), found
    assert len(found[0].mend) > 10
    assert can_start(found) == (severity == "warning")


def test_what_depends_on_what_is_wanted() -> None:
    away = [{**row, "mlflow": {"reached": False, "problem": "refused"}} for row in sound()]
    required = Wanted(WANTED.out, WANTED.tracking, "minilm", require_tracking=True, set_aside=True)
    assert can_start(judge(away, WANTED)) and not can_start(judge(away, required))
    file = Wanted(WANTED.out, "sqlite:////x/mlflow.db", "minilm", set_aside=True)
    assert any("SQLite file" in finding.text for finding in judge(sound(), file))
    assert not any("SQLite file" in finding.text for finding in judge(sound()[:2], file))
    nowhere = Wanted(WANTED.out, WANTED.tracking, "minilm", set_aside=False)
    (placed,) = [finding for finding in judge(sound(), nowhere) if finding.severity != "ok"]
    assert placed.subject == "placement" and placed.where == "one, two"


def test_builds_of_one_torch_are_no_difference() -> None:
    rows = sound()
    rows[0]["packages"]["torch"] = rows[1]["packages"]["torch"] = "2.13.0+cpu"
    assert can_start(judge(rows, WANTED)) and judge(rows, WANTED)[0].subject == "versions"


def test_an_open_cluster_on_this_machine_alone_is_no_matter() -> None:
    rows = [machine("this process", driver=True), machine("head", head=True)]
    for row in rows:
        row["auth"]["mode"] = "disabled"
    assert {finding.severity for finding in judge(rows, WANTED)} == {"ok"}


def test_when_nobody_answers() -> None:
    found = judge([{"name": "a", "driver": False, "silent": "gone"}], WANTED)
    assert [finding.subject for finding in found] == ["answer"] and not can_start(found)


def test_the_table_shows_all_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    Console(width=200).print(
        table(
            [
                Finding("error", "disk", "one", "[full]", "free some"),
                Finding("ok", "gpus", "all", "2"),
            ]
        )
    )
    shown = capsys.readouterr().out
    for word in ("error", "disk", "one", "[full]", "free some", "gpus"):
        assert word in shown


# -- looking ---------------------------------------------------------------------------------------


def ask(tmp_path: Path, **other: Any) -> dict[str, Any]:
    marker = tmp_path / "runs" / ".doctor"
    marker.mkdir(parents=True)
    (marker / "driver").write_text("word")
    return {
        "node": "n1",
        "patience": 60,
        "out": str(tmp_path / "runs"),
        "marker": str(marker),
        "word": "word",
        "tracking": None,
        "encoder": "hashing",
        "temp": str(tmp_path),
    } | other


def test_a_look_at_this_machine(tmp_path: Path) -> None:
    import torch

    report = probe.look(ask(tmp_path))
    json.dumps(report)
    assert not [
        name for name, told in report.items() if isinstance(told, dict) and "problem" in told
    ], report
    assert (
        report["python"] == sys.version.split()[0]
        and report["packages"]["torch"] == torch.__version__
    )
    assert len(report["source"]["hash"]) == 12 and report["storage"] == {
        "writable": True,
        "same": True,
    }
    assert (tmp_path / "runs/.doctor/n1").read_text() == "word"
    assert 0 < report["memory"]["free"] < report["memory"]["total"]
    assert report["began"] <= report["ended"] <= time.time()
    driver = machine("this process", driver=True) | report
    assert can_start(
        judge([driver, {**driver, "name": "it", "driver": False, "skew": 0.0}], WANTED)
    )


def test_storage_that_is_another_or_cannot_be_written(tmp_path: Path) -> None:
    asked = ask(tmp_path)
    assert probe._storage(asked | {"word": "other"}) == {"writable": False, "same": False}
    assert probe._storage(asked | {"marker": str(tmp_path / "elsewhere")}) == {
        "writable": None,
        "same": False,
    }
    blocked = tmp_path / "runs/.doctor/n2"
    blocked.mkdir()  # a folder where the file would be
    found = probe.within(5, {"storage": lambda: probe._storage(asked | {"node": "n2"})})
    assert "directory" in found["storage"]["problem"].lower()


def test_a_look_that_hangs_is_told_in_time() -> None:
    release = threading.Event()
    began = time.monotonic()
    found = probe.within(
        0.3, {"slow": lambda: release.wait(30), "after": lambda: 1}, {"fast": lambda: 2}
    )
    release.set()
    assert time.monotonic() - began < 5
    assert found == {
        "slow": {"problem": "no answer within 0.3 s"},
        "after": {"problem": "no answer within 0.3 s"},
        "fast": 2,
    }


@pytest.mark.parametrize("status", [200, 401])
def test_an_mlflow_server_that_answers_and_one_that_is_gone(status: int) -> None:
    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Not into the test's output."""

    with http.server.HTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        uri = f"http://127.0.0.1:{server.server_port}"
        assert probe._mlflow(uri) == {"reached": True}
        server.shutdown()
    assert probe._mlflow(uri) == {"reached": False, "problem": "Connection refused"}
    assert probe._mlflow(None) == {"reached": None}


def test_a_running_cluster_is_examined(ray_cluster: None, tmp_path: Path) -> None:
    from crossfed.platform.doctor.examine import examine

    reports, wanted = examine(
        None, str(tmp_path / "runs"), f"sqlite:///{tmp_path}/mlflow.db", "minilm", patience=120
    )
    found = judge(reports, wanted)
    assert can_start(found), found
    assert [row["driver"] for row in reports] == [True, False] and reports[1]["head"]
    assert reports[1]["storage"] == {"writable": True, "same": True} and reports[1]["auth"] == {
        "mode": "token"
    }
    assert abs(reports[1]["skew"]) < 2 and not (tmp_path / "runs").exists()


def test_the_command_says_that_there_is_no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    done = CliRunner().invoke(app, ["doctor", "--address", "127.0.0.1:1"])
    assert done.exit_code == 2
    assert (
        "cluster" in done.output
        and "refused" in done.output
        and ("No run can start: 1 error.") in done.output
    )


PLANTED = """
import json, os, pathlib, signal, sys
from ray.cluster_utils import Cluster
root = pathlib.Path(sys.argv[1])
def fake(name, version):
    folder = root / f"{name}-{version}"
    about = folder / f"{name}-{version}.dist-info"
    about.mkdir(parents=True, exist_ok=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n")
    return {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
late = root / "late"
late.mkdir()
(late / "sitecustomize.py").write_text("import time\\nnow = time.time\\ntime.time = lambda: now() + 900\\n")
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
cluster.add_node(num_cpus=1, num_gpus=2)
cluster.add_node(num_cpus=1, env_vars=fake("torch", "1.0"))
cluster.add_node(num_cpus=1, env_vars=fake("crossfed", "0.0.1"))
cluster.add_node(num_cpus=1, env_vars={"PYTHONPATH": os.pathsep.join([str(late), os.environ.get("PYTHONPATH", "")])})
gone = cluster.add_node(num_cpus=1)
cluster.wait_for_nodes()
os.kill(gone.all_processes["raylet"][0].process.pid, signal.SIGSTOP)
from crossfed.platform.doctor.judge import judge
from crossfed.platform.doctor.examine import examine
found = judge(*examine(cluster.address, str(root / "runs"), "http://127.0.0.1:9", "BAAI/nowhere", False, 120.0))
print(json.dumps([[f.severity, f.subject, f.where, f.text] for f in found]))
print((root / "runs").exists())
"""  # noqa: E501


@pytest.mark.slow
def test_faults_planted_for_real_on_six_nodes(tmp_path: Path) -> None:
    """Invented GPUs, another torch or crossfed, a clock 15 minutes ahead, a node that is frozen, no
    MLflow, no encoder.
    """
    script = tmp_path / "planted.py"
    script.write_text(PLANTED)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        # the repository root, which Ray would put on the path of its workers, holds
        # crossfed.egg-info
        cwd=tmp_path,
        env={
            **os.environ,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": "a" * 64,
            "HF_HUB_OFFLINE": "1",
        },
    )
    assert done.returncode == 0, done.stderr[-3000:]
    *_, told, left = done.stdout.splitlines()
    # the worst of a subject
    found = {row[1]: row for row in reversed(json.loads(told)) if row[0] != "ok"}
    print(json.dumps(list(found.values()), indent=1))
    assert "Ray counts 2 GPUs, torch sees 0" in found["gpus"][3] and found["gpus"][0] == "error"
    assert found["torch"][3].startswith("torch 1.0, but") and found["crossfed"][3].startswith(
        "crossfed 0.0.1, but"
    )
    assert found["clock"][0] == "error" and "ahead of" in found["clock"][3]
    assert found["mlflow"][0] == "warning" and found["encoder"][0] == "error"
    # told apart
    assert (
        len({found[subject][2] for subject in ("answer", "gpus", "torch", "crossfed", "clock")})
        == 5
    )
    assert left == "False"  # the folder that was made to be written into is gone


def test_actors_that_fit_no_machine_keep_a_run_from_starting() -> None:
    """The words are those of the preflight, which is asked for the same shares."""
    found = judge(sound(), replace(WANTED, shortage="No machine has room for domain 3"))
    assert not can_start(found)
    assert (found[0].subject, found[0].text) == ("actors", "No machine has room for domain 3")


def test_the_doctor_asks_for_the_shares_of_a_run(ray_cluster: None, tmp_path: Path) -> None:
    import ray

    from crossfed.platform.cluster import connect
    from crossfed.platform.config.settings import Resources
    from crossfed.platform.doctor import examine as ray_doctor

    told, shortage = ray_doctor._actors(3)
    names = ["server", "domain 1", "domain 2", "domain 3"]
    share = connect.fitted(Resources(), names, ray.nodes())["domain 1"]
    assert not shortage and f"3 domains with {share.cpus:g} CPUs" in told and "free now: " in told
