"""A cluster divided among trials: what one reserves, and how many run at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from crossfed.platform.cluster import connect
from crossfed.platform.config.settings import Resources, RunConfig
from crossfed.platform.method import SERVER


@dataclass(frozen=True, slots=True)
class Slots:
    """What a trial reserves, and how many run at once.

    Attributes:
        bundles: of the trial's placement group; the first is the trial's own process.
        run: the trials' resources, every share a number.
        cpus, gpus: of one trial.
    """

    bundles: tuple[dict[str, float], ...]
    run: RunConfig
    at_once: int
    cpus: float
    gpus: float


def slots(
    base: RunConfig,
    nodes: Sequence[str],
    concurrent: int | None,
    machines: Sequence[Mapping[str, Any]],
) -> Slots:
    """Divide a cluster among trials.

    Args:
        nodes: names of a run's nodes. concurrent: trials at once; None takes as many as fit.
        machines: rows of `ray.nodes()`.

    Raises:
        CrossfedError: not even one trial can be placed; the shortfall in words.
    """
    alive = [row["Resources"] for row in machines if row["Alive"]]
    cpus, gpus = (sum(row.get(kind, 0.0) for row in alive) for kind in ("CPU", "GPU"))
    if base.backend == "inprocess":
        at_once = concurrent or max(1, int(cpus))
        share = connect.fitted(Resources(gpus_per_domain=0.0), ["trial"], machines, at_once)[
            "trial"
        ]
        share = connect.Share(max(0.01, share.cpus), 0.0)
        return Slots(({"CPU": share.cpus},), base, at_once, share.cpus, 0.0)
    set_aside = any(connect.SERVER_RESOURCE in row for row in alive)
    wanted = connect.fitted(base.resources, nodes, machines)
    connect.preflight(wanted, machines, base.resources.placement)
    at_once = concurrent or _fitting(base, len(nodes), wanted, cpus, gpus)
    wanted = connect.fitted(base.resources, nodes, machines, at_once)
    domain = next(share for name, share in wanted.items() if name != SERVER)
    server = wanted.get(SERVER, domain)
    resources = base.resources.model_copy(
        update={
            "cpus_per_domain": domain.cpus,
            "gpus_per_domain": domain.gpus,
            "cpus_server": server.cpus,
        }
    )
    if base.resources.gpus_per_domain is None and not domain.gpus:
        resources = resources.model_copy(update={"gpus_per_domain": 0.0})
    total = [sum(getattr(share, kind) for share in wanted.values()) for kind in ("cpus", "gpus")]
    # the trial's own process waits for its nodes, beside the server's; without one, where machines
    # are set aside (with MLflow)
    own = (
        {connect.SERVER_RESOURCE: connect.SLOT}
        if set_aside and SERVER not in nodes
        else dict[str, float]()
    )
    bundles = (own, *(share.bundle() for share in wanted.values()))
    return Slots(bundles, base.model_copy(update={"resources": resources}), at_once, *total)


def _fitting(
    base: RunConfig, nodes: int, wanted: Mapping[str, connect.Share], cpus: float, gpus: float
) -> int:
    """How many trials run at once where it is not said: as many as have a whole CPU per node, or
    the shares asked for.
    """
    asked = base.resources
    per = (
        sum(share.cpus for share in wanted.values())
        if asked.cpus_per_domain and asked.cpus_server
        else float(nodes)
    )
    fits = [cpus / per]
    domains = [share for name, share in wanted.items() if name != SERVER]
    if gpus and asked.device != "cpu" and asked.gpus_per_domain != 0:
        fits.append(gpus / sum(asked.gpus_per_domain or 1.0 for _ in domains))
    return max(1, int(min(fits) + 1e-9))
