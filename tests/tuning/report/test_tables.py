"""A study's facts, figures and tables. Figures are read back from the drawn objects, expected
numbers are worked out by hand.
"""

from __future__ import annotations

import csv
import io
import logging
import math
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState, create_trial
from rich.console import Console

from crossfed.platform.errors import CrossfedError
from crossfed.tuning.report import tables
from crossfed.tuning.report.facts import StudyFacts, importance
from crossfed.tuning.report.figures import (
    Scale,
    figures,
    importances,
    optimisation_history,
    parallel_coordinates,
    pareto_front,
    rounds_run,
    save_figures,
    sensitivity,
    slices,
)

TAU = CategoricalDistribution((0.1, 1.0, math.inf))
K = CategoricalDistribution((30, 50, 70))
LR = FloatDistribution(1e-4, 1e-1, log=True)
DEPTH = IntDistribution(1, 4)


@pytest.fixture(autouse=True)
def _strict(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Nothing may reach the user: no warning, no log line of Optuna's."""
    log = logging.getLogger("optuna")
    log.addHandler(caplog.handler)
    optuna.logging.set_verbosity(optuna.logging.INFO)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
    log.removeHandler(caplog.handler)
    assert not caplog.get_records("call")


def new_study(
    objectives: Sequence[str] = ("recall_at_20",),
    directions: Sequence[Any] = ("maximize",),
    storage: str | None = None,
    name: str = "first",
) -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(study_name=name, directions=directions, storage=storage)
    optuna.logging.set_verbosity(optuna.logging.INFO)
    told = {
        "method": "fedcgr",
        "data": "synthetic shops",
        "protocol": "ratio-80-10-10",
        "metric": "recall_at_20",
    }
    for key, value in {
        **told,
        "objectives": list(objectives),
        "directions": list(directions),
    }.items():
        study.set_user_attr(key, value)
    return study


def add(
    study: optuna.Study,
    status: str,
    values: float | Sequence[float] | None = None,
    params: Mapping[str, Any] | None = None,
    distributions: Mapping[str, Any] | None = None,
    **attributes: Any,
) -> None:
    """A trial as the search leaves it. A pruned one is COMPLETE in Optuna, as Ray's OptunaSearch
    tells it.
    """
    told = {"finished": {"rounds": 10}, "pruned": {"rounds": 3}}.get(status, {})
    user = {"status": status, "max_rounds": 10, **told, "seconds": 2.0, **attributes}
    vector = [float(values)] if isinstance(values, int | float) else values
    study.add_trial(
        create_trial(
            state=TrialState.FAIL if vector is None else TrialState.COMPLETE,
            values=vector,
            params=dict(params or {}),
            distributions=dict(distributions or {}),
            user_attrs=user,
        )
    )


def small() -> optuna.Study:
    """Finished 0.10 (paper), 0.30, 0.20; pruned with 0.90 and 0.05; one failed, one killed."""
    study = new_study()
    space = {"tau_a": TAU, "K": K}
    rows: list[tuple[str, float | None, float, int, dict[str, float]]] = [
        ("finished", 0.10, 1.0, 50, {"A": 0.08, "B": 0.12}),
        ("pruned", 0.90, 0.1, 30, {"A": 0.95, "B": 0.85}),
        ("finished", 0.30, math.inf, 50, {"A": 0.2, "B": 0.4}),
        ("failed", None, 0.1, 70, {}),
        ("pruned", 0.05, 0.1, 30, {"A": 0.05, "B": 0.05}),
        ("finished", 0.20, 1.0, 70, {"A": 0.1, "B": 0.3}),
        ("killed", None, 1.0, 30, {}),
    ]
    for number, (status, value, tau, k, domains) in enumerate(rows):
        told: dict[str, Any] = {
            "domains": domains,
            "run_id": f"run-{number}",
            "cpu_seconds": 4.0,
            "bytes_up": 100 * number,
        }
        if status == "failed":
            told |= {"reason": "loss | is NaN", "rounds": 4}
        add(study, status, value, {"tau_a": tau, "K": k}, space, paper=number == 0, **told)
    return study


def two(rows: Sequence[tuple[str, float, float]]) -> optuna.Study:
    """Quality up, ε down."""
    study = new_study(("recall_at_20", "epsilon"), ("maximize", "minimize"))
    for status, quality, epsilon in rows:
        add(study, status, (quality, epsilon), {"K": 50}, {"K": K}, epsilon=epsilon)
    return study


FRONT = [
    ("finished", 0.1, 1.0),
    ("finished", 0.3, 4.0),
    ("finished", 0.2, 4.0),
    ("pruned", 0.9, 0.5),
    ("finished", 0.4, 8.0),
]


def lines(axis: Axes, gid: str) -> list[tuple[float, float]]:
    """The points of all lines with that mark."""
    found = [line for line in axis.lines if line.get_gid() == gid]
    return [
        (float(x), float(y))
        for line in found
        for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)
    ]


def texts(figure: Figure) -> str:
    return "\n".join(
        t.get_text() for t in figure.findobj(lambda o: hasattr(o, "get_text")) if t.get_text()
    )


def printed(renderable: Any, width: int = 160) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(renderable)
    output = console.file
    assert isinstance(output, io.StringIO)
    return output.getvalue()


# -- facts -----------------------------------------------------------------------------------------


def test_a_stopped_trial_is_never_the_best_though_optuna_calls_it_complete() -> None:
    study = small()
    assert study.best_trial.number == 1  # Optuna's, which is the stopped one
    facts = StudyFacts.of(study)
    best = facts.best()
    assert best is not None and best.number == 2
    assert [trial.number for trial in facts.scored("pruned")] == [1, 4]
    assert facts.counts == "7 trials: 3 finished, 2 pruned, 1 failed, 1 killed"
    assert facts.spared == "pruned trials ran 6 of at most 20 rounds"


def test_the_earliest_of_equals_is_best_and_the_smallest_where_minimised() -> None:
    study = new_study(("bytes",), ("minimize",))
    for value in (5, 3, 3, 4):
        add(study, "finished", value)
    best = StudyFacts.of(study).best()
    assert best is not None and best.number == 1


def test_states_without_a_status() -> None:
    study = new_study()
    study.enqueue_trial({"K": 50}, user_attrs={"paper": True})
    study.add_trial(create_trial(state=TrialState.RUNNING, intermediate_values={1: 0.1, 4: 0.2}))
    study.add_trial(create_trial(state=TrialState.FAIL))
    study.add_trial(create_trial(state=TrialState.COMPLETE, value=1.0))
    facts = StudyFacts.of(study)
    assert [trial.status for trial in facts.trials] == ["waiting", "running", "failed", "unknown"]
    assert facts.trials[1].rounds == 4  # the last one it reported
    assert facts.best() is None and facts.trials[3].values is None
    assert "1 failed, 1 running, 1 waiting, 1 unknown" in printed(tables.show(study))


def test_pruned_in_optuna_s_own_way_has_the_value_it_last_reported() -> None:
    study = new_study()
    trial = study.ask()
    for step, value in ((1, 0.1), (2, 0.2)):
        trial.report(value, step)
    trial.set_user_attr("status", "pruned")
    study.tell(trial, state=TrialState.PRUNED)
    [facts] = StudyFacts.of(study).trials
    assert (facts.status, facts.values, facts.rounds) == ("pruned", (0.2,), 2)


def test_a_study_made_elsewhere_is_told_apart() -> None:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(study_name="other")
    with pytest.raises(
        CrossfedError,
        match="study other does not come from crossfed tune: it has no user attribute 'method'",
    ):
        tables.show(study)


def test_the_front_holds_finished_trials_that_nothing_dominates() -> None:
    """(0.2, 4) is dominated by (0.3, 4); (0.9, 0.5), which dominates all, was stopped early and is
    not there.
    """
    assert [trial.values for trial in StudyFacts.of(two(FRONT)).front()] == [
        (0.1, 1.0),
        (0.3, 4.0),
        (0.4, 8.0),
    ]


def test_a_storage_gives_back_what_was_put_in(tmp_path: Path) -> None:
    """Infinite values and choices, lists among them, through SQLite."""
    storage = f"sqlite:///{tmp_path / 'optuna.db'}"
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore")  # Optuna's, about choices that are lists
    study = new_study(("recall_at_20", "epsilon"), ("maximize", "minimize"), storage)
    widths = CategoricalDistribution(([64, 32], [128]))  # type: ignore[arg-type]
    for number in range(9):
        params = {
            "tau_a": (0.1, 1.0, math.inf)[number % 3],
            "widths": ([64, 32], [128])[number % 2],
        }
        add(
            study,
            "finished",
            (number / 10, math.inf),
            params,
            {"tau_a": TAU, "widths": widths},
            epsilon=math.inf,
        )
    study = optuna.load_study(study_name="first", storage=storage)
    warnings.simplefilter("error")
    assert StudyFacts.of(study).trials[2].params["tau_a"] == math.inf
    assert {"slice_tau_a", "slice_widths", "pareto_front", "importance"} <= set(figures(study))
    assert "--set tau_a=.inf --set widths=[64, 32]" in printed(tables.show(study))


# -- importance ------------------------------------------------------------------------------------


def random_study(
    trials: int, objective: Any, space: Mapping[str, Any], seed: int = 0, pruned: bool = False
) -> optuna.Study:
    study = new_study()
    rng = np.random.default_rng(seed)
    for number in range(trials):
        params: dict[str, Any] = {}
        for name, kind in space.items():
            if isinstance(kind, CategoricalDistribution):
                params[name] = kind.choices[rng.integers(len(kind.choices))]
            elif isinstance(kind, IntDistribution):
                params[name] = int(rng.integers(kind.low, kind.high + 1))
            else:
                params[name] = float(kind.low * (kind.high / kind.low) ** rng.random())
        add(
            study,
            "pruned" if pruned and number % 2 else "finished",
            objective(params),
            params,
            space,
        )
    return study


@pytest.mark.parametrize("pruned", [False, True])
def test_importance_finds_what_matters(pruned: bool) -> None:
    space = {"lr": LR, "K": K, "depth": DEPTH}
    study = random_study(
        40, lambda p: -abs(math.log10(p["lr"]) + 2) + 1e-4 * p["depth"], space, pruned=pruned
    )
    [found] = importance(StudyFacts.of(study))
    assert next(iter(found.shares)) == "lr" and found.shares["lr"] > 0.6
    assert sum(found.shares.values()) == pytest.approx(1)
    assert (found.note, found.trials) == ("", 40)
    [axis] = importances(study).axes
    assert [round(patch.get_width(), 6) for patch in axis.patches][::-1] == [
        round(s, 6) for s in found.shares.values()
    ]
    assert [label.get_text() for label in axis.get_yticklabels()][::-1] == list(found.shares)


def test_importance_is_given_per_objective_and_takes_its_direction() -> None:
    """K alone decides the first objective, tau_a alone the second; turned round, the best quarter
    is another one.
    """
    study = new_study(("recall_at_20", "bytes"), ("maximize", "minimize"))
    rng = np.random.default_rng(3)
    for _ in range(45):
        k, tau = int(rng.choice(K.choices)), float(rng.choice(TAU.choices))
        add(
            study,
            "finished",
            (k, {0.1: 1, 1.0: 2, math.inf: 3}[tau]),
            {"K": k, "tau_a": tau},
            {"K": K, "tau_a": TAU},
        )
    first, second = importance(StudyFacts.of(study))
    assert (first.objective, next(iter(first.shares))) == ("recall_at_20", "K")
    assert (second.objective, next(iter(second.shares))) == ("bytes", "tau_a")
    assert tables.importance_table(study).rows[0][0] == "K"


@pytest.mark.parametrize(
    ("trials", "objective", "space", "words"),
    [
        (7, lambda p: p["K"], {"K": K}, "too few trials: 7 came to a value, 8 are needed"),
        (9, lambda p: 1.0, {"K": K}, "all 9 trials have the same value"),
        (9, lambda p: np.random.default_rng(0).random(), {}, "all 9 trials have the same value"),
    ],
)
def test_where_importance_says_nothing_it_says_why(
    trials: int, objective: Any, space: Any, words: str
) -> None:
    study = random_study(trials, objective, space)
    [found] = importance(StudyFacts.of(study))
    assert (dict(found.shares), found.note) == ({}, words)
    assert words in texts(importances(study))
    assert tables.importance_table(study).markdown() == f"No importance: {words}.\n"
    assert f"No importance: {words}." in printed(tables.show(study))


def test_a_parameter_with_one_value_is_left_out_and_named() -> None:
    study = new_study()
    for number in range(12):
        add(
            study,
            "finished",
            number,
            {"K": 30 if number < 6 else 70, "tau_a": math.inf},
            {"K": K, "tau_a": TAU},
        )
    [found] = importance(StudyFacts.of(study))
    assert dict(found.shares) == {"K": 1.0}
    assert found.note == "left out, with one value only: tau_a"
    assert found.note in texts(importances(study))
    alone = new_study()
    for number in range(12):
        add(alone, "finished", number, {"K": 30}, {"K": K})
    assert importance(StudyFacts.of(alone))[0].note == "no parameter took more than one value"


# -- scales ----------------------------------------------------------------------------------------


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


# -- figures ---------------------------------------------------------------------------------------


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


# -- tables ----------------------------------------------------------------------------------------


def test_the_table_of_trials_keeps_stopped_ones_apart() -> None:
    table = tables.trials_table(small())
    # best first in each
    assert [[row[1] for row in group] for group in table.groups] == [[2, 5, 0], [1, 4], [3], [6]]
    assert [[row[3] for row in group] for group in table.groups][1] == ["pruned", "pruned"]
    assert table.best == {0}
    shown = table.markdown().splitlines()
    assert shown[0] == "| trial | status | recall_at_20 | A | B | tau_a | K | rounds | time |"
    assert shown[2] == (
        "| **2** | **finished** | **0.3000** | **0.2000** | **0.4000** | **∞** | **50** | **10 "
        "/ 10** | **2 s** |"
    )
    assert shown[4] == "| * 0 | finished | 0.1000 | 0.0800 | 0.1200 | 1 | 50 | 10 / 10 | 2 s |"
    assert shown[5] == "| 1 | pruned | 0.9000 | 0.9500 | 0.8500 | 0.1 | 30 | 3 / 10 | 2 s |"
    assert shown[7] == "| 3 | failed | – | – | – | 0.1 | 70 | 4 / 10 | 2 s |"
    assert "A pruned trial's values are those it was stopped with." in shown[-1]


def test_a_stopped_trial_without_a_value_comes_last_of_its_kind() -> None:
    study = new_study()
    for value in (None, -0.1, 0.1):
        add(study, "pruned", value)
    assert [row[1] for row in tables.trials_table(study).rows] == [2, 1, 0]


def test_csv_has_everything_unrounded() -> None:
    study = new_study()
    add(
        study,
        "finished",
        1 / 3,
        {"tau_a": math.inf},
        {"tau_a": TAU},
        domains={"A": 1 / 7},
        seconds=61.25,
        cpu_seconds=120.5,
        gpu_seconds=3.5,
        bytes_up=12345,
        epsilon=2.5,
        run_id="r",
        paper=True,
    )
    add(study, "failed", None, {"tau_a": 1.0}, {"tau_a": TAU}, reason="a, b")
    first, second = csv.DictReader(io.StringIO(tables.trials_table(study).csv()))
    assert first == {
        "trial": "0",
        "paper": "1",
        "status": "finished",
        "recall_at_20": str(1 / 3),
        "A recall_at_20": str(1 / 7),
        "tau_a": "inf",
        "rounds": "10",
        "max_rounds": "10",
        "seconds": "61.25",
        "cpu_seconds": "120.5",
        "gpu_seconds": "3.5",
        "bytes_up": "12345",
        "epsilon": "2.5",
        "run_id": "r",
        "reason": "",
    }
    assert (second["recall_at_20"], second["reason"], second["paper"]) == ("", "a, b", "0")


def test_the_best_is_set_against_the_paper_s_setting() -> None:
    """0.30 against 0.10 is 200 % more."""
    assert tables.best_lines(small()) == [
        "Best recall_at_20: 0.3000, trial 2 (recall_at_20: A 0.2000, B 0.4000)",
        "  --set tau_a=.inf --set K=50",
        "  The paper's setting: 0.1000, trial 0; the best is 200.0 % higher.",
        "  Stopped with more than that, and not counted: trial 1 (0.9000 after 3 rounds).",
    ]
    assert tables.reasons(small()) == [
        "Trial 3 failed: loss | is NaN",
        "Trial 6 killed: no reason was recorded",
    ]


def test_the_best_of_every_objective() -> None:
    study = new_study(("domain:A", "bytes"), ("maximize", "minimize"))
    add(
        study,
        "finished",
        (0.1, 4000.0),
        {"flag": True},
        {"flag": CategoricalDistribution((True, None))},
        paper=True,
    )
    add(
        study,
        "finished",
        (0.1, 1000.0),
        {"flag": None},
        {"flag": CategoricalDistribution((True, None))},
    )
    for cost in (10.0, 9000.0):
        add(
            study,
            "pruned",
            (0.2, cost),
            {"flag": None},
            {"flag": CategoricalDistribution((True, None))},
        )
    assert tables.best_lines(study) == [
        "Best domain:A: 0.1000, trial 0, the paper's setting",
        "  --set flag=true",
        "  Stopped with more than that, and not counted: trial 2 (0.2000 after 3 rounds), 3 "
        "(0.2000 after 3 rounds).",
        "Best bytes: 1 kB, trial 1",
        "  --set flag=null",
        "  The paper's setting: 4 kB, trial 0; the best is 75.0 % lower.",
    ]
    assert optimisation_history(study).axes[0].get_ylabel() == "Recall@20, A"
    table = tables.pareto_table(study)
    assert table is not None
    # as good as trial 0 for fewer bytes
    assert table.markdown().splitlines()[2:3] == ["| 1 | 0.1000 | 1 kB | None |"]
    assert tables.trials_table(study).best == {1}


def test_a_paper_setting_that_was_stopped_is_not_compared_with() -> None:
    study = new_study()
    add(study, "pruned", 0.1, paper=True)
    add(study, "finished", 0.2)
    assert tables.best_lines(study)[-1] == (
        "  The paper's setting: 0.1000, trial 0, stopped after 3 rounds, so not comparable."
    )


def test_the_pareto_table() -> None:
    table = tables.pareto_table(two([*FRONT, ("finished", 0.5, math.inf)]))
    assert table is not None
    assert [(row[2], row[3]) for row in table.rows] == [
        (0.1, 1.0),
        (0.3, 4.0),
        (0.4, 8.0),
        (0.5, math.inf),
    ]
    assert table.markdown().splitlines()[5] == "| 5 | 0.5000 | ∞ | 50 |"
    assert "better is: recall_at_20 higher, epsilon lower" in table.caption
    assert tables.pareto_table(small()) is None


def test_a_narrow_terminal_drops_columns_and_says_which() -> None:
    wide, narrow = (
        printed(tables.trials_table(small()), 120),
        printed(tables.trials_table(small()), 60),
    )
    assert "Left out" not in wide
    assert "Left out for want of width: A, B, time." in narrow.replace("\n", " ")
    assert all(len(line) <= 60 for line in narrow.splitlines())
    assert "│   * 0 │ finished │       0.1000 │     1 │ 50 │ 10 / 10 │" in narrow


def test_the_best_row_is_bold_in_a_terminal() -> None:
    console = Console(file=io.StringIO(), width=120, force_terminal=True, color_system="standard")
    with console.capture() as captured:
        console.print(tables.trials_table(small()))
    bold = [
        line for line in captured.get().splitlines() if "\x1b[1m" in line and "finished" in line
    ]
    assert len(bold) == 1 and "0.3000" in bold[0]


def test_names_cannot_break_a_markdown_table() -> None:
    study = new_study()
    add(study, "finished", 0.1, {"a|b": "x|\ny"}, {"a|b": CategoricalDistribution(("x|\ny", "z"))})
    rows = tables.trials_table(study).markdown().splitlines()
    assert "a\\|b" in rows[0] and "x\\| y" in rows[2]


def test_show_tells_all() -> None:
    shown = printed(tables.show(small()))
    assert "Study first: fedcgr" in shown and "objective  maximise recall_at_20" in shown
    assert "Trial 3 failed: loss | is NaN" in shown
    assert "No importance: too few trials: 5 came to a value, 8 are needed." in shown
    assert "Pareto" not in shown and "Pareto front" in printed(tables.show(two(FRONT)))
    written = tables.markdown(two(FRONT))
    assert [line for line in written.splitlines() if line.startswith("#")] == [
        "# Study first", "## Best", "## Trials", "## Pareto front", "## Importance"
    ]  # fmt: skip


def test_the_study_for_a_page() -> None:
    lines, grids = tables.told(small())
    assert lines[0].startswith("fedcgr on ") and "Trial 3 failed: loss | is NaN" in lines
    assert [grid.title for grid in grids] == ["Trials", "Importance"]
    assert grids[0].csv() == tables.trials_table(small()).csv()
    assert grids[0].markdown() == tables.trials_table(small()).markdown()
    assert [row[0].text for row in grids[0].rows if row[0].best] == ["2"]  # type: ignore[union-attr]
    assert len(tables.told(two(FRONT))[1]) == 3


def test_the_budget_table() -> None:
    """Mean of 0.1, 0.2, 0.3 is 0.2, deviation √((0.01 + 0 + 0.01) / 2) = 0.1; rounds 10 · 3 + 3 · 2
    + 4 = 40; 7 · 4 s CPU.
    """
    one = tables.Spent.of(small(), [0.1, 0.2, 0.3])
    other = tables.Spent(
        "lightgcn",
        "second",
        "synthetic shops",
        "ratio-80-10-10",
        "recall_at_20",
        {"finished": 7},
        70,
        None,
        7300.0,
        None,
    )
    table = tables.budget_table([one, other])
    shown = table.markdown().splitlines()
    assert shown[0] == (
        "| method | trials | finished | pruned | failed | killed | rounds | CPU time | GPU time "
        "| validation recall_at_20 | test recall_at_20 | seeds |"
    )
    assert shown[2].replace("*", "") == (
        "| fedcgr | 7 | 3 | 2 | 1 | 1 | 40 | 28 s | – | 0.3000 | 0.2000 ± 0.1000 | 3 |"
    )
    assert shown[3] == "| lightgcn | 7 | 7 | 0 | 0 | 0 | 70 | – | 2:01:40 | – | – | 0 |"
    assert "protocol ratio-80-10-10" in table.caption and "full budget" in table.caption
    [row, _] = csv.DictReader(io.StringIO(table.csv()))
    assert (row["cpu_seconds"], row["gpu_seconds"], row["seeds"]) == ("28.0", "", "3")
    assert (float(row["test_mean"]), float(row["test_std"])) == pytest.approx((0.2, 0.1))
    assert row["protocol"] == "ratio-80-10-10"


def test_one_seed_has_no_deviation() -> None:
    assert "| 0.2500 | 1 |" in tables.budget_table(
        [tables.Spent.of(small(), [0.25])]
    ).markdown().replace("*", "")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"protocol": "leave-one-out"},
            "differ in protocol .*: ratio-80-10-10 .first.; leave-one-out .other.",
        ),
        ({"data": "beauty"}, "differ in data"),
        ({"objective": "worst"}, "differ in objective"),
    ],
)
def test_budgets_that_do_not_compare_are_refused(change: dict[str, str], words: str) -> None:
    one = tables.Spent.of(small())
    told = {
        "method": "x",
        "study": "other",
        "data": one.data,
        "protocol": one.protocol,
        "objective": one.objective,
    } | change
    other = tables.Spent(
        **told, trials={}, rounds=0, cpu_seconds=None, gpu_seconds=None, validation=None
    )  # type: ignore[arg-type]
    with pytest.raises(CrossfedError, match=words):
        tables.budget_table([one, other])
    with pytest.raises(CrossfedError, match="No studies"):
        tables.budget_table([])


def test_pyplot_is_not_imported() -> None:
    code = (
        "import sys, crossfed.tuning.report.figures; print({'matplotlib.pyplot', 'ray'} & "
        "set(sys.modules))"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
        == "set()\n"
    )
