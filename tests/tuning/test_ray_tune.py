"""When a trial is handed out: not while the one before still starts its processes."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.tune.search import Searcher

from crossfed.platform.config.settings import build
from crossfed.tuning import scheduler as desks
from crossfed.tuning.placement import Slots
from crossfed.tuning.ray_tune import SearcherAdapter
from crossfed.tuning.scheduler import TrialScheduler
from crossfed.tuning.study import Search, Study


@pytest.fixture
def desk(tmp_path: Path) -> TrialScheduler:
    base = build("toys:AVERAGE", values={"out": tmp_path, "tracking.enabled": False})
    search = Search(name="s", trials=3, changes={"step": {"low": 0.1, "high": 1.0}}, pruner="none")
    study = Study.create(search, base, "shops", "f1")
    parent: Any = SimpleNamespace(run_id=None, log=lambda *_: None)
    return TrialScheduler(study, Slots(({},), base, 2, 1.0, 0.0), parent, lambda _: None, None)


def begin(desk: TrialScheduler, number: int) -> None:
    """What a trial's run does once its nodes are up."""
    folder = desk.study.folder_of(number)
    folder.mkdir(exist_ok=True)
    (folder / "placement.json").write_text("{}")


def test_trials_start_one_after_the_other(desk: TrialScheduler) -> None:
    ask = SearcherAdapter(desk)
    assert ask.suggest("a")["number"] == 0
    assert ask.suggest("b") is None, "Tune asks again"
    begin(desk, 0)
    assert ask.suggest("b")["number"] == 1
    assert ask.suggest("c") is None


def test_a_trial_that_ended_before_its_nodes_were_up_holds_nobody(desk: TrialScheduler) -> None:
    ask = SearcherAdapter(desk)
    ask.suggest("a")
    trial: Any = SimpleNamespace(config={"number": 0})
    desk.lost(trial, "its process died")
    assert ask.suggest("b")["number"] == 1


def test_the_next_trial_waits_a_minute_at_most(
    desk: TrialScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask, now = SearcherAdapter(desk), [1000.0]
    monkeypatch.setattr(desks.time, "monotonic", lambda: now[0])
    ask.suggest("a")
    now[0] += 59
    assert ask.suggest("b") is None
    now[0] += 2
    assert ask.suggest("b")["number"] == 1


def test_what_an_interrupted_trial_left_does_not_count(desk: TrialScheduler) -> None:
    begin(desk, 0)
    file = desk.study.folder_of(0) / "placement.json"
    os.utime(file, (1, 1))
    ask = SearcherAdapter(desk)
    ask.suggest("a")
    assert ask.suggest("b") is None
    begin(desk, 0)
    assert ask.suggest("b")["number"] == 1


def test_a_search_that_is_stopped_hands_out_nothing_more(desk: TrialScheduler) -> None:
    ask = SearcherAdapter(desk)
    ask.suggest("a")
    desk.halt = "interrupted"
    assert ask.suggest("b") == Searcher.FINISHED
