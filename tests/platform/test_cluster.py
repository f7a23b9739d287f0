"""Placement: shares, the preflight's words, invented GPUs on a real Ray, the device Ray assigned."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from crossfed.platform.cluster import Share, connect, preflight, shares
from crossfed.platform.config import Resources, build
from crossfed.platform.nodes import local_device
from crossfed.platform.seam import SERVER, CrossfedError

NODES = (SERVER, "books", "films", "games")


def machine(cpus: float, gpus: float = 0) -> dict:
    return {"Alive": True, "Resources": {"CPU": cpus, "GPU": gpus}}


def test_shares_divide_what_there_is() -> None:
    found = shares(Resources(), NODES, cpus=2, gpus=1)
    assert found[SERVER] == Share(0.5, 0.0)
    assert found["films"] == Share(0.5, 0.33)  # rounded down, so that three fit on one GPU
    assert shares(Resources(), NODES, cpus=64, gpus=8)["films"] == Share(1.0, 1.0)
    assert shares(Resources(device="cpu"), NODES, cpus=64, gpus=8)["films"].gpus == 0
    preflight(found, [machine(2, 1)])


def test_configured_shares_are_kept() -> None:
    found = shares(Resources(cpus_per_domain=4, gpus_per_domain=0.5, cpus_server=2), NODES, cpus=64, gpus=8)
    assert (found[SERVER], found["books"]) == (Share(2, 0), Share(4, 0.5))


@pytest.mark.parametrize(
    ("resources", "machines", "words"),
    [
        (
            Resources(gpus_per_domain=1),
            [machine(8, 2)],
            r"needs 3 GPUs \(books 1, films 1, games 1\) .* has 2: 1 short",
        ),
        (
            Resources(cpus_per_domain=2),
            [machine(4)],
            r"needs 7 CPUs .* has 4: 3 short; lower resources.cpus_per_domain",
        ),
        (
            Resources(cpus_per_domain=3),
            [machine(2)] * 6,
            r"books asks for 3 CPUs on one machine, but the largest has 2",
        ),
        (
            Resources(gpus_per_domain=1.5),
            [machine(8, 8)],
            r"books asks for 1.5 GPUs; Ray gives a fraction below 1 or a whole",
        ),
    ],
)
def test_the_preflight_says_what_is_short(resources: Resources, machines: list[dict], words: str) -> None:
    cpus = sum(row["Resources"]["CPU"] for row in machines)
    gpus = sum(row["Resources"]["GPU"] for row in machines)
    with pytest.raises(CrossfedError, match=words):
        preflight(shares(resources, NODES, cpus, gpus), machines)


def test_a_dead_machine_does_not_count() -> None:
    with pytest.raises(CrossfedError, match="2 short"):
        preflight({"books": Share(2, 0)}, [machine(4) | {"Alive": False}])


def test_an_address_where_nothing_listens_fails_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: False)  # other tests' cluster
    began = time.monotonic()
    with pytest.raises(CrossfedError, match=r"No Ray cluster can be joined at '127\.0\.0\.1:1': .*refused"):
        connect(Resources(address="127.0.0.1:1"))
    assert time.monotonic() - began < 5


def test_a_local_cluster_that_does_not_come_up_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def timed_out(**_: object) -> None:
        raise Exception("The current node timed out during startup.\nDetails")

    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.init", timed_out)
    with pytest.raises(CrossfedError, match=r"No local Ray cluster could be started: .* startup\. Wait until .*$"):
        connect(Resources())


def test_a_gpu_asked_for_where_there_is_none() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    config = build("lightgcn", sets=["resources.gpus_per_domain=1"])
    with pytest.raises(CrossfedError, match="asks for a GPU, but torch sees none here"):
        local_device(config)


INVENTED = """
import json, sys, ray
ray.init(num_cpus=4, num_gpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
from crossfed.platform.config import build
from crossfed.platform.run import run_federation
from crossfed.platform.seam import CrossfedError
def go(*sets):
    values = {"data": sys.argv[1], "out": sys.argv[2], "tracking.enabled": False}
    return run_federation(build("toys:AVERAGE", sets=["rounds=1", *sets], values=values))
print(json.dumps(go("resources.gpus_per_domain=0.5", "resources.device=auto", "resources.device=cpu").result["placement"]))
for sets in (["resources.gpus_per_domain=1"], ["resources.gpus_per_domain=0.5"]):
    try:
        go(*sets)
        print("ran")
    except CrossfedError as error:
        print(error)
"""


def test_actors_reserve_invented_gpus_and_the_server_none(shops: Path, tmp_path: Path) -> None:
    import json

    import torch

    script = tmp_path / "invented.py"
    script.write_text(INVENTED)
    done = subprocess.run(
        [sys.executable, str(script), str(shops), str(tmp_path / "runs")],
        capture_output=True, text=True, timeout=240, env={**os.environ, "RAY_AUTH_MODE": "disabled"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    placement = json.loads(lines[0])
    assert placement[SERVER]["gpu_ids"] == [] and placement[SERVER]["gpus"] == 0
    assert all(
        len(placement[name]["gpu_ids"]) == 1 and placement[name]["gpus"] == 0.5 for name in ("books", "films", "games")
    )
    assert {placement[name]["device"] for name in placement} == {"cpu"}
    assert "needs 3 GPUs (books 1, films 1, games 1) but the cluster has 2: 1 short" in lines[1]
    if not torch.cuda.is_available():
        assert "Ray assigned GPU" in lines[2] and "but torch sees no GPU there" in lines[2]
