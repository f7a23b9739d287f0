"""Is one method better than another? Paired tests over users and over seeds, effect sizes,
correction for many comparisons.

Over users the test says whether a difference would survive other users of the same shop; over
seeds, whether it would survive another initialisation and another order of the data. Neither says
anything of the other, nor of other shops.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from crossfed.platform.errors import CrossfedError

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One method's values less another's, over the same users or the same seeds.

    Attributes:
        n: how many pairs.
        difference: mean of the differences.
        low, high: confidence interval of that mean by Student's t.
        t_p: two-sided p-value of the paired t-test.
        wilcoxon_p: two-sided p-value of Wilcoxon's signed-rank test; pairs without a difference are
            dropped.
        d: Cohen's d for paired values: mean over standard deviation of the differences. Zero
            without any difference, infinite where it is the same for every pair.
        rank_biserial: matched-pairs rank-biserial correlation (Kerby 2014): the share of the rank
            sum in favour less the share against, in [-1, 1].
    """

    n: int
    difference: float
    low: float
    high: float
    t_p: float
    wilcoxon_p: float
    d: float
    rank_biserial: float


def compare(
    users: npt.NDArray[np.integer],
    values: npt.NDArray[np.float64],
    other_users: npt.NDArray[np.integer],
    other_values: npt.NDArray[np.float64],
    confidence: float = 0.95,
) -> Comparison:
    """Compare two methods pair by pair.

    Args:
        users, values: what identifies a pair (row numbers of users, or seeds) and metric values of
            one method, [n] each.
        other_users, other_values: those of the other, in any order.
        confidence: of the interval.

    Raises:
        CrossfedError: the two were not measured on the same users, or on fewer than two.
    """
    from scipy import stats  # here, because it takes a second to import and few commands test

    order, other_order = np.argsort(users), np.argsort(other_users)
    if not np.array_equal(np.asarray(users)[order], np.asarray(other_users)[other_order]):
        raise CrossfedError(
            "the two results are for different users; compare runs of the same data and protocol"
        )
    if len(users) < 2:
        raise CrossfedError(f"a paired test needs at least two pairs, got {len(users)}")
    difference = (
        np.asarray(values, np.float64)[order] - np.asarray(other_values, np.float64)[other_order]
    )
    mean = float(difference.mean())
    if np.ptp(difference) < 1e-12:  # what rounding leaves of equal differences is no spread
        # Without spread the t-test has no statistic: no difference at all, or the same one for
        # every user.
        same = abs(mean) < 1e-12
        sign = 0.0 if same else float(np.sign(mean))
        wilcoxon = 1.0 if same else float(stats.wilcoxon(difference).pvalue)
        return Comparison(
            len(users),
            mean,
            mean,
            mean,
            float(same),
            wilcoxon,
            sign * float("inf") if sign else 0.0,
            sign,
        )
    tested = stats.ttest_1samp(difference, 0.0)
    interval = tested.confidence_interval(confidence)
    return Comparison(
        n=len(users),
        difference=mean,
        low=float(interval.low),
        high=float(interval.high),
        t_p=float(tested.pvalue),
        wilcoxon_p=float(stats.wilcoxon(difference).pvalue),
        d=mean / float(difference.std(ddof=1)),
        rank_biserial=_rank_biserial(difference),
    )


def _rank_biserial(difference: npt.NDArray[np.float64]) -> float:
    """(W₊ - W₋) / (W₊ + W₋) over the ranks of the absolute differences that are not zero."""
    from scipy import stats  # as in `compare`

    moved = difference[difference != 0]
    ranks = stats.rankdata(np.abs(moved))
    return float((ranks * np.sign(moved)).sum() / ranks.sum())


def holm(p_values: Mapping[Key, float]) -> dict[Key, float]:
    """p-values adjusted for the number of comparisons by Holm's step-down method (1979).

    With p_(1) ≤ … ≤ p_(m), the adjusted value of p_(i) is max_{j≤i} min(1, (m - j + 1) p_(j)).
    Comparing the adjusted values with a level keeps the chance of any false finding below that
    level.

    Args:
        p_values: comparison -> p-value.

    Returns:
        The same comparisons, in the given order, with adjusted values.
    """
    ascending = sorted(p_values, key=lambda name: p_values[name])
    adjusted: dict[Key, float] = {}
    highest = 0.0
    for number, name in enumerate(ascending):
        highest = max(highest, min(1.0, (len(ascending) - number) * p_values[name]))
        adjusted[name] = highest
    return {name: adjusted[name] for name in p_values}
