"""The table of a comparison: marks, rows that are not ranked, metrics, what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from analysed import MEANS, METRICS, csv_of, raw
from crossfed.platform.errors import CrossfedError
from crossfed.platform.report.comparison import comparison
from crossfed.platform.report.effects import baselines_of
from crossfed.platform.report.finished import Finished, load_runs
from made_runs import make_run, users


def test_best_second_and_improvement(made: list[Finished]) -> None:
    table = comparison(made, ["Recall@20"]).table
    assert [column.name for column in table.columns] == [
        "method",
        "seeds",
        "Recall@20",
        "Recall@20",
    ]
    assert [column.group for column in table.columns] == ["", "", "books", "toys"]
    rows = {row[0]: row for row in table.rows}
    shown = [table.cells(row)[3] for row in rows.values()]
    assert [cell.best for cell in shown] == [False, False, True, False]
    assert [cell.second for cell in shown] == [False, True, False, False]
    assert "±" in shown[0].text and "±" not in shown[3].text  # a single seed has no deviation
    assert rows["lightgcn"][1] == "3" and rows["p2p_iagr"][1] == "1"
    means = {
        m: np.mean([c.mean() for c in raw(made, m, "toys", "recall_at_20").values()]) for m in MEANS
    }
    foot = table.foot[0]
    assert foot[3] == f"{100 * (means['fedcrf'] / means['sasrec'] - 1):+.1f} %"
    assert (
        "synthetic" not in table.caption
        and "candidates books full:100, toys full:100" in table.caption
    )
    assert (
        "protocol ratio-80-10-10, split seed 42" in table.caption
        and "(lightgcn, sasrec)" in table.caption
    )


def test_equal_means_are_both_best(tmp_path: Path) -> None:
    values = {"books": {"recall_at_20": users(0, 0.3)}}
    runs = [make_run(tmp_path / name, name, 0, values) for name in ("lightgcn", "fedcrf")]
    table = comparison(load_runs(runs), METRICS[:1]).table
    assert [table.cells(row)[2].best for row in table.rows] == [True, True]
    assert not any(table.cells(row)[2].second for row in table.rows)


def test_only_the_test_split_is_tested(made: list[Finished]) -> None:
    found = comparison(made, METRICS, split="validation")
    assert found.tests == () and not found.effects and "†" not in found.table.caption
    assert comparison(made[:3]).tests == ()  # one row: nothing to test


def test_pooled_rows_are_not_ranked(tmp_path: Path) -> None:
    """The row that saw everything may be best; among those that may be chosen, the others are first
    and second.
    """
    runs = [
        make_run(
            tmp_path / f"{name}-{mean}",
            name,
            0,
            {"books": {"recall_at_20": np.full(9, mean)}},
            sets=sets,
            scope=scope,
        )
        for name, mean, sets, scope in (
            ("lightgcn", 0.2, (), "local"),
            ("lightgcn", 0.9, ("layers=3",), "pooled"),
            ("fedcrf", 0.3, (), "federated"),
        )
    ]
    found = comparison(load_runs(runs))
    rows = {row[0]: found.table.cells(row)[2] for row in found.table.rows}
    assert [(c.best, c.second) for c in rows.values()] == [
        (False, True),
        (False, False),
        (True, False),
    ]
    assert (
        "lightgcn (layers=3) (not private)" in rows
        and "saw all domains' interactions" in found.table.caption
    )
    assert found.table.foot[0][2] == "+50.0 %"
    assert [r["private"] for r in csv_of(found.table.csv())] == ["1", "0", "1"]
    assert {effect.label for effect in found.effects} == {"fedcrf"}, (
        "what may not be chosen is not tested"
    )
    pooled_first = load_runs([runs[1], runs[2]])
    assert baselines_of(pooled_first) == ["fedcrf"] and baselines_of(
        pooled_first, ["lightgcn"]
    ) == [pooled_first[0].label]


def test_what_is_missing_is_named(made: list[Finished], tmp_path: Path) -> None:
    with pytest.raises(
        CrossfedError,
        match="lightgcn-0 has no test map_at_20 for books; it has recall_at_20, ndcg_at_20",
    ):
        comparison(made, ["map@20"])
    with pytest.raises(CrossfedError, match="unknown metric"):
        comparison(made, ["recal@20"])
    with pytest.raises(
        CrossfedError, match="no domain 'music' in these runs; there are books, toys"
    ):
        comparison(made, domains=["music"])
    values = {"books": {"recall_at_20": users(0, 0.3)}}
    runs = load_runs(
        [make_run(tmp_path / name, name, 0, values) for name in ("lightgcn", "fedcrf")]
    )
    (runs[1].path / "per_user" / "books.test.parquet").unlink()
    with pytest.raises(CrossfedError, match="holds no per-user test values of domain 'books'"):
        comparison(runs)


def test_no_number_is_refused(tmp_path: Path) -> None:
    runs = load_runs(
        [make_run(tmp_path / "a", "lightgcn", 0, {"books": {"recall_at_20": np.full(9, np.nan)}})]
    )
    with pytest.raises(
        CrossfedError, match="The test recall_at_20 of a for books is nan: its result is damaged"
    ):
        comparison(runs, METRICS[:1])


def test_other_users_are_refused(tmp_path: Path) -> None:
    runs = [
        make_run(
            tmp_path / str(seed), "lightgcn", seed, {"books": {"recall_at_20": users(0, 0.3, n)}}
        )
        for seed, n in ((0, 60), (1, 59))
    ]
    runs.append(make_run(tmp_path / "f", "fedcrf", 0, {"books": {"recall_at_20": users(0, 0.3)}}))
    with pytest.raises(CrossfedError, match="lightgcn were measured on different users of books"):
        comparison(load_runs(runs))
