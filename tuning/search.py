"""A search: trials are whole federated runs, asked for by an Optuna study and placed by Ray Tune.

Ray Tune gives every trial its own placement group (a bundle for the server, one per domain), runs as many at once as fit, and
runs one again whose process died. What is asked, reported, stopped and remembered is `tuning.study`'s; what runs is
`tuning.trial`'s. The test split is read by the final runs of the winner alone, through the function that the caller hands in.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Self

import ray
from optuna.exceptions import StorageInternalError
from optuna.trial import TrialState
from pydantic import ValidationError
from ray import tune
from ray.tune.experiment import Trial
from ray.tune.schedulers import FIFOScheduler
from ray.tune.search import ConcurrencyLimiter, Searcher
from sqlalchemy.exc import SQLAlchemyError

from crossfed.platform import cluster, tracking
from crossfed.platform.checkpoint import read_json, write_json
from crossfed.platform.config import RunConfig
from crossfed.platform.data.store import PreparedData
from crossfed.platform.nodes import Artifacts, Plan
from crossfed.platform.progress import Progress, make_progress, number, span
from crossfed.platform.run import RESULT, Finish, chosen_domains, make_artifacts, resolve_data
from crossfed.platform.seam import CrossfedError
from crossfed.platform.tracking import Tracker
from crossfed.tuning import report
from crossfed.tuning.figures import save_figures
from crossfed.tuning.study import QUALITY, STUDY, Search, Study, differences, quality, reason, total_rounds
from crossfed.tuning.trial import STOPPED, FederationTrial

SUMMARY = "study.json"
TIME_IS_UP = "time budget"
UNKEPT = (OSError, SQLAlchemyError, StorageInternalError)

# read by Tune when a search starts
_TUNE = {
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # MLflow keeps the record
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # ours ends trials between rounds
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",  # reasons are told in a line and kept in the study
    "TUNE_WARN_THRESHOLD_S": "60",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
}


@dataclass(frozen=True, slots=True)
class Found:
    """A finished search: its study, and the summary that `study.json` in its folder holds."""

    study: Study
    summary: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Slots:
    """What a trial reserves, and how many run at once.

    Attributes:
        bundles: of the trial's placement group; the first is the trial's own process.
        run: the trials' resources, every share a number.
        cpus, gpus: of one trial.
    """

    bundles: tuple[dict[str, float], ...]
    run: RunConfig
    at_once: int
    cpus: float
    gpus: float


def slots(
    base: RunConfig, nodes: Sequence[str], concurrent: int | None, machines: Sequence[Mapping[str, Any]]
) -> Slots:
    """Divide a cluster among trials.

    Args:
        nodes: names of a run's nodes. concurrent: trials at once; None takes as many as fit.
        machines: rows of `ray.nodes()`.

    Raises:
        CrossfedError: not even one trial can be placed; the shortfall in words.
    """
    alive = [row["Resources"] for row in machines if row["Alive"]]
    cpus, gpus = (sum(row.get(kind, 0.0) for row in alive) for kind in ("CPU", "GPU"))
    if base.backend == "inprocess":
        at_once = concurrent or max(1, int(cpus))
        share = cluster.Share(max(0.01, int(100 * min(1.0, cpus / at_once)) / 100), 0.0)
        return Slots(({"CPU": share.cpus},), base, at_once, share.cpus, 0.0)
    set_aside = any(cluster.SERVER_RESOURCE in row for row in alive)
    wanted = cluster.shares(base.resources, nodes, cpus, gpus, set_aside)
    cluster.preflight(wanted, [dict(row) for row in machines])
    at_once = concurrent or _fitting(base, len(nodes), wanted, cpus, gpus)
    wanted = cluster.shares(base.resources, nodes, cpus / at_once, gpus / at_once, set_aside)
    domain = next(share for name, share in wanted.items() if name != cluster.SERVER)
    server = wanted.get(cluster.SERVER, domain)
    resources = base.resources.model_copy(
        update={"cpus_per_domain": domain.cpus, "gpus_per_domain": domain.gpus, "cpus_server": server.cpus}
    )
    if base.resources.gpus_per_domain is None and not domain.gpus:
        resources = resources.model_copy(update={"gpus_per_domain": 0.0})
    total = [sum(getattr(share, kind) for share in wanted.values()) for kind in ("cpus", "gpus")]
    # the trial's own process waits for its nodes, beside the server's; without one, where machines are set aside (with MLflow)
    own = {cluster.SERVER_RESOURCE: cluster.SLOT} if set_aside and cluster.SERVER not in nodes else dict[str, float]()
    bundles = (own, *(share.bundle() for share in wanted.values()))
    return Slots(bundles, base.model_copy(update={"resources": resources}), at_once, *total)


def _fitting(base: RunConfig, nodes: int, wanted: Mapping[str, cluster.Share], cpus: float, gpus: float) -> int:
    """How many trials run at once where it is not said: as many as have a whole CPU per node, or the shares asked for."""
    asked = base.resources
    per = sum(share.cpus for share in wanted.values()) if asked.cpus_per_domain and asked.cpus_server else float(nodes)
    fits = [cpus / per]
    domains = [share for name, share in wanted.items() if name != cluster.SERVER]
    if gpus and asked.device != "cpu" and asked.gpus_per_domain != 0:
        fits.append(gpus / sum(asked.gpus_per_domain or 1.0 for _ in domains))
    return max(1, int(min(fits) + 1e-9))


# -- what runs ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Desk:
    """Where Tune's calls arrive: hands out trials, judges rounds, closes the books.

    Attributes:
        halt: why everything shall stop, once it shall.
        latest: number -> the facts last reported.
        problem: why the books can no longer be kept, once they cannot.
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

    @contextlib.contextmanager
    def keeping(self) -> Iterator[None]:
        """End everything where the books cannot be kept. Tune would take it for a trial's failure, or die of it."""
        try:
            yield
        except Exception as error:  # raised again once all has stopped
            self.problem = self.problem or error
            self.halt = self.halt or "the study's records could not be written"

    def next(self) -> dict[str, Any] | None:
        """The next trial's Tune configuration."""
        while self.halt is None and (task := self.study.next()) is not None:
            base = self.slots.run
            values = {**base.config, **task.values}
            try:
                checked = base.resolved.Config.model_validate(values).model_dump(mode="json")
            except ValidationError as error:
                self._failed(task.number, f"the setting is not possible: {error.errors()[0]['msg']}")
                continue
            if task.again:
                self.say(f"trial {task.number} goes on from its last committed round")
            folder = self.study.folder_of(task.number)
            settings = base.tracking.model_copy(
                update={
                    "uri": self.uri,
                    "parent_run_id": self.parent.run_id,
                    "params": tuple(task.values),
                    "tags": base.tracking.tags | self._tags() | {"role": "trial", "trial": str(task.number)},
                    "artifacts": False,
                }
            )
            run = base.model_copy(update={"config": checked, "out": folder.parent, "tracking": settings})
            return self._task(task.number, run, folder.name, self.study.search.max_rounds)
        return None

    def _tags(self) -> dict[str, str]:
        return {"study": self.study.search.name}

    def _task(self, number: int, run: RunConfig, name: str, cap: int | None) -> dict[str, Any]:
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
        self.latest[index] = facts
        value = quality(self.study.search.objectives[0], facts["domains"]) if facts["domains"] else None
        if not self.study.report(index, result["step"], value):
            return False
        why = f"stopped by {self.study.search.pruner} after round {result['step']}"
        (self.study.folder_of(index) / STOPPED).write_text(why, encoding="utf-8")
        self.pruned.add(index)
        return True

    def close(self, trial: Trial, result: Mapping[str, Any]) -> None:
        """A trial is over, or was stopped."""
        index = trial.config["number"]
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
                self.parent.log({"best_value": best.values[0]}, sum(t.state.is_finished() for t in self.study.trials()))

    def spend(self) -> None:
        """Count the time since the last call against the study's budget."""
        now = time.monotonic()
        self.study.spend(now - self.since)
        self.since = now

    def lost(self, trial: Trial, reason: str) -> None:
        """A trial failed for good: its process died more often than it may."""
        self._failed(trial.config["number"], reason)

    def _failed(self, index: int, reason: str) -> None:
        if index in self.study.active:
            tracking.close(self._settings(), self.study.folder_of(index), "FAILED", reason, "failed")
            self.study.fail(index, reason)
            self.say(f"trial {index}  failed: {reason}")

    def _settings(self) -> tracking.TrackingSettings:
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
        setting = _setting({key: trial.config["run"].config[key] for key in self.study.parameters})
        held = "" if best is None else f"  (best {number(best.values[0])}, trial {best.number})"
        self.say(
            f"trial {index}  {setting}  {outcome} after {facts['rounds']} rounds, {span(facts['seconds'])}: {values}{held}"
        )

    def stopped(self) -> None:
        """Everything was stopped: mark what was still running, here or when an earlier process ended."""
        self.spend()
        over = self.halt == TIME_IS_UP
        left = [trial.number for trial in self.study.trials(TrialState.RUNNING)] if over else list(self.study.active)
        for index in left:
            reason = self.halt or "the search ended"
            tracking.close(self._settings(), self.study.folder_of(index), "KILLED", reason, "killed")
            if over:
                self.study.drop(index, reason)
                self.say(f"trial {index}  killed: {reason}")


@dataclass(slots=True)
class Finals(Desk):
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
        return False

    def close(self, trial: Trial, result: Mapping[str, Any]) -> None:
        seed = trial.config["number"]
        if result.get("failed"):
            self.lost(trial, str(result["failed"]))
        elif result.get("over"):
            facts = json.loads(result["facts"])
            told = ", ".join(f"{name} {number(value)}" for name, value in facts.get("test", {}).items())
            self.say(
                f"final run, seed {seed}: test {self.study.base.evaluation.select}: {told}  ({span(facts['seconds'])})"
            )

    def lost(self, trial: Trial, reason: str) -> None:
        seed = trial.config["number"]
        tracking.close(self._settings(), self.study.folder / final_name(seed), "FAILED", reason, "failed")
        self.problems.append(f"final run, seed {seed}: {reason}")
        self.say(self.problems[-1])

    def stopped(self) -> None:
        return


def _setting(values: Mapping[str, Any]) -> str:
    """Searched values for reading; rounded."""
    return " ".join(
        f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in values.items()
    )


def final_name(seed: int) -> str:
    """The run directory of a final run."""
    return f"final-seed-{seed}"


class _Unsaved:
    """Tune pickles what it is given in order to restore it; ours is restored from the study's storage instead."""

    desk: Desk

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "desk"}


class _Ask(_Unsaved, Searcher):  # type: ignore[misc]
    """Tune asks for trials here."""

    def __init__(self, desk: Desk):
        super().__init__(metric="step", mode="max")
        self.desk = desk

    def suggest(self, trial_id: str) -> Any:
        found = None
        with self.desk.keeping():
            found = self.desk.next()
        return found or Searcher.FINISHED

    def on_trial_complete(self, trial_id: str, result: Any = None, error: bool = False) -> None:
        return

    def save_to_dir(self, checkpoint_dir: str, session_str: str = "default") -> None:
        return


class _Judge(_Unsaved, FIFOScheduler):  # type: ignore[misc]
    """Tune reports rounds and ends here."""

    def __init__(self, desk: Desk):
        super().__init__()  # type: ignore[no-untyped-call]
        self.desk = desk

    def on_trial_result(self, tune_controller: Any, trial: Trial, result: Mapping[str, Any]) -> str:
        stop = False
        with self.desk.keeping():
            stop = self.desk.judge(trial, result)
        return self.STOP if stop else self.CONTINUE

    def on_trial_complete(self, tune_controller: Any, trial: Trial, result: Mapping[str, Any]) -> None:
        with self.desk.keeping():
            self.desk.close(trial, result)


class _Lost(_Unsaved, tune.Callback):  # type: ignore[misc]
    """Tune reports here what failed for good; its schedulers are told of every attempt."""

    def __init__(self, desk: Desk):
        self.desk = desk

    def on_trial_error(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        with self.desk.keeping():
            self.desk.lost(trial, _cause(trial))


class _Halt(_Unsaved, tune.Stopper):  # type: ignore[misc]
    """Stops everything between two rounds when the desk says so, or the time is up."""

    def __init__(self, desk: Desk):
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
    """Why a trial failed, in a line: the last line of an exception's text, the first of Ray's word on a dead process."""
    path = trial.error_file
    if path is None or not Path(path).is_file():
        return "its process died"
    last = Path(path).read_text(encoding="utf-8", errors="replace").rpartition("Failure #")[2]
    lines = [line.strip() for line in last.splitlines()[1:] if line.strip()]
    if not lines:
        return "its process died"
    return lines[-1] if "ray::" in lines[0] else lines[0]


class _Interruptible:
    """Ctrl-C and SIGTERM end a search between two rounds, and at once where none goes on or when they come again.

    Attributes:
        desk: of the search that goes on.
    """

    def __init__(self, warn: Callable[[str], None]):
        self.warn = warn
        self.desk: Desk | None = None
        self.before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self.before = {which: signal.signal(which, self._halt) for which in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for which, handler in self.before.items():
            signal.signal(which, handler)

    def _halt(self, _signal: int, _frame: FrameType | None) -> None:
        if self.desk is None or self.desk.halt is not None:
            raise KeyboardInterrupt
        self.desk.halt = "interrupted"
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


def _fit(desk: Desk, count: int, artifacts: Artifacts, finish: Finish | None, signals: _Interruptible) -> None:
    """Run up to `count` trials from a desk.

    Raises:
        KeyboardInterrupt: the user ended it; what was committed stays.
        Exception: the study's storage or disk took no more.
    """
    placed, folder = desk.slots, desk.study.folder
    trainable = tune.with_parameters(FederationTrial, artifacts=dict(artifacts), finish=finish)
    strategy = placed.run.resources.placement
    trainable = tune.with_resources(trainable, tune.PlacementGroupFactory(list(placed.bundles), strategy=strategy))
    tuner = tune.Tuner(
        trainable,
        tune_config=tune.TuneConfig(
            search_alg=ConcurrencyLimiter(_Ask(desk), max_concurrent=placed.at_once),
            scheduler=_Judge(desk),
            num_samples=count,
            reuse_actors=True,
            trial_name_creator=_name,
            trial_dirname_creator=_name,
        ),
        run_config=tune.RunConfig(
            name=f"tune-{int(time.time())}",
            storage_path=str(folder / ".tune"),
            stop=_Halt(desk),
            callbacks=[_Lost(desk)],
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
    shutil.rmtree(folder / ".tune", ignore_errors=True)  # Tune's own state, which nothing here reads
    if desk.halt == "interrupted":
        raise KeyboardInterrupt


# -- the whole search --------------------------------------------------------------------------------------------------


def start(search: Search, base: RunConfig, *, finish: Finish | None = None, view: Progress | None = None) -> Found:
    """Search a method's space on a data set, then run the winner in full.

    Args:
        search: how. base: the run that all trials share; its method values are the first trial.
        finish: reads the test split at the end of the winner's final runs; without it there are none.
        view: where progress is told.

    Raises:
        CrossfedError: the study exists, cannot be placed, or no trial finished.
        KeyboardInterrupt: the user ended it; `resume` goes on.
    """
    full, data = check(search, base)
    study = Study.create(search, full, data.path.name, data.fingerprint)
    try:
        return go_on(study, finish=finish, view=view)
    except CrossfedError:
        with contextlib.suppress(CrossfedError, *UNKEPT), study.locked():
            if not study.begun():  # refused, for instance by the cluster's size: its name stays free
                study.discard()
        raise


def check(search: Search, base: RunConfig) -> tuple[RunConfig, PreparedData]:
    """The run that all trials of a new study share, its paths in full, and its data.

    Raises:
        CrossfedError: the data, the space, an objective or the tracker's address is not possible.
    """
    if base.mirror is not None:
        raise CrossfedError(
            "A study is kept in a folder, not at a URI: give --out a local or shared folder, and no mirror."
        )
    data = PreparedData.open(resolve_data(base))
    domains = chosen_domains(base, data)
    for name in search.objectives:
        if name.startswith("domain:") and name.removeprefix("domain:") not in domains:
            raise CrossfedError(f"The objective {name} names no domain of this run; it has {', '.join(domains)}.")
    if "epsilon" in search.objectives and not base.resolved.releases(base.method_config()):
        raise CrossfedError(
            f"The objective epsilon needs a method that perturbs what it sends; {base.method} does not."
        )
    Study.check(search, base)
    if base.tracking.enabled:
        tracking.resolve_uri(base.tracking, base.out)
    full = base.model_copy(update={"data": base.data and data.path.absolute(), "out": base.out.absolute()})
    return full, data


def go_on(study: Study, *, more: int = 0, finish: Finish | None = None, view: Progress | None = None) -> Found:
    """Run what is left of a study: trials, then the winner's final runs, then the figures.

    Args:
        more: trials to add first. finish, view: as `start`.

    Raises: as `start`.
    """
    os.environ.update({key: value for key, value in _TUNE.items() if key not in os.environ})
    view = view or make_progress("quiet")
    base, search = study.base, study.search
    data = PreparedData.open(resolve_data(base))
    domains = chosen_domains(base, data)
    data.verify()
    before = study.optuna.user_attrs.get("data_fingerprint", data.fingerprint)
    if before != data.fingerprint:
        raise CrossfedError(
            f"The study {search.name} was started on data {before[:12]}, but {data.path} is now {data.fingerprint[:12]}; "
            "restore that data or start another study."
        )
    began = time.monotonic()
    with study.locked(), view, _kept(study):
        joined = cluster.connect(base.resources)
        try:
            with _Interruptible(view.warn) as signals:
                nodes = Plan(base, data.path, domains, study.folder, study.folder).nodes
                placed = slots(base, nodes, search.concurrent, ray.nodes())  # type: ignore[no-untyped-call]
                if more:
                    study.extend(more)
                _announce(view, study, placed, data, domains)
                artifacts = make_artifacts(base, view)
                parent = _parent(study, view)
                try:
                    _search(Desk(study, placed, parent, view.note, _uri(study), since=began), artifacts, signals)
                    summary = _finals(study, placed, parent, artifacts, finish, view, signals)
                    _record(study, parent, summary)
                except BaseException as error:
                    killed = isinstance(error, KeyboardInterrupt)
                    parent.finish("KILLED" if killed else "FAILED", "interrupted" if killed else str(error))
                    raise
                parent.finish("FINISHED")
                view.note(f"tracking   {parent.status}" + (f": {parent.url}" if parent.url else ""))
        finally:
            if joined:
                ray.shutdown()
    return Found(study, summary)


@contextlib.contextmanager
def _kept(study: Study) -> Iterator[None]:
    """Tell in a sentence where a storage or a disk takes no more."""
    try:
        yield
    except UNKEPT as error:
        raise CrossfedError(
            f"The study stopped, because its records could not be kept: {reason(error)}; what was committed stays: make room "
            f"or bring the storage back, then run crossfed tune resume {study.folder}."
        ) from error


def _search(desk: Desk, artifacts: Artifacts, signals: _Interruptible) -> None:
    """Run the trials that are left, within the time that is left."""
    study = desk.study
    if (left := study.left()) > 0:
        seconds = study.seconds_left()
        if seconds > 0:
            desk.deadline = desk.since + seconds
            _fit(desk, left, artifacts, None, signals)
        else:
            desk.halt = TIME_IS_UP
            desk.stopped()
    if study.search.sampler == "grid" and desk.halt is None and study.left():
        desk.say(f"grid       all {study.begun()} points were tried; --trials asked for {study.search.trials}")


def _announce(view: Progress, study: Study, placed: Slots, data: PreparedData, domains: Sequence[str]) -> None:
    search, base = study.search, study.base
    begun = study.begun()
    kind = "synthetic " if data.synthetic else ""
    rule = "none"
    if search.pruner != "none":
        rule = f"{search.pruner}, not before round {study.grace}"
        rule += f" and so never, as no trial has more than {study.max_rounds}" * (study.grace >= study.max_rounds)
    view.start(
        f"Study {search.name}: {base.resolved.title}",
        [
            f"data       {kind}{data.path.name}: {', '.join(domains)}",
            f"protocol   {base.evaluation.protocol}",
            f"objective  {', '.join(search.objectives)} of validation {base.evaluation.select}",
            f"space      {'; '.join(f'{name}: {_told(study, name)}' for name in study.parameters)}",
            f"trials     {search.trials} ({begun} begun before), {placed.at_once} at once, up to {study.max_rounds} rounds each",
            f"rules      sampler {search.sampler}, seed {search.seed}; stopping {rule}",
            f"placement  {placed.cpus:g} CPUs and {placed.gpus:g} GPUs per trial",
            f"directory  {study.folder}",
        ],
    )


def _told(study: Study, name: str) -> str:
    parameter = study.parameters[name]
    ends = parameter.ends()
    values = f"{ends[0]:g} to {ends[1]:g}" if hasattr(parameter, "low") else ", ".join(map(str, ends))
    return f"{values} (first {study.first[name]})"


def _uri(study: Study) -> str | None:
    """The store that trials record in: their own default would lie in the study's folder."""
    settings = study.base.tracking
    if settings.uri or os.environ.get("MLFLOW_TRACKING_URI") or not settings.enabled:
        return settings.uri
    return tracking.resolve_uri(settings, study.folder.parent)


def _parent(study: Study, view: Progress) -> Tracker:
    """The study's own MLflow run; trials are its children."""
    search, base = study.search, study.base
    known = study.folder / tracking.RUN_ID
    shown = search.model_dump(mode="json", exclude={"name", "changes"})
    parent = Tracker.start(
        base.tracking,
        study.folder,
        search.name,
        {key: value for key, value in shown.items() if value is not None},
        {
            "role": "study",
            "study": search.name,
            "method": base.method,
            "protocol": base.evaluation.protocol,
            "data": str(study.optuna.user_attrs["data"]),
            "metric": base.evaluation.select,
        }
        | base.tracking.tags,
        [],
        resume_run_id=known.read_text(encoding="utf-8").strip() if known.exists() else None,
        warn=view.warn,
    )
    if base.tracking.enabled and parent.run_id is None:
        view.warn("trials cannot be shown below their study, because its store is away; they carry the tag `study`.")
    return parent


def _finals(
    study: Study,
    placed: Slots,
    parent: Tracker,
    artifacts: Artifacts,
    finish: Finish | None,
    view: Progress,
    signals: _Interruptible,
) -> dict[str, Any]:
    """Run the winner in full for every seed that was not yet, and sum the study up."""
    winner = study.best()
    if winner is None:
        reasons = [f"trial {t.number}: {t.user_attrs.get('reason', t.state.name.lower())}" for t in study.trials()]
        raise CrossfedError(
            f"No trial of {study.search.name} finished ({'; '.join(reasons[:3]) or 'none was begun'}); "
            f"see crossfed tune show {study.folder}."
        )
    values = dict(winner.user_attrs["values"])
    seeds = [study.base.seed + index for index in range(study.search.seeds)] if finish else []
    kept = study.folder / "winner.json"
    before = read_json(kept)["trial"] if kept.is_file() else winner.number
    if before != winner.number:  # more trials found a better one: its final runs replace those of the one before
        for seed in seeds:
            old = study.folder / final_name(seed)
            if old.exists():
                old.rename(study.folder / f"{final_name(seed)}-of-trial-{before}")
    write_json(kept, {"trial": winner.number, "values": values})
    todo = [seed for seed in seeds if not (study.folder / final_name(seed) / RESULT).is_file()]
    if todo:
        seeds_told = ", ".join(map(str, todo))
        view.note(f"winner     trial {winner.number}: {_setting(values)}; now in full, seeds {seeds_told}")
        desk = Finals(study, placed, parent, view.note, _uri(study), todo=todo, values=values)
        _fit(desk, len(todo), artifacts, finish, signals)
        if desk.problems:
            raise CrossfedError(f"{desk.problems[0].rstrip('.')}. Mend it and run crossfed tune resume {study.folder}.")
    return _summary(study, winner.number, values, seeds)


def _summary(study: Study, winner: int, values: Mapping[str, Any], seeds: Sequence[int]) -> dict[str, Any]:
    """What the study came to; also written to `study.json`."""
    trials, metric = study.trials(), study.base.evaluation.select
    results = {seed: read_json(study.folder / final_name(seed) / RESULT) for seed in seeds}
    finals: dict[str, Any] = {}
    for split in ("validation", "test"):
        for name in next(iter(results.values()), {"domains": {}})["domains"]:
            found = [result["domains"][name][split][metric] for result in results.values()]
            finals.setdefault(name, {})[split] = {
                "mean": statistics.fmean(found),
                "sd": statistics.stdev(found) if len(found) > 1 else None,
                "values": found,
            }
    candidates = next(iter(results.values()))["candidates"] if results else {}
    outcomes = [trial.user_attrs.get("status", trial.state.name.lower()) for trial in trials]
    rounds = sum(trial.user_attrs.get("rounds", 0) for trial in trials)
    summary = {
        "study": study.search.name,
        "method": study.base.method,
        "data": study.optuna.user_attrs["data"],
        "protocol": study.base.evaluation.protocol,
        "metric": metric,
        "objectives": list(study.search.objectives),
        "outcomes": {name: outcomes.count(name) for name in dict.fromkeys(outcomes)},
        "rounds": rounds,
        "full_rounds": len(trials) * total_rounds(study.base),
        "winner": {"trial": winner, "config": dict(values), "values": trials[winner].values},
        "paper": {"trial": 0, "values": trials[0].values if trials[0].state.name == "COMPLETE" else None},
        "seeds": list(seeds),
        "finals": finals,
        "candidates": candidates,
    }
    write_json(study.folder / SUMMARY, summary)
    return summary


def _record(study: Study, parent: Tracker, summary: Mapping[str, Any]) -> None:
    """Figures and tables into the study's folder and its MLflow run."""
    for path in save_figures(study.optuna, study.folder / "figures"):
        parent.artifact(path, "figures")
    (study.folder / "trials.md").write_text(report.markdown(study.optuna), encoding="utf-8")
    for file in ("study.yaml", SUMMARY, "trials.md"):
        parent.artifact(study.folder / file)
    told = {"best/validation": float(summary["winner"]["values"][0])}
    for name, splits in summary["finals"].items():
        told |= {f"final/{split}/{name}/{summary['metric']}": row["mean"] for split, row in splits.items()}
    parent.log(told, len(study.trials()))
    parent.describe(report.markdown(study.optuna))


def tune_all(
    methods: Mapping[str, tuple[Search, RunConfig]], folder: Path, *, finish: Finish, view: Progress
) -> report.Table:
    """Give every method the same number of trials and the same rule, run each winner in full, and say what each cost.

    Args:
        methods: method -> its search and its run. folder: where `budget.md` and `budget.csv` go.

    Raises: as `start`, before the first trial where it can be known. A study that exists goes on; it must be the same.
    """
    rows = []
    for search, base in methods.values():
        full, _ = check(search, base)
        path = full.out / search.name
        if (path / STUDY).is_file():
            _same(Study.open(path), search, full)
    for search, base in methods.values():
        path = base.out.absolute() / search.name
        found = (
            go_on(Study.open(path), finish=finish, view=view)
            if (path / STUDY).is_file()
            else start(search, base, finish=finish, view=view)
        )
        finals = found.summary["finals"]
        test = [
            statistics.fmean(column) for column in zip(*(row["test"]["values"] for row in finals.values()), strict=True)
        ]
        rows.append(report.Spent.of(found.study.optuna, test))
        table = report.budget_table(rows)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "budget.md").write_text(table.markdown() + "\n", encoding="utf-8")
        (folder / "budget.csv").write_text(table.csv(), encoding="utf-8")
    return table


def _same(study: Study, search: Search, base: RunConfig) -> None:
    """Refuse to go on with a study that was started otherwise than is asked for now."""
    before, now = (
        {"search": s.model_dump(mode="json"), "run": b.model_dump(mode="json")}
        for s, b in ((study.search, study.base), (search, base))
    )
    for key, old, new in differences(before, now):
        raise CrossfedError(
            f"The study {search.name} was started with {key} = {old}, not {new}; ask for the same to go on with it, or choose "
            "another --study."
        )
