"""A real cluster examined: one machine, six with planted faults, and the shares of a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from crossfed.platform.doctor.judge import can_start, judge


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


def test_the_doctor_asks_for_the_shares_of_a_run(ray_cluster: None, tmp_path: Path) -> None:
    import ray

    from crossfed.platform.cluster import connect
    from crossfed.platform.config.settings import Resources
    from crossfed.platform.doctor import examine as ray_doctor

    told, shortage = ray_doctor._actors(3)
    names = ["server", "domain 1", "domain 2", "domain 3"]
    share = connect.fitted(Resources(), names, ray.nodes())["domain 1"]
    assert not shortage and f"3 domains with {share.cpus:g} CPUs" in told and "free now: " in told
