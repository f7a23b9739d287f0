"""Users' histories as sequences: windows with next-item targets, padded batches of similar length.

A window is a piece of one user's history, kept as two numbers: its inputs are
`items[start : start + count]` of the domain's `Interactions`, and the target of each input is the
item after it. Nothing is copied until a batch is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from crossfed.platform.method import Interactions

Int64s = npt.NDArray[np.int64]

Cut = Literal["all", "last", "prefixes"]
"""How histories longer than a window are cut; see `windows`."""


@dataclass(frozen=True, slots=True)
class Windows:
    """Windows of a domain's histories.

    Attributes:
        user, start, count: int64 [w]: whose it is, where its inputs begin in `Interactions.items`,
            how many they are (≥ 1).
    """

    user: Int64s
    start: Int64s
    count: Int64s

    def __len__(self) -> int:
        return len(self.start)


def windows(data: Interactions, length: int, cut: Cut, rng: np.random.Generator) -> Windows:
    """The training windows of one epoch: every user's history without its last item, which is a
    target only.

    "all": one after the other, so that every item but a user's first is the target of exactly one
    window. Where the cuts
        fall is drawn anew in each call; a history that fits one window is not cut.
    "last": the last `length` inputs of each user, and no others. "prefixes": one window per target,
    of up to `length` items before it; only its last position is to be trained.

    Users with fewer than two items have no window.

    Args:
        data: the domain's training interactions. length: inputs in a window at most.

    Raises:
        ValueError: `length` is not positive.
    """
    if length < 1:
        raise ValueError(f"length must be positive, got {length}")
    inputs = np.maximum(np.diff(data.indptr) - 1, 0)  # per user
    if cut == "last":
        user = np.flatnonzero(inputs)
        count = np.minimum(inputs[user], length)
        return Windows(user, data.indptr[user + 1] - 1 - count, count)
    user = np.repeat(np.arange(data.n_users), inputs)
    # of each input in its history
    place = np.arange(len(user)) - np.repeat(np.cumsum(inputs) - inputs, inputs)
    at = data.indptr[user] + place
    if cut == "prefixes":
        count = np.minimum(place + 1, length)
        return Windows(user, at + 1 - count, count)
    phase = np.where(inputs > length, rng.integers(0, length, data.n_users), 0)
    piece = (place + phase[user]) // length
    first = np.flatnonzero((np.diff(user, prepend=-1) != 0) | (np.diff(piece, prepend=-1) != 0))
    return Windows(user[first], at[first], np.diff(first, append=len(user)))


def histories(data: Interactions, length: int) -> Windows:
    """The last `length` items of every user who has any: what the next recommendation is made
    from.
    """
    sizes = np.diff(data.indptr)
    user = np.flatnonzero(sizes)
    count = np.minimum(sizes[user], length)
    return Windows(user, data.indptr[user + 1] - count, count)


def padded(items: Int64s, start: Int64s, count: Int64s) -> Int64s:
    """The windows' items, filled up at the end with item 0: [b, max count]."""
    place = np.arange(count.max(initial=0))
    return np.where(
        place < count[:, None], items[np.minimum(start[:, None] + place, len(items) - 1)], 0
    )


def batches(
    count: Int64s, batch_size: int, rng: np.random.Generator, pool: int = 16
) -> Iterator[Int64s]:
    """Places of the windows of each batch, in random order, windows of similar length together.

    Windows are shuffled, sorted by length within pools of `pool` batches, and the batches of a pool
    are shuffled: little padding, and yet other batches in every epoch. With `pool=1` batches are
    purely random.

    Args:
        count: int64 [w], the windows' lengths.

    Raises:
        ValueError: `batch_size` is not positive.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be positive, got {batch_size}")
    order = rng.permutation(len(count))
    for begin in range(0, len(order), batch_size * pool):
        near = order[begin : begin + batch_size * pool]
        near = near[np.argsort(count[near], kind="stable")]
        cuts = [near[i : i + batch_size] for i in range(0, len(near), batch_size)]
        for i in rng.permutation(len(cuts)):
            yield cuts[i]
