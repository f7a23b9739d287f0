"""Analyses: what figures show is read back from the drawn objects and from the numbers written
beside them.
"""

from __future__ import annotations

import csv
import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from safetensors.numpy import save_file
from statsmodels.stats.weightstats import DescrStatsW

from crossfed.platform import checkpoint
from crossfed.platform.errors import CrossfedError
from crossfed.platform.evaluation.cohorts import wilson
from crossfed.platform.report import analyses, maps, sensitivity
from crossfed.platform.report import rounds as courses
from crossfed.platform.report.comparison import comparison
from crossfed.platform.report.finished import Finished, load_runs
from made_runs import make_run, users

RECALL = "recall_at_20"


def texts(figure: Figure) -> str:
    return "\n".join(
        t.get_text() for t in figure.findobj(lambda o: hasattr(o, "get_text")) if t.get_text()
    )


def records(found: analyses.Analysis) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(found.grid.csv())))


def row(
    stage: str,
    step: int,
    recall: float | None,
    up: int,
    seconds: float = 1.0,
    best: float | None = None,
    **told: float,
) -> dict[str, Any]:
    """A round after which `recall` was measured in both domains; `best` is that of its stage where
    it is not this one.
    """
    best = recall if best is None else best
    metrics = {f"val/{d}/{RECALL}": recall for d in ("books", "toys")} if recall is not None else {}
    return {
        "stage": stage,
        "round": step,
        "rounds": 9,
        "step": step,
        "metrics": metrics | told,
        "best": best,
        "domains": {} if best is None else dict.fromkeys(("books", "toys"), best),
        "bytes_up": up,
        "bytes_down": up,
        "seconds": seconds,
    }


def both(mean: float, seed: int = 0) -> dict[str, Any]:
    return {domain: {RECALL: users(seed + len(domain), mean)} for domain in ("books", "toys")}


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


# -- against a setting -----------------------------------------------------------------------------


@pytest.fixture
def varied(tmp_path: Path) -> list[Finished]:
    """FedCRF at K of 10, 40 and 400 (two seeds at 40), and LightGCN, which has no K."""
    asked = [
        ("fedcrf", 0, 400, 0.35),
        ("fedcrf", 0, 10, 0.2),
        ("fedcrf", 0, 40, 0.3),
        ("fedcrf", 1, 40, 0.4),
    ]
    paths = [
        make_run(tmp_path / f"{m}{s}{k}", m, s, both(mean, s), sets=(f"K={k}",))
        for m, s, k, mean in asked
    ]
    return load_runs([*paths, make_run(tmp_path / "l", "lightgcn", 0, both(0.25))])


def test_sensitivity(varied: list[Finished]) -> None:
    found = sensitivity.sensitivity(varied, "K", RECALL)
    shown = [r for r in records(found) if r["domain"] == "books"]
    assert [(r["method"], r["value"], r["seeds"]) for r in shown] == [
        ("fedcrf", "10", "1"), ("fedcrf", "40", "2"), ("fedcrf", "400", "1"), ("lightgcn", "", "1")
    ]  # fmt: skip
    at_40 = [both(mean, seed)["books"][RECALL].mean() for seed, mean in ((0, 0.3), (1, 0.4))]
    assert float(shown[1]["mean"]) == pytest.approx(np.mean(at_40))
    assert float(shown[1]["std"]) == pytest.approx(np.std(at_40, ddof=1)) and shown[0]["std"] == ""
    axis = found.figure.axes[0]
    line = axis.containers[0].lines[0]
    assert list(line.get_xdata()) == [10, 40, 400] and line.get_ydata()[1] == pytest.approx(
        np.mean(at_40)
    )
    assert axis.get_xscale() == "log" and axis.get_xlabel() == "K" and axis.get_title() == "books"
    level = [each for each in axis.lines if each.get_linestyle() == "--"]
    assert level[0].get_ydata()[0] == pytest.approx(both(0.25)["books"][RECALL].mean())


@pytest.mark.parametrize(("other", "least"), [(0.30003, 0.02), (0.9, 0.6)])
def test_a_small_difference_looks_small(other: float, least: float, tmp_path: Path) -> None:
    flat = {0.2: np.full(9, 0.3), 0.4: np.full(9, other)}
    runs = [
        make_run(
            tmp_path / str(alpha),
            "fedcrf",
            0,
            {"books": {RECALL: values}},
            sets=(f"alpha={alpha}",),
        )
        for alpha, values in flat.items()
    ]
    low, high = sensitivity.sensitivity(load_runs(runs), "alpha", RECALL).figure.axes[0].get_ylim()
    assert low < 0.3 < other < high and high - low >= least * (low + high) / 2 * 0.999
    assert high - low < 1.2 * max(least * (low + high) / 2, other - 0.3)


def test_a_row_with_one_value_of_what_every_run_has_is_a_point(tmp_path: Path) -> None:
    """A baseline that saw all of the data is no level beside a method that saw a fifth."""
    runs = [
        make_run(
            tmp_path / f"{m}{share}", m, 0, both(0.3), sets=(f"evaluation.train_share={share}",)
        )
        for m, share in (("fedcrf", 0.2), ("fedcrf", 1.0), ("lightgcn", 1.0))
    ]
    axis = sensitivity.sensitivity(load_runs(runs), "evaluation.train_share", RECALL).figure.axes[0]
    assert [list(bar.lines[0].get_xdata()) for bar in axis.containers] == [[0.2, 1.0], [1.0]]
    assert not [line for line in axis.lines if line.get_linestyle() == "--"]


def test_sensitivity_of_words(tmp_path: Path) -> None:
    """Values that are no numbers stand side by side in the order of the runs; other settings make
    lines of their own.
    """
    paths = [
        make_run(
            tmp_path / f"{e}{k}", "fedcrf", 0, both(0.3, k), sets=(f"text.encoder={e}", f"K={k}")
        )
        for k in (10, 20)
        for e in ("minilm", "hashing:64")
    ]
    found = sensitivity.sensitivity(load_runs(paths), "text.encoder", RECALL)
    assert found.name == "text.encoder-recall_at_20"
    assert {r["method"] for r in records(found)} == {"fedcrf (K=10)", "fedcrf (K=20)"}
    assert [label.get_text() for label in found.figure.axes[0].get_xticklabels()] == [
        "minilm",
        "hashing:64",
    ]
    line = found.figure.axes[0].containers[0].lines[0]
    assert list(line.get_xdata()) == [0, 1]


def test_runs_that_do_not_differ_in_the_setting_are_refused(varied: list[Finished]) -> None:
    with pytest.raises(
        CrossfedError, match="what alpha does: it is the same in all of them, which differ in K"
    ):
        sensitivity.sensitivity(varied[:4], "alpha", RECALL)
    with pytest.raises(CrossfedError, match="what nonsense does: none of them has it"):
        sensitivity.sensitivity(varied, "nonsense", RECALL)
    both_ways = [
        replace(run, settings=run.settings | {"alpha": 0.1 * i}) for i, run in enumerate(varied[:3])
    ]
    with pytest.raises(CrossfedError, match="differ in K alone, but in alpha as well"):
        sensitivity.sensitivity(both_ways, "K", RECALL)


def private(epsilon: float) -> dict[str, Any]:
    totals = {
        f"epsilon_{how}": epsilon * factor
        for how, factor in (("paper", 1), ("whole", 32), ("tight", 20))
    }
    return {"note": "", "domains": dict.fromkeys(("books", "toys"), totals)}


def test_utility_against_epsilon(tmp_path: Path) -> None:
    paths = [
        make_run(
            tmp_path / f"p{eps}{seed}",
            "p2p_iagr",
            seed,
            both(mean, seed),
            sets=(f"epsilon0={eps}",),
            privacy=private(30 * eps),
        )
        for eps, seed, mean in ((5.0, 0, 0.4), (0.1, 0, 0.2), (0.1, 1, 0.24))
    ]
    runs = load_runs([*paths, make_run(tmp_path / "l", "lightgcn", 0, both(0.25))])
    found = sensitivity.utility(runs, RECALL, "whole")
    shown = [
        (r["method"], r["epsilon_whole"], r["seeds"])
        for r in records(found)
        if r["domain"] == "toys"
    ]
    assert shown == [("p2p_iagr", "4800.0", "1"), ("p2p_iagr", "96.0", "2"), ("lightgcn", "", "1")]
    axis = found.figure.axes[0]
    line = axis.containers[0].lines[0]
    assert list(line.get_xdata()) == [96, 4800] and line.get_ydata()[0] < line.get_ydata()[1]
    assert axis.get_xscale() == "log" and "ε of the whole run" in axis.get_xlabel()
    assert float(records(sensitivity.utility(runs, RECALL, "paper"))[0]["epsilon_paper"]) == 150
    with pytest.raises(CrossfedError, match="None of these runs perturbs"):
        sensitivity.utility(runs[3:], RECALL)
    with pytest.raises(CrossfedError, match="counted as paper, whole, tight, not 'tigth'"):
        sensitivity.utility(runs, RECALL, "tigth")


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


# -- rounds ----------------------------------------------------------------------------------------


def test_upload_counts_bytes_up_to_a_target(tmp_path: Path) -> None:
    """The mean of domains decides; what a stage sends before its first evaluation counts; what
    would be selected is shown, which begins anew with a stage; a target counts as reached where no
    later stage falls below it."""
    rounds = [
        row("a", 1, None, 500),
        row("a", 2, 0.1, 500),
        row("a", 3, 0.3, 500),
        row("b", 4, 0.2, 0),
        row("b", 5, 0.4, 100),
        row("b", 6, 0.25, 0, best=0.4),
    ]
    run = make_run(tmp_path / "f", "fedcrf", 0, both(0.3), history=rounds)
    local = make_run(tmp_path / "l", "lightgcn", 0, both(0.3), history=[row("train", 1, 0.35, 0)])
    found = courses.upload(load_runs([run, local]), RECALL, target=0.25)
    shown = [
        (int(r["bytes_up"]), float(r["best"])) for r in records(found) if r["method"] == "fedcrf"
    ]
    assert shown == [(1000, 0.1), (1500, 0.3), (1500, 0.2), (1600, 0.4), (1600, 0.4)]
    assert [cells[1:] for cells in found.grid.rows] == [
        ("1", "0.4000", "1.6 kB", "1.6 kB"),
        ("1", "0.3500", "0 B", "0 B"),
    ]
    assert "lightgcn (sends nothing)" in texts(found.figure)
    assert found.figure.axes[0].get_xlim()[0] == 0
    missed = courses.upload(load_runs([run, local]), RECALL, target=0.36)
    assert [cells[4] for cells in missed.grid.rows] == ["1.6 kB", "0 of 1 seeds get there"]
    default = courses.upload(load_runs([run, local]), RECALL)
    assert default.grid.columns[4].name == f"bytes to {0.99 * 0.35:.4f}"
    with pytest.raises(CrossfedError, match="f evaluated no validation ndcg_at_20"):
        courses.upload(load_runs([run]), "ndcg_at_20")
    with pytest.raises(CrossfedError, match="n holds no record of its rounds"):
        courses.upload(load_runs([make_run(tmp_path / "n", "lightgcn", 0, both(0.3))]), RECALL)


def test_upload_shows_the_selected_state_in_other_metrics_too(tmp_path: Path) -> None:
    """Recall selects, each domain its own round (books 2, toys 1); nDCG is that of those rounds,
    not its own best.
    """
    ndcg = "ndcg_at_20"

    def measured(
        step: int, books: tuple[float, float], toys: tuple[float, float], held: tuple[float, float]
    ) -> Any:
        told = {f"val/{name}/{key}": value for name, pair in (("books", books), ("toys", toys))
                for key, value in zip((RECALL, ndcg), pair, strict=True)}  # fmt: skip
        domains = {"books": held[0], "toys": held[1]}
        return row("train", step, None, 0) | {
            "metrics": told,
            "best": sum(held) / 2,
            "domains": domains,
        }

    rounds = [
        measured(1, (0.1, 0.9), (0.3, 0.5), (0.1, 0.3)),
        measured(2, (0.2, 0.7), (0.2, 0.8), (0.2, 0.3)),
        measured(3, (0.3, 0.6), (0.3, 0.9), (0.3, 0.3)),  # toys ties: its earlier round stays
    ]
    run = load_runs([make_run(tmp_path / "l", "lightgcn", 0, both(0.3), history=rounds)])[0]
    assert courses._course(run, ndcg)[1] == pytest.approx(
        [(0.9 + 0.5) / 2, (0.7 + 0.5) / 2, (0.6 + 0.5) / 2]
    )
    assert courses._course(run, RECALL)[1] == pytest.approx([0.2, 0.25, 0.3])


def test_upload_of_a_stage_that_keeps_no_best_shows_its_last_state(tmp_path: Path) -> None:
    run_dir = make_run(
        tmp_path / "l",
        "lightgcn",
        0,
        both(0.3),
        history=[row("t", 1, 0.3, 0), row("t", 2, 0.2, 0, best=0.3)],
    )
    result = json.loads((run_dir / "result.json").read_text())
    for told in result["domains"].values():
        told["selected"] = {"rounds": 2}
    (run_dir / "result.json").write_text(json.dumps(result))
    assert courses._course(load_runs([run_dir])[0], RECALL)[1] == [0.3, 0.2]


def test_time_per_round_and_epoch(tmp_path: Path) -> None:
    """FedCGR's stage without exchange has an epoch a round, its federated one `local_epochs`."""
    rounds = [
        row("cf", 1, None, 0, 3.0),
        *(row("federate", s, 0.3, 9, t) for s, t in ((2, 8.0), (3, 10.0), (4, 30.0))),
    ]
    run = make_run(tmp_path / "f", "fedcgr", 0, both(0.3), sets=("local_epochs=2",), history=rounds)
    found = courses.time(load_runs([run]))
    assert [
        (r["stage"], r["epochs_per_round"], float(r["seconds_per_epoch"])) for r in records(found)
    ] == [("cf", "1", 3.0), ("federate", "2", 5.0)]
    federated = records(found)[1]
    assert (float(federated["seconds_per_round"]), float(federated["upper_quartile"])) == (
        10.0,
        20.0,
    )
    assert (federated["threads"], federated["devices"], federated["rounds"]) == ("1", "cpu", "3.0")
    assert (float(federated["bytes_up_per_round"]), federated["peak_memory"]) == (9.0, "")
    assert "local epoch" in texts(found.figure)
    local = make_run(
        tmp_path / "l", "lightgcn", 0, both(0.3), history=[row("train", 1, 0.3, 0, 2.0)]
    )
    # a round is an epoch: one bar
    assert len(courses.time(load_runs([local])).figure.axes[0].patches) == 1


def test_the_most_memory_is_that_of_the_largest_domain(tmp_path: Path) -> None:
    def peak(**memory: tuple[int, int | None]) -> tuple[str, str]:
        told = {name: {"process": process, "gpu": gpu} for name, (process, gpu) in memory.items()}
        history = [row("train", 1, 0.3, 9, 2.0)]
        run = make_run(
            tmp_path / str(len(list(tmp_path.iterdir()))),
            "fedcgr",
            0,
            both(0.3),
            history=history,
            memory=told,
        )
        found = courses.time(load_runs([run]))
        return records(found)[0]["peak_memory"], found.grid.rows[0][-2]

    assert peak(books=(3000, None), films=(5000, None), server=(9000, None)) == ("5000", "5 kB")
    # on GPUs that is what runs out
    assert peak(books=(3000, 700), films=(5000, 600)) == ("700", "700 B")


def test_weights_round_by_round(tmp_path: Path) -> None:
    def told(step: int, own: float) -> dict[str, float]:
        pairs = {
            ("books", "books"): own,
            ("books", "toys"): 1 - own,
            ("toys", "books"): 0.3,
            ("toys", "toys"): 0.7,
        }
        return {f"train/server/weight_{i}_{j}": value for (i, j), value in pairs.items()} | {
            "train/server/weight_decay": 9.0
        }

    rounds = [
        row("cf", 1, None, 0),
        row("federate", 2, 0.1, 9, **told(2, 0.6)),
        row("federate", 3, 0.2, 9, **told(3, 0.9)),
    ]
    run = make_run(tmp_path / "f", "fedcgr", 0, both(0.3), history=rounds)
    found = courses.weights(load_runs([run])[0])
    by = {(r["round"], r["receiver"], r["sender"]): float(r["weight"]) for r in records(found)}
    assert (
        by["2", "books", "toys"] == pytest.approx(0.4)
        and by["3", "toys", "books"] == 0.3
        and len(by) == 8
    )
    books, toys, last = (axis.images[0].get_array() for axis in found.figure.axes[:3])
    np.testing.assert_allclose(books, [[0.6, 0.9], [0.4, 0.1]])  # senders down, rounds across
    np.testing.assert_allclose(toys, [[0.3, 0.3], [0.7, 0.7]])
    np.testing.assert_allclose(last, [[0.9, 0.1], [0.3, 0.7]])  # receivers down, senders across


def test_weights_that_are_the_same_for_all(tmp_path: Path) -> None:
    told = {"train/server/weight_books": 0.8, "train/server/weight_toys": 0.2}
    run = make_run(
        tmp_path / "f", "fedsasrec", 0, both(0.3), history=[row("federate", 1, 0.1, 9, **told)]
    )
    last = courses.weights(load_runs([run])[0]).figure.axes[2].images[0].get_array()
    np.testing.assert_allclose(last, [[0.8, 0.2], [0.8, 0.2]])
    silent = make_run(tmp_path / "l", "lightgcn", 0, both(0.3), history=[row("train", 1, 0.1, 0)])
    with pytest.raises(CrossfedError, match="l reports no aggregation weights"):
        courses.weights(load_runs([silent])[0])


# -- maps ------------------------------------------------------------------------------------------


@pytest.fixture
def mapped(tmp_path: Path) -> Finished:
    """Two clusters of items in each domain, of 100 items, exported and last committed; their
    centres at the server.
    """
    rng = np.random.default_rng(0)
    centres = np.array([[40.0] + [0.0] * 7, [-40.0] + [0.0] * 7], np.float32)
    run = make_run(tmp_path / "f", "fedcrf", 0, both(0.3))
    (run / "model").mkdir()
    old, new = (run / "checkpoints" / f"commit-00000{number}" for number in (1, 2))
    new.mkdir(parents=True)
    old.mkdir()
    for name in ("books", "toys"):
        items = np.concatenate([c + rng.normal(size=(50, 8)) for c in centres]).astype(np.float32)
        save_file(
            {"items": items, "users": np.zeros((60, 8), np.float32)},
            run / "model" / f"{name}.safetensors",
        )
        checkpoint.save(
            new / name,
            {"model": {"t": items[:, :3].copy(), "w": np.eye(8, dtype=np.float32)}, "step": 3},
        )
    checkpoint.save(new / "server", {"centres": centres})
    return load_runs([run])[0]


def test_item_map_keeps_clusters_apart_and_centres_with_theirs(mapped: Finished) -> None:
    found = maps.item_map(mapped, centres="centres", per_domain=40)
    together, books, _ = found.figure.axes
    items_a, items_b, stars = (np.asarray(c.get_offsets()) for c in together.collections)
    assert (len(items_a), len(items_b), len(stars)) == (40, 40, 2) and len(books.collections) == 2
    points = np.concatenate([items_a, items_b])
    nearest = np.linalg.norm(points[:, None] - stars[None], axis=2).argmin(axis=1)
    drawn = [
        int(r["row"])
        for r in records(found)
        if r["map"] == "all domains" and r["domain"] != "centre"
    ]
    assert len(set(zip(nearest.tolist(), (np.array(drawn) < 50).tolist(), strict=True))) == 2
    assert "books (40 of 100 items)" in texts(found.figure) and "2 centres" in texts(found.figure)


def test_item_map_of_several_vectors(mapped: Finished) -> None:
    """Before and after: a row each; centres only where their width is that of the vectors."""
    found = maps.item_map(mapped, ("model.t", "items"), "centres", per_domain=20)
    assert [axis.get_title() for axis in found.figure.axes] == [
        "model.t: all domains",
        "model.t: books",
        "model.t: toys",
        "items: all domains",
        "items: books",
        "items: toys",
    ]
    assert [len(axis.collections) for axis in found.figure.axes] == [2, 1, 1, 3, 2, 2]
    assert found.grid.rows[0] == ("model.t", "3", "100 items", "100 items")


def test_what_no_map_can_show_is_told(mapped: Finished) -> None:
    with pytest.raises(
        CrossfedError,
        match=r"no item vectors 'users' in all domains; it has "
        r"model.t, items, text",
    ):
        maps.item_map(mapped, ("users",))
    with pytest.raises(CrossfedError, match="no centres 'middle'; it has centres"):
        maps.item_map(mapped, centres="middle")
    with pytest.raises(CrossfedError, match="by tsne or umap, not 'pca'"):
        maps.item_map(mapped, layout="pca")


def test_prototypes(mapped: Finished) -> None:
    """Three prototypes, two of which are opposite: |cos| of 1, 0 and 0."""
    with pytest.raises(CrossfedError, match="f exported no prototypes"):
        maps.prototypes(mapped)
    table = np.array([[2.0, 0.0], [-1.0, 0.0], [0.0, 3.0]], np.float32)
    for name in ("books", "toys"):
        save_file({"user_prototypes": table}, mapped.path / "model" / f"{name}.safetensors")
    [found] = maps.prototypes(mapped)
    assert (found.name, found.grid.rows[0]) == (
        "user_prototypes",
        ("books", "3", "2", "0.333", "1.000"),
    )
    by = {(r["domain"], r["prototype"], r["other"]): float(r["cosine"]) for r in records(found)}
    assert by["toys", "0", "1"] == -1 and by["toys", "0", "2"] == 0 and len(by) == 18


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
