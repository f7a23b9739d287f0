"""K-means whose centres are weighted means, as a scikit-learn estimator.

The steps are functions of their own, so that each can be tested alone: `initial_centres`, `assign`,
`weighted_means`.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array
from sklearn.base import BaseEstimator, ClusterMixin
from sklearn.metrics import pairwise_distances_argmin_min
from sklearn.utils import check_random_state
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

Floats = npt.NDArray[np.floating[Any]]
Labels = npt.NDArray[np.int64]


def initial_centres(x: Floats, k: int, rng: np.random.RandomState) -> Floats:
    """k different rows of x, drawn without replacement. [n, d] -> [k, d]."""
    return x[rng.choice(len(x), k, replace=False)].copy()


def assign(x: Floats, centres: Floats) -> tuple[Labels, Floats]:
    """The nearest centre of every row by Euclidean distance (ties: the lower number), and that
    distance.

    Works in blocks: the [n, k] distances never exist as a whole.

    Args:
        x: [n, d].
        centres: [k, d].

    Returns:
        int64 [n] and float [n].
    """
    labels, distances = pairwise_distances_argmin_min(x, centres)
    return labels.astype(np.int64), distances


def inverse_distance(distances: Floats, eps: float) -> Floats:
    """1 / (distance + eps), [n] -> [n]: the nearer to its centre, the more a row counts."""
    return 1.0 / (distances + eps)


def weighted_means(x: Floats, labels: Labels, weights: Floats, centres: Floats) -> Floats:
    """Σ_i w_i x_i / Σ_i w_i over the members of each cluster; a cluster without members keeps its
    centre.

    Args:
        x: [n, d]; labels: int64 [n] in 0 … k-1; weights: [n], non-negative; centres: [k, d].

    Returns:
        [k, d].
    """
    k = len(centres)
    members = csr_array((weights, (labels, np.arange(len(x)))), shape=(k, len(x)))
    total = np.bincount(labels, weights, minlength=k)
    filled = total > 0
    means = centres.astype(np.result_type(x, np.float32), copy=True)
    means[filled] = (members @ x)[filled] / total[filled, None]
    return means


class WeightedKMeans(ClusterMixin, BaseEstimator):  # type: ignore[misc]
    """Lloyd's iteration with distance-weighted centres.

    With `weighting="inverse_distance"` a member at distance δ of its centre counts 1 / (δ + eps) in
    the new centre: the centre moves towards the spatial median of its cluster, outliers matter
    less. `weighting="uniform"` is plain K-means.

    A cluster that lost all members is re-seeded at the row farthest from its own centre (the next
    one gets the second farthest, and so on), which leaves its old cluster.

    Args:
        n_clusters: number of clusters, at most the number of rows.
        weighting: "inverse_distance" or "uniform".
        eps: added to the distances, in the unit of the data. A centre that starts on a row has
            distance 0 to it: with a tiny eps that row would outweigh all others and the centre
            would never move.
        max_iter: upper bound on iterations.
        tol: stop when no centre moved farther than `tol` times the data's mean standard deviation.
        init: "random" (rows of the data) or the initial centres, [n_clusters, d].
        random_state: seed, RandomState or None; used for `init="random"` only.

    Attributes:
        cluster_centers_: [n_clusters, d]; labels_: int64 [n], the nearest of these centres;
            inertia_: Σ weight ·
        distance²; n_iter_: iterations done; n_features_in_: d.
    """

    def __init__(
        self,
        n_clusters: int = 8,
        *,
        weighting: Literal["inverse_distance", "uniform"] = "inverse_distance",
        eps: float = 1.0,
        max_iter: int = 100,
        tol: float = 1e-4,
        init: Literal["random"] | npt.ArrayLike = "random",
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        self.n_clusters = n_clusters
        self.weighting = weighting
        self.eps = eps
        self.max_iter = max_iter
        self.tol = tol
        self.init = init
        self.random_state = random_state

    def fit(
        self, X: npt.ArrayLike, y: None = None, sample_weight: npt.ArrayLike | None = None
    ) -> WeightedKMeans:
        """Cluster the rows of X, [n, d]; `sample_weight` [n] multiplies the distance weights.

        Raises:
            ValueError: fewer rows than clusters, centres of another shape, an unknown weighting.
        """
        x = validate_data(self, X, dtype=[np.float64, np.float32], ensure_min_samples=1)
        if not 1 <= self.n_clusters <= len(x):
            raise ValueError(
                f"n_samples={len(x)} should be >= n_clusters={self.n_clusters} and that at least 1"
            )
        if self.weighting not in ("inverse_distance", "uniform"):
            raise ValueError(
                f"weighting must be 'inverse_distance' or 'uniform', got {self.weighting!r}"
            )
        base = _check_sample_weight(sample_weight, x, dtype=x.dtype, ensure_non_negative=True)
        if isinstance(self.init, str):
            if self.init != "random":
                raise ValueError(f"init must be 'random' or an array, got {self.init!r}")
            centres = initial_centres(x, self.n_clusters, check_random_state(self.random_state))
        else:
            centres = np.array(self.init, dtype=x.dtype)
            if centres.shape != (self.n_clusters, x.shape[1]):
                raise ValueError(
                    f"init has shape {centres.shape}, expected {(self.n_clusters, x.shape[1])}"
                )

        limit = self.tol * float(x.std(axis=0).mean())
        labels, distances = assign(x, centres)
        for iteration in range(self.max_iter):
            self.n_iter_ = iteration + 1
            labels, distances, centres = _reseed_empty(x, labels, distances, centres)
            weights = (
                base * inverse_distance(distances, self.eps)
                if self.weighting == "inverse_distance"
                else base
            )
            moved = weighted_means(x, labels, weights, centres)
            shift = float(np.sqrt(np.square(moved - centres).sum(axis=1)).max())
            centres = moved
            before = labels
            labels, distances = assign(x, centres)
            settled = self.weighting == "uniform" and np.array_equal(before, labels)
            if shift <= limit or settled:
                break
        self.cluster_centers_ = centres
        self.labels_ = labels
        self.inertia_ = float((base * distances**2).sum())
        return self

    def predict(self, X: npt.ArrayLike) -> Labels:
        """The nearest centre of every row, [n, d] -> int64 [n]."""
        check_is_fitted(self)
        x = validate_data(self, X, dtype=[np.float64, np.float32], reset=False)
        return assign(x, self.cluster_centers_)[0]


def _reseed_empty(
    x: Floats, labels: Labels, distances: Floats, centres: Floats
) -> tuple[Labels, Floats, Floats]:
    """Put the centre of every empty cluster on the row that is farthest from its own centre."""
    count = np.bincount(labels, minlength=len(centres))
    empty = np.flatnonzero(count == 0)
    if not len(empty):
        return labels, distances, centres
    labels, distances, centres = labels.copy(), distances.copy(), centres.copy()
    for cluster in empty:
        # A row that is alone in its cluster stays, or its cluster would be empty in turn.
        movable = np.where(count[labels] > 1, distances, -1.0)
        row = int(movable.argmax())
        count[labels[row]] -= 1
        count[cluster] += 1
        labels[row], distances[row], centres[cluster] = cluster, 0.0, x[row]
    return labels, distances, centres
