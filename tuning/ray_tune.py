"""What Ray Tune is given: who asks for trials, who stops them, and what ends everything. It calls a
`TrialScheduler` and knows no more.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Self

from ray import tune
from ray.tune.experiment import Trial
from ray.tune.schedulers import FIFOScheduler
from ray.tune.search import ConcurrencyLimiter, Searcher

from crossfed.platform.endings import give_up_later
from crossfed.platform.federation.node import Artifacts
from crossfed.platform.federation.run import Finish
from crossfed.tuning.scheduler import TIME_IS_UP, TrialScheduler
from crossfed.tuning.trial import FederationTrial


class _Unsaved:
    """Tune pickles what it is given in order to restore it; ours is restored from the study's
    storage instead.
    """

    desk: TrialScheduler

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "desk"}


class SearcherAdapter(_Unsaved, Searcher):  # type: ignore[misc]
    """Tune asks for trials here."""

    def __init__(self, desk: TrialScheduler):
        super().__init__(metric="step", mode="max")
        self.desk = desk

    def suggest(self, trial_id: str) -> Any:
        found = None
        with self.desk.keeping():
            if self.desk.halt is None and self.desk.busy():
                return None  # Tune asks again
            found = self.desk.next()
        return found or Searcher.FINISHED

    def on_trial_complete(self, trial_id: str, result: Any = None, error: bool = False) -> None:
        return

    def save_to_dir(self, checkpoint_dir: str, session_str: str = "default") -> None:
        return


class SchedulerAdapter(_Unsaved, FIFOScheduler):  # type: ignore[misc]
    """Tune reports rounds and ends here."""

    def __init__(self, desk: TrialScheduler):
        super().__init__()  # type: ignore[no-untyped-call]
        self.desk = desk

    def on_trial_result(self, tune_controller: Any, trial: Trial, result: Mapping[str, Any]) -> str:
        stop = False
        with self.desk.keeping():
            stop = self.desk.judge(trial, result)
        return self.STOP if stop else self.CONTINUE

    def on_trial_complete(
        self, tune_controller: Any, trial: Trial, result: Mapping[str, Any]
    ) -> None:
        with self.desk.keeping():
            self.desk.close(trial, result)


class Lost(_Unsaved, tune.Callback):  # type: ignore[misc]
    """Tune reports here what failed for good; its schedulers are told of every attempt."""

    def __init__(self, desk: TrialScheduler):
        self.desk = desk

    def on_trial_error(
        self, iteration: int, trials: list[Trial], trial: Trial, **info: Any
    ) -> None:
        with self.desk.keeping():
            self.desk.lost(trial, _cause(trial))


class StopperAdapter(_Unsaved, tune.Stopper):  # type: ignore[misc]
    """Stops everything between two rounds when the desk says so, or the time is up."""

    def __init__(self, desk: TrialScheduler):
        self.desk = desk

    def __call__(self, trial_id: str, result: Mapping[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        desk = self.desk
        if desk.halt is None and desk.deadline is not None and time.monotonic() > desk.deadline:
            desk.halt = TIME_IS_UP
        return desk.halt is not None


def _name(trial: Trial) -> str:
    """A short one: by default Tune writes the whole configuration into a folder's name."""
    return f"{trial.config['name']}-{trial.trial_id}"


def _cause(trial: Trial) -> str:
    """Why a trial failed, in a line: the last line of an exception's text, the first of Ray's word
    on a dead process.
    """
    path = trial.error_file
    if path is None or not Path(path).is_file():
        return "its process died"
    last = Path(path).read_text(encoding="utf-8", errors="replace").rpartition("Failure #")[2]
    lines = [line.strip() for line in last.splitlines()[1:] if line.strip()]
    if not lines:
        return "its process died"
    return lines[-1] if "ray::" in lines[0] else lines[0]


ROUND = 4.0
"""Seconds that a running round has after SIGTERM."""


class Interruptible:
    """Ctrl-C and SIGTERM end a search between two rounds, and at once where none goes on or when
    they come again.

    Attributes:
        desk: of the search that goes on.
    """

    def __init__(self, warn: Callable[[str], None]):
        self.warn = warn
        self.desk: TrialScheduler | None = None
        self.before: dict[int, Any] = {}
        self.again: threading.Timer | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self.before = {
                which: signal.signal(which, self._halt) for which in (signal.SIGINT, signal.SIGTERM)
            }
        return self

    def __exit__(self, *_: object) -> None:
        if self.again is not None:
            self.again.cancel()
        for which, handler in self.before.items():
            signal.signal(which, handler)

    def _halt(self, which: int, _frame: FrameType | None) -> None:
        if self.desk is None or self.desk.halt is not None:
            raise KeyboardInterrupt
        self.desk.halt = "interrupted"
        if which == signal.SIGTERM:  # of a batch system, which kills soon
            self.again = threading.Timer(ROUND, os.kill, (os.getpid(), signal.SIGTERM))
            self.again.daemon = True
            self.again.start()
            give_up_later()
            self.warn(f"Interrupted: trials whose round is not over in {ROUND:g} s end without it.")
            return
        self.warn("Interrupted: running trials end after their round; once more ends them now.")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Tune's own log repeats, with tracebacks, what is told here in a line."""
    log = logging.getLogger("ray.tune")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(before)


def fit(
    desk: TrialScheduler,
    count: int,
    artifacts: Artifacts,
    finish: Finish | None,
    signals: Interruptible,
) -> None:
    """Run up to `count` trials from a desk.

    Raises:
        KeyboardInterrupt: the user ended it; what was committed stays.
        Exception: the study's storage or disk took no more.
    """
    placed, folder = desk.slots, desk.study.folder
    trainable = tune.with_parameters(FederationTrial, artifacts=dict(artifacts), finish=finish)
    strategy = placed.run.resources.placement
    trainable = tune.with_resources(
        trainable, tune.PlacementGroupFactory(list(placed.bundles), strategy=strategy)
    )
    tuner = tune.Tuner(
        trainable,
        tune_config=tune.TuneConfig(
            search_alg=ConcurrencyLimiter(SearcherAdapter(desk), max_concurrent=placed.at_once),
            scheduler=SchedulerAdapter(desk),
            num_samples=count,
            reuse_actors=True,
            trial_name_creator=_name,
            trial_dirname_creator=_name,
        ),
        run_config=tune.RunConfig(
            name=f"tune-{int(time.time())}",
            storage_path=str(folder / ".tune"),
            stop=StopperAdapter(desk),
            callbacks=[Lost(desk)],
            failure_config=tune.FailureConfig(max_failures=desk.study.search.retries),
            verbose=0,
        ),
    )
    try:
        with _quiet():
            signals.desk = desk
            tuner.fit()
    finally:
        signals.desk = None
        with desk.keeping():
            desk.stopped()
    if desk.problem is not None:
        raise desk.problem
    # Tune's own state, which nothing here reads
    shutil.rmtree(folder / ".tune", ignore_errors=True)
    if desk.halt == "interrupted":
        raise KeyboardInterrupt
