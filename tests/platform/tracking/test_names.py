"""Names of metrics: made, read back, few, and in an order that a chart page keeps."""

from __future__ import annotations

from typing import Any

import pytest

from crossfed.platform.tracking import names as metric_names
from crossfed.platform.tracking.names import Name, parse

DOMAINS = ("books", "films", "games")
METRICS = ("recall", "ndcg", "hit_rate", "mrr", "precision", "map", "coverage")


def measured(value: float) -> dict[str, float]:
    return {f"{metric}_at_{k}": value for metric in METRICS for k in (10, 20)}


def a_round(*domains: str, best: float | None = 0.3, **more: float) -> dict[str, Any]:
    """Domain number n measures n + 1 tenths of everything."""
    metrics = {
        f"val/{name}/{key}": value
        for name in domains
        for key, value in measured((DOMAINS.index(name) + 1) / 10).items()
    }
    if domains:
        metrics["val/mean/recall_at_20"] = 0.25
    return {"metrics": metrics | more, "best": best, "bytes_up": 7, "bytes_down": 9, "seconds": 0.5}


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("all/best_recall_at_20", Name("best", "recall_at_20")),
        ("all/test_hit_rate_at_10", Name("test", "hit_rate_at_10")),
        ("domain/books/val_ndcg_at_20", Name("val", "ndcg_at_20", "books")),
        ("domain/a/b/test_ndcg_at_20", Name("test", "ndcg_at_20", "a/b")),
    ],
)
def test_a_name_is_read_as_it_was_made(name: str, read: Name) -> None:
    assert parse(name) == read and str(read) == name


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("val/books/recall_at_20", Name("val", "recall_at_20", "books")),
        ("val/mean/recall_at_20", Name("val", "recall_at_20")),
        ("final/test/books/ndcg_at_10", Name("test", "ndcg_at_10", "books")),
        ("final/validation/a/b/ndcg_at_10", Name("best", "ndcg_at_10", "a/b")),
        ("final/memory/process/books", None),
        ("best/val/books/recall_at_20", None),
        ("val_best", None),
        ("train/books/loss", None),
        ("all/stage", None),
        ("best_recall", None),
        ("time/seconds_per_round", None),
    ],
)
def test_names_of_earlier_versions_and_others(name: str, read: Name | None) -> None:
    assert parse(name) == read


def test_a_round() -> None:
    row = a_round(
        *DOMAINS,
        **{
            "train/books/loss_rec": 0.7,
            "train/books/norm": 3.0,
            "train/server/lossy/x": 1.0,
            "privacy/max/epsilon_whole": 4.0,
            "privacy/books/epsilon_whole": 4.0,
        },
    )
    assert metric_names.of_round(row, "recall_at_20", 2, DOMAINS) == {
        "all/best_recall_at_20": 0.3,
        "all/stage": 2.0,
        "all/val_recall_at_20": 0.25,
        "all/val_ndcg_at_20": pytest.approx(0.2),
        "domain/books/val_recall_at_20": 0.1,
        "domain/films/val_recall_at_20": 0.2,
        "domain/games/val_recall_at_20": 0.3,
        "domain/books/val_ndcg_at_20": 0.1,
        "domain/films/val_ndcg_at_20": 0.2,
        "domain/games/val_ndcg_at_20": 0.3,
        "privacy/epsilon_whole": 4.0,
        "train/books/loss_rec": 0.7,
        "traffic/bytes_up": 7,
        "traffic/bytes_down": 9,
        "time/seconds_per_round": 0.5,
    }


def test_a_domain_that_stopped_has_no_part_in_a_mean_that_is_made_here() -> None:
    told = metric_names.of_round(a_round("books", "games"), "recall_at_20", 1, DOMAINS)
    # the run's own, which counts the stopped domain's last value
    assert told["all/val_recall_at_20"] == 0.25
    assert "all/val_ndcg_at_20" not in told and "domain/films/val_recall_at_20" not in told


def test_a_stage_that_keeps_no_best_is_judged_by_its_last_round() -> None:
    assert (
        metric_names.of_round(a_round(*DOMAINS), "recall_at_20", 1, DOMAINS, selects=False)[
            "all/best_recall_at_20"
        ]
        == 0.25
    )


def test_a_round_that_was_not_evaluated() -> None:
    told = metric_names.of_round(a_round(best=None), "recall_at_20", 1, DOMAINS)
    assert set(told) == {
        "all/stage",
        "traffic/bytes_up",
        "traffic/bytes_down",
        "time/seconds_per_round",
    }


def test_a_result_has_means_of_domains_and_the_most_that_was_spent() -> None:
    spent = {
        "books": {"epsilon_paper": 1.0, "epsilon_tight": None},
        "films": {"epsilon_paper": 3.0, "messages": 4},
    }
    result = {
        "domains": {
            name: {"test": measured((number + 1) / 10)} for number, name in enumerate(DOMAINS)
        },
        "privacy": {"domains": spent},
    }
    told = metric_names.of_result(result, "recall_at_20")
    assert told["all/test_recall_at_20"] == told["all/test_ndcg_at_20"] == pytest.approx(0.2)
    assert told["domain/games/test_ndcg_at_20"] == 0.3
    assert told["privacy/epsilon_paper"] == 3.0
    assert len(told) == 9
    untested = result | {"domains": {name: {} for name in DOMAINS}, "privacy": {"domains": {}}}
    assert metric_names.of_result(untested, "recall_at_20") == {}


def test_what_matters_comes_first_in_the_order_of_the_chart_page() -> None:
    """MLflow sorts groups by name, and draws names without a group towards the end: there are
    none.
    """
    row = a_round(*DOMAINS, **{f"train/{name}/loss_{i}": 0.1 for name in DOMAINS for i in range(6)})
    result = {
        "domains": {name: {"test": measured(0.1)} for name in DOMAINS},
        "privacy": {"domains": {}},
    }
    told = metric_names.of_round(row, "recall_at_20", 1, DOMAINS) | metric_names.of_result(
        result, "recall_at_20"
    )
    assert len(told) <= 60
    groups = sorted({name.rpartition("/")[0] for name in told})
    assert groups == ["all", "domain/books", "domain/films", "domain/games", "time", "traffic",
                      "train/books", "train/films", "train/games"]  # fmt: skip
    assert {name for name in told if name.startswith("all/")} == {
        "all/best_recall_at_20",
        "all/stage",
        "all/test_ndcg_at_20",
        "all/test_recall_at_20",
        "all/val_ndcg_at_20",
        "all/val_recall_at_20",
    }


@pytest.mark.parametrize(
    ("select", "companion"),
    [("ndcg_at_10", "recall_at_10"), ("mrr_at_20", "ndcg_at_20"), ("recall_at_5", None)],
)
def test_the_companion_has_the_same_cut_off(select: str, companion: str | None) -> None:
    assert metric_names.shown(select, measured(0.1)) == [
        select,
        *([companion] if companion else []),
    ]


def test_a_study_is_judged_by_its_final_runs() -> None:
    rows = {
        name: {"validation": {"mean": 0.2 + number}, "test": {"mean": 0.1 + number}}
        for number, name in enumerate("ab")
    }
    summary = {
        "metric": "recall_at_20",
        "winner": {"values": [0.9]},
        "objectives": ["worst"],
        "finals": rows,
    }
    assert metric_names.of_study(summary) == {
        "all/best_recall_at_20": pytest.approx(0.7), "all/test_recall_at_20": pytest.approx(0.6),
        "domain/a/test_recall_at_20": 0.1, "domain/b/test_recall_at_20": 1.1,
    }  # fmt: skip
    # the worst domain's value is no mean
    assert metric_names.of_study(summary | {"finals": {}}) == {}
    assert metric_names.of_study(summary | {"finals": {}, "objectives": ["mean"]}) == {
        "all/best_recall_at_20": 0.9
    }


def test_columns_of_a_table_of_runs() -> None:
    names = [
        "all/best_recall_at_20",
        "domain/b/test_recall_at_20",
        "domain/a/test_recall_at_20",
        "domain/a/test_ndcg_at_20",
        "all/stage",
        "all/test_ndcg_at_20",
        "all/test_recall_at_20",
        "train/a/loss",
        "all/val_recall_at_20",
    ]
    chosen = metric_names.columns(names)
    assert chosen[:3] == ["all/test_recall_at_20", "all/best_recall_at_20", "all/test_ndcg_at_20"]
    assert chosen[3:] == ["domain/a/test_recall_at_20", "domain/b/test_recall_at_20"]
    assert metric_names.columns(
        ["final/test/a/recall_at_20", "final/validation/a/recall_at_20", "val_best"]
    ) == ["final/test/a/recall_at_20"]
