"""A study's figures, read back from the drawn objects; expected numbers worked out by hand."""

from __future__ import annotations

import csv
import io
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import optuna
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from crossfed.platform.errors import CrossfedError
from crossfed.tuning.report import tables
from crossfed.tuning.report.facts import StudyFacts
from crossfed.tuning.report.figures import (
    Scale,
    figures,
    optimisation_history,
    parallel_coordinates,
    pareto_front,
    rounds_run,
    save_figures,
    sensitivity,
    slices,
)
from made_studies import (
    DEPTH,
    FRONT,
    LR,
    K,
    add,
    new_study,
    printed,
    small,
    texts,
    two,
)


def lines(axis: Axes, gid: str) -> list[tuple[float, float]]:
    """The points of all lines with that mark."""
    found = [line for line in axis.lines if line.get_gid() == gid]
    return [
        (float(x), float(y))
        for line in found
        for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)
    ]


def test_categories_ascend_and_infinity_stands_last() -> None:
    scale = Scale([math.inf, 5, 0.1, 10.0], category=True)
    assert scale.ticks() == [(0.0, "0.1"), (1.0, "5"), (2.0, "10"), (3.0, "∞")]
    assert [scale.place(value) for value in (math.inf, 0.1)] == [3.0, 0.0]
    mixed = Scale(["xavier", None, 3, True, "normal"], category=True)
    assert [name for _, name in mixed.ticks()] == ["3", "None", "True", "normal", "xavier"]


def test_an_infinite_number_stands_past_a_gap() -> None:
    scale = Scale([1.0, 11.0, math.inf])
    assert scale.place(math.inf) == 13.0  # a fifth of the range further
    assert scale.ticks()[-1] == (13.0, "∞")
    axis = Figure().subplots()
    scale.dress(axis, "y")
    [gap] = [line for line in axis.lines if line.get_linestyle() == ":"]
    assert list(gap.get_ydata()) == [12.0, 12.0]


def test_logarithmic_places_and_ticks() -> None:
    scale = Scale([1e-4, 1e-1], log=True)
    assert scale.place(1e-2) == pytest.approx(-2)
    assert [name for _, name in scale.ticks()] == ["0.0001", "0.001", "0.01", "0.1"]
    assert [place for place, _ in scale.ticks()] == pytest.approx([-4, -3, -2, -1])
    assert [name for _, name in Scale([1.0, 20.0], log=True).ticks()] == ["1", "2", "5", "10", "20"]
    assert [name for _, name in Scale([3.0, 4.0], log=True).ticks()] == ["3", "4"]


def test_few_whole_numbers_stand_one_by_one_and_many_in_proportion() -> None:
    study = new_study()
    for depth in (4, 1, 2):
        add(
            study,
            "finished",
            0.1,
            {"depth": depth, "width": 2**depth},
            {"depth": DEPTH, "width": IntDistribution(1, 99)},
        )
    for width in range(20, 30):
        add(study, "finished", 0.1, {"width": width}, {"width": IntDistribution(1, 99)})
    facts = StudyFacts.of(study)
    assert Scale.of_param(facts, "depth").ticks() == [(0.0, "1"), (1.0, "2"), (2.0, "4")]
    assert Scale.of_param(facts, "width").place(16) == 16.0


def test_labels_that_do_not_fit_are_turned_and_lose_their_counts() -> None:
    few, many = (
        CategoricalDistribution(("a", "b")),
        CategoricalDistribution(tuple(f"a-long-choice-{i}" for i in range(8))),
    )
    study = new_study()
    for number in range(8):
        params = {"few": few.choices[number % 2], "many": many.choices[number]}
        add(study, "finished", 0.1, params, {"few": few, "many": many}, domains={"A": number / 8})
    shown = {name: sensitivity(study, name) for name in ("few", "many")}
    assert all(shown.values())
    labels = {
        name: figure.axes[0].get_xticklabels()
        for name, figure in shown.items()
        if figure is not None
    }
    assert [(label.get_text(), label.get_rotation()) for label in labels["few"]] == [
        ("a\nn=4", 0),
        ("b\nn=4", 0),
    ]
    assert {(label.get_text()[:6], label.get_rotation()) for label in labels["many"]} == {
        ("a-long", 30)
    }
    assert not any("n=" in label.get_text() for label in labels["many"])


@pytest.mark.parametrize("values", [[0.2], [0.2, 0.2], [0.0], [-3.0], [math.inf], []])
def test_a_scale_of_one_value_has_a_width(values: list[float]) -> None:
    scale = Scale(values)
    low, high = scale.limits
    assert low < high
    assert all(low < scale.place(value) < high for value in values)


def test_a_figure_says_what_it_is_about() -> None:
    for name, figure in figures(small()).items():
        assert "fedcgr · synthetic shops · ratio-80-10-10 · study first" in texts(figure), name
        assert "7 trials: 3 finished, 2 pruned, 1 failed, 1 killed" in texts(figure), name


def test_optimisation_history() -> None:
    [axis] = optimisation_history(small()).axes
    assert lines(axis, "paper") == [(0, 0.10)]
    assert lines(axis, "finished") == [(2, 0.30), (5, 0.20)]
    assert lines(axis, "pruned") == [(1, 0.90), (4, 0.05)]
    assert [x for x, _ in lines(axis, "failed")] == [3] and [
        x for x, _ in lines(axis, "killed")
    ] == [6]
    # the best of finished trials only: the stopped 0.90 does not lift it; it goes on to the last
    # trial
    assert lines(axis, "best") == [(0, 0.10), (2, 0.30), (5, 0.30), (6.5, 0.30)]
    assert axis.get_ylabel() == "Recall@20, mean of domains"


def test_the_best_so_far_falls_where_less_is_better() -> None:
    rows = [
        ("finished", 0.1, 4.0),
        ("finished", 0.1, 6.0),
        ("pruned", 0.1, 1.0),
        ("finished", 0.1, 2.0),
    ]
    axis = optimisation_history(two(rows)).axes[1]
    four, two_ = math.log10(4), math.log10(2)  # ε stands by its logarithm
    assert lines(axis, "best") == [(0, four), (1, four), (3, two_), (3.5, two_)]
    assert axis.get_ylabel() == "privacy budget ε"


def test_parallel_coordinates_tell_finished_from_pruned() -> None:
    study = small()
    figure = parallel_coordinates(study)
    assert figure is not None
    axis = figure.axes[0]
    drawn: list[Line2D] = [line for line in axis.lines if line.get_gid() in ("finished", "pruned")]
    assert [(line.get_gid(), line.get_linestyle()) for line in drawn] == [("pruned", "--")] * 2 + [
        ("finished", "-")
    ] * 3
    assert max(line.get_alpha() for line in drawn[:2]) < min(line.get_alpha() for line in drawn[2:])
    # darker is better: 0.30 has less light than 0.20, and that less than 0.10
    light = [sum(np.atleast_1d(line.get_color())[:3]) for line in drawn[2:]]
    assert light[1] < light[2] < light[0]
    assert [label.get_text() for label in axis.get_xticklabels()] == [
        "tau_a",
        "K",
        "Recall@20,\nmean of domains",
    ]
    # tau_a = ∞ is the highest of three places, K = 50 the middle one: 5/6 and 1/2 of the axis;
    # those beside it stand close
    best = drawn[3].get_ydata()
    assert float(best[0]) == pytest.approx(5 / 6) and float(best[1]) == pytest.approx(
        1 / 2, abs=0.02
    )
    assert "failed" not in {
        text.get_text() for legend in figure.legends for text in legend.get_texts()
    }


def test_a_parameter_that_only_some_trials_have() -> None:
    study = new_study()
    add(study, "finished", 0.1, {"K": 30, "lr": 0.01}, {"K": K, "lr": LR}, domains={"A": 0.1})
    add(study, "finished", 0.2, {"K": 50}, {"K": K}, domains={"A": 0.2})
    add(study, "finished", 0.3, {"K": 50, "lr": 0.001}, {"K": K, "lr": LR}, domains={"A": 0.3})
    figure = parallel_coordinates(study)
    assert figure is not None and "not used" in texts(figure)
    crossing = [
        float(line.get_ydata()[1]) for line in figure.axes[0].lines if line.get_gid() == "finished"
    ]
    assert crossing[1] < 0 < crossing[2] < crossing[0]
    sliced = slices(study, ["lr"])
    assert sliced is not None
    assert [x for x, _ in lines(sliced.axes[0], "finished")] == pytest.approx([-2, -3])
    rows = list(csv.DictReader(io.StringIO(tables.trials_table(study).csv())))
    assert [row["lr"] for row in rows] == ["0.001", "", "0.01"]
    assert (
        "| 1 | finished | 0.2000 | 0.2000 | 50 | – | 10 / 10 | 2 s |"
        in tables.trials_table(study).markdown()
    )


def test_slices_mark_the_paper_and_the_median_of_finished_trials() -> None:
    figure = slices(small())
    assert figure is not None
    tau, k = figure.axes
    assert [label.get_text() for label in tau.get_xticklabels()] == ["0.1", "1", "∞"]
    assert [round(x) for x, _ in lines(tau, "finished")] == [2, 1]
    assert [(round(x), y) for x, y in lines(tau, "paper")] == [(1, 0.10)]
    assert [(round(x), y) for x, y in lines(tau, "pruned")] == [(0, 0.90), (0, 0.05)]
    assert len({x for x, _ in lines(tau, "pruned")}) == 2  # side by side
    assert [y for _, y in lines(tau, "median")] == pytest.approx([0.15] * 2)  # of 0.10 and 0.20
    assert [y for _, y in lines(k, "median")] == pytest.approx([0.20] * 2)  # of 0.10 and 0.30
    with pytest.raises(
        CrossfedError, match="study first does not search beta; it searches tau_a, K"
    ):
        slices(small(), ["beta"])


def test_the_pareto_front_of_two_objectives() -> None:
    figure = pareto_front(two(FRONT))
    assert figure is not None
    [axis] = figure.axes
    one, four, eight, half = (math.log10(epsilon) for epsilon in (1, 4, 8, 0.5))
    assert sorted(lines(axis, "front")) == [(0.1, one), (0.3, four), (0.4, eight)]
    assert lines(axis, "pruned") == [(0.9, half)]
    (left, _), (_, top) = axis.get_xlim(), axis.get_ylim()
    # what a point dominates lies left of and above it: the border runs along from the left, up at
    # each point, to the top
    assert lines(axis, "staircase") == [
        (left, one), (0.1, one), (0.1, four), (0.3, four), (0.3, eight), (0.4, eight), (0.4, top)
    ]  # fmt: skip
    assert axis.get_xlabel() == "Recall@20 (higher is better)"
    assert axis.get_ylabel() == "privacy budget ε\n(lower is better)"
    assert "3 finished trials on the front" in texts(figure)
    assert {text.get_text(): text.xy for text in axis.texts} == dict(
        zip(("0", "1", "4"), sorted(lines(axis, "front")), strict=True)
    ), "every trial of the front has its number"


def test_epsilon_stands_by_its_logarithm_also_over_a_small_range() -> None:
    """1, 4 and 8: the step from 1 to 4 is twice as long as that from 4 to 8."""
    scale = Scale.of_objective(StudyFacts.of(two(FRONT)), 1)
    assert scale.log
    assert scale.place(4.0) - scale.place(1.0) == pytest.approx(
        2 * (scale.place(8.0) - scale.place(4.0))
    )
    assert not Scale.of_objective(StudyFacts.of(two(FRONT)), 0).log


def test_two_objectives_that_are_both_maximised() -> None:
    study = new_study(("recall_at_20", "worst"), ("maximize", "maximize"))
    for values in ((0.1, 0.3), (0.2, 0.2), (0.1, 0.1)):
        add(study, "finished", values)
    figure = pareto_front(study)
    assert figure is not None
    [axis] = figure.axes
    (left, _), (bottom, _) = axis.get_xlim(), axis.get_ylim()
    assert lines(axis, "staircase") == [
        (left, 0.3),
        (0.1, 0.3),
        (0.1, 0.2),
        (0.2, 0.2),
        (0.2, bottom),
    ]


def test_three_objectives_are_a_grid_of_pairs() -> None:
    study = new_study(("recall_at_20", "epsilon", "bytes"), ("maximize", "minimize", "minimize"))
    for values in ((0.1, 1.0, 2e6), (0.2, math.inf, 3e6), (0.05, 2.0, 1e6), (0.1, 2.0, 2e6)):
        add(study, "finished", values)
    figure = pareto_front(study)
    assert figure is not None
    assert [(a.get_xlabel(), a.get_ylabel()) for a in figure.axes] == [
        ("Recall@20 (higher is better)", "privacy budget ε\n(lower is better)"),
        ("Recall@20 (higher is better)", "bytes sent up\n(lower is better)"),
        ("privacy budget ε (lower is better)", "bytes sent up\n(lower is better)"),
    ]
    assert [len(lines(axis, "front")) for axis in figure.axes] == [3, 3, 3]
    figure.canvas.draw()
    assert "2 MB" in {label.get_text() for label in figure.axes[2].get_yticklabels()}
    assert pareto_front(small()) is None


def test_sensitivity_is_the_mean_over_finished_trials_per_domain() -> None:
    """tau_a = 1: trials 0 and 5, A has 0.08 and 0.10, so 0.09 ± √(2 · 0.01²) = 0.0141; tau_a = ∞:
    trial 2 alone.
    """
    figure = sensitivity(small(), "tau_a")
    assert figure is not None
    first, second = figure.axes
    assert (first.get_title(), second.get_title()) == ("A", "B")
    line, _, [segments] = first.containers[0].lines
    assert [label.get_text() for label in first.get_xticklabels()] == [
        "1\nn=2",
        "∞\nn=1",
    ]  # the pruned 0.1 is not there
    assert list(line.get_ydata()) == pytest.approx([0.09, 0.2])
    spread = 2**0.5 * 0.01
    assert segments.get_segments()[0][:, 1] == pytest.approx([0.09 - spread, 0.09 + spread])
    assert segments.get_segments()[1][:, 1] == pytest.approx([0.2, 0.2])
    assert list(second.containers[0].lines[0].get_ydata()) == pytest.approx([0.21, 0.4])
    assert {x for x, _ in lines(first, "paper value")} == {0.0} and lines(first, "paper") == [
        (0.0, 0.08)
    ]
    assert "the paper's value: 1" in texts(figure)
    for handle in figure.legends[0].legend_handles:
        assert handle.get_marker() not in ("", "None", None), (
            "every entry of the legend has its mark"
        )


def test_sensitivity_to_a_continuous_parameter_gathers_neighbours() -> None:
    study = new_study()
    for number in np.random.default_rng(0).permutation(15).tolist():
        lr = 10 ** (-4 + 0.2 * number)
        add(study, "finished", number, {"lr": lr}, {"lr": LR}, domains={"A": float(number)})
    figure = sensitivity(study, "lr")
    assert figure is not None
    line = figure.axes[0].containers[0].lines[0]
    # the middles of five groups of three
    assert list(line.get_ydata()) == pytest.approx([1, 4, 7, 10, 13])
    assert list(line.get_xdata()) == pytest.approx([-3.8, -3.2, -2.6, -2.0, -1.4])


def test_sensitivity_needs_two_values_and_domains() -> None:
    study = new_study()
    add(study, "finished", 0.1, {"K": 30}, {"K": K}, domains={"A": 0.1})
    add(study, "pruned", 0.2, {"K": 50}, {"K": K}, domains={"A": 0.2})
    assert sensitivity(study, "K") is None
    add(study, "finished", 0.2, {"K": 70}, {"K": K})
    assert sensitivity(study, "K") is None
    add(study, "finished", 0.2, {"K": 70}, {"K": K}, domains={"A": 0.2})
    assert sensitivity(study, "K") is not None


def test_rounds_run_beside_the_most() -> None:
    figure = rounds_run(small())
    assert figure is not None
    [axis] = figure.axes
    assert [patch.get_height() for patch in axis.containers[0]] == [10] * 7
    ran = {bars.patches[0].get_x() + 0.4: bars for bars in axis.containers[1:] if bars.patches}
    heights = {
        round(p.get_x() + p.get_width() / 2): p.get_height() for bars in ran.values() for p in bars
    }
    assert heights == {0: 10, 1: 3, 2: 10, 3: 4, 4: 3, 5: 10, 6: 0}
    assert "pruned trials ran 6 of at most 20 rounds" in texts(figure)


def test_files_have_stable_names(tmp_path: Path) -> None:
    names = ["optimisation_history", "parallel_coordinates", "importance", "rounds"]
    names += ["slice_tau_a", "slice_K", "sensitivity_tau_a", "sensitivity_K"]
    paths = save_figures(small(), tmp_path / "figures")
    assert paths == [tmp_path / "figures" / f"{name}.png" for name in names]
    for path in paths:
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size < 300_000
    assert "pareto_front" in figures(two(FRONT))


LONG = "a_parameter_with_quite_a_long_name_that_does_not_fit"


def edge(case: str) -> optuna.Study:
    study = new_study(name="a-study-with-a-long-name-" * 5)
    space = {"K": K, LONG: FloatDistribution(0, 1)}
    if case == "one trial":
        add(study, "finished", 0.1, {"K": 30, LONG: 0.5}, space, domains={"A": 0.1}, paper=True)
    if case == "all failed":
        for _ in range(3):
            add(
                study,
                "failed",
                None,
                {"K": 30, LONG: 0.5},
                space,
                reason="out of memory on a-domain " * 20,
            )
    if case == "none finished":
        for number in range(3):
            add(
                study,
                "pruned",
                0.1 * number,
                {"K": 30, LONG: 0.5},
                space,
                domains={"A": 0.1},
                paper=number == 0,
            )
    if case == "equal values":
        for number in range(10):
            add(
                study,
                "finished",
                0.1,
                {"K": (30, 50)[number % 2], LONG: number / 10},
                space,
                domains={"A": 0.1},
            )
    if case == "no parameter":
        for number in range(10):
            add(study, "finished", 0.1 * number, domains={"A": 0.1})
    if case == "waiting":
        study.enqueue_trial({"K": 50}, user_attrs={"paper": True})
    if case == "paper failed":
        add(study, "failed", None, {"K": 30, LONG: 0.5}, space, paper=True, reason="NaN")
        add(study, "finished", 0.1, {"K": 50, LONG: 0.4}, space, domains={"A": 0.1})
        add(study, "finished", 0.1, {"K": 70, LONG: 0.6}, space, domains={"A": 0.2})
    return study


EDGES = [
    "empty",
    "one trial",
    "all failed",
    "none finished",
    "equal values",
    "no parameter",
    "waiting",
    "paper failed",
]


@pytest.mark.parametrize("case", EDGES)
def test_nothing_breaks_at_the_edges(case: str, tmp_path: Path) -> None:
    study = edge(case)
    written = {path.stem for path in save_figures(study, tmp_path)}
    assert {"optimisation_history", "importance"} <= written
    scored = case not in ("empty", "all failed", "waiting")
    assert ("parallel_coordinates" in written) is scored
    shown = printed(tables.show(study), 80)
    assert "a-study-with-a-long-name" in shown
    if case not in ("one trial", "equal values", "no parameter", "paper failed", "empty"):
        assert "No trial finished: there is no best one." in shown
    if case == "paper failed":
        assert "The paper's setting, trial 0, is failed and has no value to compare with." in shown
    assert tables.markdown(study).startswith("# Study a-study")
    assert tables.trials_table(study).csv().startswith("trial,paper,status,recall_at_20")
    assert tables.Spent.of(study).validation == (
        0.9 if case == "no parameter" else 0.1 if scored and case != "none finished" else None
    )


def test_pyplot_is_not_imported() -> None:
    code = (
        "import sys, crossfed.tuning.report.figures; print({'matplotlib.pyplot', 'ray'} & "
        "set(sys.modules))"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
        == "set()\n"
    )
