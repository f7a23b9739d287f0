"""Placement: shares, the preflight's words, invented GPUs on a real Ray, the device Ray
assigned.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from crossfed.platform.cluster import connect as cluster
from crossfed.platform.cluster.connect import (
    SERVER_RESOURCE,
    Share,
    connect,
    fitted,
    preflight,
    reach,
    shares,
)
from crossfed.platform.config.settings import Resources
from crossfed.platform.errors import CrossfedError
from crossfed.platform.method import SERVER

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


@pytest.mark.parametrize(("gpus", "share"), [(2, 0.5), (3, 1.0), (1.5, 0.5), (0.5, 0.16), (0, 0.0)])
def test_domains_share_whole_gpus(gpus: float, share: float) -> None:
    """Three domains on two GPUs: two on one, one on the other, 1 / ceil(3 / 2) each; 2 / 3 each
    would fit only twice.
    """
    found = shares(Resources(), NODES, cpus=8, gpus=gpus)
    assert found["games"].gpus == share
    if gpus == int(gpus):
        preflight(found, [machine(8, 1)] * int(gpus) or [machine(8)])


def test_the_server_stays_on_machines_that_are_set_aside() -> None:
    found = shares(Resources(cpus_server=2), NODES, cpus=8, gpus=0, set_aside=True)
    assert found[SERVER].bundle() == {"CPU": 2, SERVER_RESOURCE: 0.001}
    assert found["books"].bundle() == {"CPU": 1.0}
    head = machine(2)
    head["Resources"][SERVER_RESOURCE] = 1.0
    preflight(found, [machine(8), head])
    head["Resources"]["CPU"] = 1.0
    with pytest.raises(
        CrossfedError,
        match=r"server asks for 2 CPUs .* set aside .* has 1; lower "
        r"resources.cpus_server",
    ):
        preflight(found, [machine(8), head])


def test_configured_shares_are_kept() -> None:
    found = shares(
        Resources(cpus_per_domain=4, gpus_per_domain=0.5, cpus_server=2), NODES, cpus=64, gpus=8
    )
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
def test_the_preflight_says_what_is_short(
    resources: Resources, machines: list[dict], words: str
) -> None:
    cpus = sum(row["Resources"]["CPU"] for row in machines)
    gpus = sum(row["Resources"]["GPU"] for row in machines)
    with pytest.raises(CrossfedError, match=words):
        preflight(shares(resources, NODES, cpus, gpus), machines)


@pytest.mark.parametrize(
    ("machines", "share"),
    [
        ((1, 2), 0.5),  # three quarters each, the total divided by four, fits three times
        ((1, 1, 1), 0.5),
        ((2, 2), 1.0),
        ((0.5, 3), 0.5),
        ((8,), 1.0),
        ((1.5, 1.5), 0.75),
    ],
)
def test_shares_fit_machines_and_not_only_their_sum(
    machines: tuple[float, ...], share: float
) -> None:
    rows = [machine(cpus) for cpus in machines]
    found = fitted(Resources(), NODES, rows)
    assert {row.cpus for row in found.values()} == {share}
    preflight(found, rows)


def test_what_is_configured_is_packed_per_machine() -> None:
    """0.75 each is 3 CPUs in all, which the two machines have, and fits three times."""
    resources = Resources(cpus_per_domain=0.75, cpus_server=0.75)
    rows = [machine(1), machine(2)]
    with pytest.raises(
        CrossfedError,
        match=r"No machine has room for games .* have 1 \+ 2 "
        r"CPUs.*placement=PACK; lower",
    ):
        preflight(fitted(resources, NODES, rows), rows)
    preflight(fitted(resources, NODES, [*rows, machine(1)]), [*rows, machine(1)])


def test_a_configured_server_leaves_the_rest_to_the_domains() -> None:
    found = fitted(Resources(cpus_server=1.5), NODES, [machine(2), machine(2)])
    assert (found[SERVER].cpus, found["books"].cpus) == (1.5, 0.5)


@pytest.mark.parametrize(
    ("strategy", "share"), [("STRICT_PACK", 0.5), ("STRICT_SPREAD", 1.0), ("SPREAD", 1.0)]
)
def test_the_strategy_is_heeded(strategy: str, share: float) -> None:
    rows = [machine(2), machine(1), machine(1), machine(1)]
    found = fitted(Resources(placement=strategy), NODES, rows)
    assert found["books"].cpus == share
    preflight(found, rows, strategy)
    with pytest.raises(CrossfedError, match="STRICT_SPREAD"):
        preflight(found, rows[:3], "STRICT_SPREAD")


def test_gpus_and_cpus_must_be_on_the_same_machine() -> None:
    """The machine with the GPUs has one CPU; two domains that want a GPU and a whole CPU do not fit
    it.
    """
    rows = [machine(4), machine(1, 2)]
    wanted = {name: Share(1, 1) for name in ("books", "films")}
    with pytest.raises(CrossfedError, match="No machine has room for films"):
        preflight(wanted, rows)
    assert fitted(Resources(gpus_per_domain=1), ("books", "films"), rows)["films"] == Share(0.5, 1)


def test_a_dead_machine_does_not_count() -> None:
    with pytest.raises(CrossfedError, match="2 short"):
        preflight({"books": Share(2, 0)}, [machine(4) | {"Alive": False}])


def test_an_address_where_nothing_listens_fails_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: False)  # other tests' cluster
    began = time.monotonic()
    with pytest.raises(
        CrossfedError,
        match=r"No Ray cluster can be joined at "
        r"'127\.0\.0\.1:1': .*refused",
    ):
        connect(Resources(address="127.0.0.1:1"))
    assert time.monotonic() - began < 5


@pytest.fixture
def listener() -> Iterator[list]:
    """[port, what it answers to everyone]; it says nothing at first."""
    talk: list = [0, b""]
    with socket.create_server(("", 0)) as server:
        talk[0] = server.getsockname()[1]
        kept: list[socket.socket] = []

        def serve() -> None:
            while True:
                try:
                    kept.append(server.accept()[0])
                except OSError:
                    return
                kept[-1].sendall(talk[1])

        threading.Thread(target=serve, daemon=True).start()
        yield talk
        server.shutdown(socket.SHUT_RDWR)
        for connection in kept:
            connection.close()


SETTINGS = bytes(3) + b"\x04" + bytes(5)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"", "what listens there is not Ray"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "what listens there is not Ray"),
        (SETTINGS, "does not answer as Ray's head node does"),
    ],
)
def test_what_is_no_ray_is_refused_in_seconds(
    listener: list, answer: bytes, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service that is silent, one that speaks HTTP/1.1, and one that speaks HTTP/2 and then is
    silent.
    """
    monkeypatch.setattr(cluster, "_PATIENCE", 0.5)
    listener[1] = answer
    began = time.monotonic()
    with pytest.raises(
        CrossfedError,
        match=rf"No Ray cluster can be joined at '127\.0\.0\.1:{listener[0]}': "
        rf".*{words}",
    ):
        reach(f"127.0.0.1:{listener[0]}")
    assert time.monotonic() - began < 3


@pytest.mark.parametrize(
    "address", ["nonsense", "127.0.0.1:99999", "127.0.0.1:http", "no-such-host.invalid:6379"]
)
def test_an_address_that_is_none(address: str) -> None:
    with pytest.raises(CrossfedError, match=f"No Ray cluster can be joined at {address!r}: "):
        reach(address)


def test_a_token_file_that_cannot_be_read_is_told(
    listener: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray would abort the process."""
    listener[1] = SETTINGS
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    path = tmp_path / "token"
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(path))
    with pytest.raises(
        CrossfedError,
        match=r"RAY_AUTH_TOKEN_PATH names .*token, which cannot "
        r"be read \(No such file",
    ):
        reach(f"127.0.0.1:{listener[0]}")
    path.write_text("\n")
    with pytest.raises(CrossfedError, match="which holds no token"):
        reach(f"127.0.0.1:{listener[0]}")


def test_a_local_cluster_listens_on_the_loopback_interface(ray_cluster: None) -> None:
    import ipaddress

    import psutil

    me = psutil.Process()
    ours = {me.pid, *(child.pid for child in me.children(recursive=True))}
    listening = [
        ipaddress.ip_address(row.laddr.ip.removeprefix("::ffff:"))
        for row in psutil.net_connections(kind="inet")
        if row.status == psutil.CONN_LISTEN and row.pid in ours
    ]
    assert len(listening) > 3 and all(address.is_loopback for address in listening)


def test_a_local_cluster_that_does_not_come_up_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def timed_out(**_: object) -> None:
        raise Exception("The current node timed out during startup.\nDetails")

    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.init", timed_out)
    with pytest.raises(
        CrossfedError,
        match=r"No local Ray cluster could be started: .* "
        r"startup\. Wait until .*$",
    ):
        connect(Resources())


def test_a_local_cluster_is_one_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an address Ray would join whatever `ray start` left on this machine."""
    asked: list[dict[str, object]] = []
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.init", lambda **given: asked.append(given))
    connect(Resources())
    assert asked[0]["address"] == "local"


INVENTED = """
import json, sys, ray
ray.init(address="local", num_cpus=4, num_gpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
from crossfed.platform.config.settings import build
from crossfed.platform.report.recording import run_recorded
from crossfed.platform.errors import CrossfedError
def go(*sets):
    values = {"data": sys.argv[1], "out": sys.argv[2], "tracking.enabled": False}
    return run_recorded(build("toys:AVERAGE", sets=["rounds=1", *sets], values=values))
print(json.dumps(go("resources.gpus_per_domain=0.5", "resources.device=auto", "resources.device=cpu").result["placement"]))
for sets in (["resources.gpus_per_domain=1"], ["resources.gpus_per_domain=0.5"]):
    try:
        go(*sets)
        print("ran")
    except CrossfedError as error:
        print(error)
"""  # noqa: E501


def test_actors_reserve_invented_gpus_and_the_server_none(shops: Path, tmp_path: Path) -> None:
    import json

    import torch

    script = tmp_path / "invented.py"
    script.write_text(INVENTED)
    done = subprocess.run(
        [sys.executable, str(script), str(shops), str(tmp_path / "runs")],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "RAY_AUTH_MODE": "disabled"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    placement = json.loads(lines[0])
    assert placement[SERVER]["gpu_ids"] == [] and placement[SERVER]["gpus"] == 0
    assert all(
        len(placement[name]["gpu_ids"]) == 1 and placement[name]["gpus"] == 0.5
        for name in ("books", "films", "games")
    )
    assert {placement[name]["device"] for name in placement} == {"cpu"}
    assert "needs 3 GPUs (books 1, films 1, games 1) but the cluster has 2: 1 short" in lines[1]
    if not torch.cuda.is_available():
        assert "Ray assigned GPU" in lines[2] and "but torch sees no GPU there" in lines[2]
