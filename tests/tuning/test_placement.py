"""A cluster divided among trials: what one reserves, how many run at once."""

from __future__ import annotations

from crossfed.platform.cluster.connect import (
    SERVER_RESOURCE,
)
from crossfed.platform.config.settings import build
from crossfed.platform.method import SERVER
from crossfed.tuning.placement import slots

NODES = (SERVER, "books", "films", "games")


def machine(cpus: float, gpus: float = 0) -> dict:
    return {"Alive": True, "Resources": {"CPU": cpus, "GPU": gpus}}


def test_a_trial_without_a_server_waits_where_machines_are_set_aside() -> None:
    """There MLflow runs, on the loopback interface."""
    base = build("lightgcn")
    head = machine(8)
    assert slots(base, NODES[1:], 1, [head, machine(8)]).bundles[0] == {}
    head["Resources"][SERVER_RESOURCE] = 1.0
    assert slots(base, NODES[1:], 1, [head, machine(8)]).bundles[0] == {SERVER_RESOURCE: 0.001}
    own, server, *_ = slots(base, NODES, 1, [head, machine(8)]).bundles
    assert own == {} and server[SERVER_RESOURCE] == 0.001  # its process is in the server's bundle


def test_trials_at_once_fit_machines_too() -> None:
    rows = [machine(1), machine(2)]
    made = slots(build("toys:AVERAGE"), NODES, 1, rows)
    assert made.run.resources.cpus_per_domain == 0.5
    inside = slots(build("toys:AVERAGE", values={"backend": "inprocess"}), NODES, 4, rows)
    assert inside.cpus == 0.5  # four times 0.75 are 3 CPUs, which no four processes can share here


def test_as_many_trials_run_at_once_as_have_a_cpu_per_node() -> None:
    """Four nodes on eight CPUs: two trials; on three CPUs one; what is said counts."""
    base = build("toys:AVERAGE")
    assert slots(base, NODES, None, [machine(8)]).at_once == 2
    assert slots(base, NODES, None, [machine(3)]).at_once == 1
    assert slots(base, NODES, 3, [machine(8)]).at_once == 3
