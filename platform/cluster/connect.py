"""Ray: connect or start, refuse in seconds what cannot be placed, reserve one bundle per node,
choose the device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch
from ray._private import ray_constants, services
from ray._raylet import AuthenticationTokenLoader, Config, GcsClient  # type: ignore[attr-defined]
from ray.exceptions import AuthenticationError, RpcError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from crossfed.platform.config.settings import Resources
from crossfed.platform.errors import CrossfedError
from crossfed.platform.method import SERVER
from crossfed.platform.uris import home

SERVER_RESOURCE = "crossfed_server"
"""Ray's custom resource by which machines are set aside for server actors (cluster.yaml gives it to
the head).
"""
SLOT = 0.001
"""Of one unit of it per server actor: a machine that has one takes a thousand."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one node's actor reserves.

    Args:
        slot: of `SERVER_RESOURCE`, which keeps the server actor on the machines that have it; 0 for
            everyone else.
    """

    cpus: float
    gpus: float
    slot: float = 0.0

    def bundle(self) -> dict[str, float]:
        """As a placement group's bundle."""
        named = {"CPU": self.cpus, "GPU": self.gpus, SERVER_RESOURCE: self.slot}
        return {kind: amount for kind, amount in named.items() if amount or kind == "CPU"}


def connect(resources: Resources) -> bool:
    """Join the cluster at `resources.address`, or start a local one; True when this call started or
    joined it.

    A local cluster listens on the loopback interface and gets token authentication with a fresh
    token that lives in this process and its workers only.

    Raises:
        CrossfedError: no cluster answers at the address, or a local one does not come up.
        KeyboardInterrupt: SIGTERM came meanwhile.
    """
    if ray.is_initialized():
        return False
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if resources.address is not None:
        reach(resources.address)
        try:
            with _terminable():
                ray.init(address=resources.address, **quiet)
        except (OSError, ValueError, RuntimeError) as error:
            raise _unreachable(resources.address, " ".join(str(error).split())) from error
        return True
    # Ray turns token authentication on for a new local cluster. A token of our own keeps it from
    # writing one to the home
    # directory; it is drawn once per process, because Ray reads it once per process.
    if not os.environ.get("RAY_AUTH_TOKEN"):
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
        AuthenticationTokenLoader.instance().reset_cache()  # an attempt to join may have found none
    try:
        with _no_address(), _loopback(), _apart(), _terminable():
            # without it, what `ray start` left is joined
            ray.init(address="local", include_dashboard=False, **quiet)
    # Ray raises nothing narrower where its processes do not come up in time
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise CrossfedError(
            f"No local Ray cluster could be started: {reason} Wait until the machine is less "
            f"busy, or use --backend inprocess."
        ) from error
    return True


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM end the start of Ray as Ctrl-C does, and leave it to its handler of before
    afterwards.

    Ray takes the signal for itself: while it starts, SIGTERM raises SystemExit; then its core
    prints a crash report first.
    """
    main = threading.current_thread() is threading.main_thread()
    handler, reports = (
        signal.getsignal(signal.SIGTERM),
        ray_constants.RAY_DISABLE_FAILURE_SIGNAL_HANDLER,
    )
    ray_constants.RAY_DISABLE_FAILURE_SIGNAL_HANDLER = True
    try:
        yield
    except SystemExit:
        raise KeyboardInterrupt from None
    finally:
        ray_constants.RAY_DISABLE_FAILURE_SIGNAL_HANDLER = reports
        if main:
            signal.signal(signal.SIGTERM, handler)


_PATIENCE = 5.0
"""Seconds for each step of finding out whether a cluster answers; Ray's own attempts take up to a
minute.
"""


def reach(address: str) -> None:
    """Whether a Ray cluster answers at an address and takes our token, in seconds.

    A process that joins authenticates where a token is at hand (RAY_AUTH_TOKEN,
    RAY_AUTH_TOKEN_PATH, `~/.ray/auth_token`) and RAY_AUTH_MODE does not say otherwise; Ray by
    itself does that in processes that start a cluster only.

    Args:
        address: as `ray.init` takes it: `host:port`, `auto` or `ray://host:port`.

    Raises:
        CrossfedError: nothing listens there, what listens is no Ray, or the cluster refuses our
            token.
    """
    client, where = address.startswith("ray://"), None
    try:
        where = (
            address.removeprefix("ray://")
            if client
            else services.canonicalize_bootstrap_address(address)
        )
        # `auto` with no cluster in sight, or `local`: Ray's own words or a new cluster
        if where is None:
            return
        _knock(where)
        authenticate()
        if not client:
            _greet(where)
    except AuthenticationError as error:
        raise _unreachable(address, refused()) from error
    except (OSError, ValueError, RpcError) as error:
        # Ray turns this machine's loopback address into that of its network interface
        asked = f"{where}: " if where and where not in address else ""
        raise _unreachable(address, asked + str(error).splitlines()[0]) from error


def _unreachable(address: str, reason: str) -> CrossfedError:
    return CrossfedError(f"No Ray cluster can be joined at {address!r}: {reason}")


def _knock(where: str) -> None:
    """Raise OSError where nothing listens at `host:port`, or what listens does not speak gRPC."""
    host, port = services.parse_address(where) or ("", "")  # type: ignore[attr-defined]  # Ray has no types here
    if not host or not str(port).isdecimal() or int(port) >= 2**16:
        raise ValueError("that is no host:port")
    with socket.create_connection((host, int(port)), timeout=_PATIENCE) as talk:
        if os.environ.get("RAY_USE_TLS", "0") == "1":
            return
        # The opening of HTTP/2 with an empty SETTINGS frame; the other side must open with its own
        # (RFC 9113, section 3.4)
        talk.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5))
        try:
            frame = talk.recv(9)
        except (TimeoutError, ConnectionError):
            frame = b""
    if len(frame) < 4 or frame[3] != 4:
        raise OSError(
            "what listens there is not Ray; give the address that `ray start --head` printed"
        )


def _greet(where: str) -> None:
    """Raise what Ray raises when its head node at `host:port` is asked for its identity, or OSError
    where it is silent.
    """
    raised: list[BaseException] = []

    def ask() -> None:
        try:
            GcsClient(address=where)
        except (AuthenticationError, RpcError) as error:
            raised.append(error)

    # Ray's client has no timeout that could be set from here
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_PATIENCE)
    if asking.is_alive():
        raise OSError("what listens there does not answer as Ray's head node does")
    if raised:
        raise raised[0]


def authenticate() -> None:
    """Use the token that is at hand. A file that cannot be read is told here, because Ray aborts
    the process over it.
    """
    source = token_source()
    if "RAY_AUTH_MODE" not in os.environ and source is not None:
        os.environ["RAY_AUTH_MODE"] = "token"
        Config.initialize("")  # Ray has read the environment already
    if source == "RAY_AUTH_TOKEN_PATH":
        path = Path(os.environ[source])
        try:
            empty = not path.read_text(encoding="utf-8").strip()
        except OSError as error:
            raise OSError(
                f"{source} names {path}, which cannot be read ({error.strerror})"
            ) from error
        if empty:
            raise OSError(f"{source} names {path}, which holds no token")


def token_source() -> str | None:
    """Where this process's token comes from, in Ray's order; None where there is none."""
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        if os.environ.get(name):
            return name
    folder = home()
    path = folder and folder / ".ray" / "auth_token"
    return str(path) if path and path.exists() else None


def refused() -> str:
    """Why a cluster with token authentication did not let us in."""
    source, mode = token_source(), os.environ.get("RAY_AUTH_MODE", "")
    if source is None:
        return (
            "it asks for a token; set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to a "
            "file that holds the cluster's own"
        )
    if mode.lower() != "token":
        return f"it asks for a token, but RAY_AUTH_MODE={mode} here; set it to token"
    return f"the token in {source} is not the cluster's"


@contextlib.contextmanager
def _loopback() -> Iterator[None]:
    """Make a cluster that is started here, and all its processes, listen on the loopback interface.

    Ray on Linux binds to every interface and has no option for this; what it does for macOS and
    Windows is asked for.
    """
    kept, here = (
        os.environ.get(ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR),
        ray_constants.ENABLE_RAY_CLUSTER,
    )
    os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = here
        if kept is None:
            del os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR]
        else:
            os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = kept


@contextlib.contextmanager
def _apart() -> Iterator[None]:
    """Start Ray's processes in a process group of their own: a signal to ours is for this process,
    which ends them.
    """
    module: Any = services
    usual: Any = module.ConsolePopen

    class Apart(usual):  # type: ignore[misc]  # Ray has no types here
        def __init__(self, *given: Any, **named: Any):
            super().__init__(*given, **{**named, "process_group": 0})

    module.ConsolePopen = Apart
    try:
        yield
    finally:
        module.ConsolePopen = usual


@contextlib.contextmanager
def _no_address() -> Iterator[None]:
    """Hide RAY_ADDRESS, which would make `ray.init()` join whatever it names instead of starting a
    local cluster.
    """
    kept = os.environ.pop("RAY_ADDRESS", None)
    try:
        yield
    finally:
        if kept is not None:
            os.environ["RAY_ADDRESS"] = kept


def _down(value: float) -> float:
    """Two decimals, never rounded up, so that shares always fit."""
    return math.floor(value * 100 + 1e-9) / 100


def shares(
    resources: Resources, nodes: Sequence[str], cpus: float, gpus: float, set_aside: bool = False
) -> dict[str, Share]:
    """What every node reserves, given the cluster's totals.

    A share that is not configured divides what there is evenly, at most one CPU and one GPU each;
    the server takes no GPU. GPUs are divided so that the same number of domains, or one less, falls
    on each: a share cannot lie across two.

    Args:
        set_aside: the cluster has machines with `SERVER_RESOURCE`, and the server stays on them.
    """
    domains = [name for name in nodes if name != SERVER]
    each = _down(min(1.0, cpus / max(1, len(nodes))))
    gpu = resources.gpus_per_domain
    if gpu is None:
        gpu = (
            0.0
            if resources.device == "cpu" or not gpus
            else _down(1 / max(1, math.ceil(len(domains) / gpus - 1e-9)))
        )
    found = {name: Share(resources.cpus_per_domain or each, gpu) for name in domains}
    server = Share(resources.cpus_server or each, 0.0, SLOT if set_aside else 0.0)
    return ({SERVER: server} if SERVER in nodes else {}) | found


def fitted(
    resources: Resources,
    nodes: Sequence[str],
    machines: Sequence[Mapping[str, Any]],
    at_once: int = 1,
) -> dict[str, Share]:
    """What every node reserves on these machines: `shares`, or half, a third … of a CPU where those
    do not fit.

    An actor lies on one machine: of 1 and 2 CPUs, four actors can have 0.5 each, and not 0.75.

    Args:
        machines: rows of `ray.nodes()`. at_once: how many such runs share the machines.

    Returns:
        Shares by node. Where no size fits, those that would divide the totals; `preflight` refuses
        them.
    """
    alive = [row["Resources"] for row in machines if row["Alive"]]
    cpus, gpus = (sum(row.get(kind, 0.0) for row in alive) / at_once for kind in ("CPU", "GPU"))
    even = shares(resources, nodes, cpus, gpus, any(SERVER_RESOURCE in row for row in alive))
    fixed = {
        name
        for name in even
        if (resources.cpus_server if name == SERVER else resources.cpus_per_domain) is not None
    }
    most = max((share.cpus for name, share in even.items() if name not in fixed), default=0.0)
    smaller = (size for part in range(1, 101) if (size := _down(1 / part)) < most)
    for size in (most, *smaller):
        tried = {
            name: share if name in fixed else dataclasses.replace(share, cpus=size)
            for name, share in even.items()
        }
        if _pack([tried] * at_once, alive, resources.placement) is None:
            return tried
    return even


def _pack(
    runs: Sequence[Mapping[str, Share]], machines: Sequence[Mapping[str, float]], strategy: str
) -> str | None:
    """Put the actors of every run on machines, the largest first; the first one that finds no room,
    None where all do.

    Args:
        runs: shares by node, per run. machines: Ray's totals of each. strategy: Ray's, which holds
            within a run.
    """
    rooms = [_Room(machine) for machine in machines]
    for run in runs:
        order = sorted(run.items(), key=lambda row: (-row[1].gpus, -row[1].slot, -row[1].cpus))
        if strategy == "STRICT_PACK":
            total = Share(
                sum(share.cpus for _, share in order),
                0.0,
                sum(share.slot for _, share in order),
            )
            rooms.sort(key=lambda room: room.cpus)
            chosen = next(
                (room for room in rooms if room.fits(total) and room.all_gpus(order)), None
            )
            if chosen is None:
                return order[0][0]
            for _, share in order:
                chosen.take(share)
            continue
        used: set[int] = set()
        for name, share in order:
            # the fullest machine that has room; those with a GPU are left to those who need one
            rooms.sort(key=lambda room: (len(room.gpus) > 0, room.cpus))
            found = next(
                (room for room in rooms if id(room) not in used and room.fits(share)), None
            )
            if found is None:
                return name
            found.take(share)
            if strategy == "STRICT_SPREAD":
                used.add(id(found))
    return None


class _Room:
    """What is left of a machine."""

    def __init__(self, machine: Mapping[str, float]):
        self.cpus = machine.get("CPU", 0.0)
        self.slot = machine.get(SERVER_RESOURCE, 0.0)
        self.gpus = [1.0] * int(machine.get("GPU", 0.0))

    def fits(self, share: Share) -> bool:
        if share.cpus > self.cpus + 1e-6 or share.slot > self.slot + 1e-9:
            return False
        if share.gpus >= 1:
            return sum(gpu > 1 - 1e-6 for gpu in self.gpus) >= share.gpus
        return not share.gpus or any(share.gpus <= gpu + 1e-6 for gpu in self.gpus)

    def all_gpus(self, order: Sequence[tuple[str, Share]]) -> bool:
        """Whether the GPU shares of all these fit together."""
        left = _Room({"GPU": float(len(self.gpus))})
        left.gpus = list(self.gpus)
        for _, share in order:
            alone = Share(0.0, share.gpus)
            if not left.fits(alone):
                return False
            left.take(alone)
        return True

    def take(self, share: Share) -> None:
        self.cpus -= share.cpus
        self.slot -= share.slot
        for _ in range(int(share.gpus)):
            self.gpus.remove(next(gpu for gpu in self.gpus if gpu > 1 - 1e-6))
        if 0 < share.gpus < 1:
            place = next(index for index, gpu in enumerate(self.gpus) if share.gpus <= gpu + 1e-6)
            self.gpus[place] -= share.gpus


def preflight(
    wanted: Mapping[str, Share], alive: Sequence[Mapping[str, Any]], strategy: str = "PACK"
) -> None:
    """Refuse what this cluster can never place.

    Args:
        wanted: shares by node.
        alive: rows of `ray.nodes()`.
        strategy: Ray's, of the placement group.

    Raises:
        CrossfedError: the shortfall in words: how much is needed, how much there is, or which actor
            fits no machine.
    """
    machines = [row["Resources"] for row in alive if row["Alive"]]
    for kind, word in (("CPU", "CPUs"), ("GPU", "GPUs")):
        need = {name: getattr(share, f"{kind.lower()}s") for name, share in wanted.items()}
        total, have = sum(need.values()), sum(machine.get(kind, 0.0) for machine in machines)
        if total > have + 1e-6:
            parts = ", ".join(f"{name} {value:g}" for name, value in need.items() if value)
            raise CrossfedError(
                f"This run needs {total:g} {word} ({parts}) but the cluster has {have:g}: "
                f"{total - have:g} short; "
                f"lower resources.{word.lower()}_per_domain or add machines."
            )
        for name, value in need.items():
            largest = max((machine.get(kind, 0.0) for machine in machines), default=0.0)
            if value > largest + 1e-6:
                raise CrossfedError(
                    f"{name} asks for {value:g} {word} on one machine, but the largest has "
                    f"{largest:g}; "
                    f"lower resources.{word.lower()}_per_domain."
                )
    for name, share in wanted.items():
        kept = max(
            (machine.get("CPU", 0.0) for machine in machines if machine.get(SERVER_RESOURCE)),
            default=0.0,
        )
        if share.slot and share.cpus > kept + 1e-6:
            raise CrossfedError(
                f"{name} asks for {share.cpus:g} CPUs on a machine that is set aside for it "
                f"({SERVER_RESOURCE}), but the largest "
                f"of those has {kept:g}; lower resources.cpus_server."
            )
    free = [[1.0] * int(machine.get("GPU", 0.0)) for machine in machines]
    for name, share in sorted(wanted.items(), key=lambda row: -row[1].gpus):
        if 0 < share.gpus < 1 and not _take(free, share.gpus):
            raise CrossfedError(
                f"No GPU is left for {name}: a share of {share.gpus:g} fits "
                f"{int(1 / share.gpus + 1e-9)} times on one GPU and "
                f"never across two, and the cluster has {sum(map(len, free))}; lower "
                f"resources.gpus_per_domain or add machines."
            )
    for name, share in wanted.items():
        if share.gpus > 1 and share.gpus != int(share.gpus):
            raise CrossfedError(
                f"{name} asks for {share.gpus:g} GPUs; Ray gives a fraction "
                f"below 1 or a whole number."
            )
    if (left := _pack([wanted], machines, strategy)) is not None:
        asked = ", ".join(f"{name} {share.cpus:g}" for name, share in wanted.items())
        each = " + ".join(f"{machine.get('CPU', 0.0):g}" for machine in machines)
        raise CrossfedError(
            f"No machine has room for {left} beside the others: an actor lies on one machine, "
            f"the machines have {each} "
            f"CPUs, and {asked} are asked for with resources.placement={strategy}; lower "
            f"resources.cpus_per_domain or "
            "resources.cpus_server, or leave both out."
        )


def _take(free: list[list[float]], share: float) -> bool:
    """Put a fraction of a GPU on the first one with room, in `free` [machine][GPU]; False where
    there is none.
    """
    for machine in free:
        for gpu, room in enumerate(machine):
            if share <= room + 1e-6:
                machine[gpu] -= share
                return True
    return False


def reserve(
    wanted: dict[str, Share],
    strategy: str,
    timeout: float,
    say: Callable[[str], None] = lambda _: None,
) -> PlacementGroup:
    """One placement group with one bundle per node, in the order of `wanted`.

    Args:
        say: told, in a sentence, where room is not there at once.

    Raises:
        CrossfedError: the bundles were not placed within `timeout` seconds (others hold the
            resources).
    """
    group = placement_group([share.bundle() for share in wanted.values()], strategy=strategy)
    placed = group.wait(min(timeout, 5.0))
    if not placed and timeout > 5.0:
        say(f"actors     waiting up to {timeout:g} s for room that others hold; free now: {free()}")
        placed = group.wait(timeout - 5.0)
    if not placed:
        remove_placement_group(group)
        asked = ", ".join(f"{name} {share.cpus:g}" for name, share in wanted.items())
        raise CrossfedError(
            f"The cluster could not place all actors ({strategy}) within {timeout:g} s "
            f"(resources.start_timeout): CPUs "
            f"asked for: {asked}; free now: {free()}. Wait for other runs, or lower the shares."
        )
    return group


def free() -> str:
    """What is not reserved now, by machine, in words."""
    left = ray._private.state.available_resources_per_node()
    parts = []
    for row in ray.nodes():
        room = left.get(row["NodeID"], {})
        amounts = [f"{room[kind]:g} {kind}" for kind in ("CPU", "GPU") if room.get(kind)]
        if row["Alive"]:
            parts.append(f"{' and '.join(amounts) or 'nothing'} on {row['NodeManagerHostname']}")
    return ", ".join(parts) or "nothing"


def assigned_device(resources: Resources, name: str) -> tuple[torch.device, list[str]]:
    """The device of this actor, from the GPU ids Ray assigned to it (never from what the process
    happens to see).

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
            f"Ray assigned GPU {', '.join(ids)} to {name}, but torch sees no GPU there; "
            f"install a CUDA build of torch or set "
            "resources.gpus_per_domain=0."
        )
    if resources.gpu_memory_fraction is not None:
        torch.cuda.set_per_process_memory_fraction(resources.gpu_memory_fraction, 0)
    # Ray sets CUDA_VISIBLE_DEVICES to the assigned ids, so the first visible one is ours
    return torch.device("cuda", 0), ids
