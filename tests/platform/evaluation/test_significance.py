import numpy as np
import pytest
from scipy import stats

from crossfed.platform.evaluation.significance import compare, holm
from crossfed.platform.seam import CrossfedError


def test_users_are_paired_by_row_number():
    """The same values in another order of users differ nowhere."""
    users, values = np.array([3, 1, 2]), np.array([0.3, 0.1, 0.2])
    result = compare(users, values, users[::-1], values[::-1])
    assert (result.difference, result.low, result.high) == (0, 0, 0)
    assert (result.t_p, result.wilcoxon_p) == (1, 1)


def test_t_statistic_by_hand():
    """Differences 1, 2, 3: mean 2, standard error 1/√3, t = 2√3 with 2 degrees of freedom."""
    result = compare(np.arange(3), np.array([2.0, 4.0, 6.0]), np.arange(3), np.array([1.0, 2.0, 3.0]))
    assert result.n_users == 3 and result.difference == pytest.approx(2)
    assert result.t_p == pytest.approx(2 * stats.t.sf(2 * np.sqrt(3), 2))
    assert result.wilcoxon_p == pytest.approx(2 / 2**3)  # all signs equal: 2 of the 2³ assignments are as extreme
    assert 1 <= result.low < result.difference < result.high <= 3


def test_direction_and_interval():
    rng = np.random.default_rng(0)
    base = rng.random(400)
    users, better = np.arange(400), base + rng.normal(0.05, 0.1, 400)
    result, reverse = compare(users, better, users, base), compare(users, base, users, better)
    assert result.difference > 0 and result.low > 0 and result.t_p < 1e-6 and result.wilcoxon_p < 1e-6
    assert reverse.difference == pytest.approx(-result.difference) and reverse.t_p == pytest.approx(result.t_p)
    # For a mean of 400 values the percentile interval is close to the normal one.
    half = stats.norm.ppf(0.975) * np.std(better - base) / np.sqrt(400)
    assert result.high - result.low == pytest.approx(2 * half, rel=0.1)
    wider = compare(users, better, users, base, confidence=0.99)
    assert wider.low < result.low < result.high < wider.high


def test_the_same_difference_for_everybody():
    result = compare(np.arange(3), np.full(3, 0.75), np.arange(3), np.full(3, 0.5))
    assert (result.low, result.high, result.t_p) == (0.25, 0.25, 0)
    assert result.wilcoxon_p == pytest.approx(0.25)


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
    """0.3 and 0.31 of three: 3·0.2 = 0.6, 2·0.3 = 0.6, then 0.31 is raised to 0.6. And 2·0.8 is cut to 1."""
    assert holm({"a": 0.2, "b": 0.3, "c": 0.31}) == pytest.approx({"a": 0.6, "b": 0.6, "c": 0.6})
    assert holm({"a": 0.8, "b": 0.9}) == {"a": 1, "b": 1}
    assert holm({}) == {}
