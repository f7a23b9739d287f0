"""Negatives are unseen and uniform, positives come once each, and the generator decides
everything.
"""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossfed.methods.parts.sampling import bpr_epoch, draw_negatives, pointwise_epoch
from crossfed.platform.method import Interactions


def history(data: Interactions, user: int) -> set[int]:
    return set(data.items[data.indptr[user] : data.indptr[user + 1]].tolist())


def test_an_epoch_has_every_pair_once_and_negatives_outside_the_history():
    rng = np.random.default_rng(0)
    pairs = np.unique(rng.integers(0, [40, 25], (300, 2)), axis=0)
    data = Interactions.build(40, 25, pairs[:, 0], pairs[:, 1], rng.integers(0, 9, len(pairs)))
    batches = list(bpr_epoch(data, 64, rng))
    assert [len(users) for users, _, _ in batches] == [64] * (len(pairs) // 64) + [len(pairs) % 64]
    users, positives, negatives = (
        np.concatenate([b[k].numpy() for b in batches]) for k in range(3)
    )
    assert sorted(zip(users.tolist(), positives.tolist(), strict=True)) == sorted(
        map(tuple, pairs.tolist())
    )
    assert all(
        item not in history(data, user)
        for user, item in zip(users.tolist(), negatives.tolist(), strict=True)
    )
    assert (np.diff(users) < 0).any(), "pairs must be shuffled"


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 6), st.integers(1, 9), st.integers(0, 2**32))
def test_negatives_are_unseen_or_minus_one(draw, n_users, n_items, seed):
    pairs = draw.draw(
        st.lists(st.tuples(st.integers(0, n_users - 1), st.integers(0, n_items - 1)), max_size=40)
    )
    columns = np.array(pairs, np.int64).reshape(-1, 2)
    data = Interactions.build(n_users, n_items, columns[:, 0], columns[:, 1])  # pairs may repeat
    users = np.arange(n_users).repeat(5)
    for user, item in zip(
        users, draw_negatives(data, users, np.random.default_rng(seed)), strict=True
    ):
        seen = history(data, user)
        assert item == -1 if len(seen) == n_items else (0 <= item < n_items and item not in seen)


@pytest.mark.parametrize("seen", [[0], [7], [0, 2, 3, 7], [3, 4, 5], [5, 5, 1]])
def test_negatives_are_uniform_over_the_unseen(seen):
    """60,000 draws: each unseen item within 5 standard deviations of its share."""
    data = Interactions.build(3, 8, np.array([0, *[1] * len(seen), 2]), np.array([4, *seen, 4]))
    drawn = Counter(
        draw_negatives(data, np.ones(60_000, np.int64), np.random.default_rng(1)).tolist()
    )
    unseen = sorted(set(range(8)) - set(seen))
    assert sorted(drawn) == unseen
    share = 1 / len(unseen)
    deviation = (60_000 * share * (1 - share)) ** 0.5
    assert all(abs(count - 60_000 * share) < 5 * deviation for count in drawn.values())


def test_a_user_who_has_everything_is_left_out():
    data = Interactions.build(2, 3, np.array([0, 0, 0, 1]), np.array([0, 1, 2, 1]))
    ((users, positives, negatives),) = bpr_epoch(data, 8, np.random.default_rng(0))
    assert users.tolist() == [1]
    assert positives.tolist() == [1]
    assert negatives[0] in (0, 2)


def test_without_interactions_there_are_no_batches():
    empty = np.array([], np.int64)
    assert (
        list(bpr_epoch(Interactions.build(2, 3, empty, empty), 8, np.random.default_rng(0))) == []
    )


def test_the_generator_decides():
    rng = np.random.default_rng(3)
    data = Interactions.build(20, 30, rng.integers(0, 20, 100), rng.integers(0, 30, 100))

    def epoch(seed: int) -> list[list[int]]:
        return [
            column.tolist()
            for batch in bpr_epoch(data, 16, np.random.default_rng(seed))
            for column in batch
        ]

    assert epoch(1) == epoch(1)
    assert epoch(1) != epoch(2)


def test_batch_size_must_be_positive():
    data = Interactions.build(1, 2, np.array([0]), np.array([0]))
    with pytest.raises(ValueError, match="batch_size"):
        next(bpr_epoch(data, 0, np.random.default_rng(0)))


@pytest.mark.parametrize("negatives", [0, 1, 4])
def test_a_pointwise_epoch_has_every_pair_once_and_so_many_unseen_items(negatives):
    rng = np.random.default_rng(0)
    pairs = np.unique(rng.integers(0, [40, 25], (300, 2)), axis=0)
    data = Interactions.build(40, 25, pairs[:, 0], pairs[:, 1])
    batches = list(pointwise_epoch(data, 64, negatives, rng))
    total = len(pairs) * (1 + negatives)
    sizes = [min(64, total - start) for start in range(0, total, 64)]
    assert [len(users) for users, _, _ in batches] == sizes
    users, items, labels = (np.concatenate([b[k].numpy() for b in batches]) for k in range(3))
    assert set(labels.tolist()) <= {0, 1} and labels.dtype == np.float32
    rows = list(zip(users.tolist(), items.tolist(), labels.tolist(), strict=True))
    assert sorted((u, i) for u, i, y in rows if y) == sorted(map(tuple, pairs.tolist()))
    drawn = [(u, i) for u, i, y in rows if not y]
    assert all(i not in history(data, u) for u, i in drawn)
    assert Counter(u for u, _ in drawn) == Counter(np.repeat(pairs[:, 0], negatives).tolist())
    if negatives:  # both kinds come in every batch, and negatives differ from epoch to epoch
        assert all(0 < b[2].mean() < 1 for b in batches)
        again = np.concatenate([b[1].numpy() for b in pointwise_epoch(data, 64, negatives, rng)])
        assert sorted(again.tolist()) != sorted(items.tolist())


def test_a_user_who_has_everything_comes_with_positives_only():
    data = Interactions.build(2, 3, np.array([0, 0, 0, 1]), np.array([0, 1, 2, 1]))
    ((users, _, labels),) = pointwise_epoch(data, 100, 2, np.random.default_rng(0))
    rows = sorted(zip(users.tolist(), labels.tolist(), strict=True))
    assert rows == [(0, 1)] * 3 + [(1, 0)] * 2 + [(1, 1)]


@pytest.mark.parametrize(("batch_size", "negatives"), [(0, 1), (4, -1)])
def test_a_pointwise_epoch_refuses_impossible_sizes(batch_size, negatives):
    data = Interactions.build(1, 2, np.array([0]), np.array([0]))
    with pytest.raises(ValueError, match="must be positive"):
        next(pointwise_epoch(data, batch_size, negatives, np.random.default_rng(0)))
