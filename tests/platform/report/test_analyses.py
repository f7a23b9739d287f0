"""Analyses: what figures show is read back from the drawn objects and from the numbers written
beside them.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from statsmodels.stats.weightstats import DescrStatsW

from analysed import RECALL, both, records, texts
from crossfed.platform.errors import CrossfedError
from crossfed.platform.evaluation.cohorts import wilson
from crossfed.platform.report import analyses
from crossfed.platform.report.comparison import comparison
from crossfed.platform.report.finished import load_runs
from made_runs import make_run


def test_an_analysis_is_a_picture_and_its_numbers(tmp_path: Path) -> None:
    runs = load_runs([make_run(tmp_path / "a", "lightgcn", 0, both(0.3))])
    picture, numbers = analyses.cohorts(runs, RECALL).save(tmp_path / "new" / "folder")
    assert (
        picture.read_bytes().startswith(b"\x89PNG") and numbers.name == "cohorts-recall_at_20.csv"
    )
    assert numbers.read_text().startswith("method,domain,cohort,")
    (tmp_path / "file").touch()
    with pytest.raises(CrossfedError, match="cannot be written"):
        analyses.cohorts(runs, RECALL).save(tmp_path / "file")


def test_cohorts_are_means_over_seeds_with_intervals_over_users(tmp_path: Path) -> None:
    trained = {"books": np.repeat([3, 10, 30], [30, 20, 10]), "toys": np.repeat([3, 30], [59, 1])}
    paths = [
        make_run(tmp_path / str(seed), "fedcrf", seed, both(0.3, seed), trained=trained)
        for seed in (0, 1)
    ]
    found = analyses.cohorts(load_runs(paths), RECALL)
    by = {(r["domain"], r["cohort"]): r for r in records(found)}
    own = (both(0.3, 0)["books"][RECALL] + both(0.3, 1)["books"][RECALL]) / 2
    told = DescrStatsW(own[30:50])
    warm = by["books", "warm"]
    assert float(warm["mean"]) == pytest.approx(told.mean) and warm["users"] == "20"
    assert (float(warm["low"]), float(warm["high"])) == pytest.approx(wilson(own[30:50]))
    assert len({axis.get_ylim() for axis in found.figure.axes}) == 1, (
        "panels are read against each other"
    )
    assert found.figure.axes[0].get_ylim()[0] == 0
    assert (
        by["toys", "warm"]["users"],
        by["toys", "active"]["users"],
        by["books", "cold"]["interactions"],
    ) == (
        "0",
        "1",
        "≤ 7",
    )
    heights = [bar.get_height() for bar in found.figure.axes[0].patches]
    assert heights[1] == pytest.approx(told.mean) and len(heights) == 3
    assert "8–15, 20 users" in texts(found.figure) and "seeds 0, 1" in texts(found.figure)
    assert len(records(analyses.cohorts(load_runs(paths), RECALL, (5,)))) == 4
    with pytest.raises(CrossfedError, match="coverage_at_20 has no value per user"):
        analyses.cohorts(load_runs(paths), "coverage_at_20")
    half = make_run(tmp_path / "half", "fedcrf", 0, both(0.3), sets=("evaluation.train_share=0.5",))
    with pytest.raises(CrossfedError, match=r"trained on different shares of them .*: 0\.5, 1\.0"):
        analyses.cohorts(load_runs([*paths, half]), RECALL)


def test_bars_of_many_rows_are_told_apart(tmp_path: Path) -> None:
    """Eight rows, seven colours: no two bars of a cohort, and no two entries of the legend, look
    the same.
    """
    paths = [
        make_run(tmp_path / str(k), "fedcrf", 0, both(0.3), sets=(f"K={k}",)) for k in range(2, 10)
    ]
    figure = analyses.cohorts(load_runs(paths), RECALL).figure
    looks = [(bar.get_facecolor(), bar.get_hatch()) for bar in figure.axes[0].patches]
    legend = [
        (entry.get_facecolor(), entry.get_hatch()) for entry in figure.legends[0].get_patches()
    ]
    assert len(set(looks)) == len(legend) == len(set(legend)) == 8 and set(looks) == set(legend)


# -- differences -----------------------------------------------------------------------------------


def test_ablation_sets_every_part_against_the_whole(tmp_path: Path) -> None:
    paths = [
        make_run(
            tmp_path / f"{part}{seed}", "fedcrf", seed, both(mean, seed), sets=(f"ablation={part}",)
        )
        for part, seed, mean in (
            ("cl", 0, 0.35),
            ("none", 0, 0.3),
            ("none", 1, 0.3),
            ("fed", 0, 0.1),
        )
    ]
    runs = load_runs(paths)
    found = analyses.ablation(runs, "ablation")
    assert [r[0] for r in found.grid.rows] == [
        "fedcrf, ablation=cl",
        "fedcrf",
        "fedcrf, ablation=fed",
    ]
    assert {r["against"] for r in records(found)} == {"", "fedcrf"}
    axis = found.figure.axes[0]
    assert [label.get_text() for label in axis.get_yticklabels()] == [
        "fedcrf, ablation=cl",
        "fedcrf, ablation=fed",
    ]
    with pytest.raises(
        CrossfedError, match="None of these runs is the whole fedcrf, with ablation=none"
    ):
        analyses.ablation([runs[0], runs[3]], "ablation")
    with pytest.raises(
        CrossfedError, match="fedcrf has no setting 'ablations'; did you mean ablation"
    ):
        analyses.ablation(runs, "ablations")
    with pytest.raises(CrossfedError, match="nothing to set against the whole fedcrf"):
        analyses.ablation(runs[1:3], "ablation")
    other = load_runs([paths[0], make_run(tmp_path / "o", "fedcrf", 1, both(0.3), sets=("K=30",))])
    with pytest.raises(
        CrossfedError,
        match=r"differ in ablation alone; these are fedcrf "
        r"\(K=50\), fedcrf \(K=30\)",
    ):
        analyses.ablation(other, "ablation")


def test_forest_draws_relative_differences_with_their_intervals(tmp_path: Path) -> None:
    paths = [
        make_run(tmp_path / m, m, 0, both(mean))
        for m, mean in (("lightgcn", 0.3), ("fedcrf", 0.36))
    ]
    paths.append(make_run(tmp_path / "p", "p2p_iagr", 0, both(0.31, 7)))
    found = comparison(load_runs(paths), [RECALL])
    figure = analyses.forest(found, "Differences", "shops")
    assert figure is not None
    effect = next(e for e in found.effects if e.label == "p2p_iagr" and e.domain == "books")
    assert effect.users is not None
    base = both(0.3)["books"][RECALL].mean()
    segment, point = [line for line in figure.axes[0].lines if set(line.get_ydata()) == {-1}]
    assert list(segment.get_xdata()) == pytest.approx(
        [100 * effect.users.low / base, 100 * effect.users.high / base]
    )
    assert point.get_xdata()[0] == pytest.approx(100 * effect.difference / base)
    assert analyses.forest(comparison(load_runs(paths[:1])), "", "") is None


# -- maps ------------------------------------------------------------------------------------------


def test_not_a_number_is_drawn_nowhere(tmp_path: Path) -> None:
    """A cohort without users has no bar."""
    trained = {name: np.full(60, 3) for name in ("books", "toys")}
    run = make_run(tmp_path / "a", "lightgcn", 0, both(0.3), trained=trained)
    found = analyses.cohorts(load_runs([run]), RECALL)
    assert [math.isnan(bar.get_height()) for bar in found.figure.axes[0].patches] == [
        False,
        True,
        True,
    ]
