"""Privacy audit of uploaded item vectors: the similarity-based inference attack (SIA).

Source: FedCRF, Table 6, after Yuan et al. (2025). An attacker who intercepts item vectors guesses
that the users of an item are the users of the items most similar to it. The lower the F1 score, the
less the vectors give away; what counts as low depends on the data, so compare with
`random_baseline` and `popularity_baseline`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy import sparse

from crossfed.platform.errors import CrossfedError
from crossfed.platform.evaluation.ranking import top_k
from crossfed.platform.method import Interactions

TOP_KS = (1, 3, 5)
"""The columns of FedCRF's Table 6."""


def similarity_attack(
    vectors: npt.NDArray[Any],
    data: Interactions,
    top_ks: Sequence[int] = TOP_KS,
    block_entries: int = 2**22,
) -> dict[int, float]:
    """F1 score of the attack for each Top-K, averaged over items.

    For item i with users U_i, let N_i be its K most similar other items by cosine (equal
    similarities: the lower item number first; a zero vector has similarity 0 to everything). The
    prediction is P_i = ∪_{j ∈ N_i} U_j and F1_i = 2 |P_i ∩ U_i| / (|P_i| + |U_i|). Items without
    users have nothing to attack and are left out of the mean.

    Args:
        vectors: [n_items, width], as uploaded.
        data: the domain's training interactions, which the attack is checked against.
        top_ks: the numbers K of similar items.
        block_entries: how many similarities to hold at a time.

    Returns:
        K -> mean F1 in [0, 1].

    Raises:
        CrossfedError: the vectors do not fit the items or are not finite, or there are not K other
            items.
    """
    vectors = np.asarray(vectors, np.float32)
    if vectors.ndim != 2 or len(vectors) != data.n_items:
        raise CrossfedError(
            f"the audit needs one vector per item ({data.n_items}), got shape {vectors.shape}"
        )
    if not np.isfinite(vectors).all():
        raise CrossfedError(
            "the audited item vectors hold NaN or infinite values; the model has diverged"
        )
    unit = torch.nn.functional.normalize(torch.from_numpy(vectors), dim=1)
    return _f1(lambda targets, k: _similar(unit, targets, k), _truth(data), top_ks, block_entries)


def popularity_baseline(data: Interactions, top_ks: Sequence[int] = TOP_KS) -> dict[int, float]:
    """F1 score of guessing, in place of the most similar items, the most popular ones.

    All else is as in `similarity_attack`: N_i are the K other items with the most users in the
    training interactions (equally many: the lower item number first), the prediction is the union
    of their users. It is the same guess for every item but those K themselves, so it needs no
    vectors; what the attack reaches above it, the vectors gave away.

    Args:
        data, top_ks: as in `similarity_attack`.
    """
    truth = _truth(data)
    order = np.argsort(-np.diff(truth.indptr), kind="stable")

    def popular(targets: npt.NDArray[np.int64], k: int) -> npt.NDArray[np.int64]:
        first = np.broadcast_to(order[: k + 1], (len(targets), k + 1))
        own = first == targets[:, None]
        # of k + 1 popular items one is left out: the target, or the last
        own[~own.any(axis=1), k] = True
        return first[~own].reshape(len(targets), k)

    return _f1(popular, truth, top_ks)


def _truth(data: Interactions) -> sparse.csr_array:
    """Which users each item has in training, once each: int32 [n_items, n_users].

    Raises:
        CrossfedError: no item has any.
    """
    truth = sparse.csr_array(
        (np.ones(len(data.users), np.int32), (data.items, data.users)),
        shape=(data.n_items, data.n_users),
    )
    truth.sum_duplicates()
    truth.data[:] = 1
    if not truth.nnz:
        raise CrossfedError("the audit has no item with users to attack")
    return truth


def _f1(
    neighbours: Callable[[npt.NDArray[np.int64], int], npt.NDArray[np.int64]],
    truth: sparse.csr_array,
    top_ks: Sequence[int],
    block_entries: int = 2**22,
) -> dict[int, float]:
    """Mean F1 over the items with users, for each K.

    Args:
        neighbours: (targets int64 [b], k) -> the k items whose users are guessed, the first ones
            first, int64 [b, k].

    Raises:
        CrossfedError: there are not K other items.
    """
    n_items = truth.shape[0]
    if not top_ks or min(top_ks) < 1 or max(top_ks) >= n_items:
        raise CrossfedError(
            f"Top-K must lie between 1 and {n_items - 1} (other items), got {list(top_ks)}"
        )
    attacked = np.flatnonzero(np.diff(truth.indptr))
    total = dict.fromkeys(top_ks, 0.0)
    step = max(1, block_entries // n_items)
    for start in range(0, len(attacked), step):
        targets = attacked[start : start + step]
        guessed = neighbours(targets, max(top_ks))
        own = truth[targets]
        for k in top_ks:
            predicted = _pattern(guessed[:, :k], n_items) @ truth
            predicted.data[:] = 1  # several similar items may share a user
            shared = predicted.multiply(own).sum(axis=1)
            total[k] += float(
                np.sum(2 * shared / (np.diff(predicted.indptr) + np.diff(own.indptr)))
            )
    return {k: value / len(attacked) for k, value in total.items()}


def random_baseline(
    data: Interactions,
    width: int,
    seed: int = 0,
    top_ks: Sequence[int] = TOP_KS,
    block_entries: int = 2**22,
) -> dict[int, float]:
    """F1 score of the same attack on vectors that know nothing (standard normal), to read
    `similarity_attack` against.

    Args:
        data, top_ks, block_entries: as in `similarity_attack`.
        width: the width of the vectors compared with.
        seed: of the random vectors.
    """
    vectors = np.random.default_rng(seed).standard_normal((data.n_items, width), np.float32)
    return similarity_attack(vectors, data, top_ks, block_entries)


def _similar(unit: torch.Tensor, targets: npt.NDArray[np.int64], k: int) -> npt.NDArray[np.int64]:
    """The k items most similar to each target, itself excluded: int64 [len(targets), k]."""
    rows = torch.arange(len(targets))
    index = torch.from_numpy(targets)
    scores = unit[index] @ unit.T
    scores[rows, index] = -torch.inf  # last, and k is less than the number of items
    return top_k(scores, torch.zeros(scores.shape, dtype=torch.uint8), None, k)[0]


def _pattern(columns: npt.NDArray[np.int64], width: int) -> sparse.csr_array:
    """Ones at the given columns of each row: int32 [len(columns), width]."""
    rows, k = columns.shape
    indptr = np.arange(0, rows * k + 1, k)
    return sparse.csr_array(
        (np.ones(rows * k, np.int32), columns.ravel(), indptr), shape=(rows, width)
    )
