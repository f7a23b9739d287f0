"""Batches of training pairs with uniform negatives, for pairwise and for pointwise losses."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from crossfed.platform.method import Interactions

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Three columns of one length on the CPU: users, positives, negatives; or users, items, labels."""


def bpr_epoch(data: Interactions, batch_size: int, rng: np.random.Generator) -> Iterator[Batch]:
    """One shuffled pass over all training pairs, each with one item its user has no training
    interaction with.

    A pair that occurs n times in the data comes n times. Pairs of a user who has every item are
    left out, since no negative exists for them. The last batch may be smaller.

    Raises:
        ValueError: `batch_size` is not positive.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be positive, got {batch_size}")
    drawn = draw_negatives(data, data.users, rng)
    order = rng.permutation(np.flatnonzero(drawn >= 0))
    users, positives, negatives = (
        torch.from_numpy(column[order]) for column in (data.users, data.items, drawn)
    )
    for start in range(0, len(order), batch_size):
        batch = slice(start, start + batch_size)
        yield users[batch], positives[batch], negatives[batch]


def pointwise_epoch(
    data: Interactions,
    batch_size: int,
    negatives: int,
    rng: np.random.Generator,
) -> Iterator[Batch]:
    """One shuffled pass over all training pairs, labelled 1, and unseen items, labelled 0.

    Every pair has its `negatives`, drawn independently, so one may come twice; none is one the user
    has trained on. A user who has every item comes with positives only. The last batch may be
    smaller.

    Yields:
        Users and items, int64 [b] each, and their labels, float32 [b], on the CPU.

    Raises:
        ValueError: `batch_size` is not positive, or `negatives` is negative.
    """
    if batch_size < 1 or negatives < 0:
        sizes = f"batch_size ({batch_size}) must be positive, negatives ({negatives}) not below 0"
        raise ValueError(sizes)
    owners = np.repeat(data.users, negatives)
    drawn = draw_negatives(data, owners, rng)
    users = np.concatenate([data.users, owners[drawn >= 0]])
    items = np.concatenate([data.items, drawn[drawn >= 0]])
    order = rng.permutation(len(users))
    labels = torch.from_numpy((order < len(data.users)).astype(np.float32))
    shuffled_users, shuffled_items = torch.from_numpy(users[order]), torch.from_numpy(items[order])
    for start in range(0, len(order), batch_size):
        batch = slice(start, start + batch_size)
        yield shuffled_users[batch], shuffled_items[batch], labels[batch]


def draw_negatives(
    data: Interactions, users: npt.NDArray[np.int64], rng: np.random.Generator
) -> npt.NDArray[np.int64]:
    """For each user, one item drawn uniformly from those without a training interaction; -1 where
    there is none.

    Exact, without rejection and without a users × items table: with a user's sorted items h_0 < h_1
    < …, the r-th unseen item is r + #{k : h_k - k <= r}, and these counts come from one binary
    search over all users at once.

    Args:
        users: int64 [m], with repetitions.

    Returns:
        int64 [m].
    """
    seen = np.sort(data.users * data.n_items + data.items)
    seen = seen[np.diff(seen, prepend=-1) > 0]  # five times as fast as np.unique, which hashes
    owner = seen // max(data.n_items, 1)
    count = np.bincount(owner, minlength=data.n_users)
    start = np.concatenate([[0], np.cumsum(count)])
    gaps = seen - (np.arange(len(seen)) - start[owner])  # user * n_items + (h_k - k), sorted
    free = data.n_items - count[users]
    # A user without a free item draws from {0}, and is marked afterwards.
    rank = rng.integers(0, np.maximum(free, 1))
    below = np.searchsorted(gaps, users * data.n_items + rank, side="right") - start[users]
    return np.where(free > 0, rank + below, -1)
