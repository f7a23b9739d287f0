"""Metrics: cases solved by hand, and ranx as the oracle over random ones."""

import json
import os
import subprocess
import sys
from math import log2

import numpy as np
import pytest

from crossfed.platform.errors import CrossfedError
from crossfed.platform.evaluation.metrics import (
    METRICS,
    PER_USER_METRICS,
    macro_metrics,
    metric_name,
    parse_metric,
    per_user_metrics,
)

RANX = {
    "recall": "recall",
    "ndcg": "ndcg",
    "hit_rate": "hit_rate",
    "mrr": "mrr",
    "precision": "precision",
    "map": "map",
}

# ranx compiles for a minute; without compilation it answers at once, but that must be chosen before
# numba is imported.
ORACLE = """
import json, sys
from ranx import Qrels, Run, evaluate
case = json.load(sys.stdin)
values = evaluate(Qrels(case["truth"]), Run(case["scores"]), case["metrics"], return_mean=False)
json.dump({name: dict(zip(sorted(case["truth"]), map(float, row))) for name, row in values.items()}, sys.stdout)
"""  # noqa: E501


def ask_ranx(truth: dict, scores: dict, metrics: list[str]) -> dict[str, dict[str, float]]:
    pytest.importorskip("ranx", reason="ranx is an extra of the test suite")
    case = json.dumps({"truth": truth, "scores": scores, "metrics": metrics})
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ORACLE],
        input=case,
        capture_output=True,
        text=True,
        env=os.environ | {"NUMBA_DISABLE_JIT": "1"},
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_one_user_by_hand():
    """Two of T = 3 held-out items, found at positions 2 and 4; K = 3 and 4.

    K = 3: one hit, at 2. Recall 1/3, precision 1/3, reciprocal rank 1/2, DCG 1/log2(3), ideal over
    min(3, 3) positions, average precision (1/2) / min(3, 3). K = 4: hits at 2 and 4. Average
    precision (1/2 + 2/4) / min(4, 3).
    """
    hits = np.array([[False, True, False, True]])
    values = per_user_metrics(hits, np.array([3]), [3, 4])
    ideal = 1 + 1 / log2(3) + 1 / log2(4)
    expected = {
        "recall_at_3": 1 / 3,
        "precision_at_3": 1 / 3,
        "hit_rate_at_3": 1,
        "mrr_at_3": 1 / 2,
        "ndcg_at_3": (1 / log2(3)) / ideal,
        "map_at_3": (1 / 2) / 3,
        "recall_at_4": 2 / 3,
        "precision_at_4": 2 / 4,
        "hit_rate_at_4": 1,
        "mrr_at_4": 1 / 2,
        "ndcg_at_4": (1 / log2(3) + 1 / log2(5)) / ideal,
        "map_at_4": (1 / 2 + 2 / 4) / 3,
    }
    assert {name: float(value[0]) for name, value in values.items()} == pytest.approx(expected)


def test_the_ideal_list_is_cut_at_k():
    """T = 5 held-out items and K = 2, both positions hit: NDCG and MAP are 1 although recall is
    2/5.
    """
    values = per_user_metrics(np.array([[True, True]]), np.array([5]), [2])
    assert values["ndcg_at_2"] == [1] and values["map_at_2"] == [1]
    assert values["recall_at_2"] == [0.4]


def test_every_cut_off_has_its_own_ideal_list():
    """T = 5 with hits at 1 and 2: NDCG is 1 at K = 2 also when a larger cut-off is measured at the
    same time.
    """
    values = per_user_metrics(np.array([[True, True, False, False, False]]), np.array([5]), [2, 5])
    ideal = sum(1 / log2(i + 1) for i in range(1, 6))
    assert values["ndcg_at_2"] == pytest.approx([1])
    assert values["ndcg_at_5"] == pytest.approx([(1 + 1 / log2(3)) / ideal])


def test_hits_are_counted_within_their_user():
    """Hits at positions 1 and 2 of one user and at 2 of the other: T = 2 and 1, K = 2.

    Average precision: (1/1 + 2/2) / 2 = 1 and (1/2) / 1; reciprocal ranks 1 and 1/2.
    """
    hits = np.array([[True, True], [False, True]])
    values = per_user_metrics(hits, np.array([2, 1]), [2])
    assert values["map_at_2"].tolist() == [1.0, 0.5]
    assert values["mrr_at_2"].tolist() == [1.0, 0.5]
    assert values["recall_at_2"].tolist() == [1.0, 1.0]


def test_no_hit_is_zero_everywhere():
    values = per_user_metrics(np.zeros((2, 5), bool), np.array([1, 2]), [5])
    assert all((value == 0).all() and value.shape == (2,) for value in values.values())


def test_random_cases_equal_ranx():
    """ranx divides average precision by T where we divide by min(K, T); everything else is the same
    by definition.
    """
    rng = np.random.default_rng(3)
    n_users, n_items, ks = 60, 40, [1, 5, 10, 20]
    n_truth = rng.integers(1, 30, n_users)
    truth, scores, hits = {}, {}, np.zeros((n_users, 20), bool)
    for user in range(n_users):
        held_out = rng.choice(n_items, n_truth[user], replace=False)
        ranked = rng.permutation(n_items)
        hits[user] = np.isin(ranked[:20], held_out)
        truth[f"u{user:02}"] = {f"i{item}": 1 for item in held_out}
        scores[f"u{user:02}"] = {
            f"i{item}": float(n_items - place) for place, item in enumerate(ranked)
        }
    ours = per_user_metrics(hits, n_truth, ks)
    theirs = ask_ranx(truth, scores, [f"{RANX[name]}@{k}" for name in PER_USER_METRICS for k in ks])
    for name in PER_USER_METRICS:
        for k in ks:
            expected = np.array(
                [theirs[f"{RANX[name]}@{k}"][f"u{user:02}"] for user in range(n_users)]
            )
            if name == "map":
                expected = expected * n_truth / np.minimum(k, n_truth)
            assert ours[f"{name}_at_{k}"] == pytest.approx(expected, abs=1e-12), (name, k)


def test_macro_is_the_mean_over_users_and_coverage_counts_items():
    """(0 + 0 + 1 + 0.2) / 4 = 0.3.

    Best positions 0, 3 and never (5): two of three items stand in a list of 5, one in a list of 3.
    """
    macro = macro_metrics(
        {"recall_at_3": np.array([0.0, 0.0, 1.0, 0.2])}, np.array([0, 3, 5]), [3, 5]
    )
    assert macro == pytest.approx(
        {"recall_at_3": 0.3, "coverage_at_3": 1 / 3, "coverage_at_5": 2 / 3}
    )


def test_hits_must_reach_the_largest_cut_off():
    with pytest.raises(ValueError, match="position 3"):
        per_user_metrics(np.zeros((1, 3), bool), np.array([1]), [5])


def test_one_user_without_truth_among_others_is_refused():
    with pytest.raises(ValueError, match="without held-out items"):
        per_user_metrics(np.zeros((2, 3), bool), np.array([2, 0]), [3])


def test_a_user_without_truth_is_refused():
    with pytest.raises(ValueError, match="held-out"):
        per_user_metrics(np.zeros((1, 3), bool), np.array([0]), [3])


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Recall@20", "recall_at_20"),
        ("recall_at_20", "recall_at_20"),
        ("NDCG@5", "ndcg_at_5"),
        ("Hit Rate @ 10", "hit_rate_at_10"),
        ("hit-rate@10", "hit_rate_at_10"),
        ("hit_rate_at_10", "hit_rate_at_10"),
        ("coverage@1", "coverage_at_1"),
    ],
)
def test_metric_names(text, name):
    assert metric_name(text) == name
    assert "@" not in name and parse_metric(name) == (
        name.rpartition("_at_")[0],
        int(name.rpartition("_")[2]),
    )


@pytest.mark.parametrize(
    "text",
    ["recal@20", "recall", "recall@", "recall@0", "recall@-5", "@20", "", "recall@20 ndcg@20"],
)
def test_an_unknown_metric_names_the_allowed_ones(text):
    with pytest.raises(CrossfedError) as error:
        metric_name(text)
    assert repr(text) in str(error.value) and all(name in str(error.value) for name in METRICS)
