"""Nodes as Ray actors: one per domain with its CPU and GPU share, one for the server.

Payloads travel from actor to actor by object reference; this process holds the references and never the arrays.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import GetTimeoutError, ObjectLostError, OutOfMemoryError, RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from crossfed.platform import cluster
from crossfed.platform.nodes import Artifacts, Node, NodeLost, Plan, Sent
from crossfed.platform.seam import SERVER, CrossfedError, Payload

_KEPT: dict[tuple[Any, ...], dict[str, Any]] = {}
"""Emptied node processes of this trial, by placement."""

Ref = Any
"""An object reference; Ray's own annotation has no useful type argument for a payload."""


def _fetch(inbox: Mapping[str, Ref]) -> dict[str, Payload]:
    """The payloads behind the references; Ray's arrays are read-only already."""
    return dict(zip(inbox, ray.get(list(inbox.values())), strict=True))


def _put(send: Mapping[str, Payload]) -> dict[str, Ref]:
    """References to the payloads; one that goes to several receivers is stored once."""
    stored: dict[int, Ref] = {}
    for payload in send.values():
        if id(payload) not in stored:
            stored[id(payload)] = ray.put(dict(payload))
    return {receiver: stored[id(payload)] for receiver, payload in send.items()}


class NodeActor:
    """A `Node` in its own process."""

    node: Node

    def build(self, plan: Plan, name: str) -> None:
        """Make the node. Not done in `__init__`, where an error would look like a dead actor."""
        if name == SERVER:
            device, self.gpus = torch.device("cpu"), list[str]()
        else:
            device, self.gpus = cluster.assigned_device(plan.config.resources, name)
        self.node = Node(plan, name, device)

    def clear(self) -> None:
        """Drop the node, and with it all data and state of its run."""
        del self.node

    def call(self, method: str, *args: Any) -> Any:
        return getattr(self.node, method)(*args)

    def run_phase(self, stage: int, part: str, phase: int, round: int, inbox: Mapping[str, Ref]) -> Sent:
        send, rows, metrics = self.node.run_phase(stage, part, phase, round, _fetch(inbox))
        return Sent(_put(send), rows, metrics)

    def save(self, folder: Path, inbox: Mapping[str, Ref]) -> dict[str, str]:
        return self.node.save(folder, _fetch(inbox))

    def load_state(self, folder: Path) -> dict[str, Ref]:
        return _put(self.node.load_state(folder))

    def where(self) -> dict[str, Any]:
        context = ray.get_runtime_context()
        return {
            "host": socket.gethostname(),
            "ray_node": context.get_node_id(),
            "pid": os.getpid(),
            "gpu_ids": self.gpus,
            "device": str(self.node.device),
        }


class RayNodes:
    """All nodes of a run as actors in one placement group, one bundle each.

    Inside a Tune trial that is the trial's own group. There the processes outlive a run: what they held is dropped, and
    the trial's next run builds its nodes in them, because starting processes costs more than a short run.

    Args:
        terminate: what SIGTERM shall do in this process; installed anew once Ray is up, which replaces it by a crash report.
    """

    def __init__(self, terminate: Any = signal.SIG_DFL) -> None:
        self.terminate = terminate
        self.actors: dict[str, Any] = {}
        self.group: PlacementGroup | None = None
        self.shares: dict[str, cluster.Share] = {}
        self.started = False
        self.timeout: float | None = None
        self.inherited = ray.is_initialized() and ray.util.get_current_placement_group() is not None
        self.sound = True

    def preflight(self, plan: Plan) -> None:
        resources = plan.config.resources
        self.started = cluster.connect(resources) or self.started
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self.terminate)
        total = ray.cluster_resources()
        self.shares = cluster.shares(
            resources, plan.nodes, total.get("CPU", 0.0), total.get("GPU", 0.0), cluster.SERVER_RESOURCE in total
        )
        cluster.preflight(self.shares, ray.nodes())

    def start(self, plan: Plan, artifacts: Artifacts) -> None:
        self.preflight(plan)  # machines may have come or gone since the last start
        resources = plan.config.resources
        inherited = ray.util.get_current_placement_group() if self.inherited else None
        self.group = inherited or cluster.reserve(self.shares, resources.placement, resources.start_timeout)
        self.actors = _KEPT.pop(self._place(), {})
        actor = ray.remote(NodeActor)
        for index, (name, share) in enumerate(self.shares.items()):
            if name not in self.actors:
                self.actors[name] = actor.options(
                    num_cpus=share.cpus,
                    num_gpus=share.gpus,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(
                        self.group, placement_group_bundle_index=index
                    ),
                    max_restarts=0,  # a restart would lose the state silently; the run goes back to its last commit
                ).remote()
        self.timeout = resources.start_timeout
        self._gather({name: actor.build.remote(plan, name) for name, actor in self.actors.items()})
        self.timeout = None
        sizes = self.each("prepare", {name: (ray.put(dict(artifacts.get(name, {}))),) for name in self.actors})
        self.each("connect", dict.fromkeys(self.actors, (sizes,)))

    def _place(self) -> tuple[Any, ...]:
        """What a kept process must agree in: the group, and every node's name and share."""
        return (self.group.id if self.group else None, tuple(self.shares.items()))

    def _gather(self, refs: Mapping[str, Ref]) -> dict[str, Any]:
        """Results by node."""
        self.sound = False
        done = self._collect(refs)
        self.sound = True
        return done

    def _collect(self, refs: Mapping[str, Ref]) -> dict[str, Any]:
        """Results by node.

        Raises:
            CrossfedError: what a node raised, or it did not start in time.
            NodeLost: an actor, its machine, or a message it owned is gone.
        """
        done = {}
        for name, ref in refs.items():
            try:
                done[name] = ray.get(ref, timeout=self.timeout)
            except GetTimeoutError as error:
                raise CrossfedError(
                    f"{name} did not start within {self.timeout:g} s (resources.start_timeout)."
                ) from error
            except (RayActorError, OutOfMemoryError, ObjectLostError) as error:
                raise NodeLost(f"{name} was lost: {_reason(error)}") from error
            except RayTaskError as error:
                cause = error.cause
                if isinstance(cause, CrossfedError):
                    raise cause from None
                if isinstance(cause, RayActorError | OutOfMemoryError | ObjectLostError):
                    raise NodeLost(f"a message to {name} was lost: {_reason(cause)}") from error
                raise
        return done

    def each(self, call: str, args: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
        return self._gather({name: self.actors[name].call.remote(call, *values) for name, values in args.items()})

    def run_phase(
        self, stage: int, part: str, phase: int, round: int, inboxes: Mapping[str, Mapping[str, Any]]
    ) -> dict[str, Sent]:
        return self._gather(
            {
                name: self.actors[name].run_phase.remote(stage, part, phase, round, dict(inbox))
                for name, inbox in inboxes.items()
            }
        )

    def save(self, folder: Path, inboxes: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
        written: dict[str, dict[str, str]] = self._gather(
            {name: actor.save.remote(folder, dict(inboxes.get(name, {}))) for name, actor in self.actors.items()}
        )
        return {name: told for files in written.values() for name, told in files.items()}

    def load_state(self, folder: Path) -> dict[str, dict[str, Any]]:
        return self._gather({name: actor.load_state.remote(folder) for name, actor in self.actors.items()})

    def placement(self) -> dict[str, dict[str, Any]]:
        found = self._gather({name: actor.where.remote() for name, actor in self.actors.items()})
        return {
            name: {**row, "cpus": self.shares[name].cpus, "gpus": self.shares[name].gpus} for name, row in found.items()
        }

    def stop(self) -> None:
        for actor in self.actors.values():
            ray.kill(actor)
        self.actors = {}
        if self.group is not None and not self.inherited:
            remove_placement_group(self.group)
        self.group = None

    def _keep(self) -> None:
        """Leave the processes, emptied, to the trial's next run."""
        self._gather({name: actor.clear.remote() for name, actor in self.actors.items()})
        _KEPT[self._place()] = self.actors
        self.actors = {}

    def close(self) -> None:
        """End the nodes, and leave or end the cluster if this run joined or started it."""
        if ray.is_initialized():
            if self.inherited and self.sound and self.actors:
                with contextlib.suppress(NodeLost, CrossfedError):  # then they are stopped
                    self._keep()
            self.stop()
            if self.started:
                ray.shutdown()
        self.started = False


def _reason(error: Exception) -> str:
    """The telling line of a Ray error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
