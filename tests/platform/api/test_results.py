"""Runs and comparisons as objects: their tables hold what the run's files hold."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

import crossfed


@pytest.fixture(scope="module")
def runs(shops: Path, tmp_path_factory: pytest.TempPathFactory) -> list[crossfed.Run]:
    """A run of two methods each, with tracking off."""
    out = tmp_path_factory.mktemp("runs")
    common = {
        "data": shops,
        "out": out,
        "backend": "inprocess",
        "progress": "quiet",
        "settings": {"tracking.enabled": False, "text.encoder": "hashing:32"},
    }
    return [
        crossfed.run("lightgcn", dim=8, epochs=2, batch_size=64, **common),
        crossfed.run("fedsasrec", dim=8, inner=8, rounds=2, batch_size=16, **common),
    ]


def test_metrics_are_those_of_the_result(runs: list[crossfed.Run]) -> None:
    table = runs[0].metrics.set_index(["domain", "split", "metric"])["value"]
    result = json.loads((runs[0].path / "result.json").read_text())
    stored = {
        (domain, split, metric): value
        for domain, row in result["domains"].items()
        for split in ("validation", "test")
        for metric, value in row[split].items()
    }
    assert table.to_dict() == stored


def test_history_has_a_row_per_round_and_a_column_per_metric(runs: list[crossfed.Run]) -> None:
    history = runs[1].history
    assert list(history["round"]) == [1, 2] and (history["bytes_up"] > 0).all()
    assert history["train/books/loss"].notna().all()


def test_means_of_per_user_values_are_the_metrics(runs: list[crossfed.Run]) -> None:
    table = (
        runs[0]
        .metrics.query("split == 'test' and metric == 'recall_at_20'")
        .set_index("domain")["value"]
    )
    means = runs[0].per_user().groupby("domain")["recall_at_20"].mean()
    pd.testing.assert_series_equal(means.sort_index(), table.sort_index(), check_names=False)
    with pytest.raises(crossfed.CrossfedError, match="nowhere"):
        runs[0].per_user("nowhere")


def test_the_ledger_counts_what_the_history_counts(runs: list[crossfed.Run]) -> None:
    ledger = runs[1].ledger()
    assert ledger.query("direction == 'up'")["bytes"].sum() == runs[1].history["bytes_up"].sum()
    assert runs[0].ledger().empty


def test_recommendations_are_ranked_and_unknown_users_said(runs: list[crossfed.Run]) -> None:
    table = runs[0].recommend("books", ["books-u0", "nobody"], k=3)
    assert list(table["rank"]) == [1, 2, 3, 1, 2, 3]
    assert list(table.groupby("user", sort=False)["known"].first()) == [True, False]
    assert table.groupby("user")["score"].apply(lambda scores: scores.is_monotonic_decreasing).all()


def test_a_run_is_found_again(runs: list[crossfed.Run]) -> None:
    again = crossfed.load(runs[0].id, out=runs[0].path.parent)
    assert isinstance(again, crossfed.Run) and again.metrics.equals(runs[0].metrics)
    assert again.config.method == "lightgcn" and "seed 0" in repr(again)


def test_an_unfinished_run_says_so(runs: list[crossfed.Run], tmp_path: Path) -> None:
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "config.yaml").write_text((runs[0].path / "config.yaml").read_text())
    half = crossfed.Run(tmp_path / "half")
    assert "not finished" in repr(half) and half.history.empty
    with pytest.raises(crossfed.CrossfedError, match="--resume"):
        _ = half.metrics
    with pytest.raises(crossfed.CrossfedError, match="holds no run"):
        crossfed.Run(tmp_path)


def test_a_comparison_is_a_table_for_people_and_for_programs(runs: list[crossfed.Run]) -> None:
    made = crossfed.compare(runs, metrics=["recall@20"])
    assert set(made.table["method"]) == {"lightgcn", "fedsasrec"} and not made.tests.empty
    assert (
        "<table>" in made._repr_html_()
        and "| lightgcn" in made.markdown()
        and "tabular" in made.latex()
    )
    with pytest.raises(crossfed.CrossfedError, match="validation"):
        crossfed.compare(runs, split="train")


def test_html_is_escaped_and_holds_the_numbers(runs: list[crossfed.Run]) -> None:
    value = runs[0].metrics["value"].iloc[0]
    assert f"{value:.4f}" in runs[0]._repr_html_()
