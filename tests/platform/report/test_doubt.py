"""What a comparison doubts, from runs made of numbers; and the rows that nobody has to learn."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from crossfed.platform.report.comparison import comparison
from crossfed.platform.report.finished import load_runs
from crossfed.platform.report.tables import Grid
from made_runs import make_run

SAMPLED = ("evaluation.protocol=leave-one-out-99",)
N = 400


def at(mean: float, spread: float = 0.1, seed: int = 0) -> np.ndarray:
    """Per-user values of exactly that mean."""
    values = np.random.default_rng(seed).normal(0, spread, N)
    return values - values.mean() + mean


def table(tmp_path: Path, sets: tuple[str, ...], **rows: dict[str, float]) -> Grid:
    paths = [
        make_run(
            tmp_path / method,
            method,
            0,
            {"books": {k: at(v) for k, v in values.items()}},
            sets=sets,
        )
        for method, values in rows.items()
    ]
    return comparison(load_runs(paths), ["ndcg@10", "hit_rate@10"]).table


def test_a_sampled_protocol_carries_its_chance(tmp_path: Path) -> None:
    rows = {"lightgcn": {"ndcg_at_10": 0.2, "hit_rate_at_10": 0.4}}
    made = table(tmp_path / "sampled", SAMPLED, **rows)
    assert [row for row in made.foot if row[0] == "chance"] == [("chance", "", "0.0454", "0.1000")]
    assert not table(tmp_path / "full", (), **rows).foot


@pytest.mark.parametrize(
    "ndcg, words",
    [
        (0.0454, "is within its interval of chance (0.0454)"),
        (0.02, "is below chance (0.0454)"),
        (0.08, None),
    ],
)
def test_a_row_that_chance_explains_is_flagged(
    ndcg: float, words: str | None, tmp_path: Path
) -> None:
    """400 users of deviation .1: the interval is ± .0098."""
    made = table(tmp_path, SAMPLED, lightgcn={"ndcg_at_10": ndcg, "hit_rate_at_10": 0.4})
    told = f"lightgcn, books: NDCG@10 {ndcg:.4f} ± 0.0098 {words}."
    assert (told in made.caption) == (words is not None)
    assert ("chance (" in made.caption) == (words is not None)


def test_below_chance_is_no_matter_where_all_items_are_ranked(tmp_path: Path) -> None:
    made = table(tmp_path, (), lightgcn={"ndcg_at_10": 0.0, "hit_rate_at_10": 0.4})
    assert "To be doubted" not in made.caption


@pytest.mark.parametrize("ratio, flagged", [(0.79, False), (0.92, True)])
def test_hits_that_are_nearly_all_first_are_flagged(
    ratio: float, flagged: bool, tmp_path: Path
) -> None:
    made = table(tmp_path, (), sasrec={"ndcg_at_10": 0.2 * ratio, "hit_rate_at_10": 0.2})
    assert (f"sasrec, books: NDCG@10 is {ratio:.2f} of HR@10" in made.caption) == flagged


def test_a_sampled_result_wants_its_full_ranking_beside_it(tmp_path: Path) -> None:
    """It is there once a run of the full protocol says that it measured this one's model."""
    good = {"ndcg_at_10": 0.2, "hit_rate_at_10": 0.4}
    assert (
        "lightgcn: ranked among sampled items only"
        in table(tmp_path, SAMPLED, lightgcn=good).caption
    )
    full = make_run(tmp_path / "again", "lightgcn", 0, {"books": {"ndcg_at_10": at(0.05)}})
    made = comparison(load_runs([tmp_path / "lightgcn"]), ["ndcg@10"]).table
    assert "sampled items only" in made.caption
    result = json.loads((full / "result.json").read_text())
    result |= {
        "protocol": "leave-one-out",
        "evaluated": {"run": "lightgcn", "protocol": "leave-one-out-99"},
    }
    (full / "result.json").write_text(json.dumps(result))
    made = comparison(load_runs([tmp_path / "lightgcn"]), ["ndcg@10"]).table
    assert "sampled items only" not in made.caption


def test_popularity_is_a_row_unless_it_is_not_wanted(tmp_path: Path) -> None:
    path = make_run(tmp_path / "a", "lightgcn", 0, {"books": {"ndcg_at_10": at(0.2)}})
    result = json.loads((path / "result.json").read_text())
    result["domains"]["books"]["popularity"] = {"ndcg_at_10": 0.0123}
    (path / "result.json").write_text(json.dumps(result))
    runs = load_runs([path])
    assert ("popularity", "", "0.0123") in comparison(runs, ["ndcg@10"]).table.foot
    assert not comparison(runs, ["ndcg@10"], floors=False).table.foot
    assert not comparison(runs, ["ndcg@10"], split="validation").table.foot


def test_a_run_measures_what_popularity_reaches(shops: Path, tmp_path: Path) -> None:
    """The same numbers as a run of the method `pop`, whatever the run's method."""
    from crossfed.platform.config.settings import build
    from crossfed.platform.federation.final import test_once as final_test
    from crossfed.platform.report.recording import run_recorded

    values = {"data": shops, "out": tmp_path, "backend": "inprocess", "tracking.enabled": False}
    small = ["dim=8", "epochs=1", "tracking.artifacts=false"]
    one = run_recorded(build("lightgcn", sets=small, values=values), finish=final_test)
    pop = run_recorded(
        build("pop", sets=["tracking.artifacts=false"], values=values), finish=final_test
    )
    for domain, row in one.result["domains"].items():
        assert row["popularity"] == pop.result["domains"][domain]["test"] != row["test"]
    assert (
        "popularity"
        not in run_recorded(build("lightgcn", sets=small, values=values)).result["domains"]["books"]
    )
