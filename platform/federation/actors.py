"""Nodes as Ray actors: one per domain with its CPU and GPU share, one for the server.

Payloads travel from actor to actor by object reference; this process holds the references and never
the arrays.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import (
    ActorUnschedulableError,
    NodeDiedError,
    ObjectLostError,
    ObjectStoreFullError,
    OutOfDiskError,
    OutOfMemoryError,
    RayActorError,
    RayTaskError,
    WorkerCrashedError,
)
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from crossfed.platform.cluster import connect
from crossfed.platform.console import span
from crossfed.platform.errors import CrossfedError
from crossfed.platform.federation.node import Artifacts, NodeLost, Plan, Sent
from crossfed.platform.federation.ray_actor import PULSE, NodeActor, Ref

_KEPT: dict[tuple[Any, ...], dict[str, Any]] = {}
"""Emptied node processes of this trial, by placement."""

LOST = (
    RayActorError,
    OutOfMemoryError,
    ObjectLostError,
    NodeDiedError,
    WorkerCrashedError,
    ActorUnschedulableError,
)
"""What Ray raises where an actor, its machine, or a message that it owned is gone."""

GRACE = 5.0
"""Seconds that the other nodes have to finish when one has raised; so that of several errors always
the same is told.
"""


class RayNodes:
    """All nodes of a run as actors in one placement group, one bundle each.

    Inside a Tune trial that is the trial's own group. There the processes outlive a run: what they
    held is dropped, and the trial's next run builds its nodes in them, because starting processes
    costs more than a short run.
    """

    def __init__(self) -> None:
        self.actors: dict[str, Any] = {}
        self.group: PlacementGroup | None = None
        self.shares: dict[str, connect.Share] = {}
        self.started = False
        self.began, self.allowed, self.what = time.monotonic(), 0.0, ""
        self.heartbeat = 0.0
        self.inherited = ray.is_initialized() and ray.util.get_current_placement_group() is not None
        self.sound = True
        self.restarting = False

    def preflight(self, plan: Plan) -> None:
        resources = plan.config.resources
        self.started = connect.connect(resources) or self.started
        machines = ray.nodes()
        self.shares = connect.fitted(resources, plan.nodes, machines)
        connect.preflight(self.shares, machines, resources.placement)

    def start(
        self, plan: Plan, artifacts: Artifacts, say: Callable[[str], None] = lambda _: None
    ) -> None:
        resources, began = plan.config.resources, time.monotonic()
        until = time.monotonic() + resources.start_timeout
        while True:
            try:
                self._build(plan, say)
                break
            except NodeLost:
                # the loss that this start makes good: Ray notices seconds later that a machine is
                # gone, and places actors on it
                if not self.restarting or time.monotonic() > until:
                    raise
                self.stop()
                time.sleep(1.0)
        self.heartbeat = resources.heartbeat_timeout
        say(f"actors     all up after {span(time.monotonic() - began)}; each loads its data")
        self.deadline(resources.round_timeout, "loading the data")
        sizes = self.each(
            "prepare", {name: (ray.put(dict(artifacts.get(name, {}))),) for name in self.actors}
        )
        self.each("connect", dict.fromkeys(self.actors, (sizes,)))
        self.restarting = True  # from here on, whoever starts again has lost something

    def _build(self, plan: Plan, say: Callable[[str], None]) -> None:
        """Place the actors, and make their nodes."""
        resources = plan.config.resources
        self._room(plan)
        inherited = ray.util.get_current_placement_group() if self.inherited else None
        self.group = inherited or connect.reserve(
            self.shares, resources.placement, resources.start_timeout, say
        )
        self.actors = _KEPT.pop(self._place(), {})
        actor = ray.remote(concurrency_groups={PULSE: 1})(NodeActor)  # type: ignore[call-overload]
        # a trial's own bundle, where it has one, comes before
        first = self.group.bundle_count - len(self.shares)
        for index, (name, share) in enumerate(self.shares.items(), first):
            if name not in self.actors:
                self.actors[name] = actor.options(
                    num_cpus=share.cpus,
                    num_gpus=share.gpus,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(
                        self.group, placement_group_bundle_index=index
                    ),
                    # a restart would lose the state silently; the run goes back to its last commit
                    max_restarts=0,
                ).remote()
        say(
            f"actors     {len(self.actors)} processes start and import torch: "
            f"{', '.join(self.actors)}"
        )
        # no deadline of their own: a busy machine takes its time, and what hangs shows no sign of
        # life
        self.deadline(resources.round_timeout, "their start")
        pickled = ray.cloudpickle.dumps(plan)
        self._gather(
            {name: actor.build.remote(pickled, name) for name, actor in self.actors.items()},
            _Starting(self.actors, resources.start_timeout),
        )

    def deadline(self, seconds: float, what: str) -> None:
        self.began, self.allowed, self.what = time.monotonic(), seconds, what

    def _room(self, plan: Plan) -> None:
        """The preflight of every start, since machines come and go; a lost one has `start_timeout`
        to be replaced.
        """
        before, until = self.shares, time.monotonic() + plan.config.resources.start_timeout
        while True:
            try:
                self.preflight(plan)
                if any(share.gpus for share in before.values()) and not any(
                    share.gpus for share in self.shares.values()
                ):
                    raise CrossfedError(
                        "No machine with a GPU is left, and this run began on GPUs."
                    )
                return
            except CrossfedError:
                self.shares = before
                if not self.restarting or time.monotonic() > until:
                    raise
                time.sleep(1.0)

    def _place(self) -> tuple[Any, ...]:
        """What a kept process must agree in: the group, and every node's name and share."""
        return (self.group.id if self.group else None, tuple(self.shares.items()))

    def _gather(self, refs: Mapping[str, Ref], pulse: _Pulse | None = None) -> dict[str, Any]:
        """Results by node."""
        self.sound = False
        done = self._collect(refs, pulse)
        self.sound = True
        return done

    def _collect(self, refs: Mapping[str, Ref], pulse: _Pulse | None = None) -> dict[str, Any]:
        """Results by node, each looked at as it comes in.

        Args:
            pulse: asks for signs of life meanwhile; by default of every actor, by `heartbeat`.

        Raises:
            CrossfedError: what a node raised.
            NodeLost: an actor, its machine, or a message it owned is gone; its process is silent;
                or it is late.
        """
        waiting = {ref: name for name, ref in refs.items()}
        pulse = pulse or _Pulse(self.actors, self.heartbeat)
        done: dict[str, Any] = {}
        seconds: dict[str, float] = {}
        errors: dict[str, Exception] = {}
        until = self.began + self.allowed
        while waiting and (left := until - time.monotonic()) > 0:
            ready, _ = ray.wait(list(waiting), timeout=min(left, pulse.every))
            for ref in ready:
                name = waiting.pop(ref)
                seconds[name] = time.monotonic() - self.began
                try:
                    done[name] = ray.get(ref)  # is there: does not wait
                except Exception as error:
                    errors[name] = _told(name, error)
                    if isinstance(errors[name], NodeLost):
                        raise errors[name] from error
            if errors and until > (soon := time.monotonic() + GRACE):
                until = soon
            if not ready:
                pulse.check(waiting.values())
        if errors:
            raise next(errors[name] for name in refs if name in errors)
        if waiting:
            raise _Late(self.what, self.allowed, list(waiting.values()), seconds)
        return {name: done[name] for name in refs}

    def each(self, call: str, args: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
        return self._gather(
            {name: self.actors[name].call.remote(call, *values) for name, values in args.items()}
        )

    def run_phase(
        self,
        stage: int,
        part: str,
        phase: int,
        round: int,
        inboxes: Mapping[str, Mapping[str, Any]],
    ) -> dict[str, Sent]:
        return self._gather(
            {
                name: self.actors[name].run_phase.remote(stage, part, phase, round, dict(inbox))
                for name, inbox in inboxes.items()
            }
        )

    def save(self, folder: Path, inboxes: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
        written: dict[str, dict[str, str]] = self._gather(
            {
                name: actor.save.remote(folder, dict(inboxes.get(name, {})))
                for name, actor in self.actors.items()
            }
        )
        return {name: told for files in written.values() for name, told in files.items()}

    def load_state(self, folder: Path) -> dict[str, dict[str, Any]]:
        return self._gather(
            {name: actor.load_state.remote(folder) for name, actor in self.actors.items()}
        )

    def placement(self) -> dict[str, dict[str, Any]]:
        found = self._gather({name: actor.where.remote() for name, actor in self.actors.items()})
        return {
            name: {**row, "cpus": self.shares[name].cpus, "gpus": self.shares[name].gpus}
            for name, row in found.items()
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


class _Late(NodeLost):
    """Nodes did not answer in time.

    Args:
        what: what was asked of them. allowed: seconds from its beginning on. names: who has not
            answered.
        seconds: when the others had, by name.
    """

    def __init__(self, what: str, allowed: float, names: list[str], seconds: Mapping[str, float]):
        others = ", ".join(f"{name} {took:.1f} s" for name, took in seconds.items()) or "nobody"
        super().__init__(
            f"{', '.join(names)} had no answer {allowed:g} s after {what} began "
            f"(resources.round_timeout); in time: {others}"
        )
        self.names = names


class _Pulse:
    """Asks actors for a sign of life.

    Args:
        actors: by name. limit: seconds without one after which an actor counts as lost; 0 asks
            nobody.
    """

    def __init__(self, actors: Mapping[str, Any], limit: float):
        self.actors, self.limit, self.every = actors, limit, min(10.0, limit / 4) or 10.0
        self.seen = dict.fromkeys(actors, time.monotonic())
        self.asked: dict[str, Ref] = {}

    def check(self, waiting: Collection[str]) -> None:
        """Read the answers, ask again.

        Args:
            waiting: who has not done what all were asked to do.

        Raises:
            NodeLost: an actor is gone, or has been silent for too long.
        """
        if not self.limit:
            return
        now = time.monotonic()
        for name, actor in self.actors.items():
            if name in self.asked and ray.wait([self.asked[name]], timeout=0)[0]:
                try:
                    ray.get(self.asked.pop(name))
                except LOST as error:
                    raise NodeLost(f"{name} was lost: {_reason(error)}") from error
                self.seen[name] = now
            if name not in self.asked:
                self.asked[name] = actor.alive.remote()
        self._judge(now, waiting)

    def _judge(self, now: float, waiting: Collection[str]) -> None:
        for name, seen in self.seen.items():
            if now - seen > self.limit:
                raise NodeLost(
                    f"{name} was lost: its process has not answered for {now - seen:.0f} s "
                    "(resources.heartbeat_timeout)"
                )


class _Starting(_Pulse):
    """The same while processes start, which a busy machine lets do so one after the other.

    The clock runs from the last sign of life of any that is not up; those that are up prove
    nothing.
    """

    def __init__(self, actors: Mapping[str, Any], limit: float):
        super().__init__(actors, limit)
        self.latest = time.monotonic()

    def _judge(self, now: float, waiting: Collection[str]) -> None:
        self.latest = max([self.latest, *(self.seen[name] for name in waiting)])
        if now - self.latest > self.limit:
            raise CrossfedError(
                f"{', '.join(waiting)} did not start: no sign of life for "
                f"{now - self.latest:.0f} s "
                f"(resources.start_timeout={self.limit:g}). Where the machine is busy, wait "
                f"for what else runs on it, take "
                f"fewer trials at once (--concurrent), or allow more: --set "
                f"resources.start_timeout={2 * self.limit:g}."
            )


def _told(name: str, error: Exception) -> Exception:
    """What a node's error means for the run."""
    # first, because Ray makes it an instance of its cause's class, too
    if isinstance(error, RayTaskError):
        if isinstance(error.cause, CrossfedError):
            return error.cause
        if isinstance(error.cause, LOST):
            return NodeLost(f"a message to {name} was lost: {_reason(error.cause)}")
        if isinstance(error.cause, ObjectStoreFullError | OutOfDiskError):
            return CrossfedError(
                f"{name} could not keep its messages: {_reason(error.cause)}; give Ray a "
                f"larger object store, or free the disk "
                "of its machine. The last committed round stays."
            )
    elif isinstance(error, LOST):
        return NodeLost(f"{name} was lost: {_reason(error)}")
    return error


def _reason(error: Exception) -> str:
    """The telling line of a Ray error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
