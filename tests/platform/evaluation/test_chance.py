"""Chance against a count over all places, and against the published table of it."""

import numpy as np
import pytest

from crossfed.platform.errors import CrossfedError
from crossfed.platform.evaluation.chance import chance
from crossfed.platform.evaluation.metrics import per_user_metrics

ALL = ("recall", "hit_rate", "ndcg", "mrr", "precision", "map")


@pytest.mark.parametrize("n", [7, 100, 1000])
@pytest.mark.parametrize("k", [1, 5, 10, 20])
def test_it_is_the_mean_over_all_places_of_the_true_item(n, k):
    """Every place of the one true item once, measured by the metrics themselves."""
    hits = np.eye(n, max(n, k), dtype=bool)
    measured = per_user_metrics(hits, np.ones(n, np.int64), [k])
    for name in ALL:
        assert chance(f"{name}_at_{k}", n) == pytest.approx(
            measured[f"{name}_at_{k}"].mean(), rel=1e-12
        )


def test_it_is_what_is_known_of_99_and_999_negatives():
    """HR@k = k/n; NDCG@10 .0454 and .0045."""
    assert chance("hit_rate@10", 100) == pytest.approx(0.1)
    assert chance("ndcg@10", 100) == pytest.approx(0.0454, abs=5e-5)
    assert chance("ndcg@5", 100) == pytest.approx(0.0295, abs=5e-5)
    assert chance("ndcg@10", 1000) == pytest.approx(0.0045, abs=5e-5)
    assert chance("hit_rate@10", 1000) == pytest.approx(0.01)
    assert chance("MRR", 100) == pytest.approx(0.0519, abs=5e-5)
    assert chance("MRR", 1000) == pytest.approx(0.0075, abs=5e-5)


def test_what_has_no_chance_and_what_is_no_metric():
    assert chance("coverage@10", 100) is None
    with pytest.raises(CrossfedError, match="unknown metric"):
        chance("ndgc@10", 100)
    with pytest.raises(ValueError, match="must be a candidate"):
        chance("ndcg@10", 0)
