"""What crosses: every payload is checked against the method's declaration before it leaves its sender, and counted.

The checks run inside the sender's own process, so a refused array never leaves it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from crossfed.platform.seam import (
    SERVER,
    Array,
    CrossfedError,
    Direction,
    Field,
    LeakError,
    Method,
    MethodConfig,
    Payload,
    Stage,
)


@dataclass(frozen=True, slots=True)
class Entry:
    """One row of the byte ledger: one array of one message."""

    stage: str
    round: int
    sender: str
    receiver: str
    direction: str
    key: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    copy: int = 0  # under a key that leaves perturbed: which of its sender's different arrays of the phase this is


def direction(sender: str, receiver: str) -> Direction:
    """Which way a message between two nodes travels."""
    if receiver == SERVER:
        return Direction.UP
    return Direction.DOWN if sender == SERVER else Direction.PEER


def declared(fields: Sequence[Field], key: str, way: Direction) -> Field | None:
    """The declaration that covers `key` in this direction, or None."""
    for field in fields:
        match = field.key == key or (field.key.endswith("*") and key.startswith(field.key[:-1]))
        if match and field.direction == way:
            return field
    return None


def dimension(name: int | str, config: MethodConfig, sizes: Mapping[str, int]) -> int:
    """The number a declared dimension stands for."""
    if isinstance(name, int):
        return name
    if name in sizes:
        return sizes[name]
    return int(getattr(config, name))


class Gate:
    """Checks what one node sends.

    Args:
        method, config: whose declarations count.
        node: the sender.
        nodes: every node there is, with its item count (0 for the server).
        n_users: the sender's own user count; None at the server.
    """

    def __init__(self, method: Method, config: MethodConfig, node: str, nodes: Mapping[str, int], n_users: int | None):
        self.method, self.config, self.node, self.nodes, self.n_users = method, config, node, nodes, n_users

    def check(self, stage: Stage, round: int, send: Mapping[str, Payload]) -> list[Entry]:
        """Ledger rows of a node's messages.

        Raises:
            LeakError: a receiver outside the stage's edges, an undeclared key, another shape or type than declared,
                values out of range, or NaN/Inf. Names the sender and the key.
        """
        rows = []
        for receiver, payload in send.items():
            way = self._edge(stage, receiver)
            for key, value in payload.items():
                self._array(receiver, way, key, value)
                rows.append(
                    Entry(
                        stage.name,
                        round,
                        self.node,
                        receiver,
                        str(way),
                        key,
                        value.shape,
                        str(value.dtype),
                        value.nbytes,
                    )
                )
        return rows

    def _edge(self, stage: Stage, receiver: str) -> Direction:
        if receiver not in self.nodes or receiver == self.node:
            raise LeakError(
                f"{self.node} tried to send to {receiver!r} in stage {stage.name!r}: there is no such other node."
            )
        way = direction(self.node, receiver)
        if way not in stage.edges:
            allowed = ", ".join(sorted(stage.edges)) or "none: the stage is local"
            raise LeakError(
                f"{self.node} tried to send to {receiver} ({way}) in stage {stage.name!r}, outside its edges ({allowed})."
            )
        return way

    def _array(self, receiver: str, way: Direction, key: str, value: Array) -> None:
        who = f"{self.node} → {receiver}: payload key {key!r}"
        field = declared(self.method.fields, key, way)
        if field is None:
            known = ", ".join(f.key for f in self.method.fields if f.direction == way) or "none"
            raise LeakError(f"{who} is not declared for direction {way} (declared: {known}); it was not sent.")
        if not isinstance(value, np.ndarray):
            raise LeakError(f"{who} is a {type(value).__name__}, not a NumPy array; it was not sent.")
        if str(value.dtype) != field.dtype:
            raise LeakError(f"{who} has dtype {value.dtype}, declared {field.dtype}; it was not sent.")
        if field.shape is not None:
            domain = receiver if self.node == SERVER else self.node
            sizes = {"n_items": self.nodes[domain]} | ({} if self.n_users is None else {"n_users": self.n_users})
            expected = tuple(dimension(name, self.config, sizes) for name in field.shape)
            if value.shape != expected:
                raise LeakError(f"{who} has shape {value.shape}, declared {field.shape} = {expected}; it was not sent.")
        elif self.n_users in value.shape and self.n_users not in self.config.model_dump().values():
            raise LeakError(
                f"{who} has shape {value.shape}, with an axis as long as the domain has users ({self.n_users}); a field "
                "declared without a shape may not grow with users. It was not sent."
            )
        if np.issubdtype(value.dtype, np.floating) and not np.isfinite(value).all():
            raise LeakError(f"{who} holds NaN or Inf; it was not sent. The training has diverged or the step is wrong.")
        if field.high is not None and value.size:
            high = dimension(field.high, self.config, {})
            if value.min() < 0 or value.max() >= high:
                raise LeakError(f"{who} holds values outside 0 … {high - 1} as declared; it was not sent.")


class ShapeWatch:
    """Holds fields declared with `shape=None` to one shape for all domains and rounds, so that it cannot grow with users."""

    def __init__(self, fields: Iterable[Field]):
        self.fields = [field for field in fields if field.shape is None]
        self.seen: dict[tuple[str, str], tuple[tuple[int, ...], str]] = {}

    def check(self, rows: Iterable[Entry]) -> None:
        """Raises LeakError when an array's shape differs from the one first seen under its key and direction."""
        for row in rows:
            if declared(self.fields, row.key, Direction(row.direction)) is None:
                continue
            shape, first = self.seen.setdefault((row.key, row.direction), (row.shape, row.sender))
            if shape != row.shape:
                raise LeakError(
                    f"{row.sender} → {row.receiver}: payload key {row.key!r} has shape {row.shape}, but {first} sent {shape}; "
                    "a field declared without a shape must be the same at every domain. It was not delivered."
                )


def check_declarations(method: Method, config: MethodConfig) -> None:
    """Raises CrossfedError when a declared dimension is neither a size, a number, nor a value of the method's Config."""
    for field in method.fields:
        if field.direction == Direction.DOWN and "n_users" in (field.shape or ()):
            raise CrossfedError(
                f"{method.name}: field {field.key!r} goes down with n_users rows, which the server cannot know."
            )
        for name in itertools.chain(field.shape or (), () if field.high is None else (field.high,)):
            if (
                isinstance(name, str)
                and name not in ("n_items", "n_users")
                and not isinstance(getattr(config, name, None), int)
            ):
                raise CrossfedError(
                    f"{method.name}: field {field.key!r} declares dimension {name!r}, which its Config lacks."
                )


def freeze(payload: Payload) -> dict[str, Array]:
    """A read-only copy, as Ray would deliver it."""
    copied = {key: np.array(value, copy=True, order="C") for key, value in payload.items()}
    for value in copied.values():
        value.setflags(write=False)
    return copied
