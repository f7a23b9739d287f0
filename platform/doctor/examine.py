"""Asks every machine of a cluster what it says of itself (`ray_probe.look`): one task per machine,
and this process.
"""

from __future__ import annotations

import contextlib
import functools
import secrets
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from crossfed.platform.cluster import connect
from crossfed.platform.config.settings import Resources, TrackingSettings
from crossfed.platform.doctor import probe
from crossfed.platform.doctor.judge import Report, Wanted
from crossfed.platform.errors import CrossfedError
from crossfed.platform.method import SERVER
from crossfed.platform.tracking import abandoned
from crossfed.platform.tracking.tracker import resolve_uri
from crossfed.platform.uris import redact

PATIENCE = 45.0
"""Seconds that each look at a machine may take."""
_START = 40.0
"""Seconds that a machine has to start the process that looks."""


def examine(
    address: str | None,
    out: str,
    tracking_uri: str | None,
    encoder: str,
    require_tracking: bool = False,
    patience: float = PATIENCE,
    domains: int = 3,
) -> tuple[list[Report], Wanted]:
    """The reports of this process and of every machine, and what they are to be held against.

    Args:
        address: of the cluster; None starts a local one and looks at this machine.
        out: folder or URI of the runs; a file is written into it and taken away.
        tracking_uri: as for a run. encoder: the text encoder. domains: of the runs to come.

    Raises:
        CrossfedError: there is no cluster to join, or the tracking URI makes no sense.
    """
    if "://" not in out:
        out = str(Path(out).absolute())
    where = Path(out.partition("://")[2] if "://" in out else out)
    tracking = redact(resolve_uri(TrackingSettings(uri=tracking_uri), where)).replace("***@", "")
    started = connect.connect(Resources(address=address))
    try:
        set_aside = connect.SERVER_RESOURCE in ray.cluster_resources()
        wanted = Wanted(
            out,
            tracking,
            encoder,
            require_tracking,
            set_aside,
            *_actors(domains),
            _interrupted(out, tracking_uri),
        )
        return _ask(wanted, patience), wanted
    finally:
        if started:
            ray.shutdown()


def _actors(domains: int) -> tuple[str, str]:
    """What the actors of a run would reserve here, and why they could not; in words."""
    names = [SERVER, *(f"domain {number}" for number in range(1, domains + 1))]
    machines: list[dict[str, Any]] = ray.nodes()
    wanted = connect.fitted(Resources(), names, machines)
    share, server = wanted[names[-1]], wanted[SERVER]
    actors = (
        f"a server with {server.cpus:g} CPUs, {domains} domains with {share.cpus:g} CPUs and "
        f"{share.gpus:g} GPUs each"
    )
    try:
        connect.preflight(wanted, machines)
    except CrossfedError as error:
        return actors, str(error)
    return f"{actors}; free now: {connect.free()}", ""


def _interrupted(out: str, tracking_uri: str | None) -> str:
    """Runs and studies in a folder here that nobody works on, though MLflow has them as running;
    recorded so.
    """
    if "://" in out or not Path(out).is_dir():
        return ""
    left = abandoned.close(Path(out), tracking_uri)
    return abandoned.sentence(left, Path(out)) if left else ""


def _ask(wanted: Wanted, patience: float) -> list[Report]:
    machines = [row for row in ray.nodes() if row["Alive"]]
    ask: dict[str, Any] = {
        "patience": patience,
        "out": wanted.out,
        "tracking": wanted.tracking if wanted.tracking.startswith("http") else None,
        "encoder": wanted.encoder,
        "temp": None,
    }
    with _marked(wanted.out, patience) as marker:
        ask |= marker
        # by value: machines with another crossfed, or none, are to answer as well
        ray.cloudpickle.register_pickle_by_value(probe)
        try:
            # a process of its own, so that what hangs in a look does not stay in the way of actors
            look = ray.remote(num_cpus=0, max_calls=1, max_retries=0)(probe.look)
            sent = {}
            for row in machines:
                strategy = NodeAffinitySchedulingStrategy(row["NodeID"], soft=False)
                ref = look.options(scheduling_strategy=strategy).remote(
                    {**ask, "node": row["NodeID"]}
                )
                sent[ref] = (row, time.time())
            with ThreadPoolExecutor(1) as pool:  # beside the others, whose arrival is timed
                looking = pool.submit(probe.look, {**ask, "node": "this-process"})
                answers = _gather(sent, _START + patience)
                own = looking.result()
        finally:
            ray.cloudpickle.unregister_pickle_by_value(probe)
        written = _written(ask, [row["NodeID"] for row in machines]) if ask["marker"] else set()
        if ask["trouble"]:
            own["storage"] = {"problem": ask["trouble"]}
    driver = own | {
        "name": "this process",
        "driver": True,
        "head": False,
        "gpus": 0.0,
        "skew": None,
    }
    reports: list[Report] = [driver]
    for row, answer in answers:
        told = {
            "name": f"{row['NodeManagerHostname']} ({row['NodeManagerAddress']})",
            "driver": False,
            "head": "node:__internal_head__" in row["Resources"],
            "gpus": float(row["Resources"].get("GPU", 0.0)),
        }
        if answer.get("storage", {}).get("writable") and row["NodeID"] not in written:
            answer["storage"] = {"writable": True, "same": False}
        reports.append(answer | told)
    _tell_apart(reports)
    return reports


def _tell_apart(reports: list[Report]) -> None:
    """Number machines of one name: several Ray nodes can share a machine."""
    names = [row["name"] for row in reports]
    for index, row in enumerate(reports):
        if names.count(row["name"]) > 1:
            reports[index] = {
                **row,
                "name": f"{row['name']} #{names[: index + 1].count(row['name'])}",
            }


def _gather(
    sent: dict[Any, tuple[dict[str, Any], float]], patience: float
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Answers in the order asked, with the skew of each clock; who is not back in time is
    silent.
    """
    found: dict[Any, dict[str, Any]] = {}
    waiting, end = list(sent), time.monotonic() + patience
    while waiting and (left := end - time.monotonic()) > 0:
        ready, waiting = ray.wait(waiting, timeout=left)
        for ref in ready:
            try:
                answer = ray.get(ref)
                # an answer arrives after it was made, and is begun after it was asked for: both
                # bound what the clock is off
                low, high = answer["ended"] - time.time(), answer["began"] - sent[ref][1]
                found[ref] = answer | {
                    "skew": low if low > 0 else min(high, 0.0) if high < 0 else 0.0
                }
            except RayError as error:
                found[ref] = {"silent": " ".join(str(error).split())[:300]}
    for ref in waiting:
        ray.cancel(ref, force=True)
        found[ref] = {"silent": f"nothing within {patience:g} s"}
    return [(row, found[ref]) for ref, (row, _) in sent.items()]


@contextlib.contextmanager
def _marked(out: str, patience: float) -> Iterator[dict[str, Any]]:
    """A folder in the runs' folder with a word in it, while the machines are asked; without one
    where that cannot be made.
    """
    word = secrets.token_hex(8)
    marker = f"{out.rstrip('/')}/.doctor-{word}"
    existed = "://" in out or Path(out).exists()

    def make() -> dict[str, Any]:
        store, path = probe.file_system(marker)
        store.create_dir(path, recursive=True)
        probe.write(store, f"{path}/driver", word)
        return {}

    trouble = probe.within(patience, {"storage": make})["storage"].get(
        "problem"
    )  # storage that is gone may never answer
    try:
        yield {"marker": None if trouble else marker, "word": word, "trouble": trouble}
    finally:
        if not trouble:
            store, path = probe.file_system(marker)
            with contextlib.suppress(OSError):
                store.delete_dir(path)
            if not existed:
                with contextlib.suppress(OSError):
                    Path(out).rmdir()


def _written(ask: dict[str, Any], nodes: list[str]) -> set[str]:
    """Nodes whose files the driver sees."""

    def seen(node: str) -> dict[str, Any]:
        store, path = probe.file_system(ask["marker"])
        return {"seen": probe.read(store, f"{path}/{node}") == ask["word"]}

    found = probe.within(
        ask["patience"], *({node: functools.partial(seen, node)} for node in nodes)
    )
    return {node for node, answer in found.items() if answer.get("seen")}
