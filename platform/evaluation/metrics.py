"""Ranking metrics at a cut-off K, per user, from where in the list the truth was found.

Notation, for one user: T = n_truth ≥ 1 held-out items; h_i = 1 when the item at position i = 1 … K
of the list is one of them, else 0; hits(K) = Σ_{i≤K} h_i. Relevance is binary. A list shorter than
K counts as filled up with misses.

| name | formula |
|---|---|
| recall_at_K | hits(K) / T |
| precision_at_K | hits(K) / K |
| hit_rate_at_K | 1 when hits(K) > 0, else 0 |
| mrr_at_K | 1 / (position of the first hit), 0 when there is none within K |
| mrr | 1 / (position of the first hit), however far down; only of the test split |
| ndcg_at_K | Σ_{i≤K} h_i / log₂(i + 1), divided by Σ_{i≤min(K, T)} 1 / log₂(i + 1) |
| map_at_K | Σ_{i≤K} h_i · hits(i) / i, divided by min(K, T) |
| coverage_at_K | share of all items that stand in the first K of at least one user's list (one value for all users) |

Average precision is divided by min(K, T), so that a perfect list scores 1 at every K; RecBole does
the same, while ranx and trec_eval divide by T, which bounds the value by K / T.
"""  # noqa: E501

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from crossfed.platform.errors import CrossfedError

PER_USER_METRICS: tuple[str, ...] = ("recall", "ndcg", "hit_rate", "mrr", "precision", "map")
"""Metrics with a value per user; the macro value is their mean."""

METRICS: tuple[str, ...] = (*PER_USER_METRICS, "coverage")
"""All metrics, without their cut-off."""

WHOLE = "mrr"
"""The reciprocal rank without a cut-off, which needs the place of the first hit in the whole order.
"""

_METRIC = re.compile(r"\s*([a-z][a-z_\- ]*?)\s*(?:@|_at_)\s*(\d+)\s*")


def parse_metric(text: str) -> tuple[str, int]:
    """Metric and cut-off of a name in any of its spellings: `Recall@20`, `hit-rate@10`,
    `ndcg_at_20`.

    Raises:
        CrossfedError: not a metric with a positive cut-off; names the allowed ones.
    """
    match = _METRIC.fullmatch(text.lower())
    if match:
        name, k = re.sub(r"[\- ]+", "_", match[1]), int(match[2])
        if name in METRICS and k > 0:
            return name, k
    raise CrossfedError(
        f"unknown metric {text!r}; write a metric and a cut-off, such as recall_at_20, with "
        f"one of {', '.join(METRICS)}"
    )


def metric_name(text: str) -> str:
    """The name under which a metric is stored, e.g. `recall_at_20` for `Recall@20` (trackers refuse
    the at sign).

    `MRR` alone is the reciprocal rank without a cut-off.

    Raises:
        CrossfedError: as `parse_metric`.
    """
    if text.strip().lower() == WHOLE:
        return WHOLE
    name, k = parse_metric(text)
    return f"{name}_at_{k}"


def per_user_metrics(
    hits: npt.NDArray[np.bool_], n_truth: npt.NDArray[np.integer], ks: Sequence[int]
) -> dict[str, npt.NDArray[np.float64]]:
    """Every per-user metric at every cut-off; the formulas are in the module's docstring.

    Args:
        hits: bool [n_users, max(ks)] or wider; `hits[u, i]` says whether the item at position i + 1
            is held out.
        n_truth: [n_users], the number of held-out items of each user; at least 1.
        ks: the cut-offs.

    Returns:
        name -> float64 [n_users].
    """
    depth = max(ks)
    if hits.shape[1] < depth:
        raise ValueError(
            f"hits reach to position {hits.shape[1]}, but a cut-off of {depth} was asked for"
        )
    if n_truth.size and n_truth.min() < 1:
        raise ValueError("a user without held-out items has no metrics")
    values: dict[str, npt.NDArray[np.float64]] = {
        f"{name}_at_{k}": np.zeros(len(hits)) for name in PER_USER_METRICS for k in ks
    }
    # Hits are sparse (most positions miss), so work on the list of hits instead of the whole
    # matrix. nonzero() goes row
    # by row, hence a hit's number within its user is its index minus the user's first index.
    user, position = np.nonzero(hits[:, :depth])
    first = np.searchsorted(user, np.arange(len(hits)))
    nth = np.arange(len(user)) - first[user] + 1
    gains = 1.0 / np.log2(np.arange(2, depth + 2))
    ideal = np.concatenate([[0.0], np.cumsum(gains)])
    for k in ks:
        kept = position < k
        u, p = user[kept], position[kept]
        count = np.bincount(u, minlength=len(hits))
        possible = np.minimum(n_truth, k)
        values[f"recall_at_{k}"] = count / n_truth
        values[f"precision_at_{k}"] = count / k
        values[f"hit_rate_at_{k}"] = (count > 0).astype(np.float64)
        leading = nth[kept] == 1
        values[f"mrr_at_{k}"][u[leading]] = 1.0 / (p[leading] + 1)
        values[f"ndcg_at_{k}"] = (
            np.bincount(u, weights=gains[p], minlength=len(hits)) / ideal[possible]
        )
        values[f"map_at_{k}"] = (
            np.bincount(u, weights=nth[kept] / (p + 1), minlength=len(hits)) / possible
        )
    return values


def macro_metrics(
    per_user: dict[str, npt.NDArray[np.float64]],
    best_position: npt.NDArray[np.integer],
    ks: Sequence[int],
) -> dict[str, float]:
    """Means over users, and coverage.

    Args:
        per_user: as `per_user_metrics` returns.
        best_position: [n_items], the best 0-based position at which each item was recommended to
            anybody; max(ks) or more where it never was.
        ks: the cut-offs.
    """
    macro = {name: float(values.mean()) for name, values in per_user.items()}
    macro.update({f"coverage_at_{k}": float((best_position < k).mean()) for k in ks})
    return macro
