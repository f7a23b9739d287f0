"""Paired tests, their effect sizes and intervals, each checked against statsmodels, scipy or a case
solved by hand.
"""

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.weightstats import DescrStatsW

from crossfed.platform.errors import CrossfedError
from crossfed.platform.evaluation.significance import compare, holm


def test_users_are_paired_by_row_number():
    """The same values in another order of users differ nowhere."""
    users, values = np.array([3, 1, 2]), np.array([0.3, 0.1, 0.2])
    result = compare(users, values, users[::-1], values[::-1])
    assert (result.difference, result.low, result.high) == (0, 0, 0)
    assert (result.t_p, result.wilcoxon_p, result.d, result.rank_biserial) == (1, 1, 0, 0)


def test_t_statistic_by_hand():
    """Differences 1, 2, 3: mean 2, deviation 1, standard error 1/√3, t = 2√3 with 2 degrees of
    freedom; all ranks in favour.
    """
    result = compare(
        np.arange(3), np.array([2.0, 4.0, 6.0]), np.arange(3), np.array([1.0, 2.0, 3.0])
    )
    assert result.n == 3 and result.difference == pytest.approx(2)
    assert result.t_p == pytest.approx(2 * stats.t.sf(2 * np.sqrt(3), 2))
    # all signs equal: 2 of the 2³ assignments are as extreme
    assert result.wilcoxon_p == pytest.approx(2 / 2**3)
    half = stats.t.ppf(0.975, 2) / np.sqrt(3)
    assert (result.low, result.high) == (pytest.approx(2 - half), pytest.approx(2 + half))
    assert (result.d, result.rank_biserial) == (pytest.approx(2), 1)


def test_rank_biserial_by_hand():
    """Differences 0, 1, -2, 3, 3: ranks 1, 2, 3.5, 3.5 without the zero; (1 + 7 - 2) / 10."""
    other = np.zeros(5)
    result = compare(np.arange(5), np.array([0.0, 1.0, -2.0, 3.0, 3.0]), np.arange(5), other)
    assert result.rank_biserial == pytest.approx(0.6)


@pytest.mark.parametrize("n", [3, 20, 400])
def test_agrees_with_statsmodels_and_scipy(n):
    rng = np.random.default_rng(n)
    base = rng.random(n).round(2)  # rounded: ties and zero differences, as metrics have
    other = (base + rng.normal(0.05, 0.2, n)).round(2)
    users = rng.permutation(n)
    result, reverse = compare(users, other, users, base), compare(users, base, users, other)
    told = DescrStatsW(other - base)
    assert result.difference == pytest.approx(told.mean)
    assert (result.low, result.high) == pytest.approx(told.tconfint_mean(0.05))
    assert result.t_p == pytest.approx(told.ttest_mean(0)[1])
    assert result.d == pytest.approx(told.ttest_mean(0)[0] / np.sqrt(n))
    assert result.wilcoxon_p == pytest.approx(stats.wilcoxon(other, base).pvalue)
    up, down = (
        stats.wilcoxon(other, base, alternative="greater"),
        stats.wilcoxon(base, other, alternative="greater"),
    )
    assert result.rank_biserial == pytest.approx(
        (up.statistic - down.statistic) / (up.statistic + down.statistic)
    )
    assert reverse.difference == pytest.approx(-result.difference) and reverse.d == pytest.approx(
        -result.d
    )
    wider = compare(users, other, users, base, confidence=0.99)
    assert (wider.low, wider.high) == pytest.approx(told.tconfint_mean(0.01))


def test_the_same_difference_for_everybody():
    result = compare(np.arange(3), np.full(3, 0.75), np.arange(3), np.full(3, 0.5))
    assert (result.low, result.high, result.t_p) == (0.25, 0.25, 0)
    assert result.wilcoxon_p == pytest.approx(0.25)
    assert (result.d, result.rank_biserial) == (np.inf, 1)
    worse = compare(np.arange(3), np.full(3, 0.5), np.arange(3), np.full(3, 0.75))
    assert (worse.difference, worse.d, worse.rank_biserial) == (-0.25, -np.inf, -1)


def test_two_pairs_are_enough():
    """Differences 1 and 3: mean 2, deviation √2, t = 2 / (√2 / √2) with one degree of freedom."""
    result = compare(np.arange(2), np.array([1.0, 3.0]), np.arange(2), np.zeros(2))
    assert result.n == 2 and result.t_p == pytest.approx(2 * stats.t.sf(2, 1))


@pytest.mark.parametrize(
    ("users", "others", "told"),
    [([1, 2], [1, 3], "different users"), ([1, 2], [1], "different users"), ([1], [1], "two")],
)
def test_unpaired_users_are_refused(users, others, told):
    with pytest.raises(CrossfedError, match=told):
        compare(np.array(users), np.zeros(len(users)), np.array(others), np.zeros(len(others)))


def test_holm_by_hand():
    """0.01, 0.02, 0.03, 0.9 → 4·0.01, 3·0.02, 2·0.03 (not below the one before), 0.9."""
    adjusted = holm({"c": 0.03, "a": 0.01, "d": 0.9, "b": 0.02})
    assert list(adjusted) == ["c", "a", "d", "b"]
    assert adjusted == pytest.approx({"a": 0.04, "b": 0.06, "c": 0.06, "d": 0.9})


def test_holm_keeps_order_and_stays_below_one():
    """0.3 and 0.31 of three: 3·0.2 = 0.6, 2·0.3 = 0.6, then 0.31 is raised to 0.6. And 2·0.8 is cut
    to 1.
    """
    assert holm({"a": 0.2, "b": 0.3, "c": 0.31}) == pytest.approx({"a": 0.6, "b": 0.6, "c": 0.6})
    assert holm({"a": 0.8, "b": 0.9}) == {"a": 1, "b": 1}
    assert holm({}) == {}


def test_holm_agrees_with_statsmodels():
    for seed in range(20):
        p = np.random.default_rng(seed).beta(0.3, 2, 9)
        adjusted = holm(dict(enumerate(p.tolist())))
        assert list(adjusted.values()) == pytest.approx(multipletests(p, method="holm")[1].tolist())
