"""The similarity-based inference attack: a case by hand, a slow version, and what random vectors
must give.
"""

import numpy as np
import pytest

from crossfed.platform.errors import CrossfedError
from crossfed.platform.evaluation.attack import (
    TOP_KS,
    popularity_baseline,
    random_baseline,
    similarity_attack,
)
from crossfed.platform.method import Interactions


def interactions(users_of: list[list[int]], n_users: int) -> Interactions:
    pairs = [(user, item) for item, users in enumerate(users_of) for user in users]
    users, items = zip(*pairs, strict=True)
    return Interactions.build(n_users, len(users_of), users, items)


def slow(vectors: np.ndarray, users_of: list[list[int]], k: int) -> float:
    scores = []
    for target, users in enumerate(users_of):
        if not users:
            continue
        others = [item for item in range(len(users_of)) if item != target]
        cosine = {
            item: vectors[target]
            @ vectors[item]
            / (np.linalg.norm(vectors[target]) * np.linalg.norm(vectors[item]))
            for item in others
        }
        similar = sorted(others, key=lambda item: -cosine[item])[:k]
        predicted = set().union(*(users_of[item] for item in similar))
        hit = len(predicted & set(users))
        precision, recall = hit / len(predicted) if predicted else 0, hit / len(set(users))
        scores.append(2 * precision * recall / (precision + recall) if hit else 0)
    return float(np.mean(scores))


def test_four_items_by_hand():
    """Vectors at 0°, 10°, 90° and 100°, of different lengths; users {0, 1}, {1, 2}, {3}, {0, 1, 3}.

    Top-1: 0 and 1 are each other's neighbour, so are 2 and 3. F1 = 2·1/(2+2), the same, 2·1/(3+1),
    the same: mean 1/2. Top-2: 0 takes 1 and 2: {1,2,3}, F1 = 2·1/(3+2). 1 takes 0 and 2: {0,1,3},
    2·1/(3+2).
           2 takes 3 and 1: {0,1,2,3}, 2·1/(4+1). 3 takes 2 and 1: {1,2,3}, 2·2/(3+3).
    """
    angles, lengths = np.deg2rad([0, 10, 90, 100]), np.array([1, 5, 0.1, 2])
    vectors = np.stack([np.cos(angles), np.sin(angles)], axis=1) * lengths[:, None]
    result = similarity_attack(vectors, interactions([[0, 1], [1, 2], [3], [0, 1, 3]], 4), (1, 2))
    assert result == pytest.approx({1: 1 / 2, 2: (2 / 5 + 2 / 5 + 2 / 5 + 4 / 6) / 4})


@pytest.mark.parametrize("block", [1, 100, 2**22])
def test_equal_to_the_slow_version(block):
    rng = np.random.default_rng(4)
    # some repeat, some are empty
    users_of = [rng.integers(0, 40, rng.integers(0, 12)).tolist() for _ in range(30)]
    vectors = rng.standard_normal((30, 6))
    result = similarity_attack(vectors, interactions(users_of, 40), block_entries=block)
    assert result == pytest.approx({k: slow(vectors, users_of, k) for k in TOP_KS}, abs=1e-6)


def test_equal_vectors_take_the_lower_item_number():
    """All vectors equal: item 0's neighbour is 1, everybody else's is 0. Users {0}, {1}, {0}: only
    2 is guessed right.
    """
    result = similarity_attack(np.ones((3, 2)), interactions([[0], [1], [0]], 2), (1,))
    assert result == pytest.approx({1: 1 / 3})


def test_popularity_by_hand():
    """Users {0, 1}, {1, 2, 3}, {0, 1, 2, 3}, {3}: by users, item 2 comes first, then 1, 0, 3.

    Top-1: everybody guesses item 2's users, item 2 those of item 1. F1 = 2·2/(4+2), 2·3/(4+3),
    2·3/(3+4), 2·1/(4+1). Top-2: items 0 and 3 guess {0,1,2,3} (of 2 and 1), item 1 that of 2 and 0,
    item 2 that of 1 and 0: always all four.
    """
    data = interactions([[0, 1], [1, 2, 3], [0, 1, 2, 3], [3]], 4)
    assert popularity_baseline(data, (1, 2)) == pytest.approx(
        {1: (4 / 6 + 6 / 7 + 6 / 7 + 2 / 5) / 4, 2: (4 / 6 + 6 / 7 + 8 / 8 + 2 / 5) / 4}
    )


def test_popularity_equals_a_slow_version():
    """Equally popular items come in the order of their numbers, and items without users are neither
    attacked nor left out.
    """
    rng = np.random.default_rng(4)
    users_of = [sorted(set(rng.integers(0, 40, rng.integers(0, 12)).tolist())) for _ in range(30)]
    order = sorted(range(30), key=lambda item: (-len(users_of[item]), item))
    scores = []
    for target in (item for item in range(30) if users_of[item]):
        popular = [item for item in order if item != target][:3]
        predicted, own = set().union(*(users_of[item] for item in popular)), set(users_of[target])
        scores.append(2 * len(predicted & own) / (len(predicted) + len(own)))
    assert popularity_baseline(interactions(users_of, 40))[3] == pytest.approx(
        float(np.mean(scores))
    )


def test_vectors_that_tell_all_and_vectors_that_tell_nothing():
    """Items in pairs with the same users. The pair's vectors next to each other reveal everything
    (F1 = 1 at Top-1); random ones find the partner with chance 1/(n - 1), and nobody else shares a
    user."""
    n = 200
    data = interactions([[item // 2] for item in range(n)], n // 2)
    telling = np.repeat(np.random.default_rng(0).standard_normal((n // 2, 16)), 2, axis=0)
    assert similarity_attack(telling, data)[1] == 1
    assert random_baseline(data, 16, seed=1)[1] < 0.03
    assert (
        random_baseline(data, 16, seed=1)
        == random_baseline(data, 16, seed=1)
        != random_baseline(data, 16, seed=3)
    )


@pytest.mark.parametrize(
    ("vectors", "top_ks", "told"),
    [
        (np.ones((2, 4)), (1,), "one vector per item"),
        (np.full((3, 4), np.nan), (1,), "NaN"),
        (np.ones((3, 4)), (3,), "between 1 and 2"),
        (np.ones((3, 4)), (0,), "between 1 and 2"),
        (np.ones((3, 4)), (), "between 1 and 2"),
    ],
)
def test_bad_input_is_told(vectors, top_ks, told):
    with pytest.raises(CrossfedError, match=told):
        similarity_attack(vectors, interactions([[0], [1], [0]], 2), top_ks)
