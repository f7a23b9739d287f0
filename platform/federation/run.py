"""`run_federation(config)`: one whole federated run, and the unit that tuning searches over.

It selects on validation only. The test split is read by `evaluation.final`, which callers may hand
in as `finish`; this module does not import it.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import importlib.metadata
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from crossfed.platform import uris
from crossfed.platform.checkpoint import read_json, write_json, write_text, writing
from crossfed.platform.config.settings import RunConfig
from crossfed.platform.console import Progress, SummaryRow, make_progress
from crossfed.platform.data import synthetic
from crossfed.platform.data.artifacts import ArtifactStore, default_root
from crossfed.platform.data.splits import refuse_without_order
from crossfed.platform.data.store import PreparedData
from crossfed.platform.errors import CrossfedError
from crossfed.platform.evaluation.protocols import get_protocol
from crossfed.platform.federation import pace, privacy
from crossfed.platform.federation.callbacks import Callback, Ended, Started, Status
from crossfed.platform.federation.controls import MEANING, SOLO, blame, check_control
from crossfed.platform.federation.mirror import Mirror
from crossfed.platform.federation.node import Artifacts, InProcess, Measured, NodeLost, Nodes, Plan
from crossfed.platform.federation.rounds import Round, Rounds, check_method
from crossfed.platform.federation.runs import finished, stored_config
from crossfed.platform.layout import (
    CONFIG,
    DATA,
    ENDING,
    HISTORY,
    LEDGER,
    PLACEMENT,
    RESULT,
    RUN_ID,
    TRAINED,
)
from crossfed.platform.method import Direction, Scope
from crossfed.platform.registry import method_name
from crossfed.platform.tokeniser import tokenise

if TYPE_CHECKING:
    import pandas as pd

Finish = Callable[[Plan, Nodes], Mapping[str, Measured]]
"""What runs on the selected state before the nodes end: `evaluation.final.test_once` from the
command line.
"""


class Stopped(Exception):
    """Raised by `on_round` to end a run on purpose, for instance by a tuner that stops a trial
    early.

    Args:
        reason: why, in words; recorded with the run.
        status: how the tracker records the end.
        outcome: the tag beside it, e.g. "pruned".
    """

    def __init__(self, reason: str, status: Status = "KILLED", outcome: str = "killed"):
        super().__init__(reason)
        self.status: Status = status
        self.outcome = outcome


@dataclass(frozen=True, slots=True)
class RunResult:
    """A finished run: its directory and what `result.json` in it holds."""

    run_id: str
    run_dir: Path
    result: dict[str, Any]


def resolve_data(config: RunConfig) -> Path:
    """The prepared data directory of a run; the embedded synthetic shops are generated once and
    kept in the cache.
    """
    if config.data is not None:
        return config.data.absolute()
    return synthetic.ensure(default_root() / "synthetic", **config.synthetic.model_dump())


def chosen_domains(config: RunConfig, data: PreparedData) -> tuple[str, ...]:
    """The domains of a run, in order.

    Raises:
        CrossfedError: one is not in the data, is named twice or cannot have its name, a federated
            method is left with a single one, or method or protocol need an order that a domain does
            not have.
    """
    chosen = data.domains if config.domains is None else config.domains
    for name in chosen:
        if name not in data.domains:
            raise CrossfedError(
                f"There is no domain {name!r} in {data.path}; it has {', '.join(data.domains)}."
            )
    if len(set(chosen)) < len(chosen) or not chosen:
        raise CrossfedError(
            f"domains must name each domain once; got {', '.join(chosen) or 'none'}."
        )
    for name in chosen:
        # a checkpoint holds `<node>.safetensors`, `<node>.inbox.safetensors` … of every node, and
        # files of its own
        if name in ("progress", "manifest") or any(
            name.startswith(f"{other}.") for other in chosen
        ):
            raise CrossfedError(
                f"A domain of this run cannot be called {name!r}: a file of "
                f"the run's checkpoints is."
            )
    federated = config.resolved.scope == Scope.FEDERATED
    if len(chosen) < 2 and federated and config.control != SOLO:
        raise CrossfedError(
            f"{config.method} is federated and needs at least two domains, but got {chosen[0]} "
            f"alone; "
            "add a domain, or run a local method such as lightgcn."
        )
    rule, method = get_protocol(config.evaluation.protocol).split, config.resolved
    for name in chosen:
        ordered = method.name if method.ordered else None
        refuse_without_order(data.times(name), name, rule, ordered, config.evaluation.order)
    return chosen


def run_federation(
    config: RunConfig,
    *,
    resume: Path | None = None,
    view: Progress | None = None,
    on_round: Callable[[Round], None] | None = None,
    finish: Finish | None = None,
    started: Callable[[Path], None] | None = None,
    artifacts: Artifacts | None = None,
    name: str | None = None,
    callbacks: Sequence[Callback] = (),
) -> RunResult:
    """Run a federation from its configuration to its result.

    Args:
        config: the run. With `resume` it must be the one the run was started with.
        resume: an interrupted run's directory, continued from its last committed round.
        view: where progress is shown; nowhere by default.
        on_round: called after every round, e.g. to report to a tuner; what it raises ends the run.
        finish: called once with the selected state while the nodes are alive; its result is stored
            as the test metrics.
        started: called with the run's directory as soon as it exists.
        artifacts: what `make_artifacts` gave for this configuration, made beforehand; made here by
            default.
        name: the run's name, which is that of its directory in `config.out`; by default method,
            seed and time.
        callbacks: what watches it besides; see `report.recording.run_recorded` for one that MLflow
            hears of.

    Raises:
        CrossfedError: anything a user can mend, in one sentence. What was committed before stays
            and can be resumed.
        Stopped: what `on_round` raised.
    """
    shown, view = view is not None, view or make_progress("quiet")
    method = config.resolved
    check_control(method, config.control)
    if resume is None and config.evaluated is not None:
        raise CrossfedError(
            f"This configuration is of a run that measured {config.evaluated.run} again and "
            f"trains nothing: use "
            f"crossfed evaluate, or take the block `evaluated` out."
        )
    check_method(method, config.method_config())
    data = PreparedData.open(resolve_data(config))
    domains = chosen_domains(config, data)
    data.verify()
    out_was_there = config.out.exists()
    run_dir = resume or _new_directory(config, data, name)
    if started:
        started(run_dir)
    plan = Plan(
        config, data.path.absolute(), domains, run_dir.absolute(), default_root().absolute()
    )
    with _unless_refused(run_dir, resume is None, out_was_there), _locked(run_dir), view:
        guard(run_dir, config, data, domains)
        if resume is not None and _over(plan, finish is not None):
            view.note(
                f"{run_dir} is finished: there is nothing to resume, and nothing in it was changed."
            )
            result = read_json(run_dir / RESULT)
            return RunResult(result["run_id"], run_dir, result)
        if resume is not None and config.data != stored_config(run_dir).data:
            write_text(run_dir / CONFIG, config.to_yaml())
        synthetic = "synthetic " if data.synthetic else ""
        view.start(
            f"{method.title}: {run_dir.name}",
            [
                f"data       {synthetic}{data.path.name}: "
                f"{', '.join(domains)}{shared(config.evaluation.train_share)}",
                f"protocol   {config.evaluation.protocol}, {_selecting(config)}",
                f"seed       {config.seed}   configuration {config.hash()}   back end "
                f"{config.backend}",
                f"directory  {run_dir}",
            ]
            + (
                [f"control    {config.control}: {MEANING[config.control]}"]
                if config.control != "none"
                else []
            ),
        )
        if config.backend == "inprocess" and (idle := config.resources.without_ray()):
            view.warn(
                f"In one process resources.{', resources.'.join(idle)} "
                f"{'does' if len(idle) == 1 else 'do'} nothing."
            )
        began = time.perf_counter()
        with _nodes(config) as nodes:
            rounds = Rounds(plan, nodes, lambda _: None, view.warn)
            for line in rounds.expect():
                view.note(f"privacy    {line}")
            nodes.preflight(plan)  # what cannot be placed leaves no record anywhere
            rounds.mirror = mirror = _mirror(config, run_dir, view)
            for callback in callbacks:
                callback.on_start(Started(plan, data, rounds.stages, resume is not None, view))
            try:
                done = _run(rounds, data, view, callbacks, on_round, finish, artifacts, began)
                with writing(run_dir):
                    for callback in callbacks:
                        callback.on_end(done)
            except BaseException as error:
                blame(error, config.control)
                for callback in callbacks:
                    callback.on_failure(*_ended(error))
                raise
        result = done.result
        if mirror is not None:
            mirror.finish()
        (run_dir / ENDING).unlink(missing_ok=True)
        if shown:
            _summary(view, config, result)
            for line in privacy.summary(result["privacy"]):
                view.note(f"privacy    {line}")
        for line in (line for callback in callbacks for line in callback.notes()):
            view.note(line)
    return RunResult(result["run_id"], run_dir, result)


def shared(train_share: float) -> str:
    """How much of the training data a run trains on, for the end of a phrase; nothing where it is
    all.
    """
    return "" if train_share == 1 else f", {train_share:.3g} of the training interactions"


def _selecting(config: RunConfig) -> str:
    """What selects, in words."""
    told = config.evaluated
    if told is None:
        return f"selecting on validation {config.evaluation.select}"
    return (
        f"measuring what validation {config.evaluation.select} under {told.protocol} "
        f"selected in {told.run}"
    )


def _ended(error: BaseException) -> tuple[Status, str, str]:
    """How the tracker records the end of a run that raised: status, reason, outcome."""
    if isinstance(error, Stopped):
        return error.status, str(error), error.outcome
    if isinstance(error, KeyboardInterrupt):
        return "KILLED", "interrupted", "killed"
    return "FAILED", str(error) or type(error).__name__, "failed"


def run_name(config: RunConfig) -> str:
    """A new name for a run: method, control, seed, the protocol of a second measurement, time."""
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    method = re.sub(r"[^A-Za-z0-9]+", "_", method_name(config.method))
    control = "" if config.control == "none" else f"-{config.control}"
    again = "" if config.evaluated is None else f"-{config.evaluation.protocol}"
    return f"{method}{control}-s{config.seed}{again}-{stamp}-{secrets.token_hex(2)}"


def _new_directory(config: RunConfig, data: PreparedData, name: str | None) -> Path:
    run_dir = config.out / (name or run_name(config))
    try:
        run_dir.mkdir(parents=True)
        # the data directory is written out in full, so that a resumed run does not depend on where
        # it is started
        full = config.model_copy(update={"data": config.data and data.path.absolute()})
        write_text(run_dir / CONFIG, full.to_yaml())
    except OSError as error:
        raise CrossfedError(
            f"The run directory {run_dir} cannot be made: {error.strerror}; choose another --out."
        ) from error
    return run_dir


@contextlib.contextmanager
def _locked(run_dir: Path) -> Iterator[None]:
    """One process at a time per run directory."""
    with (run_dir / ".lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CrossfedError(f"{run_dir} is being run by another process.") from None
        yield


@contextlib.contextmanager
def _unless_refused(run_dir: Path, new: bool, out_was_there: bool) -> Iterator[None]:
    """Take a new run's directory away again where the run is refused before its nodes are up."""
    try:
        yield
    except CrossfedError:
        if new and not (run_dir / PLACEMENT).exists():
            shutil.rmtree(run_dir, ignore_errors=True)
            if not out_was_there:
                with contextlib.suppress(OSError):  # something else may be in it by now
                    run_dir.parent.rmdir()
        raise


def _over(plan: Plan, tested: bool) -> bool:
    """Whether a run is at its end: its result is there and recorded, and so is its selected state.

    Args:
        tested: whether test metrics belong to the result.
    """
    run_dir = plan.run_dir
    if (run_dir / ENDING).exists() or not (
        finished(run_dir) if tested else (run_dir / RESULT).is_file()
    ):
        return False
    return Rounds(plan, InProcess(), lambda _: None, lambda _: None).at_the_end()


def guard(run_dir: Path, config: RunConfig, data: PreparedData, domains: tuple[str, ...]) -> None:
    """A resumed run must have the data, the configuration and the seed it was started with.

    Raises:
        CrossfedError: it does not; what differs.
    """
    path = run_dir / DATA
    told = {
        "fingerprint": data.fingerprint,
        "config_hash": config.hash(),
        "seed": config.seed,
        "domains": list(domains),
        "manifest": data.manifest,
    }
    if not path.exists():
        write_json(path, told)
        return
    before = read_json(path)
    for key in ("config_hash", "seed"):
        if before[key] != told[key]:
            raise CrossfedError(
                f"{run_dir} was started with {key} {before[key]}, but its config.yaml now "
                f"gives {told[key]}; "
                "undo the edit, or start a new run with `crossfed run` on a copy of that file."
            )
    if before["fingerprint"] != told["fingerprint"]:
        raise CrossfedError(
            f"{run_dir} was started on data {before['fingerprint'][:12]}, but {data.path} is "
            f"now {data.fingerprint[:12]}; "
            "restore that data or start a new run."
        )


def _mirror(config: RunConfig, run_dir: Path, view: Progress) -> Mirror | None:
    """Where the run is copied to; its place is taken and tried before anything is computed."""
    if config.mirror is None:
        return None
    logs: tuple[str, ...] = (HISTORY, LEDGER, privacy.RECORD)
    if config.tracking.uri is not None:  # a store that another machine finds, too
        logs += (RUN_ID,)
    mirror = Mirror(uris.join(config.mirror, run_dir.name), run_dir, logs, view.warn)
    mirror.start()
    view.note(f"copied to  {mirror.uri}")
    return mirror


def make_artifacts(config: RunConfig, view: Progress) -> Artifacts:
    """The shared arrays that the method of a run needs, by domain; kept by content in the cache.

    Item text is public to the run; interactions are not touched here.
    """
    wanted = set(config.resolved.artifacts)
    if not wanted & {"text", tokenise.SIDS}:
        return {}
    data = PreparedData.open(resolve_data(config))
    texts: dict[str, tuple[str, npt.NDArray[Any]]] = {}
    text, store, hits = config.text, ArtifactStore(), []
    for name in chosen_domains(config, data):
        told = functools.partial(view.encoding, name)
        path, vectors, hit = store.ensure_text(
            data.item_texts(name), text.encoder, text.missing, name, told
        )
        texts[name] = (path.stem, vectors)
        hits.append(f"{name} {len(vectors)} × {vectors.shape[1]}{' (cached)' if hit else ''}")
    view.note(f"text       {text.encoder}: {', '.join(hits)}")
    found = (
        tokenise.tokenise(config, texts, view)
        if tokenise.SIDS in wanted
        else {name: {} for name in texts}
    )
    return {
        name: ({"text": texts[name][1]} if "text" in wanted else {}) | found[name] for name in texts
    }


def _nodes(config: RunConfig) -> contextlib.AbstractContextManager[Nodes]:
    if config.backend == "inprocess":
        return contextlib.closing(InProcess())
    # ray takes seconds to import and is not needed in process
    from crossfed.platform.federation.actors import RayNodes

    return contextlib.closing(RayNodes())


def _run(
    rounds: Rounds,
    data: PreparedData,
    view: Progress,
    callbacks: Sequence[Callback],
    on_round: Callable[[Round], None] | None,
    finish: Finish | None,
    artifacts: Artifacts | None,
    began: float,
) -> Ended:
    plan, nodes, config = rounds.plan, rounds.nodes, rounds.config
    stage = ""

    def told(row: Round) -> None:
        nonlocal stage
        if row.stage != stage:
            stage = row.stage
            view.stage(row.stage, row.rounds)
        view.round(
            row.stage, row.round, row.rounds, row.metrics, row.seconds, row.bytes_up, row.bytes_down
        )
        for callback in callbacks:
            callback.on_round(row)
        if on_round:
            on_round(row)

    rounds.told = told
    before = time.perf_counter()
    if artifacts is None or not tokenise.fits(config, artifacts):
        artifacts = make_artifacts(config, view)
    sids = (
        tokenise.describe(config, artifacts) if tokenise.SIDS in config.resolved.artifacts else None
    )
    encode, lost = time.perf_counter() - before, 0
    while True:
        try:
            nodes.start(plan, artifacts, view.note)
            there = rounds.restore()
            if config.evaluated is not None:
                _check_trained(rounds, config.evaluated.run, sids)
            elif there:
                view.note(f"continuing after round {rounds.progress.step} of the run")
            placement = nodes.placement()
            write_json(plan.run_dir / PLACEMENT, placement)
            if rounds.progress.stage < len(rounds.stages):
                if length := pace.announcement(
                    config, _interactions(data, plan), _cores(plan, placement)
                ):
                    view.note(f"time       {length}")
                view.note(f"begins     {rounds.upcoming()}; a line follows when it is over")
            rounds.run()
            ready = time.perf_counter()
            nodes.deadline(config.resources.round_timeout, "the final evaluation")
            validation: dict[str, Measured] = nodes.each(
                "evaluate", dict.fromkeys(plan.domains, ())
            )
            test = finish(plan, nodes) if finish else {}
            audit = (
                nodes.each("audit", dict.fromkeys(plan.domains, ()))
                if config.evaluation.audit
                else {}
            )
            nodes.each("export", dict.fromkeys(plan.domains, ()))
            memory: dict[str, dict[str, int | None]] = nodes.each(
                "memory", dict.fromkeys(plan.nodes, ())
            )
            break
        except NodeLost as error:
            if config.resources.on_failure == "fail" or lost == config.resources.max_restarts:
                why = f"restarted {lost} times already, resources.max_restarts"
                why = "resources.on_failure=fail" if config.resources.on_failure == "fail" else why
                resume = f"; the last committed round stays: crossfed run --resume {plan.run_dir}"
                raise CrossfedError(
                    f"{error} ({why}){resume if rounds.progress.commits else '.'}"
                ) from error
            lost += 1
            view.warn(
                f"{error}; going back to the last committed round (restart {lost} of "
                f"{config.resources.max_restarts})"
            )
            nodes.stop()
    nodes.close()
    ended = time.perf_counter()
    import pandas as pd  # here, because a run that is refused needs none of it

    ledger = pd.DataFrame(
        rounds.ledger.rows(),
        columns=[
            "stage",
            "round",
            "sender",
            "receiver",
            "direction",
            "key",
            "shape",
            "dtype",
            "bytes",
        ],
    )
    result = {
        "run_id": plan.run_dir.name,
        "method": method_name(config.method),
        "scope": str(config.resolved.scope),
        "preset": config.preset,
        "control": config.control,
        "seed": config.seed,
        "data": {"name": data.path.name, "synthetic": data.synthetic},
        "data_fingerprint": data.fingerprint,
        "protocol": config.evaluation.protocol,
        "split_seed": config.evaluation.split_seed,
        "train_share": config.evaluation.train_share,
        "candidates": {name: found.candidates for name, found in (test or validation).items()},
        "config": config.config,
        "config_hash": config.hash(),
        "domains": {
            name: {
                "counts": data.manifest["domains"][name],
                "selected": rounds.progress.selected.get(name),
                "validation": validation[name].metrics,
                "validation_users": validation[name].users,
                "validation_candidates": validation[name].candidates,
            }
            | ({"test": test[name].metrics, "test_users": test[name].users} if test else {})
            | ({"popularity": test[name].popularity} if test and test[name].popularity else {})
            | ({"audit": audit[name]} if audit else {})
            for name in plan.domains
        },
        "bytes": _bytes(ledger, plan.domains),
        "privacy": rounds.accountant.report(rounds.ledger.rows(), rounds.progress.budget_stops),
    } | ({"tokeniser": sids} if sids else {})
    if ":" in config.method:
        result["method_from"] = config.method
    executed: dict[str, Any] = {
        "seconds": {
            "total": ended - began,
            "encode": encode,
            "rounds": rounds.progress.seconds,
            "final": ended - ready,
        },
        "restarts": lost,
        "placement": placement,
        "memory": memory,
        "backend": config.backend,
        "versions": {
            name: importlib.metadata.version(name) for name in ("crossfed", "torch", "ray", "numpy")
        },
    }
    if config.evaluated is not None:
        trained = read_json(plan.run_dir / TRAINED)
        result["evaluated"] = config.evaluated.model_dump(mode="json") | executed
        executed = {key: trained[key] for key in executed if key in trained}
    result |= executed
    with writing(plan.run_dir):
        (plan.run_dir / ENDING).touch()
    write_json(plan.run_dir / RESULT, result)
    with writing(plan.run_dir):
        ledger.to_parquet(plan.run_dir / "ledger.parquet", index=False)
    return Ended(plan, result, rounds.history.rows(), ledger, view)


def _interactions(data: PreparedData, plan: Plan) -> int:
    """The interactions of a run's domains."""
    return sum(int(data.manifest["domains"][name]["interactions"]) for name in plan.domains)


def _cores(plan: Plan, placement: Mapping[str, Mapping[str, Any]]) -> float:
    """How many cores compute for a run's domains: in one process one after the other, else each on
    its share.
    """
    if plan.config.backend == "inprocess":
        return 1.0
    return sum(min(1.0, float(placement[name]["cpus"])) for name in plan.domains)


def _check_trained(rounds: Rounds, run: str, sids: Mapping[str, Any] | None) -> None:
    """Raise CrossfedError unless the model to measure again is there, and items have the semantic
    IDs it was trained on.
    """
    run_dir = rounds.plan.run_dir
    if rounds.progress.stage < len(rounds.stages):
        raise CrossfedError(
            f"{run_dir} measures the model of {run} again, but does not hold it any more; use "
            f"crossfed evaluate "
            "once more."
        )
    then = read_json(run_dir / TRAINED).get("tokeniser")
    if sids and then and not tokenise.alike(sids, then):
        raise CrossfedError(
            f"The tokeniser gives items other semantic IDs than those {run_dir} was trained "
            f"on; restore {default_root()} as it "
            "was then, or measure on the machine that trained it."
        )


def _bytes(ledger: pd.DataFrame, domains: tuple[str, ...]) -> dict[str, dict[str, int]]:
    """Bytes sent (up) and received (down) by each domain over the run."""
    up = ledger[ledger["direction"] != Direction.DOWN].groupby("sender")["bytes"].sum()
    down = ledger[ledger["direction"] != Direction.UP].groupby("receiver")["bytes"].sum()
    return {
        "up": {name: int(up.get(name, 0)) for name in domains},
        "down": {name: int(down.get(name, 0)) for name in domains},
    }


def _summary(view: Progress, config: RunConfig, result: dict[str, Any]) -> None:
    """The final table: the selecting metric and the first two of the others; everything else is in
    `result.json`.
    """
    told = [
        f"{name}_at_{k}" for name in config.evaluation.metrics[:2] for k in config.evaluation.ks
    ]
    told = list(dict.fromkeys([config.evaluation.select, *told]))

    def short(metrics: Mapping[str, float]) -> dict[str, float]:
        return {name: metrics[name] for name in told if name in metrics}

    view.finish(
        [
            SummaryRow(
                name,
                short(row["validation"]),
                short(row.get("test", {})),
                result["protocol"],
                result["candidates"][name],
            )
            for name, row in result["domains"].items()
        ]
    )
