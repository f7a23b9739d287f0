"""The desk by itself: a real study, a real tracker switched off, and Tune's calls made by hand. No
Ray here.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import TrialState
from ray.tune.experiment import Trial

from crossfed.platform.config.settings import build
from crossfed.platform.tracking.tracker import Tracker
from crossfed.tuning.placement import slots
from crossfed.tuning.scheduler import TIME_IS_UP, Finals, TrialScheduler, final_name, setting_of
from crossfed.tuning.study import Search, Study
from crossfed.tuning.trial import STOPPED

SPACE = {"step": {"low": 0.1, "high": 1.0}, "dim": [2, 3, 4]}
MACHINE = {"Alive": True, "Resources": {"CPU": 4.0}}


def desk_of(
    out: Path, kind: type[TrialScheduler] = TrialScheduler, **search: Any
) -> tuple[TrialScheduler, list[str]]:
    """A desk over a new study, and the lines that it says."""
    values = {"out": out, "tracking.enabled": False, "backend": "inprocess"}
    base = build("toys:AVERAGE", values=values)
    given = {"name": "s", "trials": 3, "changes": SPACE, "pruner": "none", "sampler": "random"}
    study = Study.create(Search(**given | search), base, "shops", "f1")
    parent = Tracker.start(base.tracking, study.folder, "s", {}, {}, [])
    said: list[str] = []
    return kind(
        study, slots(base, ("books", "films"), 2, [MACHINE]), parent, said.append, None
    ), said


def trial_of(config: dict[str, Any]) -> Trial:
    """What Tune hands over with every call."""
    return Trial("toy", config=config, stub=True)


def facts(books: float, films: float, rounds: int = 4, **more: Any) -> str:
    told = {
        "domains": {"books": books, "films": films},
        "rounds": rounds,
        "bytes_up": 100,
        "seconds": 2.0,
    }
    return json.dumps(told | more)


def started(desk: TrialScheduler) -> Trial:
    task = desk.next()
    assert task is not None
    return trial_of(task)


def test_a_trial_is_the_base_run_with_the_searched_values(tmp_path: Path) -> None:
    desk, _ = desk_of(tmp_path, max_rounds=3)
    first, second = desk.next(), desk.next()
    assert first is not None and second is not None
    assert (first["number"], first["name"], first["cap"]) == (0, "trial-0000", 3)
    assert (first["cpus"], first["gpus"]) == (desk.slots.cpus, desk.slots.gpus) == (1.0, 0.0)
    run = second["run"]
    assert run.out == desk.study.folder
    asked = desk.study.optuna.trials[1].user_attrs["values"]
    assert {name: run.config[name] for name in ("step", "dim")} == asked
    rest = {name: value for name, value in run.config.items() if name not in asked}
    assert rest == {
        name: value for name, value in desk.slots.run.config.items() if name not in asked
    }
    assert run.tracking.params == ("step", "dim") and run.tracking.artifacts is False
    assert run.tracking.tags == {"study": "s", "role": "trial", "trial": "1"}


def test_no_more_trials_are_handed_out_than_asked_for_or_once_all_shall_stop(
    tmp_path: Path,
) -> None:
    desk, _ = desk_of(tmp_path, trials=2)
    assert [task["number"] for _ in range(2) if (task := desk.next())] == [0, 1]
    assert desk.next() is None
    desk, _ = desk_of(tmp_path, name="t")
    desk.halt = "interrupted"
    assert desk.next() is None and not desk.study.active


def test_a_finished_trial_is_told_with_its_value_and_the_best_so_far(tmp_path: Path) -> None:
    desk, said = desk_of(tmp_path)
    one, two = started(desk), started(desk)
    desk.close(one, {"over": True, "facts": facts(0.2, 0.4)})
    desk.close(two, {"over": True, "facts": facts(0.1, 0.2, restarts=2)})
    assert [t.values for t in desk.study.trials(TrialState.COMPLETE)] == [
        [pytest.approx(0.3)],
        [pytest.approx(0.15)],
    ]
    assert desk.study.trials()[0].user_attrs["run_id"] == "trial-0000"
    assert "trial 0  step=0.5 dim=3  finished after 4 rounds" in said[0]
    assert said[0].endswith("recall_at_20 0.3000  (best 0.3000, trial 0)")
    assert "2 restarts after a lost node" in said[1]
    assert said[1].endswith("recall_at_20 0.1500  (best 0.3000, trial 0)")
    # it is over: what comes later changes nothing
    desk.close(two, {"over": True, "facts": facts(0.9, 0.9)})
    assert len(said) == 2 and desk.study.trials()[1].values == [pytest.approx(0.15)]


def test_every_objective_is_told_under_its_name(tmp_path: Path) -> None:
    desk, said = desk_of(tmp_path, objectives=("worst", "domain:films", "bytes"))
    desk.close(started(desk), {"over": True, "facts": facts(0.25, 0.5)})
    assert "worst 0.2500  domain:films 0.5000  bytes 100" in said[0]


def test_a_trial_whose_objective_is_no_number_failed(tmp_path: Path) -> None:
    desk, said = desk_of(tmp_path)
    desk.close(started(desk), {"over": True, "facts": facts(float("nan"), 0.4)})
    assert desk.study.trials()[0].state == TrialState.FAIL
    assert said == ["trial 0  failed: the objective mean came to no number (nan)"]


def test_a_failure_is_recorded_once_with_its_reason(tmp_path: Path) -> None:
    desk, said = desk_of(tmp_path)
    one, two = started(desk), started(desk)
    desk.close(one, {"failed": "the data is gone"})
    desk.lost(two, "its process died")
    desk.lost(two, "its process died")
    assert said == ["trial 0  failed: the data is gone", "trial 1  failed: its process died"]
    assert [t.user_attrs["reason"] for t in desk.study.trials(TrialState.FAIL)] == [
        "the data is gone",
        "its process died",
    ]


def test_a_setting_that_the_method_refuses_is_a_failed_trial_and_the_next_is_asked(
    tmp_path: Path,
) -> None:
    desk, said = desk_of(tmp_path)
    run = desk.slots.run
    odd = run.model_copy(update={"config": run.config | {"K": "many"}})
    desk.slots = replace(desk.slots, run=odd)
    assert desk.next() is None
    assert [line.split("  failed: ")[0] for line in said] == ["trial 0", "trial 1", "trial 2"]
    assert "the setting is not possible" in said[0]
    assert [t.state for t in desk.study.trials()] == [TrialState.FAIL] * 3


def test_a_trial_below_the_median_is_stopped_after_its_round_and_told_as_pruned(
    tmp_path: Path,
) -> None:
    """Four trials at 0.5; the fifth has 0.1 and is stopped in round 2, the first that a grace of 2
    allows.
    """
    desk, said = desk_of(tmp_path, trials=6, pruner="median", grace=2)
    for _ in range(4):
        trial = started(desk)
        for step in (1, 2):
            assert not desk.judge(trial, {"step": step, "facts": facts(0.5, 0.5, step)})
        desk.close(trial, {"over": True, "facts": facts(0.5, 0.5)})
    bad = started(desk)
    folder = desk.study.folder_of(4)
    folder.mkdir()  # made by the trial itself when it begins
    stops = [desk.judge(bad, {"step": step, "facts": facts(0.1, 0.1, step)}) for step in (1, 2)]
    assert stops == [False, True]
    assert (folder / STOPPED).read_text() == "stopped by median after round 2"
    desk.close(bad, {})
    trial = desk.study.trials()[4]
    assert trial.state == TrialState.PRUNED
    assert (trial.user_attrs["rounds"], trial.user_attrs["run_id"]) == (2, "trial-0004")
    assert "pruned after 2 rounds" in said[-1] and "(best 0.5000, trial 0)" in said[-1]


def test_a_round_without_a_measurement_stops_nothing(tmp_path: Path) -> None:
    desk, _ = desk_of(tmp_path, pruner="median", grace=1)
    row = json.dumps({"domains": {}, "rounds": 1, "bytes_up": 0, "seconds": 1.0})
    assert not desk.judge(started(desk), {"step": 1, "facts": row})
    assert desk.study.trials()[0].intermediate_values == {}


def test_time_is_counted_against_the_budget_between_two_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk, _ = desk_of(tmp_path, time_budget=100.0)
    clock = iter([10.0, 14.0, 21.0])
    monkeypatch.setattr("crossfed.tuning.scheduler.time.monotonic", lambda: next(clock))
    desk.since = 8.0
    left = []
    for _ in range(3):
        desk.spend()
        left.append(desk.study.seconds_left())
    assert left == [98.0, 94.0, 87.0]


def test_what_runs_when_the_time_is_up_is_dropped_and_otherwise_goes_on_later(
    tmp_path: Path,
) -> None:
    desk, said = desk_of(tmp_path)
    started(desk)
    desk.halt = "interrupted"
    desk.stopped()
    assert desk.study.trials()[0].state == TrialState.RUNNING and said == []
    desk.halt = TIME_IS_UP
    desk.stopped()
    assert desk.study.trials()[0].state == TrialState.FAIL and said == [
        "trial 0  killed: time budget"
    ]


def test_books_that_cannot_be_kept_end_everything_and_the_first_problem_counts(
    tmp_path: Path,
) -> None:
    desk, _ = desk_of(tmp_path)
    first = OSError("disk full")
    for error in (first, OSError("again")):
        with desk.keeping():
            raise error
    assert desk.problem is first and desk.halt == "the study's records could not be written"
    desk.halt = "interrupted"
    with desk.keeping():
        raise OSError("later")
    assert desk.halt == "interrupted"


def test_final_runs_are_the_winner_once_per_seed(tmp_path: Path) -> None:
    desk, said = desk_of(tmp_path, Finals)
    assert isinstance(desk, Finals)
    desk.todo, desk.values = [3, 4], {"step": 0.9}
    tasks = [desk.next(), desk.next(), desk.next()]
    assert [
        None if task is None else (task["number"], task["name"], task["cap"]) for task in tasks
    ] == [
        (3, "final-seed-3", None),
        (4, "final-seed-4", None),
        None,
    ]
    run = tasks[1]["run"] if tasks[1] is not None else None
    assert run is not None and run.seed == 4 and run.config == desk.slots.run.config | {"step": 0.9}
    assert run.out == desk.study.folder and run.tracking.tags == {"study": "s", "role": "final"}
    trial = trial_of(tasks[0] or {})
    assert not desk.judge(trial, {"step": 1, "facts": facts(0, 0)})
    desk.close(
        trial, {"over": True, "facts": facts(0, 0, test={"books": 0.25, "films": 0.5}, restarts=1)}
    )
    assert said[0].startswith("final run, seed 3: test recall_at_20: books 0.2500, films 0.5000  (")
    assert said[0].endswith(", 1 restart after a lost node)")
    desk.close(trial, {"failed": "no room"})
    assert desk.problems == ["final run, seed 3: no room"] == said[1:]
    desk.stopped()
    desk.halt = "interrupted"
    desk.todo = [5]
    assert desk.next() is None and desk.todo == [5]


def test_settings_are_told_rounded() -> None:
    assert setting_of({"lr": 0.00123456, "K": 50, "how": "plain"}) == "lr=0.001235 K=50 how=plain"
    assert final_name(7) == "final-seed-7"
