"""A search: trials are whole federated runs, asked for by an Optuna study and placed by Ray Tune.

Ray Tune gives every trial its own placement group (a bundle for the server, one per domain), runs
as many at once as fit, and runs one again whose process died. What is asked, reported, stopped and
remembered is `tuning.study`'s; what runs is `tuning.trial`'s. The test split is read by the final
runs of the winner alone, through the function that the caller hands in.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from optuna.exceptions import StorageInternalError
from sqlalchemy.exc import SQLAlchemyError

from crossfed.platform.checkpoint import read_json, write_json
from crossfed.platform.cluster import connect
from crossfed.platform.config.settings import RunConfig
from crossfed.platform.console import Progress, make_progress
from crossfed.platform.data.store import PreparedData
from crossfed.platform.errors import CrossfedError
from crossfed.platform.federation.node import Artifacts, Plan
from crossfed.platform.federation.run import (
    Finish,
    chosen_domains,
    make_artifacts,
    resolve_data,
    shared,
)
from crossfed.platform.layout import RESULT, RUN_ID
from crossfed.platform.registry import method_name
from crossfed.platform.tracking import names, tracker
from crossfed.platform.tracking.tracker import Tracker
from crossfed.tuning.placement import Slots, slots
from crossfed.tuning.ray_tune import Interruptible, fit
from crossfed.tuning.report import tables
from crossfed.tuning.report.figures import save_figures
from crossfed.tuning.scheduler import TIME_IS_UP, Finals, TrialScheduler, final_name, setting_of
from crossfed.tuning.study import (
    STUDY,
    SUMMARY,
    Search,
    Study,
    differences,
    idle,
    reason,
    total_rounds,
    unreached,
)

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


# -- the whole search ------------------------------------------------------------------------------


def start(
    search: Search, base: RunConfig, *, finish: Finish | None = None, view: Progress | None = None
) -> Found:
    """Search a method's space on a data set, then run the winner in full.

    Args:
        search: how. base: the run that all trials share; its method values are the first trial.
        finish: reads the test split at the end of the winner's final runs; without it there are
            none.
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
            # refused, for instance by the cluster's size: its name stays free
            if not study.begun():
                study.discard()
        raise


def check(search: Search, base: RunConfig) -> tuple[RunConfig, PreparedData]:
    """The run that all trials of a new study share, its paths in full, and its data.

    Raises:
        CrossfedError: the data, the space, an objective or the tracker's address is not possible.
    """
    if base.mirror is not None:
        raise CrossfedError(
            "A study is kept in a folder, not at a URI: give --out a local or shared folder, "
            "and no mirror."
        )
    data = PreparedData.open(resolve_data(base))
    domains = chosen_domains(base, data)
    for name in search.objectives:
        if name.startswith("domain:") and name.removeprefix("domain:") not in domains:
            raise CrossfedError(
                f"The objective {name} names no domain of this run; it has {', '.join(domains)}."
            )
    if "epsilon" in search.objectives and not base.resolved.releases(base.method_config()):
        raise CrossfedError(
            f"The objective epsilon needs a method that perturbs what it sends; {base.method} "
            f"does not."
        )
    Study.check(search, base)
    if base.tracking.enabled:
        tracker.resolve_uri(base.tracking, base.out)
    full = base.model_copy(
        update={"data": base.data and data.path.absolute(), "out": base.out.absolute()}
    )
    return full, data


def go_on(
    study: Study, *, more: int = 0, finish: Finish | None = None, view: Progress | None = None
) -> Found:
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
            f"The study {search.name} was started on data {before[:12]}, but {data.path} is "
            f"now {data.fingerprint[:12]}; "
            "restore that data or start another study."
        )
    began = time.monotonic()
    with study.locked(), view, _kept(study):
        joined = connect.connect(base.resources)
        try:
            with Interruptible(view.warn) as signals:
                nodes = Plan(base, data.path, domains, study.folder, study.folder).nodes
                placed = slots(base, nodes, search.concurrent, ray.nodes())  # type: ignore[no-untyped-call]
                if more:
                    study.extend(more)
                _announce(view, study, placed, data, domains)
                _warn_of_idle(view, study)
                artifacts = make_artifacts(base, view)
                parent = _parent(study, view)
                try:
                    _search(
                        TrialScheduler(study, placed, parent, view.note, _uri(study), since=began),
                        artifacts,
                        signals,
                    )
                    summary = _finals(study, placed, parent, artifacts, finish, view, signals)
                    _record(study, parent, summary)
                except BaseException as error:
                    killed = isinstance(error, KeyboardInterrupt)
                    parent.finish(
                        "KILLED" if killed else "FAILED", "interrupted" if killed else str(error)
                    )
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
            f"The study stopped, because its records could not be kept: {reason(error)}; what "
            f"was committed stays: make room "
            f"or bring the storage back, then run crossfed tune resume {study.folder}."
        ) from error


def _search(desk: TrialScheduler, artifacts: Artifacts, signals: Interruptible) -> None:
    """Run the trials that are left, within the time that is left."""
    study = desk.study
    if (left := study.left()) > 0:
        seconds = study.seconds_left()
        if seconds > 0:
            desk.deadline = desk.since + seconds
            fit(desk, left, artifacts, None, signals)
        else:
            desk.halt = TIME_IS_UP
            desk.stopped()
    if desk.halt is None and study.left():
        grid = study.search.sampler == "grid"
        tried = (
            f"grid       all {study.begun()} points were"
            if grid
            else f"space      no setting is left to try; {study.begun()} were"
        )
        desk.say(f"{tried} tried; --trials asked for {study.search.trials}")


def _announce(
    view: Progress, study: Study, placed: Slots, data: PreparedData, domains: Sequence[str]
) -> None:
    search, base = study.search, study.base
    begun = study.begun()
    kind = "synthetic " if data.synthetic else ""
    rule = "none"
    if search.pruner != "none":
        rule = f"{search.pruner}, not before round {study.grace}"
        rule += f" and so never, as no trial has more than {study.max_rounds}" * (
            study.grace >= study.max_rounds
        )
    view.start(
        f"Study {search.name}: {base.resolved.title}",
        [
            f"data       {kind}{data.path.name}: "
            f"{', '.join(domains)}{shared(base.evaluation.train_share)}",
            f"protocol   {base.evaluation.protocol}",
            f"objective  {', '.join(search.objectives)} of validation {base.evaluation.select}",
            f"space      {'; '.join(f'{name}: {_told(study, name)}' for name in study.parameters)}",
            f"trials     {search.trials} ({begun} begun before), {placed.at_once} at once, up "
            f"to {study.max_rounds} rounds each",
            f"rules      sampler {search.sampler}, seed {search.seed}; stopping {rule}",
            f"placement  {placed.cpus:g} CPUs and {placed.gpus:g} GPUs per trial",
            f"directory  {study.folder}",
        ],
    )


def _warn_of_idle(view: Progress, study: Study) -> None:
    """Say which stages no trial gets to, and which searched keys can therefore not matter."""
    stages = unreached(study.search, study.base, study.parameters)
    keys = idle(stages, study.base, study.parameters)
    if not keys and (not stages or study.search.max_rounds is None):
        return
    named = f"stage{'s' * (len(stages) > 1)} {', '.join(stages)}"
    why = (
        f"with max_rounds={study.search.max_rounds} " if study.search.max_rounds is not None else ""
    )
    warning = f"{why}no trial gets to {named}"
    if keys:
        warning += f", and {', '.join(keys)}, searched here, can make no difference between trials"
    mend = "take more --max-rounds, or " if why else ""
    view.warn(
        f"{warning}; {mend}{'leave them out, e.g. --search ' + keys[0] + '=null' if keys else 'search nothing of it'}."  # noqa: E501
    )


def _told(study: Study, name: str) -> str:
    parameter = study.parameters[name]
    ends = parameter.ends()
    values = (
        f"{ends[0]:g} to {ends[1]:g}" if hasattr(parameter, "low") else ", ".join(map(str, ends))
    )
    return f"{values} (first {study.first[name]})"


def _uri(study: Study) -> str | None:
    """The store that trials record in: their own default would lie in the study's folder."""
    settings = study.base.tracking
    if settings.uri or os.environ.get("MLFLOW_TRACKING_URI") or not settings.enabled:
        return settings.uri
    return tracker.resolve_uri(settings, study.folder.parent)


def _parent(study: Study, view: Progress) -> Tracker:
    """The study's own MLflow run; trials are its children."""
    search, base = study.search, study.base
    known = study.folder / RUN_ID
    shown = search.model_dump(mode="json", exclude={"name", "changes"})
    parent = Tracker.start(
        base.tracking,
        study.folder,
        f"{search.name} {method_name(base.method)} {study.optuna.user_attrs['data']}",
        {key: value for key, value in shown.items() if value is not None}
        | {
            "method": base.method,
            "data": str(study.optuna.user_attrs["data"]),
            "protocol": base.evaluation.protocol,
            "select": base.evaluation.select,
        }
        | ({"preset": base.preset} if base.preset else {}),
        {
            "role": "study",
            "study": search.name,
            "method": method_name(base.method),
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
        view.warn(
            "trials cannot be shown below their study, because its store is away; they "
            "carry the tag `study`."
        )
    return parent


def _finals(
    study: Study,
    placed: Slots,
    parent: Tracker,
    artifacts: Artifacts,
    finish: Finish | None,
    view: Progress,
    signals: Interruptible,
) -> dict[str, Any]:
    """Run the winner in full for every seed that was not yet, and sum the study up."""
    winner = study.best()
    if winner is None:
        reasons = [
            f"trial {t.number}: {t.user_attrs.get('reason', t.state.name.lower())}"
            for t in study.trials()
        ]
        raise CrossfedError(
            f"No trial of {study.search.name} finished "
            f"({'; '.join(reasons[:3]) or 'none was begun'}); "
            f"see crossfed tune show {study.folder}."
        )
    values = dict(winner.user_attrs["values"])
    seeds = [study.base.seed + index for index in range(study.search.seeds)] if finish else []
    kept = study.folder / "winner.json"
    before = read_json(kept)["trial"] if kept.is_file() else winner.number
    # more trials found a better one: its final runs replace those of the one before
    if before != winner.number:
        for seed in seeds:
            old = study.folder / final_name(seed)
            if old.exists():
                old.rename(study.folder / f"{final_name(seed)}-of-trial-{before}")
    write_json(kept, {"trial": winner.number, "values": values})
    todo = [seed for seed in seeds if not (study.folder / final_name(seed) / RESULT).is_file()]
    if todo:
        seeds_told = ", ".join(map(str, todo))
        view.note(
            f"winner     trial {winner.number}: {setting_of(values)}; now in full, seeds "
            f"{seeds_told}"
        )
        desk = Finals(study, placed, parent, view.note, _uri(study), todo=todo, values=values)
        fit(desk, len(todo), artifacts, finish, signals)
        if desk.problems:
            raise CrossfedError(
                f"{desk.problems[0].rstrip('.')}. Mend it and run crossfed "
                f"tune resume {study.folder}."
            )
    return _summary(study, winner.number, values, seeds)


def _summary(
    study: Study, winner: int, values: Mapping[str, Any], seeds: Sequence[int]
) -> dict[str, Any]:
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
        "method": method_name(study.base.method),
        "data": study.optuna.user_attrs["data"],
        "protocol": study.base.evaluation.protocol,
        "metric": metric,
        "objectives": list(study.search.objectives),
        "outcomes": {name: outcomes.count(name) for name in dict.fromkeys(outcomes)},
        "rounds": rounds,
        "full_rounds": study.begun() * total_rounds(study.base),
        "winner": {"trial": winner, "config": dict(values), "values": trials[winner].values},
        "paper": {
            "trial": 0,
            "values": trials[0].values if trials[0].state.name == "COMPLETE" else None,
        },
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
    (study.folder / "trials.md").write_text(tables.markdown(study.optuna), encoding="utf-8")
    for file in ("study.yaml", SUMMARY, "trials.md"):
        parent.artifact(study.folder / file)
    parent.log(names.of_study(summary), len(study.trials()))
    parent.describe(tables.markdown(study.optuna))


def tune_all(
    methods: Mapping[str, tuple[Search, RunConfig]], folder: Path, *, finish: Finish, view: Progress
) -> tables.Table:
    """Give every method the same number of trials and the same rule, run each winner in full, and
    say what each cost.

    Args:
        methods: method -> its search and its run. folder: where `budget.md` and `budget.csv` go.

    Raises: as `start`, before the first trial where it can be known. A study that exists goes on;
    it must be the same.
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
            statistics.fmean(column)
            for column in zip(*(row["test"]["values"] for row in finals.values()), strict=True)
        ]
        rows.append(tables.Spent.of(found.study.optuna, test))
        table = tables.budget_table(rows)
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
            f"The study {search.name} was started with {key} = {old}, not {new}; ask for the "
            f"same to go on with it, or choose "
            "another --study."
        )
