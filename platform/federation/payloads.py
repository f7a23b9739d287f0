"""What crosses: every payload is checked against the method's declaration before it leaves its
sender, and counted.

The checks run inside the sender's own process, so a refused array never leaves it; and once more
inside the receiver's, which need not take the sender's word for them.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from crossfed.platform.errors import CrossfedError, LeakError
from crossfed.platform.method import (
    SERVER,
    Array,
    Direction,
    Field,
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
    # under a key that leaves perturbed: which of its sender's different arrays of the phase this is
    copy: int = 0


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


UNDECLARED = 2**30
"""Bytes that a message may hold where its fields declare no shape, unless
`resources.max_message_mb` says otherwise.
"""

_NAME = re.compile(r"(?!.*\.\.)[A-Za-z0-9_][A-Za-z0-9_.:/-]{0,199}")
_METRICS = 256
"""Most metrics of one step: each is a number that leaves the domain unperturbed, for the tracker.
"""


class Gate:
    """Checks what one node sends, and what it receives.

    Args:
        method, config: whose declarations count.
        node: this node.
        nodes: every node there is, with its item count (0 for the server).
        n_users: this node's own user count; None at the server.
        max_bytes: largest message; None derives it from the declared shapes.
    """

    def __init__(
        self,
        method: Method,
        config: MethodConfig,
        node: str,
        nodes: Mapping[str, int],
        n_users: int | None,
        max_bytes: int | None = None,
    ):
        self.method, self.config, self.node, self.nodes, self.n_users = (
            method,
            config,
            node,
            nodes,
            n_users,
        )
        self.max_bytes = max_bytes

    def check(self, stage: Stage, round: int, send: Mapping[str, Payload]) -> list[Entry]:
        """Ledger rows of this node's messages.

        Raises:
            LeakError: a receiver outside the stage's edges, an undeclared key, another shape or
                type than declared, values out of range, NaN/Inf, or more bytes than a message may
                have. Names the sender and the key.
        """
        rows = []
        for receiver, payload in _messages(self.node, send):
            way = self._edge(stage, self.node, receiver)
            self._payload(self.node, receiver, way, payload, "it was not sent")
            for key, value in payload.items():
                shape, dtype = value.shape, str(value.dtype)
                rows.append(
                    Entry(
                        stage.name,
                        round,
                        self.node,
                        receiver,
                        str(way),
                        key,
                        shape,
                        dtype,
                        value.nbytes,
                    )
                )
        return rows

    def receive(self, stage: Stage, inbox: Mapping[str, Payload]) -> None:
        """Refuse what the sender should have refused.

        Raises:
            LeakError: as in `check`; a shape that only the sender's user count explains is taken as
                it is.
        """
        for sender, payload in _messages(self.node, inbox):
            self._payload(
                sender, self.node, self._edge(stage, sender, self.node), payload, "it was not read"
            )

    def _edge(self, stage: Stage, sender: str, receiver: str) -> Direction:
        for name in (sender, receiver):
            if name not in self.nodes or sender == receiver:
                raise LeakError(
                    f"{sender} tried to send to {receiver!r} in stage {stage.name!r}: there is "
                    f"no such other node."
                )
        way = direction(sender, receiver)
        if way not in stage.edges:
            allowed = ", ".join(sorted(stage.edges)) or "none: the stage is local"
            raise LeakError(
                f"{sender} tried to send to {receiver} ({way}) in stage {stage.name!r}, "
                f"outside its edges ({allowed})."
            )
        return way

    def _payload(
        self, sender: str, receiver: str, way: Direction, payload: Payload, end: str
    ) -> None:
        """Check one message; `end` says what becomes of a refused one."""
        who = f"{sender} → {receiver}"
        if not isinstance(payload, Mapping):
            raise LeakError(
                f"{who}: a {type(payload).__name__} is no payload of named arrays; {end}."
            )
        arrays: list[tuple[str, Array, Field]] = []
        for key, value in payload.items():
            if not isinstance(key, str) or not _NAME.fullmatch(key):
                raise LeakError(f"{who}: payload key {str(key)[:80]!r} is no name; {end}.")
            field = declared(self.method.fields, key, way)
            if field is None:
                known = ", ".join(f.key for f in self.method.fields if f.direction == way) or "none"
                raise LeakError(
                    f"{who}: payload key {key!r} is not declared for direction {way} "
                    f"(declared: {known}); {end}."
                )
            if not isinstance(value, np.ndarray):
                raise LeakError(
                    f"{who}: payload key {key!r} is a {type(value).__name__}, not "
                    f"a NumPy array; {end}."
                )
            self._form(f"{who}: payload key {key!r}", sender, receiver, field, value, end)
            arrays.append((key, value, field))
        if (total := sum(value.nbytes for _, value, _ in arrays)) > (
            allowed := self._allowed(sender, receiver, way)
        ):
            key = max(arrays, key=lambda row: row[1].nbytes)[0]
            raise LeakError(
                f"{who}: the message holds {total:,} bytes (most of them in payload key "
                f"{key!r}), more than the {allowed:,} "
                f"that it may have (resources.max_message_mb); {end}."
            )
        for key, value, field in arrays:
            self._values(f"{who}: payload key {key!r}", field, value, end)

    def _sizes(self, sender: str, receiver: str) -> dict[str, int]:
        """The sizes that a declared shape may name and this node knows."""
        sizes = {"n_items": self.nodes[receiver if sender == SERVER else sender]}
        return (
            sizes
            if self.n_users is None or sender != self.node
            else sizes | {"n_users": self.n_users}
        )

    def _allowed(self, sender: str, receiver: str, way: Direction) -> int:
        """Bytes that a message may have."""
        if self.max_bytes is not None:
            return self.max_bytes
        total, sizes = 0, self._sizes(sender, receiver)
        for field in self.method.fields:
            if field.direction != way:
                continue
            if (
                field.shape is None
                or field.key.endswith("*")
                or ("n_users" in field.shape and "n_users" not in sizes)
            ):
                total += UNDECLARED
            else:
                shape = [dimension(name, self.config, sizes) for name in field.shape]
                total += math.prod(shape) * np.dtype(field.dtype).itemsize
        return total

    def _form(
        self, who: str, sender: str, receiver: str, field: Field, value: Array, end: str
    ) -> None:
        if str(value.dtype) != field.dtype:
            raise LeakError(f"{who} has dtype {value.dtype}, declared {field.dtype}; {end}.")
        if field.shape is not None:
            sizes = self._sizes(sender, receiver)
            expected = tuple(
                None
                if name == "n_users" and name not in sizes
                else dimension(name, self.config, sizes)
                for name in field.shape
            )
            fits = len(expected) == value.ndim and all(
                want in (None, have) for want, have in zip(expected, value.shape, strict=True)
            )
            if not fits:
                raise LeakError(
                    f"{who} has shape {value.shape}, declared {field.shape} = {expected}; {end}."
                )
        elif (
            self.n_users in value.shape
            and sender == self.node
            and self.n_users not in self.config.model_dump().values()
        ):
            raise LeakError(
                f"{who} has shape {value.shape}, with an axis as long as the domain has users "
                f"({self.n_users}); a field "
                f"declared without a shape may not grow with users; {end}."
            )

    def _values(self, who: str, field: Field, value: Array, end: str) -> None:
        if np.issubdtype(value.dtype, np.inexact) and not np.isfinite(value).all():
            raise LeakError(
                f"{who} holds NaN or Inf; {end}. The training has diverged or the step is wrong."
            )
        if field.high is not None and value.size:
            high = dimension(field.high, self.config, {})
            if value.min() < 0 or value.max() >= high:
                raise LeakError(f"{who} holds values outside 0 … {high - 1} as declared; {end}.")


def _messages(node: str, messages: Mapping[str, Payload]) -> Iterable[tuple[str, Payload]]:
    """The messages of a node by the other node's name."""
    if not isinstance(messages, Mapping):
        raise LeakError(
            f"{node}: a {type(messages).__name__} is no mapping of node names to payloads."
        )
    return messages.items()


def check_metrics(node: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """A step's metrics as plain numbers.

    Raises:
        LeakError: a name is no name, a value is no number, or there are more than `_METRICS` of
            them.
    """
    if not isinstance(metrics, Mapping) or len(metrics) > _METRICS:
        raise LeakError(
            f"{node}: the metrics of a step are a mapping of at most {_METRICS} names to numbers."
        )
    found = {}
    for name, value in metrics.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise LeakError(f"{node}: metric {str(name)[:80]!r} is no name.")
        try:
            found[name] = float(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise LeakError(
                f"{node}: metric {name!r} is a {type(value).__name__}, not one number."
            ) from error
    return found


def check_told(
    stage: Stage, sender: str, nodes: Iterable[str], receivers: Iterable[str], rows: Iterable[Entry]
) -> None:
    """Hold what a node says it has sent against the stage, before anything of it is delivered.

    Args:
        receivers: of the messages it hands over. rows: the ledger rows that it tells of them.

    Raises:
        LeakError: a message for nobody or outside the edges, or a row that speaks of another
            message or cannot be true.
    """
    known, handed = set(nodes), set(receivers)
    for receiver in handed:
        if receiver not in known - {sender} or direction(sender, receiver) not in stage.edges:
            raise LeakError(
                f"{sender} handed over a message to {receiver!r}, outside the edges of stage "
                f"{stage.name!r}."
            )
    for row in rows:
        try:
            told = math.prod(row.shape) * np.dtype(row.dtype).itemsize
            true = (
                row.sender == sender
                and row.receiver in handed
                and min(row.shape, default=0) >= 0
                and row.bytes == told
            )
        except (TypeError, ValueError):
            true = False
        if not true:
            raise LeakError(
                f"{sender} tells of {row.key!r} to {row.receiver!r} what does not fit the "
                f"messages it handed over."
            )


class ShapeWatch:
    """Holds fields declared with `shape=None` to one shape for all domains and rounds, so that it
    cannot grow with users.
    """

    def __init__(self, fields: Iterable[Field]):
        self.fields = [field for field in fields if field.shape is None]
        self.seen: dict[tuple[str, str], tuple[tuple[int, ...], str]] = {}

    def check(self, rows: Iterable[Entry]) -> None:
        """Raises LeakError when an array's shape differs from the one first seen under its key and
        direction.
        """
        for row in rows:
            if declared(self.fields, row.key, Direction(row.direction)) is None:
                continue
            shape, first = self.seen.setdefault((row.key, row.direction), (row.shape, row.sender))
            if shape != row.shape:
                raise LeakError(
                    f"{row.sender} → {row.receiver}: payload key {row.key!r} has shape "
                    f"{row.shape}, but {first} sent {shape}; "
                    "a field declared without a shape must be the same at every domain. It was "
                    "not delivered."
                )


def check_declarations(method: Method, config: MethodConfig) -> None:
    """Raises CrossfedError when a declared dimension is neither a size, a number, nor a value of
    the method's Config.
    """
    for field in method.fields:
        if field.direction == Direction.DOWN and "n_users" in (field.shape or ()):
            raise CrossfedError(
                f"{method.name}: field {field.key!r} goes down with n_users rows, which the "
                f"server cannot know."
            )
        for name in itertools.chain(field.shape or (), () if field.high is None else (field.high,)):
            if (
                isinstance(name, str)
                and name not in ("n_items", "n_users")
                and not isinstance(getattr(config, name, None), int)
            ):
                raise CrossfedError(
                    f"{method.name}: field {field.key!r} declares dimension {name!r}, which "
                    f"its Config lacks."
                )


def freeze(payload: Payload) -> dict[str, Array]:
    """A read-only copy, as Ray would deliver it."""
    copied = {key: np.array(value, copy=True, order="C") for key, value in payload.items()}
    for value in copied.values():
        value.setflags(write=False)
    return copied
