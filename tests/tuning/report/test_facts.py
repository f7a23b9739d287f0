"""A study's facts and the importance of its parameters; numbers worked out by hand."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pytest
from optuna.distributions import CategoricalDistribution
from optuna.trial import TrialState, create_trial

from crossfed.tuning.report import tables
from crossfed.tuning.report.facts import StudyFacts, importance
from crossfed.tuning.report.figures import (
    figures,
    importances,
)
from made_studies import (
    DEPTH,
    FRONT,
    LR,
    TAU,
    K,
    add,
    new_study,
    printed,
    random_study,
    small,
    texts,
    two,
)


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
