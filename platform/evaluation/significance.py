"""Is one method better than another? Paired tests over the users both have ranked, and correction for many comparisons.

The unit is the user: these tests say whether a difference would survive other users of the same shop. They say nothing
about other random seeds of a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import stats

from crossfed.platform.seam import CrossfedError


@dataclass(frozen=True, slots=True)
class Comparison:
    """A method's values less another's, over the same users.

    Attributes:
        n_users: how many users.
        difference: mean of the differences.
        low, high: bootstrap confidence interval of that mean (percentiles).
        t_p: two-sided p-value of the paired t-test.
        wilcoxon_p: two-sided p-value of Wilcoxon's signed-rank test; users without a difference are dropped.
    """

    n_users: int
    difference: float
    low: float
    high: float
    t_p: float
    wilcoxon_p: float


def compare(
    users: npt.NDArray[np.integer],
    values: npt.NDArray[np.float64],
    other_users: npt.NDArray[np.integer],
    other_values: npt.NDArray[np.float64],
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Comparison:
    """Compare two methods user by user.

    Args:
        users, values: row numbers and metric values of one method, [n_users] each.
        other_users, other_values: those of the other, in any order of users.
        confidence: of the interval.
        resamples, seed: of the bootstrap.

    Raises:
        CrossfedError: the two were not measured on the same users, or on fewer than two.
    """
    order, other_order = np.argsort(users), np.argsort(other_users)
    if not np.array_equal(np.asarray(users)[order], np.asarray(other_users)[other_order]):
        raise CrossfedError("the two results are for different users; compare runs of the same data and protocol")
    if len(users) < 2:
        raise CrossfedError(f"a paired test needs at least two users, got {len(users)}")
    difference = np.asarray(values, np.float64)[order] - np.asarray(other_values, np.float64)[other_order]
    mean = float(difference.mean())
    if np.ptp(difference) == 0:
        # Without spread the tests have no statistic: no difference at all, or the same one for every user.
        p = 1.0 if mean == 0 else 0.0
        wilcoxon = 1.0 if mean == 0 else float(stats.wilcoxon(difference).pvalue)
        return Comparison(len(users), mean, mean, mean, p, wilcoxon)
    interval = stats.bootstrap(
        (difference,),
        np.mean,
        n_resamples=resamples,
        batch=max(1, 2**22 // len(difference)),
        confidence_level=confidence,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return Comparison(
        n_users=len(users),
        difference=mean,
        low=float(interval.low),
        high=float(interval.high),
        t_p=float(stats.ttest_1samp(difference, 0.0).pvalue),
        wilcoxon_p=float(stats.wilcoxon(difference).pvalue),
    )


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """p-values adjusted for the number of comparisons by Holm's step-down method (1979).

    With p_(1) ≤ … ≤ p_(m), the adjusted value of p_(i) is max_{j≤i} min(1, (m - j + 1) p_(j)). Comparing the adjusted
    values with a level keeps the chance of any false finding below that level.

    Args:
        p_values: comparison -> p-value.

    Returns:
        The same comparisons, in the given order, with adjusted values.
    """
    ascending = sorted(p_values, key=lambda name: p_values[name])
    adjusted: dict[str, float] = {}
    highest = 0.0
    for number, name in enumerate(ascending):
        highest = max(highest, min(1.0, (len(ascending) - number) * p_values[name]))
        adjusted[name] = highest
    return {name: adjusted[name] for name in p_values}
