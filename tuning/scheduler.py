"""Where Tune's calls arrive: trials are handed out, their rounds judged, and the study's books
kept.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from optuna.trial import TrialState
from pydantic import ValidationError
from ray.tune.experiment import Trial

from crossfed.platform.config import settings
from crossfed.platform.config.settings import RunConfig
from crossfed.platform.console import number, span
from crossfed.platform.errors import CrossfedError
from crossfed.platform.layout import PLACEMENT
from crossfed.platform.tracking import tracker
from crossfed.platform.tracking.tracker import Tracker
from crossfed.tuning.placement import Slots
from crossfed.tuning.study import QUALITY, Study, Task, quality
from crossfed.tuning.trial import STOPPED

TIME_IS_UP = "time budget"
STAGGER = 60.0
"""Seconds that one trial has to start its processes before the next one does."""


@dataclass(slots=True)
class TrialScheduler:
    """Where Tune's calls arrive: hands out trials, judges rounds, closes the books.

    Attributes:
        halt: why everything shall stop, once it shall.
        latest: number -> the facts last reported.
        problem: why the books can no longer be kept, once they cannot.
        beginning: of the trial handed out last: its number, the file that is written once its nodes
            are up, when that was written before, and when it was handed out.
    """

    study: Study
    slots: Slots
    parent: Tracker
    say: Callable[[str], None]
    uri: str | None
    halt: str | None = None
    latest: dict[int, dict[str, Any]] = field(default_factory=dict)
    pruned: set[int] = field(default_factory=set)
    deadline: float | None = None
    since: float = 0.0
    problem: Exception | None = None
    beginning: tuple[int, Path, int, float] | None = None

    @contextlib.contextmanager
    def keeping(self) -> Iterator[None]:
        """End everything where the books cannot be kept. Tune would take it for a trial's failure,
        or die of it.
        """
        try:
            yield
        except Exception as error:  # raised again once all has stopped
            self.problem = self.problem or error
            self.halt = self.halt or "the study's records could not be written"

    def busy(self) -> bool:
        """Whether the trial handed out last is still starting its processes, which another would
        slow down.
        """
        if self.beginning is None:
            return False
        _, file, before, since = self.beginning
        if _written(file) != before or time.monotonic() - since > STAGGER:
            self.beginning = None
        return self.beginning is not None

    def _begun(self, index: int) -> None:
        """A trial was heard of."""
        if self.beginning is not None and self.beginning[0] == index:
            self.beginning = None

    def next(self) -> dict[str, Any] | None:
        """The next trial's Tune configuration."""
        while self.halt is None and (task := self._next()) is not None:
            base = self.slots.run
            values = {**base.config, **task.values}
            try:
                checked = base.resolved.Config.model_validate(values).model_dump(mode="json")
            except ValidationError as error:
                self._failed(
                    task.number, f"the setting is not possible: {error.errors()[0]['msg']}"
                )
                continue
            if task.again:
                self.say(f"trial {task.number} goes on from its last committed round")
            folder = self.study.folder_of(task.number)
            settings = base.tracking.model_copy(
                update={
                    "uri": self.uri,
                    "parent_run_id": self.parent.run_id,
                    "params": tuple(task.values),
                    "tags": base.tracking.tags
                    | self._tags()
                    | {"role": "trial", "trial": str(task.number)},
                    "artifacts": False,
                }
            )
            run = base.model_copy(
                update={"config": checked, "out": folder.parent, "tracking": settings}
            )
            return self._task(task.number, run, folder.name, self.study.search.max_rounds)
        return None

    def _next(self) -> Task | None:
        """The study's next trial, after a line for every one that it had not to run."""
        task = self.study.next()
        for index, same in self.study.repeats:
            self.say(
                f"trial {index}  has the setting of trial {same}: not run again, another is asked"
            )
        self.study.repeats.clear()
        return task

    def _tags(self) -> dict[str, str]:
        return {"study": self.study.search.name}

    def _task(self, number: int, run: RunConfig, name: str, cap: int | None) -> dict[str, Any]:
        file = run.out / name / PLACEMENT
        self.beginning = (number, file, _written(file), time.monotonic())
        return {
            "number": number,
            "run": run,
            "name": name,
            "cap": cap,
            "cpus": self.slots.cpus,
            "gpus": self.slots.gpus,
        }

    def judge(self, trial: Trial, result: Mapping[str, Any]) -> bool:
        """Whether a trial stops after the round it reports."""
        index, facts = trial.config["number"], json.loads(result["facts"])
        self._begun(index)
        self.latest[index] = facts
        value = (
            quality(self.study.search.objectives[0], facts["domains"]) if facts["domains"] else None
        )
        if not self.study.report(index, result["step"], value):
            return False
        why = f"stopped by {self.study.search.pruner} after round {result['step']}"
        (self.study.folder_of(index) / STOPPED).write_text(why, encoding="utf-8")
        self.pruned.add(index)
        return True

    def close(self, trial: Trial, result: Mapping[str, Any]) -> None:
        """A trial is over, or was stopped."""
        index = trial.config["number"]
        self._begun(index)
        if index not in self.study.active:
            return
        self.spend()
        if result.get("failed"):
            self._failed(index, str(result["failed"]))
        elif index in self.pruned:
            facts = self.latest[index]
            self.study.prune(index, {**facts, "run_id": self._run_id(index)})
            self._tell(index, trial, "pruned", facts)
        elif result.get("over"):
            facts = json.loads(result["facts"])
            try:
                self.study.finish(index, {**facts, "run_id": self._run_id(index)})
            except CrossfedError as error:
                self._failed(index, str(error))
                return
            self._tell(index, trial, "finished", facts)
            best = self.study.best()
            if best is not None:
                self.parent.log(
                    {"best_value": best.values[0]},
                    sum(t.state.is_finished() for t in self.study.trials()),
                )

    def spend(self) -> None:
        """Count the time since the last call against the study's budget."""
        now = time.monotonic()
        self.study.spend(now - self.since)
        self.since = now

    def lost(self, trial: Trial, reason: str) -> None:
        """A trial failed for good: its process died more often than it may."""
        self._begun(trial.config["number"])
        self._failed(trial.config["number"], reason)

    def _failed(self, index: int, reason: str) -> None:
        if index in self.study.active:
            tracker.close(self._settings(), self.study.folder_of(index), "FAILED", reason, "failed")
            self.study.fail(index, reason)
            self.say(f"trial {index}  failed: {reason}")

    def _settings(self) -> settings.TrackingSettings:
        return self.study.base.tracking.model_copy(update={"uri": self.uri})

    def _run_id(self, index: int) -> str:
        return self.study.folder_of(index).name

    def _tell(self, index: int, trial: Trial, outcome: str, facts: Mapping[str, Any]) -> None:
        objectives = self.study.search.objectives
        metric = self.study.base.evaluation.select
        best = self.study.best()
        values = "  ".join(
            f"{metric if name == 'mean' else name} {number(quality(name, facts['domains']))}"
            if name in QUALITY or name.startswith("domain:")
            else f"{name} {facts.get('bytes_up' if name == 'bytes' else name)}"
            for name in objectives
        )
        setting = setting_of(
            {key: trial.config["run"].config[key] for key in self.study.parameters}
        )
        held = "" if best is None else f"  (best {number(best.values[0])}, trial {best.number})"
        self.say(
            f"trial {index}  {setting}  {outcome} after {facts['rounds']} rounds, "
            f"{span(facts['seconds'])}{_lost(facts)}: "
            f"{values}{held}"
        )

    def stopped(self) -> None:
        """Everything was stopped: mark what was still running, here or when an earlier process
        ended.
        """
        self.spend()
        over = self.halt == TIME_IS_UP
        left = (
            [trial.number for trial in self.study.trials(TrialState.RUNNING)]
            if over
            else list(self.study.active)
        )
        for index in left:
            reason = self.halt or "the search ended"
            tracker.close(self._settings(), self.study.folder_of(index), "KILLED", reason, "killed")
            if over:
                self.study.drop(index, reason)
                self.say(f"trial {index}  killed: {reason}")


@dataclass(slots=True)
class Finals(TrialScheduler):
    """The winner's runs in full, one per seed; they alone read the test split."""

    todo: list[int] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def next(self) -> dict[str, Any] | None:
        if self.halt is not None or not self.todo:
            return None
        seed, base = self.todo.pop(0), self.slots.run
        settings = base.tracking.model_copy(
            update={
                "uri": self.uri,
                "parent_run_id": self.parent.run_id,
                "params": tuple(self.values),
                "tags": base.tracking.tags | self._tags() | {"role": "final"},
            }
        )
        run = base.model_copy(
            update={
                "config": {**base.config, **self.values},
                "out": self.study.folder,
                "tracking": settings,
                "seed": seed,
            }
        )
        return self._task(seed, run, final_name(seed), None)

    def judge(self, trial: Trial, result: Mapping[str, Any]) -> bool:
        self._begun(trial.config["number"])
        return False

    def close(self, trial: Trial, result: Mapping[str, Any]) -> None:
        seed = trial.config["number"]
        self._begun(seed)
        if result.get("failed"):
            self.lost(trial, str(result["failed"]))
        elif result.get("over"):
            facts = json.loads(result["facts"])
            told = ", ".join(
                f"{name} {number(value)}" for name, value in facts.get("test", {}).items()
            )
            took = f"{span(facts['seconds'])}{_lost(facts)}"
            self.say(
                f"final run, seed {seed}: test {self.study.base.evaluation.select}: "
                f"{told}  ({took})"
            )

    def lost(self, trial: Trial, reason: str) -> None:
        seed = trial.config["number"]
        self._begun(seed)
        tracker.close(
            self._settings(), self.study.folder / final_name(seed), "FAILED", reason, "failed"
        )
        self.problems.append(f"final run, seed {seed}: {reason}")
        self.say(self.problems[-1])

    def stopped(self) -> None:
        return


def _written(file: Path) -> int:
    """When a file was written, in nanoseconds; 0 where it was not."""
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return 0


def _lost(facts: Mapping[str, Any]) -> str:
    """How often a run went back to its last committed round, for the end of a phrase."""
    count = facts.get("restarts", 0)
    return f", {count} restart{'s' * (count > 1)} after a lost node" if count else ""


def setting_of(values: Mapping[str, Any]) -> str:
    """Searched values for reading; rounded."""
    return " ".join(
        f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}"
        for key, value in values.items()
    )


def final_name(seed: int) -> str:
    """The run directory of a final run."""
    return f"final-seed-{seed}"
