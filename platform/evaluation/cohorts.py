"""Metrics by how active users were in training: cold (at most 7 interactions), warm (8–15), active (16 and more).

The bounds are those of FedCGR's Figure 3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from scipy import stats

from crossfed.platform.errors import CrossfedError

NAMES = ("cold", "warm", "active")
BOUNDS = (7, 15)


@dataclass(frozen=True, slots=True)
class Cohort:
    """One group of users.

    Attributes:
        name: e.g. "cold".
        n_users: how many users are in it.
        share: their share of all users, in [0, 1].
        means: metric name -> mean over the group's users; empty when it has none.
        intervals: metric name -> 95 % confidence interval of that mean by Student's t; only with two users or more.
    """

    name: str
    n_users: int
    share: float
    means: dict[str, float]
    intervals: dict[str, tuple[float, float]]


def by_activity(
    per_user: Mapping[str, npt.NDArray[np.float64]],
    activity: npt.NDArray[np.integer],
    bounds: Sequence[int] = BOUNDS,
    names: Sequence[str] = NAMES,
) -> list[Cohort]:
    """Group users by activity and average their metrics.

    Args:
        per_user: metric name -> values [n_users], as in `Ranking.per_user`.
        activity: [n_users], training interactions of the same users in the same order.
        bounds: for every cohort but the last, the largest activity that belongs to it; ascending.
        names: the cohorts' names, one more than bounds.

    Raises:
        CrossfedError: the bounds do not ascend, or do not fit the names.
    """
    if len(names) != len(bounds) + 1 or any(low >= high for low, high in pairwise(bounds)):
        raise CrossfedError(
            f"cohort bounds must ascend and be one fewer than the names, got {list(bounds)} for {', '.join(names)}"
        )
    for name, values in per_user.items():
        if len(values) != len(activity):
            raise ValueError(f"{name} has {len(values)} users, activity {len(activity)}")
    group = np.searchsorted(np.asarray(bounds), activity, side="left")
    cohorts = []
    for number, name in enumerate(names):
        member = group == number
        count = int(member.sum())
        means = {metric: float(values[member].mean()) for metric, values in per_user.items()} if count else {}
        intervals = {metric: _interval(values[member]) for metric, values in per_user.items()} if count > 1 else {}
        cohorts.append(Cohort(name, count, count / len(activity) if len(activity) else 0.0, means, intervals))
    return cohorts


def _interval(values: npt.NDArray[np.float64]) -> tuple[float, float]:
    half = float(stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values)))
    return float(values.mean()) - half, float(values.mean()) + half
