"""A finished run's selected model, measured again: under another protocol of the same split, with
other cut-offs or metrics.

Nothing is trained. The last commit of the run, its history, ledger and record of noise are brought
into a new run directory, whose configuration differs in what is measured and in how the method
ranks; the ordinary end of a run does the rest.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from crossfed.platform.checkpoint import Checkpoints, read_json, write_json, write_text
from crossfed.platform.config.settings import Evaluated, RunConfig, build, parse_value
from crossfed.platform.console import Progress
from crossfed.platform.data.store import PreparedData
from crossfed.platform.errors import CrossfedError
from crossfed.platform.evaluation.metrics import metric_name, parse_metric
from crossfed.platform.evaluation.protocols import get_protocol
from crossfed.platform.federation.callbacks import Callback
from crossfed.platform.federation.node import Plan
from crossfed.platform.federation.privacy import RECORD
from crossfed.platform.federation.rounds import check_method
from crossfed.platform.federation.run import (  # fmt: skip
    Finish,
    RunResult,
    guard,
    resolve_data,
    run_federation,
    run_name,
)
from crossfed.platform.federation.runs import finished, stored_config
from crossfed.platform.layout import CONFIG, DATA, HISTORY, LEDGER, RESULT, TRAINED
from crossfed.platform.method import ranking_keys

MEASURED = ("evaluation.protocol", "evaluation.ks", "evaluation.metrics")
"""Keys of a run that change what is measured, and neither what was trained nor what was selected.
"""


def evaluation_config(
    run_dir: Path, protocol: str | None = None, sets: Sequence[str] = (), data: Path | None = None
) -> RunConfig:
    """The configuration of a run that measures a run's selected model again.

    Args:
        run_dir: the run. protocol: by default its own.
        sets: `key=value`; a key of `MEASURED` or one that the method marks with `method.RANKING`.
        data: where its data are now, if not where they were.

    Raises:
        CrossfedError: another key, a value that is not possible, a protocol with another split, or
            the metric that selected would not be measured.
    """
    old = stored_config(run_dir, data)
    ranking = ranking_keys(old.resolved.Config)
    for text in sets:
        key, _, value = text.partition("=")
        key = key.strip().removeprefix("config.")
        if key not in (*MEASURED, *ranking):
            raise CrossfedError(
                f"--set {text}: {key} cannot change for a model that is trained and selected; "
                f"what can: "
                f"{', '.join((*MEASURED, *ranking))}."
            )
        _check_selecting(old.evaluation.select, key, value)
    chosen = [] if protocol is None else [f"evaluation.protocol={protocol}"]
    new = build(
        str(run_dir / CONFIG), sets=[*sets, *chosen], values={"data": data and data.absolute()}
    )
    before, after = get_protocol(old.evaluation.protocol), get_protocol(new.evaluation.protocol)
    if before.split != after.split:
        raise CrossfedError(
            f"{run_dir} was trained on the split of {before.id}, but {after.id} splits "
            f"otherwise ({after.split}): the model has "
            "seen some of its test items; train under that protocol."
        )
    then = old.evaluated or Evaluated(run=run_dir.absolute().name, protocol=before.id)
    values = {key: {**old.config, **then.ranking}[key] for key in ranking}
    told = then.model_copy(
        update={"ranking": {key: was for key, was in values.items() if was != new.config[key]}}
    )
    tags = {**old.tracking.tags, "evaluated": then.run}
    tracking = old.tracking.model_copy(update={"parent_run_id": None, "params": None, "tags": tags})
    return new.model_copy(update={"evaluated": told, "tracking": tracking})


def _check_selecting(select: str, key: str, value: str) -> None:
    """Raise CrossfedError where the metric that selected is left out."""
    given, (metric, k) = parse_value(value), parse_metric(select)
    if not isinstance(given, list):
        return
    if key == "evaluation.ks":
        left_out = None if k in given else str(k)
    elif key == "evaluation.metrics":
        left_out = None if select in [metric_name(f"{name}_at_{k}") for name in given] else metric
    else:
        return
    if left_out is not None:
        raise CrossfedError(
            f"--set {key}={value} leaves out {left_out}: {select} selected this model and "
            f"stays measured."
        )


def evaluate(
    run_dir: Path,
    finish: Finish,
    *,
    protocol: str | None = None,
    sets: Sequence[str] = (),
    out: Path | None = None,
    data: Path | None = None,
    backend: Literal["ray", "inprocess"] | None = None,
    view: Progress | None = None,
    started: Callable[[Path], None] | None = None,
    callbacks: Sequence[Callback] = (),
) -> RunResult:
    """Measure a finished run's selected model again, as a run of its own.

    Args:
        run_dir: the run; nothing in it changes.
        finish: reads the test split: `evaluation.final.test_once`.
        protocol, sets, data: as in `evaluation_config`.
        out: folder of the new run; by default that of the given one. backend: by default that of
            the given run.
        view, started, callbacks: as in `run_federation`.

    Raises:
        CrossfedError: the run has not finished or never read the test split, its data or
            configuration have changed, it holds no sound last commit, or as `evaluation_config`.
    """
    if not finished(run_dir):
        raise CrossfedError(
            f"{run_dir} has no test metrics: it has not finished, or it is a trial of a search; "
            f"crossfed run --resume {run_dir} goes on with an interrupted run."
        )
    config = evaluation_config(run_dir, protocol, sets, data)
    place: dict[str, Any] = {"out": out or run_dir.parent, "backend": backend or config.backend}
    config = config.model_copy(update=place)
    old = stored_config(run_dir, data)
    told = read_json(run_dir / DATA)
    guard(run_dir, old, PreparedData.open(resolve_data(old)), tuple(told["domains"]))
    commit = _last_commit(run_dir, old, tuple(told["domains"]), view)
    there = config.out / run_name(config)
    _bring(run_dir, commit, there, config)
    return run_federation(
        config, resume=there, view=view, finish=finish, started=started, callbacks=callbacks
    )


def _last_commit(
    run_dir: Path, config: RunConfig, domains: tuple[str, ...], view: Progress | None
) -> Path:
    """The commit after the last stage, which holds the selected state."""
    nodes = Plan(config, run_dir, domains, run_dir, run_dir).nodes
    problems: list[str] = []
    found = Checkpoints(run_dir, nodes).latest(problems.append)
    if found is None or found[1]["stage"] < len(
        check_method(config.resolved, config.method_config())
    ):
        why = f" ({'; '.join(problems)})" if problems else ""
        raise CrossfedError(
            f"{run_dir} does not hold its selected state any more{why}; crossfed run --resume "
            f"{run_dir} makes it again."
        )
    return found[0]


def _bring(run_dir: Path, commit: Path, there: Path, config: RunConfig) -> None:
    """Make the new run directory. Its configuration comes last: before, it is no run, and nothing
    can go on with it.
    """
    try:
        there.mkdir(parents=True)
    except OSError as error:
        raise CrossfedError(
            f"The run directory {there} cannot be made: {error.strerror}; choose another --out."
        ) from error
    try:
        shutil.copytree(commit, there / commit.parent.name / commit.name)
        for name in (HISTORY, LEDGER, RECORD):
            if (run_dir / name).is_file():
                shutil.copyfile(run_dir / name, there / name)
        shutil.copyfile(run_dir / RESULT, there / TRAINED)
        write_json(there / DATA, read_json(run_dir / DATA) | {"config_hash": config.hash()})
        write_text(there / CONFIG, config.to_yaml())
    except BaseException as error:
        shutil.rmtree(there, ignore_errors=True)
        if isinstance(error, OSError):
            raise CrossfedError(
                f"{run_dir} cannot be copied to {there} ({error}); free the disk and repeat."
            ) from error
        raise
