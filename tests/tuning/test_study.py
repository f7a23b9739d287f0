"""A study's books: settings, the first trial, what survives a killed process, the stopping rules.
No Ray here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState
from pydantic import ValidationError

from crossfed.platform.config.settings import RunConfig, build
from crossfed.platform.errors import CrossfedError
from crossfed.tuning.study import (
    Search,
    Study,
    find_study,
    grace_rounds,
    idle,
    make_sampler,
    quality,
    total_rounds,
    unreached,
)

SPACE = {"step": {"low": 0.1, "high": 1.0}, "dim": [2, 3, 4]}
FACTS = {"domains": {"books": 0.2, "films": 0.4}, "rounds": 4, "bytes_up": 100}


def base(out: Path, method: str = "toys:AVERAGE", *sets: str) -> RunConfig:
    return build(method, sets=sets, values={"out": out, "tracking.enabled": False})


def make(
    out: Path, method: str = "toys:AVERAGE", sets: tuple[str, ...] = (), **search: Any
) -> Study:
    given = {"name": "s", "trials": 6, "changes": SPACE, "pruner": "none"} | search
    return Study.create(Search(**given), base(out, method, *sets), "shops", "f1")


def run_all(study: Study) -> list[dict[str, Any]]:
    """Ask for every trial and give it a value that grows with `step`."""
    asked = []
    while (task := study.next()) is not None:
        asked.append(task.values)
        value = task.values.get("step", 0.5)
        study.finish(task.number, FACTS | {"domains": {"books": value, "films": value}})
    return asked


def test_the_first_trial_is_the_papers_setting(tmp_path: Path) -> None:
    study = make(tmp_path, sets=("step=0.7",))
    first = study.next()
    assert first is not None and first.values == {"step": 0.7, "dim": 3}
    assert study.optuna.trials[0].user_attrs["paper"] is True
    second = study.next()
    assert (
        second is not None
        and second.number == 1
        and "paper" not in study.optuna.trials[1].user_attrs
    )


def test_a_first_value_is_added_to_choices_and_refused_outside_a_range(tmp_path: Path) -> None:
    study = make(tmp_path, changes={"dim": [2, 4]})
    task = study.next()
    assert task is not None and task.values == {"dim": 3}
    with pytest.raises(
        CrossfedError,
        match=r"step=0\.5, the value of the first trial, lies "
        r"outside 0\.6 to 1",
    ):
        make(tmp_path, name="t", changes={"step": {"low": 0.6, "high": 1.0}})


def test_of_equal_trials_the_earliest_wins(tmp_path: Path) -> None:
    """Values 0.1, 0.3, 0.3, 0.2: trial 1 wins, not trial 2, and still does when the study is read
    again.
    """
    study = make(tmp_path, trials=4)
    for value in (0.1, 0.3, 0.3, 0.2):
        task = study.next()
        assert task is not None
        study.finish(task.number, FACTS | {"domains": {"books": value, "films": value}})
    for read in (study, Study.open(study.folder)):
        best = read.best()
        assert best is not None and best.number == 1


@pytest.mark.parametrize("sampler", ["tpe", "cmaes", "nsgaii", "gp"])
def test_every_sampler_runs_and_draws_the_same_after_an_interruption(
    tmp_path: Path, sampler: str
) -> None:
    straight = run_all(make(tmp_path / "a", sampler=sampler, trials=7))
    assert len(straight) == 7
    study = make(tmp_path / "b", sampler=sampler, trials=7)
    halves = []
    for _ in range(4):
        task = study.next()
        assert task is not None
        halves.append(task.values)
        value = task.values["step"]
        study.finish(task.number, FACTS | {"domains": {"books": value, "films": value}})
    halves += run_all(Study.open(study.folder))
    assert halves == straight


def test_samplers_are_pinned() -> None:
    sampler = make_sampler(Search(name="s", trials=12, seed=3), number=5)
    assert isinstance(sampler, optuna.samplers.TPESampler)
    assert sampler._n_startup_trials == 4  # a third of 12
    assert (sampler._multivariate, sampler._group, sampler._constant_liar) == (True, True, True)


def test_a_grid_visits_every_point_once_and_ends(tmp_path: Path) -> None:
    changes = {"dim": [2, 3], "K": [1, 2, 3]}
    study = make(tmp_path, sampler="grid", trials=20, changes=changes)
    asked = [task.values for _ in range(2) if (task := study.next())]
    study.optuna.enqueue_trial({"dim": 2, "K": 2})  # what a process leaves that dies before it asks
    asked += run_all(study)
    assert asked[0] == {"dim": 3, "K": 2}
    assert sorted((point["dim"], point["K"]) for point in asked) == [
        (d, k) for d in (2, 3) for k in (1, 2, 3)
    ]
    with pytest.raises(
        CrossfedError,
        match=r"a grid needs values, but step is the range 0\.1 "
        r"to 1",
    ):
        make(tmp_path, name="t", sampler="grid")


def test_a_conditional_parameter_is_asked_for_where_it_is_active(tmp_path: Path) -> None:
    changes = {"dim": [2, 3, 4], "step": {"low": 0.1, "high": 1.0, "when": {"dim": [2, 4]}}}
    asked = run_all(make(tmp_path, trials=15, changes=changes, sampler="random"))
    assert asked[0] == {"dim": 3}
    assert {point["dim"] for point in asked} == {2, 3, 4}
    assert all(("step" in point) == (point["dim"] != 3) for point in asked)
    with pytest.raises(CrossfedError, match="depend on each other"):
        make(
            tmp_path,
            name="t",
            changes={
                "dim": {"values": [2], "when": {"K": [2]}},
                "K": {"values": [2], "when": {"dim": [2]}},
            },
        )


def test_an_interrupted_trial_keeps_its_number_and_values(tmp_path: Path) -> None:
    study = make(tmp_path)
    first, second = study.next(), study.next()
    assert first is not None and second is not None
    study.finish(first.number, FACTS)
    study.report(second.number, 1, 0.3)
    del study  # the process dies here

    again = Study.open(tmp_path / "s")
    assert again.left() == 5  # the one left running and four new ones
    task = again.next()
    assert task is not None
    assert (task.number, task.values, task.again) == (1, second.values, True)
    assert again.report(1, 1, 0.3) is False  # a round run again after a roll-back is no new report
    again.finish(1, FACTS)
    assert len(run_all(again)) == 4
    assert [trial.state for trial in again.optuna.trials] == [TrialState.COMPLETE] * 6
    assert [trial.number for trial in again.optuna.trials] == list(range(6))


def test_extending_adds_so_many_trials(tmp_path: Path) -> None:
    study = make(tmp_path, trials=3)
    run_all(study)
    again = Study.open(study.folder)
    assert again.next() is None
    again.extend(4)
    assert len(run_all(Study.open(study.folder))) == 4


def test_asha_stops_by_rounds_and_not_within_the_grace_period(tmp_path: Path) -> None:
    study = make(tmp_path, sets=("rounds=16",), pruner="asha", grace=4, reduction=2)
    assert study.next() is not None  # the paper's, which is never stopped
    good, bad, better = study.next(), study.next(), study.next()
    assert good is not None and bad is not None and better is not None
    assert [study.report(good.number, step, 0.5) for step in range(1, 17)] == [False] * 16
    assert [study.report(bad.number, step, 0.4) for step in range(1, 5)] == [
        False,
        False,
        False,
        True,
    ]
    assert [study.report(better.number, step, 0.6) for step in range(1, 9)] == [False] * 8
    study.finish(good.number, FACTS)
    study.prune(bad.number, FACTS)
    assert study.optuna.trials[bad.number].state == TrialState.PRUNED
    assert study.optuna.trials[bad.number].value == 0.4  # what the sampler learns from it
    best = study.best()
    assert best is not None and best.number == good.number


def test_the_papers_setting_is_never_stopped(tmp_path: Path) -> None:
    study = make(tmp_path, sets=("rounds=16",), pruner="asha", grace=1, reduction=2)
    paper, good, bad = study.next(), study.next(), study.next()
    assert paper is not None and good is not None and bad is not None
    assert study.report(good.number, 1, 0.5) is False
    assert [study.report(paper.number, step, 0.1) for step in range(1, 17)] == [False] * 16
    assert study.report(bad.number, 1, 0.05) is True


def test_the_median_rule_stops_what_lies_below_it(tmp_path: Path) -> None:
    study = make(tmp_path, sets=("rounds=6",), pruner="median", grace=2)
    for value in (0.5, 0.6, 0.7, 0.8):
        task = study.next()
        assert task is not None
        assert not any(study.report(task.number, step, value) for step in range(1, 7))
        study.finish(task.number, FACTS)
    task = study.next()
    assert task is not None
    assert [study.report(task.number, step, 0.1) for step in range(1, 4)] == [False, True, True]


def test_the_grace_period_covers_the_first_of_several_stages(tmp_path: Path) -> None:
    two, one = base(tmp_path, "toys:TWO_STAGES"), base(tmp_path, "toys:AVERAGE", "rounds=16")
    assert (total_rounds(two), grace_rounds(Search(name="s"), two)) == (16, 5)
    assert grace_rounds(Search(name="s", reduction=2), one) == 2
    # an eighth of a trial's rounds, not of a full run's
    assert grace_rounds(Search(name="s", max_rounds=8), one) == 1
    assert grace_rounds(Search(name="s", grace=7), two) == 7


def test_objectives() -> None:
    domains = {"books": 0.2, "films": 0.4}
    assert quality("mean", domains) == pytest.approx(0.3)
    assert quality("worst", domains) == 0.2
    assert quality("domain:films", domains) == 0.4


def test_several_objectives_are_told_in_order(tmp_path: Path) -> None:
    study = make(tmp_path, objectives=("worst", "bytes"), sampler="nsgaii")
    task = study.next()
    assert task is not None
    assert study.report(task.number, 1, 0.1) is False
    assert study.finish(task.number, FACTS) == [0.2, 100.0]
    assert study.optuna.directions == [
        optuna.study.StudyDirection.MAXIMIZE,
        optuna.study.StudyDirection.MINIMIZE,
    ]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"objectives": ("median",)}, "none of mean, worst"),
        ({"objectives": ("bytes",)}, "the first objective must be a quality"),
        ({"objectives": ("mean", "mean")}, "occurs twice"),
        ({"objectives": ("mean", "bytes"), "pruner": "asha"}, "use pruner none"),
        ({"objectives": ("mean", "bytes"), "sampler": "cmaes"}, "takes one objective"),
        *(
            ({"name": name}, "begins with a letter or digit")
            for name in ("../x", "a/b", "", "a b", ".a", "x" * 101, "語" * 70)
        ),
        ({"grace": 2}, "a grace period needs a pruner"),
        ({"pruner": "median", "reduction": 3}, "reduction belongs to the pruner asha"),
    ],
)
def test_wrong_settings_are_named(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        Search(**({"name": "s", "pruner": "none"} | given))


def test_a_study_is_made_once_and_found_by_name(tmp_path: Path) -> None:
    made = make(tmp_path)
    with pytest.raises(
        CrossfedError,
        match=r"There is a study s in .* already; crossfed tune "
        r"resume .*s goes on",
    ):
        make(tmp_path)
    assert find_study("s", tmp_path) == made.folder
    with pytest.raises(CrossfedError, match=r"no study 'z' in .*; known: s"):
        find_study("z", tmp_path)
    with pytest.raises(CrossfedError, match="declares nothing to search"):
        make(tmp_path, name="u", changes={})


def test_one_process_at_a_time(tmp_path: Path) -> None:
    study = make(tmp_path)
    with (
        study.locked(),
        pytest.raises(CrossfedError, match="is being run by another process"),
        study.locked(),
    ):
        pass


def test_a_grace_period_leaves_something_to_stop(tmp_path: Path) -> None:
    make(tmp_path, pruner="asha", grace=3)  # of 4 rounds
    with pytest.raises(
        CrossfedError,
        match="grace period of 4 rounds leaves nothing to stop: a trial has 4 at most",
    ):
        make(tmp_path, name="t", pruner="asha", grace=4)
    with pytest.raises(
        CrossfedError,
        match="grace period of 3 rounds leaves nothing to stop: a trial has 3 at most",
    ):
        make(tmp_path, name="t", pruner="median", grace=3, max_rounds=3)


def test_the_space_is_the_one_the_study_was_made_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {
        "step": {"low": 0.1, "high": 1.0, "when": {"dim": [2, 4]}},
        "patience": [None, 3],
        "dim": [2, 4],
    }
    made = make(tmp_path, changes=changes)
    # another version's
    monkeypatch.setattr("crossfed.tuning.space.declared_search", lambda method: {"K": [1, 2]})
    assert Study.open(made.folder).parameters == made.parameters


def test_a_trial_without_a_number_is_no_finished_one(tmp_path: Path) -> None:
    study = make(tmp_path, objectives=("mean", "epsilon"))
    task = study.next()
    assert task is not None
    nan = {"domains": {"books": float("nan"), "films": 0.1}, "epsilon": 1.0}
    for facts in (
        FACTS,
        FACTS | {"epsilon": float("inf")},
        FACTS | nan,
        FACTS | {"domains": {}, "epsilon": 1.0},
    ):
        with pytest.raises(CrossfedError, match=r"the objective (mean|epsilon) came to no number"):
            study.finish(task.number, facts)
    study.fail(task.number, "no number")
    assert study.optuna.trials[0].state == TrialState.FAIL


def test_a_trial_whose_end_cannot_be_written_stays_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = make(tmp_path)
    task = study.next()
    assert task is not None

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as context:
        context.setattr("optuna.Trial.set_user_attr", full)
        with pytest.raises(OSError, match="No space left"):
            study.finish(task.number, FACTS)
    assert task.number in study.active
    study.finish(task.number, FACTS)
    assert study.optuna.trials[0].state == TrialState.COMPLETE and not study.active


def test_the_time_budget_counts_over_processes_and_anew_for_more_trials(tmp_path: Path) -> None:
    study = make(tmp_path, trials=100, time_budget=60.0)
    first, second = study.next(), study.next()
    assert first is not None and second is not None
    study.finish(first.number, FACTS)
    study.spend(40.0)
    again = Study.open(study.folder)
    assert again.seconds_left() == pytest.approx(20.0)
    again.spend(25.0)
    # left running by the process before, asked for by none since
    again.drop(second.number, "time budget")
    assert again.optuna.trials[second.number].state == TrialState.FAIL
    assert again.optuna.trials[second.number].user_attrs["status"] == "killed"
    again.extend(4)
    assert (again.seconds_left(), again.search.trials, again.left()) == (60.0, 6, 4)
    assert make(tmp_path / "b").seconds_left() == float("inf")


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("study.yaml", None, "There is no study in"),
        ("study.yaml", "search:\n  name: s\n", r"study.yaml cannot be read \(it has no 'run'\)"),
        ("study.yaml", "", "study.yaml cannot be read"),
        (
            "study.yaml",
            "search: {name: s, trails: 3}",
            r"study.yaml: unknown key 'trails'; did "
            r"you mean trials",
        ),
        ("study.yaml", "a: [", "study.yaml cannot be read"),
        ("optuna.db", None, "optuna.db, which holds the study's trials, is missing"),
        ("optuna.db", "", "holds no study s"),
        ("optuna.db", "rubbish" * 100, "optuna.db cannot be used: .*not a database"),
    ],
)
def test_a_damaged_study_is_told_in_a_sentence(
    tmp_path: Path, file: str, content: str | None, words: str
) -> None:
    study = make(tmp_path)
    path = study.folder / file
    if content is None:
        path.unlink()
    else:
        path.write_text(content)
    with pytest.raises(CrossfedError, match=words) as caught:
        Study.open(study.folder)
    assert "\n" not in str(caught.value)
    assert content is not None or not path.exists()


def test_a_storage_is_found_from_elsewhere_and_its_password_is_not_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    study = make(tmp_path / "out", storage="sqlite:///own.db")
    monkeypatch.chdir(study.folder)
    assert Study.open(study.folder).left() == 6
    with pytest.raises(CrossfedError, match="holds a study s already"):
        make(tmp_path / "more", storage=f"sqlite:///{tmp_path / 'own.db'}")
    with pytest.raises(CrossfedError, match="names no file"):
        make(tmp_path / "more", storage="sqlite://")
    with pytest.raises(
        CrossfedError, match=r"storage nodb://\*\*\*@host/x cannot be used"
    ) as caught:
        make(tmp_path / "more", storage="nodb://me:secret@host/x")
    assert "secret" not in str(caught.value)


def test_a_setting_that_was_tried_is_not_run_again(tmp_path: Path) -> None:
    """Each takes the value of the first at once, and another is asked for: ten trials are ten
    settings.
    """
    study = make(
        tmp_path,
        sampler="tpe",
        trials=10,
        startup=1,
        changes={"dim": [1, 2, 3, 4], "K": [2, 3, 4, 5]},
    )
    asked = []
    while (task := study.next()) is not None:
        assert task.values not in asked
        asked.append(task.values)
        study.finish(task.number, FACTS | {"domains": {"books": task.values["dim"], "films": 0.0}})
    assert len(asked) == study.begun() == 10 and study.left() == 0
    assert study.repeats, "the seed is one under which the sampler asks for a setting twice"
    for number, same in study.repeats:
        again, first = study.optuna.trials[number], study.optuna.trials[same]
        assert again.values == first.values and again.params == first.params and same < number
        assert again.user_attrs["status"] == "repeated" and "rounds" not in again.user_attrs
    assert study.best() is not None and "repeats" not in study.best().user_attrs
    from crossfed.tuning.report.facts import StudyFacts

    assert len(StudyFacts.of(study.optuna).trials) == 10


def test_a_setting_that_still_runs_is_not_begun_beside_it(tmp_path: Path) -> None:
    study = make(tmp_path, sampler="random", trials=4, changes={"dim": [3, 4]})
    first, second = study.next(), study.next()
    assert first is not None and second is not None and first.values != second.values
    assert study.next() is None, "both settings are being run"


def test_a_space_of_few_settings_ends_the_study(tmp_path: Path) -> None:
    study = make(tmp_path, sampler="random", trials=9, changes={"dim": [2, 3, 4]})
    assert sorted(values["dim"] for values in run_all(study)) == [2, 3, 4]
    assert study.left() == 6 and Study.open(study.folder).next() is None


def test_what_is_perturbed_anew_each_time_is_run_again(tmp_path: Path) -> None:
    changes = {"dim": [2, 3]}
    study = make(tmp_path, "toys:WHISPER", sampler="random", trials=6, changes=changes)
    assert len(run_all(study)) == 6
    seeded = make(
        tmp_path, "toys:WHISPER", ("privacy.noise_seed=1",), name="t", trials=6, changes=changes
    )
    assert len(run_all(seeded)) == 2


def test_stages_that_no_trial_reaches_are_named_with_their_keys() -> None:
    """The first stage of fedcrf has 8 rounds; a key that both stages read, or that is marked with
    neither, matters.
    """
    from crossfed.tuning.space import space

    config = build("fedcrf")
    searched = space("fedcrf", {"tau": [0.1, 0.5], "lr": [0.001, 0.005]}, config.config)
    short, long = Search(name="s", max_rounds=4), Search(name="s", max_rounds=9)
    assert unreached(short, config, searched) == ("finetune",)
    assert idle(("finetune",), config, searched) == ("alpha", "tau")
    assert unreached(long, config, searched) == unreached(Search(name="s"), config, searched) == ()
    fed = build("fedcrf", sets=["ablation=fed"])
    assert unreached(Search(name="s"), fed, searched) == ("pretrain",)
    assert idle(("pretrain",), fed, searched) == ("K", "lambda_kd", "lambda_fa")
    both = space("fedcrf", {"ablation": ["none", "fed"]}, fed.config)
    assert unreached(Search(name="s"), fed, both) == ()
    # the cap ends no trial before something was measured, and the first stage of fedcgr measures
    # nothing
    assert unreached(Search(name="s", max_rounds=2), build("fedcgr"), {}) == ()
