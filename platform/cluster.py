"""Ray: connect or start, refuse in seconds what cannot be placed, reserve one bundle per node, choose the device."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ray
import torch
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from crossfed.platform.config import Resources
from crossfed.platform.seam import SERVER, CrossfedError


@dataclass(frozen=True, slots=True)
class Share:
    """What one node's actor reserves."""

    cpus: float
    gpus: float

    def bundle(self) -> dict[str, float]:
        """As a placement group's bundle."""
        return {"CPU": self.cpus} | ({"GPU": self.gpus} if self.gpus else {})


def connect(resources: Resources) -> bool:
    """Join the cluster at `resources.address`, or start a local one; True when this call started or joined it.

    A local cluster gets token authentication with a fresh token that lives in this process and its workers only.

    Raises:
        CrossfedError: no cluster answers at the address, or a local one does not come up.
    """
    if ray.is_initialized():
        return False
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if resources.address is not None:
        try:
            _knock(resources.address)
            ray.init(address=resources.address, **quiet)
        except (OSError, ValueError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            raise CrossfedError(f"No Ray cluster can be joined at {resources.address!r}: {reason}") from error
        return True
    # Ray turns token authentication on for a new local cluster. A token of our own keeps it from writing one to the home
    # directory; it is drawn once per process, because Ray reads it once per process.
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    try:
        with _no_address():
            ray.init(include_dashboard=False, **quiet)
    except Exception as error:  # Ray raises nothing narrower where its processes do not come up in time
        reason = str(error).splitlines()[0]
        raise CrossfedError(
            f"No local Ray cluster could be started: {reason} Wait until the machine is less busy, or use --backend inprocess."
        ) from error
    return True


def _knock(address: str) -> None:
    """Raise OSError where nothing listens at `[ray://]host:port`; Ray's own attempts take a minute."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal() and int(port) < 2**16:
        socket.create_connection((host, int(port)), timeout=5).close()


@contextlib.contextmanager
def _no_address() -> Iterator[None]:
    """Hide RAY_ADDRESS, which would make `ray.init()` join whatever it names instead of starting a local cluster."""
    kept = os.environ.pop("RAY_ADDRESS", None)
    try:
        yield
    finally:
        if kept is not None:
            os.environ["RAY_ADDRESS"] = kept


def _down(value: float) -> float:
    """Two decimals, never rounded up, so that shares always fit."""
    return math.floor(value * 100 + 1e-9) / 100


def shares(resources: Resources, nodes: Sequence[str], cpus: float, gpus: float) -> dict[str, Share]:
    """What every node reserves, given the cluster's totals.

    A share that is not configured divides what there is evenly, at most one CPU and one GPU each; the server takes no GPU.
    """
    domains = [name for name in nodes if name != SERVER]
    each = _down(min(1.0, cpus / max(1, len(nodes))))
    gpu = resources.gpus_per_domain
    if gpu is None:
        gpu = 0.0 if resources.device == "cpu" else _down(min(1.0, gpus / max(1, len(domains))))
    found = {name: Share(resources.cpus_per_domain or each, gpu) for name in domains}
    return ({SERVER: Share(resources.cpus_server or each, 0.0)} if SERVER in nodes else {}) | found


def preflight(wanted: dict[str, Share], alive: Sequence[dict[str, Any]]) -> None:
    """Refuse what this cluster can never place.

    Args:
        wanted: shares by node.
        alive: rows of `ray.nodes()`.

    Raises:
        CrossfedError: the shortfall in words: how much is needed, how much there is, or which actor fits no machine.
    """
    machines = [row["Resources"] for row in alive if row["Alive"]]
    for kind, word in (("CPU", "CPUs"), ("GPU", "GPUs")):
        need = {name: getattr(share, f"{kind.lower()}s") for name, share in wanted.items()}
        total, have = sum(need.values()), sum(machine.get(kind, 0.0) for machine in machines)
        if total > have + 1e-6:
            parts = ", ".join(f"{name} {value:g}" for name, value in need.items() if value)
            raise CrossfedError(
                f"This run needs {total:g} {word} ({parts}) but the cluster has {have:g}: {total - have:g} short; "
                f"lower resources.{word.lower()}_per_domain or add machines."
            )
        for name, value in need.items():
            largest = max((machine.get(kind, 0.0) for machine in machines), default=0.0)
            if value > largest + 1e-6:
                raise CrossfedError(
                    f"{name} asks for {value:g} {word} on one machine, but the largest has {largest:g}; "
                    f"lower resources.{word.lower()}_per_domain."
                )
    free = [[1.0] * int(machine.get("GPU", 0.0)) for machine in machines]
    for name, share in sorted(wanted.items(), key=lambda row: -row[1].gpus):
        if 0 < share.gpus < 1 and not _take(free, share.gpus):
            raise CrossfedError(
                f"No GPU is left for {name}: a share of {share.gpus:g} fits {int(1 / share.gpus + 1e-9)} times on one GPU and "
                f"never across two, and the cluster has {sum(map(len, free))}; lower resources.gpus_per_domain or add machines."
            )
    for name, share in wanted.items():
        if share.gpus > 1 and share.gpus != int(share.gpus):
            raise CrossfedError(f"{name} asks for {share.gpus:g} GPUs; Ray gives a fraction below 1 or a whole number.")


def _take(free: list[list[float]], share: float) -> bool:
    """Put a fraction of a GPU on the first one with room, in `free` [machine][GPU]; False where there is none."""
    for machine in free:
        for gpu, room in enumerate(machine):
            if share <= room + 1e-6:
                machine[gpu] -= share
                return True
    return False


def reserve(wanted: dict[str, Share], strategy: str, timeout: float) -> PlacementGroup:
    """One placement group with one bundle per node, in the order of `wanted`.

    Raises:
        CrossfedError: the bundles were not placed within `timeout` seconds (others hold the resources).
    """
    group = placement_group([share.bundle() for share in wanted.values()], strategy=strategy)
    if not group.wait(timeout):
        remove_placement_group(group)
        free = ", ".join(
            f"{value:g} {kind}" for kind, value in ray.available_resources().items() if kind in ("CPU", "GPU")
        )
        raise CrossfedError(
            f"The cluster could not place all actors ({strategy}) within {timeout:g} s: free now: {free or 'nothing'}. "
            "Wait for other runs, or lower the shares."
        )
    return group


def assigned_device(resources: Resources, name: str) -> tuple[torch.device, list[str]]:
    """The device of this actor, from the GPU ids Ray assigned to it (never from what the process happens to see).

    Raises:
        CrossfedError: a GPU was asked for explicitly, Ray assigned one, and torch cannot use it.
    """
    ids = [str(gpu) for gpu in ray.get_runtime_context().get_accelerator_ids().get("GPU", [])]
    if not ids or resources.device == "cpu":
        return torch.device("cpu"), ids
    if not torch.cuda.is_available():
        if resources.gpus_per_domain is None:
            return torch.device("cpu"), ids
        raise CrossfedError(
            f"Ray assigned GPU {', '.join(ids)} to {name}, but torch sees no GPU there; install a CUDA build of torch or set "
            "resources.gpus_per_domain=0."
        )
    if resources.gpu_memory_fraction is not None:
        torch.cuda.set_per_process_memory_fraction(resources.gpu_memory_fraction, 0)
    # Ray sets CUDA_VISIBLE_DEVICES to the assigned ids, so the first visible one is ours
    return torch.device("cuda", 0), ids
