"""Windows, padding and batches against loops over users."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossfed.methods.parts.sequences import Windows, batches, histories, padded, windows
from crossfed.platform.method import Interactions


def shop(sizes: list[int]) -> Interactions:
    """One user per size; item numbers count up over all users, so that an item tells its place."""
    users = np.repeat(np.arange(len(sizes)), sizes)
    return Interactions.build(len(sizes), max(sum(sizes), 1), users, np.arange(len(users)))


def told(pieces: Windows) -> list[tuple[int, int, int]]:
    return [
        (int(u), int(s), int(c))
        for u, s, c in zip(pieces.user, pieces.start, pieces.count, strict=True)
    ]


def test_windows_by_hand():
    """Histories of 4, 1, 0 and 2 items; the last item of each is a target only."""
    data, rng = shop([4, 1, 0, 2]), np.random.default_rng(0)
    assert told(windows(data, 10, "all", rng)) == [(0, 0, 3), (3, 5, 1)]
    assert told(windows(data, 2, "last", rng)) == [(0, 1, 2), (3, 5, 1)]
    assert told(windows(data, 2, "prefixes", rng)) == [(0, 0, 1), (0, 0, 2), (0, 1, 2), (3, 5, 1)]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 14), min_size=1, max_size=8), st.integers(1, 6), st.integers(0, 5))
def test_windows_follow_each_other_and_train_every_target_once(sizes, length, seed):
    data = shop(sizes)
    pieces = windows(data, length, "all", np.random.default_rng(seed))
    assert (pieces.count >= 1).all() and (pieces.count <= length).all()
    targets = [s + 1 + t for _, s, c in told(pieces) for t in range(c)]
    expected = [i for u in range(len(sizes)) for i in range(data.indptr[u] + 1, data.indptr[u + 1])]
    assert targets == expected
    for user, start, count in told(pieces):
        assert data.indptr[user] <= start and start + count + 1 <= data.indptr[user + 1]
    for user, size in enumerate(sizes):
        inner = pieces.count[pieces.user == user][1:-1]
        assert (inner == length).all()
        if size - 1 <= length:
            assert (pieces.user == user).sum() == (size > 1)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 14), min_size=1, max_size=8), st.integers(1, 6))
def test_last_and_prefixes_and_histories(sizes, length):
    data, rng = shop(sizes), np.random.default_rng(0)
    last, prefixes, known = [], [], []
    for user, size in enumerate(sizes):
        mine = list(range(data.indptr[user], data.indptr[user + 1]))
        if size > 1:
            inputs = mine[:-1][-length:]
            last.append((user, inputs[0], len(inputs)))
        for t in range(1, size):
            inputs = mine[:t][-length:]
            prefixes.append((user, inputs[0], len(inputs)))
        if size:
            known.append((user, mine[-length:][0], len(mine[-length:])))
    assert told(windows(data, length, "last", rng)) == last
    assert told(windows(data, length, "prefixes", rng)) == prefixes
    assert told(histories(data, length)) == known


def test_the_cuts_move_from_call_to_call():
    data, rng = shop([100]), np.random.default_rng(0)
    first = {int(windows(data, 10, "all", rng).count[0]) for _ in range(100)}
    assert first == set(range(1, 11))  # every phase, a whole window included


def test_padded_fills_the_end():
    items = np.array([7, 8, 9, 5])
    assert padded(items, np.array([1, 3]), np.array([3, 1])).tolist() == [[8, 9, 5], [5, 0, 0]]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 50), max_size=60), st.integers(1, 7), st.integers(1, 4))
def test_every_window_is_in_one_batch(counts, size, pool):
    made = list(batches(np.array(counts, np.int64), size, np.random.default_rng(1), pool))
    assert sorted(i for batch in made for i in batch) == list(range(len(counts)))
    assert all(len(batch) <= size for batch in made)
    assert sum(len(batch) < size for batch in made) <= 1


def test_batches_hold_windows_of_similar_length_and_change():
    """1000 windows of lengths 1 to 50: padding to a batch's longest costs little, and far more
    where batches are random.
    """
    counts = np.random.default_rng(0).integers(1, 51, 1000)

    def cost(pool: int) -> float:
        made = list(batches(counts, 20, np.random.default_rng(3), pool))
        return sum(counts[batch].max() * len(batch) for batch in made) / counts.sum()

    assert cost(16) < 1.1 < 1.7 < cost(1)
    rng = np.random.default_rng(0)
    one, two = ([tuple(sorted(batch)) for batch in batches(counts, 20, rng)] for _ in range(2))
    assert not set(one) & set(two)
    lengths = [counts[list(batch)].mean() for batch in one[:16]]
    assert lengths != sorted(lengths)


def test_sizes_must_be_positive():
    with pytest.raises(ValueError, match="length must be positive"):
        windows(shop([3]), 0, "all", np.random.default_rng(0))
    with pytest.raises(ValueError, match="batch_size must be positive"):
        next(batches(np.ones(3, np.int64), 0, np.random.default_rng(0)))
