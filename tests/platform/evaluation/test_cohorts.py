import numpy as np
import pytest
from statsmodels.stats.proportion import proportion_confint
from statsmodels.stats.weightstats import DescrStatsW

from crossfed.platform.errors import CrossfedError
from crossfed.platform.evaluation.cohorts import by_activity, wilson


def test_bounds_of_the_paper():
    """Activities 1 and 7 are cold, 8 and 15 warm, 16 and 90 active."""
    values = {"ndcg_at_10": np.array([0.0, 0.5, 0.2, 0.4, 1.0, 0.8])}
    cohorts = by_activity(values, np.array([1, 7, 8, 15, 16, 90]))
    assert [(cohort.name, cohort.n_users) for cohort in cohorts] == [
        ("cold", 2),
        ("warm", 2),
        ("active", 2),
    ]
    assert [cohort.means["ndcg_at_10"] for cohort in cohorts] == pytest.approx([0.25, 0.3, 0.9])
    assert [cohort.share for cohort in cohorts] == pytest.approx([1 / 3] * 3)


@pytest.mark.parametrize(("hits", "n"), [(0, 12), (1, 12), (7, 12), (12, 12), (3, 400)])
def test_intervals_of_hits_are_wilsons(hits, n):
    """The oracle: statsmodels' Wilson interval of a share."""
    values = np.r_[np.ones(hits), np.zeros(n - hits)]
    assert wilson(values) == pytest.approx(proportion_confint(hits, n, 0.05, "wilson"), abs=1e-12)


def test_intervals_of_many_values_are_the_usual_ones():
    values = np.random.default_rng(0).random(4000) ** 2
    assert wilson(values) == pytest.approx(DescrStatsW(values).zconfint_mean(0.05), rel=1e-3)


def test_intervals_never_leave_what_a_metric_can_be():
    """One user of forty has a little: mean ± 1.96 standard errors begins below 0."""
    values = np.r_[np.zeros(39), 0.3]
    low, high = wilson(values)
    assert DescrStatsW(values).tconfint_mean(0.05)[0] < 0 < low < values.mean() < high < 0.1
    assert 0.9 < wilson(1 - values)[0] < wilson(1 - values)[1] < 1
    assert wilson(np.zeros(5))[0] == 0 and wilson(np.full(3, 0.1))[0] > 0
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        wilson(np.array([1.0, 1.5]))


def test_one_user_has_no_interval():
    values = np.random.default_rng(0).random(30)
    cold, warm, active = by_activity({"mrr_at_5": values}, np.r_[np.full(20, 3), np.full(9, 9), 20])
    assert cold.intervals["mrr_at_5"] == wilson(values[:20])
    assert warm.intervals["mrr_at_5"] == wilson(values[20:29])
    assert active.intervals == {}  # one user has no spread


def test_own_bounds_and_an_empty_cohort():
    cohorts = by_activity(
        {"mrr_at_5": np.array([0.5, 1.0])}, np.array([2, 9]), (3, 5, 7), ("a", "b", "c", "d")
    )
    assert [cohort.n_users for cohort in cohorts] == [1, 0, 0, 1]
    assert (
        cohorts[0].means == {"mrr_at_5": 0.5}
        and cohorts[1].means == {}
        and cohorts[3].means == {"mrr_at_5": 1.0}
    )


@pytest.mark.parametrize(
    ("bounds", "names"), [((7, 7), "abc"), ((15, 7), "abc"), ((7,), "abc"), ((7, 15), "ab")]
)
def test_bad_bounds_are_told(bounds, names):
    with pytest.raises(CrossfedError, match="cohort bounds"):
        by_activity({}, np.array([1]), bounds, tuple(names))


def test_users_must_match():
    with pytest.raises(ValueError, match="mrr_at_5 has 2 users"):
        by_activity({"mrr_at_5": np.zeros(2)}, np.array([1, 2, 3]))
