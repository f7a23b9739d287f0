"""Weighted K-means: each step by hand, plain Lloyd as a reduction, and scikit-learn's
conventions.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.cluster import KMeans
from sklearn.utils.estimator_checks import parametrize_with_checks

from crossfed.methods.parts.kmeans import (
    WeightedKMeans,
    _reseed_empty,
    assign,
    initial_centres,
    inverse_distance,
    weighted_means,
)


@pytest.fixture
def blobs() -> np.ndarray:
    rng = np.random.default_rng(0)
    middles = rng.normal(0, 4, (6, 5))
    return (middles[rng.integers(0, 6, 300)] + rng.normal(0, 1, (300, 5))).astype(np.float64)


def test_initial_centres_are_different_rows(blobs: np.ndarray) -> None:
    centres = initial_centres(blobs, 40, np.random.RandomState(3))
    rows = [int(np.flatnonzero((blobs == centre).all(axis=1))[0]) for centre in centres]
    assert len(set(rows)) == 40
    centres[:] = 0
    assert np.abs(blobs).min(axis=1).max() > 0, "the data must not be touched through the centres"


def test_assign_is_the_nearest_centre(blobs: np.ndarray) -> None:
    centres = blobs[:7]
    labels, distances = assign(blobs, centres)
    for row, label, distance in zip(blobs, labels, distances, strict=True):
        each = [np.sqrt(((row - centre) ** 2).sum()) for centre in centres]
        assert label == int(np.argmin(each))
        assert distance == pytest.approx(min(each), abs=1e-6)


def test_a_nearer_row_counts_more() -> None:
    """1/(1+1) = 1/2, 1/(3+1) = 1/4."""
    np.testing.assert_allclose(inverse_distance(np.array([1.0, 3.0]), 1.0), [0.5, 0.25])


def test_weighted_means_by_hand() -> None:
    """Cluster 0: (1·0 + 3·4) / 4 = 3 and (1·0 + 3·8) / 4 = 6; cluster 1 is empty; cluster 2 has one
    row.
    """
    x = np.array([[0.0, 0.0], [4.0, 8.0], [5.0, 5.0]])
    means = weighted_means(x, np.array([0, 0, 2]), np.array([1.0, 3.0, 7.0]), np.full((3, 2), -1.0))
    np.testing.assert_allclose(means, [[3, 6], [-1, -1], [5, 5]])


def test_the_weights_of_a_cluster_do_not_depend_on_their_scale(blobs: np.ndarray) -> None:
    labels = np.arange(len(blobs)) % 4
    weights = np.random.default_rng(1).random(len(blobs))
    centres = np.zeros((4, 5))
    np.testing.assert_allclose(
        weighted_means(blobs, labels, weights, centres),
        weighted_means(blobs, labels, 9 * weights, centres),
    )


def test_one_iteration_by_hand() -> None:
    """Centres 0 and 10; rows 0, 2 | 10. Weights with ε = 1: 1 and 1/3, so the first centre is (0·1
    + 2/3) / (4/3) = 1/2.
    """
    model = WeightedKMeans(2, init=[[0.0], [10.0]], eps=1.0, max_iter=1).fit([[0.0], [2.0], [10.0]])
    np.testing.assert_allclose(model.cluster_centers_, [[0.5], [10.0]])
    np.testing.assert_array_equal(model.labels_, [0, 0, 1])
    assert model.inertia_ == pytest.approx(0.5**2 + 1.5**2)


def test_uniform_weights_are_plain_lloyd(blobs: np.ndarray) -> None:
    start = blobs[[3, 50, 99, 120, 200, 250]]
    ours = WeightedKMeans(6, weighting="uniform", init=start, max_iter=200, tol=0).fit(blobs)
    theirs = KMeans(6, init=start, n_init=1, max_iter=200, tol=0, algorithm="lloyd").fit(blobs)
    np.testing.assert_array_equal(ours.labels_, theirs.labels_)
    np.testing.assert_allclose(ours.cluster_centers_, theirs.cluster_centers_, rtol=1e-8)
    assert ours.inertia_ == pytest.approx(theirs.inertia_)


def test_uniform_sample_weights_are_plain_lloyd_too(blobs: np.ndarray) -> None:
    start, weight = blobs[:5], np.random.default_rng(4).random(len(blobs)) + 0.1
    ours = WeightedKMeans(5, weighting="uniform", init=start, max_iter=200, tol=0).fit(
        blobs, sample_weight=weight
    )
    theirs = KMeans(5, init=start, n_init=1, max_iter=200, tol=0, algorithm="lloyd").fit(
        blobs, sample_weight=weight
    )
    np.testing.assert_allclose(ours.cluster_centers_, theirs.cluster_centers_, rtol=1e-8)


def test_a_sample_weight_of_two_is_the_row_twice(blobs: np.ndarray) -> None:
    """Also where distance weights are used: the two multiply."""
    times, settings = (
        np.random.default_rng(5).integers(1, 4, len(blobs)),
        {"eps": 0.5, "max_iter": 8, "tol": 0},
    )
    once = WeightedKMeans(4, init=blobs[:4], **settings).fit(blobs, sample_weight=times)
    repeated = WeightedKMeans(4, init=blobs[:4], **settings).fit(np.repeat(blobs, times, axis=0))
    np.testing.assert_allclose(once.cluster_centers_, repeated.cluster_centers_, rtol=1e-8)
    assert once.inertia_ == pytest.approx(repeated.inertia_)


def test_it_stops_when_no_centre_moved_farther_than_the_tolerance(blobs: np.ndarray) -> None:
    """The first iteration whose longest step is at most tol × the mean standard deviation is the
    last.
    """
    tol, start = 0.003, blobs[:4]
    places = [start]
    for steps in range(1, 30):
        places.append(
            WeightedKMeans(4, init=start, max_iter=steps, tol=0).fit(blobs).cluster_centers_
        )
    longest = [
        max(np.linalg.norm(b - a) for a, b in zip(*pair, strict=True)) for pair in pairwise(places)
    ]
    deviation = np.mean([np.std(column) for column in blobs.T])
    expected = next(number for number, step in enumerate(longest, 1) if step <= tol * deviation)
    assert 3 < expected < 29
    model = WeightedKMeans(4, init=start, tol=tol).fit(blobs)
    assert model.n_iter_ == expected
    np.testing.assert_array_equal(model.cluster_centers_, places[expected])


def test_a_huge_eps_makes_the_weights_uniform(blobs: np.ndarray) -> None:
    start = blobs[:4]
    weighted = WeightedKMeans(4, init=start, eps=1e9, max_iter=20, tol=0).fit(blobs)
    uniform = WeightedKMeans(4, init=start, weighting="uniform", max_iter=20, tol=0).fit(blobs)
    np.testing.assert_allclose(weighted.cluster_centers_, uniform.cluster_centers_, rtol=1e-5)


def test_distance_weights_resist_an_outlier() -> None:
    """Nine rows near 0 and one at 100: the mean is 10, the weighted centre stays near the nine."""
    x = np.append(np.linspace(-1, 1, 9), 100.0)[:, None]
    plain = WeightedKMeans(1, weighting="uniform", init=[[10.0]]).fit(x).cluster_centers_
    weighted = WeightedKMeans(1, init=[[10.0]], eps=0.1).fit(x).cluster_centers_
    assert plain[0, 0] == pytest.approx(10)
    assert abs(weighted[0, 0]) < 1.5


def test_a_centre_that_starts_on_a_row_moves() -> None:
    x = np.array([[0.0], [1.0], [2.0], [3.0]])
    assert WeightedKMeans(1, init=[[0.0]], eps=1.0).fit(x).cluster_centers_[0, 0] == pytest.approx(
        1.5, abs=0.01
    )


def test_an_empty_cluster_is_seeded_at_the_farthest_row() -> None:
    """The second centre is out of reach; the row at 9 is the farthest from the first and becomes
    its own cluster.
    """
    x = np.array([[0.0], [1.0], [9.0]])
    model = WeightedKMeans(2, init=[[0.0], [1000.0]]).fit(x)
    np.testing.assert_array_equal(model.labels_, [0, 0, 1])
    assert model.cluster_centers_[1, 0] == pytest.approx(9)


def test_a_row_that_is_alone_does_not_fill_an_empty_cluster() -> None:
    """The row at 20 is the farthest of all from its centre (30), but leaving would empty that
    cluster: the 1 moves.
    """
    model = WeightedKMeans(3, init=[[0.0], [30.0], [1000.0]]).fit([[0.0], [1.0], [20.0]])
    np.testing.assert_array_equal(model.labels_, [0, 2, 1])


def test_a_re_seeded_row_is_at_its_own_centre() -> None:
    """Labels, distances and centres agree after a re-seed."""
    x, centres = np.array([[0.0], [1.0], [9.0]]), np.array([[0.0], [1000.0]])
    labels, distances, moved = _reseed_empty(x, *assign(x, centres), centres)
    assert (labels.tolist(), distances.tolist(), moved.tolist()) == (
        [0, 0, 1],
        [0.0, 1.0, 0.0],
        [[0.0], [9.0]],
    )
    assert centres.tolist() == [[0.0], [1000.0]]


def test_no_cluster_stays_empty(blobs: np.ndarray) -> None:
    far = np.vstack([blobs[:2], np.full((28, 5), 1e3) + np.arange(28)[:, None]])
    model = WeightedKMeans(30, init=far).fit(blobs)
    assert len(np.unique(model.labels_)) == 30


def test_the_same_seed_gives_the_same_clusters(blobs: np.ndarray) -> None:
    one, two, other = (WeightedKMeans(6, random_state=seed).fit(blobs) for seed in (5, 5, 6))
    np.testing.assert_array_equal(one.cluster_centers_, two.cluster_centers_)
    assert not np.array_equal(one.cluster_centers_, other.cluster_centers_)


def test_a_warm_start_keeps_the_identity_of_clusters(blobs: np.ndarray) -> None:
    first = WeightedKMeans(6, random_state=0).fit(blobs)
    moved = blobs + np.random.default_rng(8).normal(0, 0.01, blobs.shape)
    again = WeightedKMeans(6, init=first.cluster_centers_).fit(moved)
    assert (again.labels_ == first.labels_).mean() > 0.98


def test_predict_and_labels_agree(blobs: np.ndarray) -> None:
    model = WeightedKMeans(6, random_state=0).fit(blobs)
    np.testing.assert_array_equal(model.predict(blobs), model.labels_)
    np.testing.assert_array_equal(clone(model).fit_predict(blobs), model.labels_)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_clusters": 301}, "n_samples=300 should be >= n_clusters=301"),
        ({"n_clusters": 0}, "n_clusters=0"),
        ({"weighting": "cosine"}, "weighting must be"),
        ({"init": "k-means++"}, "init must be"),
        ({"init": np.zeros((3, 5))}, r"init has shape \(3, 5\), expected \(8, 5\)"),
    ],
)
def test_what_cannot_be_fitted_is_refused(blobs: np.ndarray, arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WeightedKMeans(**arguments).fit(blobs)


def _expected_to_fail(estimator: WeightedKMeans) -> dict[str, str]:
    reason = (
        "the random start draws rows, so repeating rows changes it (as for scikit-learn's "
        "own KMeans)"
    )
    return {"check_sample_weight_equivalence_on_dense_data": reason}


@parametrize_with_checks([WeightedKMeans(n_clusters=2)], expected_failed_checks=_expected_to_fail)
def test_scikit_learns_conventions(estimator: WeightedKMeans, check) -> None:
    check(estimator)
