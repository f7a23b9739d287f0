"""A node in a process of its own.

This module imports Ray and nothing heavier: an actor's process can show signs of life while `build`
imports torch and what else a node needs, which takes a minute on a busy machine.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

if TYPE_CHECKING:
    from crossfed.platform.federation.node import Node, Plan, Sent
    from crossfed.platform.method import Payload

PULSE = "pulse"
"""The actors' second thread, which answers while a step runs in the first."""

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

    def build(self, pickled: bytes, name: str) -> None:
        """Make the node of a plan. Not done in `__init__`, where an error would look like a dead
        actor.

        Args:
            pickled: the plan. As an argument of its own it would be unpickled, and torch imported,
                before this process can answer.
        """
        import torch

        from crossfed.platform.cluster import connect
        from crossfed.platform.federation.node import Node
        from crossfed.platform.method import SERVER

        plan: Plan = ray.cloudpickle.loads(pickled)
        if name == SERVER:
            device, self.gpus = torch.device("cpu"), list[str]()
        else:
            device, self.gpus = connect.assigned_device(plan.config.resources, name)
        self.node = Node(plan, name, device)

    @ray.method(concurrency_group=PULSE)
    def alive(self) -> None:
        """A sign of life; answered beside a running step."""

    def clear(self) -> None:
        """Drop the node, and with it all data and state of its run."""
        del self.node

    def call(self, method: str, *args: Any) -> Any:
        return getattr(self.node, method)(*args)

    def run_phase(
        self, stage: int, part: str, phase: int, round: int, inbox: Mapping[str, Ref]
    ) -> Sent:
        from crossfed.platform.federation.node import Sent

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
