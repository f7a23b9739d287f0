"""Metrics by how active users were in training: cold (at most 7 interactions), warm (8–15), active
(16 and more).

The bounds are those of FedCGR's Figure 3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

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
        intervals: metric name -> 95 % confidence interval of that mean (`wilson`); only with two
            users or more.
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
            f"cohort bounds must ascend and be one fewer than the names, got {list(bounds)} "
            f"for {', '.join(names)}"
        )
    for name, values in per_user.items():
        if len(values) != len(activity):
            raise ValueError(f"{name} has {len(values)} users, activity {len(activity)}")
    group = np.searchsorted(np.asarray(bounds), activity, side="left")
    cohorts = []
    for number, name in enumerate(names):
        member = group == number
        count = int(member.sum())
        means = (
            {metric: float(values[member].mean()) for metric, values in per_user.items()}
            if count
            else {}
        )
        intervals = (
            {metric: wilson(values[member]) for metric, values in per_user.items()}
            if count > 1
            else {}
        )
        cohorts.append(
            Cohort(name, count, count / len(activity) if len(activity) else 0.0, means, intervals)
        )
    return cohorts


def wilson(values: npt.NDArray[np.float64], level: float = 0.95) -> tuple[float, float]:
    """A confidence interval of the mean of values in [0, 1], which lies in [0, 1] itself.

    Wilson's interval (J. Am. Stat. Assoc. 22, 1927) for a share, of as many users as would give a
    share of that mean the variance that the values' mean has, as survey statistics does it (Korn
    and Graubard, Survey Methodology 24, 1998). Of zeros and ones it is Wilson's own; of many values
    away from 0 and 1 it is the usual one, mean ± 1.96 standard errors.

    Args:
        values: [n], n ≥ 1.

    Raises:
        ValueError: the mean is outside [0, 1], as no metric's is.
    """
    mean, variance, n = float(values.mean()), float(values.var()), float(len(values))
    if not 0 <= mean <= 1:
        raise ValueError(f"a mean in [0, 1] is wanted, got {mean:g}")
    if variance > 0 < mean * (1 - mean):
        n *= mean * (1 - mean) / variance
    z = NormalDist().inv_cdf((1 + level) / 2)
    centre = (mean + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * (mean * (1 - mean) / n + (z / (2 * n)) ** 2) ** 0.5
    # rounding must not take the interval out of [0, 1], nor off its own mean
    return max(0.0, min(mean, centre - half)), min(1.0, max(mean, centre + half))
