"""Views of item sequences: crop, mask, reorder, and two random views of every sequence.

A batch is items int64 [b, T], padded at the end with item 0, and its lengths int64 [b], each at
least 1. No function writes into its arguments: a view is always a new array.

Source: Xie et al., "Contrastive Learning for Sequential Recommendation" (CL4SRec), ICDE 2022,
arXiv 2010.14395, section III-C. Equation numbers are those that `crossfed.methods.cl4srec` gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]
Sequences = tuple[Int64s, Int64s]
"""Items [b, T] and lengths [b]."""

Operator = Literal["crop", "mask", "reorder"]


def crop(items: Int64s, count: Int64s, share: float, rng: np.random.Generator) -> Sequences:
    """Eq. (3): ⌊share · n⌋ items in a row, at least one, from a place drawn uniformly.

    Args:
        items, count: int64 [b, T] and [b]. share: η, in [0, 1].

    Returns:
        int64 [b, T] and the new lengths [b].
    """
    kept = np.maximum(np.floor(share * count).astype(np.int64), 1)
    first = rng.integers(0, count - kept + 1)
    place = np.arange(items.shape[1])
    moved = np.take_along_axis(items, np.minimum(first[:, None] + place, items.shape[1] - 1), 1)
    return np.where(place < kept[:, None], moved, 0), kept


def mask(
    items: Int64s,
    count: Int64s,
    share: float,
    token: int,
    rng: np.random.Generator,
) -> Sequences:
    """Eq. (4): ⌊share · n⌋ items, drawn without replacement, become the mask token.

    Args:
        items, count: int64 [b, T] and [b]. share: γ, in [0, 1]. token: what masked items become.

    Returns:
        int64 [b, T] and the lengths [b], which stay.
    """
    real = np.arange(items.shape[1]) < count[:, None]
    order = np.argsort(np.where(real, rng.random(items.shape), 2.0), axis=1)
    hidden = np.zeros(items.shape, bool)
    chosen = np.arange(items.shape[1]) < np.floor(share * count)[:, None]
    np.put_along_axis(hidden, order, chosen, 1)
    return np.where(hidden, token, items), count.copy()


def reorder(items: Int64s, count: Int64s, share: float, rng: np.random.Generator) -> Sequences:
    """Eq. (5): ⌊share · n⌋ items in a row, from a place drawn uniformly, are shuffled.

    Args:
        items, count: int64 [b, T] and [b]. share: β, in [0, 1].

    Returns:
        int64 [b, T] and the lengths [b], which stay.
    """
    size = np.floor(share * count).astype(np.int64)[:, None]
    first = rng.integers(0, count - size[:, 0] + 1)[:, None]
    place = np.arange(items.shape[1])
    inside = (place >= first) & (place < first + size)
    # shuffled places get keys within the stretch, so that sorting leaves all others where they are
    keys = np.where(inside, first + size * rng.random(items.shape), place)
    return np.take_along_axis(items, np.argsort(keys, axis=1, kind="stable"), 1), count.copy()


def two_views(
    items: Int64s,
    count: Int64s,
    operators: Sequence[Operator],
    shares: tuple[float, float, float],
    token: int,
    rng: np.random.Generator,
) -> Sequences:
    """Two views of every sequence, each by an operator of its own where there are two or more.

    Args:
        items, count: int64 [b, T] and [b].
        operators: what is drawn from, uniformly and without replacement.
        shares: η of `crop`, γ of `mask`, β of `reorder`. token: of `mask`.

    Returns:
        int64 [2b, T] and lengths [2b]; rows n and b + n are the views of sequence n.
    """
    b, choices = len(count), len(operators)
    first = rng.integers(0, choices, b)
    other = (first + rng.integers(1, max(choices, 2), b)) % choices
    chosen = np.concatenate([first, other])
    views, sizes = np.concatenate([items, items]), np.concatenate([count, count])
    for number, operator in enumerate(operators):
        rows = np.flatnonzero(chosen == number)
        given = views[rows], sizes[rows]
        if operator == "crop":
            made = crop(*given, shares[0], rng)
        elif operator == "mask":
            made = mask(*given, shares[1], token, rng)
        else:
            made = reorder(*given, shares[2], rng)
        views[rows], sizes[rows] = made
    return views, sizes
