"""Starting a run and starting a search from Python."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from crossfed.platform.config.settings import RunConfig, build
from crossfed.platform.console import Mode, make_progress
from crossfed.platform.data.store import PreparedData
from crossfed.results import Run, Study

if TYPE_CHECKING:
    from crossfed.tuning.study import Search

Data = str | Path | PreparedData
"""A prepared data directory, or what `crossfed.prepare` gave."""


def run(
    method: str,
    *,
    data: Data | None = None,
    domains: Sequence[str] | None = None,
    preset: str | None = None,
    seed: int | None = None,
    out: str | Path | None = None,
    backend: Literal["ray", "inprocess"] | None = None,
    control: str | None = None,
    address: str | None = None,
    tracking_uri: str | None = None,
    settings: Mapping[str, Any] | None = None,
    progress: Mode = "auto",
    test: bool = True,
    **config: Any,
) -> Run:
    """Run one federation from start to result, as `crossfed run` does.

    Args:
        method: a method's name, `package.module:ATTRIBUTE`, or a run's YAML file.
        data: the prepared data; the embedded synthetic shops by default.
        domains: a subset of the data's domains, in this order.
        preset: one of the method's presets.
        seed: the run's seed, 0 by default.
        out: folder of run directories, `runs` by default, or a URI.
        backend: Ray actors (the default), or all nodes in this process.
        control: what every node receives in place of what it was sent; see `crossfed run --help`.
        address: a running Ray cluster to join; without it a local one starts.
        tracking_uri: an MLflow server or a `sqlite:///` URI; by default a database beside the runs.
        settings: other settings of the run by dotted key, e.g.
            `{"evaluation.protocol": "leave-one-out-99"}`.
        progress: `auto`, `live`, `plain`, or `quiet` for silence.
        test: read the test split once, at the end. Without it the result holds validation metrics
            only.
        **config: the method's own settings, e.g. `K=60`.

    Returns:
        The finished run.

    Raises:
        CrossfedError: anything that can be mended, in one sentence. What was committed stays, and
            can be resumed.

    Examples:
        >>> import crossfed
        >>> made = crossfed.run("lightgcn", backend="inprocess", progress="quiet", epochs=1)  # doctest: +SKIP
        >>> made.metrics.head()  # doctest: +SKIP
    """  # noqa: E501
    from crossfed.platform.federation.final import test_once
    from crossfed.platform.report.recording import run_recorded

    made = configure(
        method,
        data=data,
        domains=domains,
        preset=preset,
        seed=seed,
        out=out,
        backend=backend,
        control=control,
        address=address,
        tracking_uri=tracking_uri,
        settings=settings,
        config=config,
    )
    view = make_progress(progress)
    finished = run_recorded(made, view=view, finish=test_once if test else None)
    return Run(finished.run_dir)


def tune(
    method: str,
    *,
    data: Data | None = None,
    domains: Sequence[str] | None = None,
    preset: str | None = None,
    trials: int = 20,
    study: str | None = None,
    search: Mapping[str, Any] | None = None,
    objectives: Sequence[str] = ("mean",),
    sampler: str = "tpe",
    pruner: str | None = None,
    concurrent: int | None = None,
    max_rounds: int | None = None,
    time_budget: float | None = None,
    grace: int | None = None,
    reduction: int | None = None,
    seeds: int = 1,
    retries: int = 1,
    storage: str | None = None,
    seed: int | None = None,
    out: str | Path | None = None,
    backend: Literal["ray", "inprocess"] | None = None,
    address: str | None = None,
    tracking_uri: str | None = None,
    settings: Mapping[str, Any] | None = None,
    progress: Literal["plain", "quiet"] = "plain",
    **config: Any,
) -> Study:
    """Search a method's settings over whole federated runs, as `crossfed tune` does.

    Args:
        method: as for `run`, like `data`, `domains`, `preset`, `out`, `backend`, `address`,
            `tracking_uri`, `settings`.
        trials: trials in all; the first has the paper's setting.
        study: the study's name; by default method, data and time.
        search: changes to the space the method declares, e.g.
            `{"K": [10, 20], "lr": {"low": 1e-4, "high": 1e-2}}`.
        objectives: `mean`, `worst` or `domain:NAME` of the selecting validation metric; `epsilon`,
            `bytes`.
        sampler: Optuna's: tpe, random, grid, cmaes, nsgaii, nsgaiii or gp.
        pruner: asha, median or none; asha by default, none with several objectives.
        concurrent: trials at once; by default as many as fit.
        max_rounds: rounds of a trial at most; the winner is run again in full.
        time_budget: seconds after which the search ends.
        grace: rounds before which nothing is stopped.
        reduction: asha: one trial in so many goes on at each rung.
        seeds: seeds of the winner's final runs, which read the test split; 0 for none.
        retries: how often a trial whose process dies is run again.
        storage: Optuna storage URL; by default SQLite in the study's folder.
        seed: of the trials' runs and of the sampler.
        progress: a line per trial, or `quiet`.
        **config: the method's own settings for the first trial.

    Returns:
        The study, with its trials and the winner's final runs.

    Raises:
        CrossfedError: anything that can be mended, in one sentence.
    """
    from crossfed.platform.federation.final import test_once
    from crossfed.tuning.search import start
    from crossfed.tuning.study import checked_search

    base = configure(
        method,
        data=data,
        domains=domains,
        preset=preset,
        seed=seed,
        out=out,
        backend=backend,
        address=address,
        tracking_uri=tracking_uri,
        settings=settings,
        config=config,
    )
    asked: Search = checked_search(
        name=study or study_name(base),
        trials=trials,
        concurrent=concurrent,
        objectives=tuple(objectives),
        sampler=sampler,
        pruner=pruner or ("none" if len(objectives) > 1 else "asha"),
        grace=grace,
        reduction=reduction,
        max_rounds=max_rounds,
        time_budget=time_budget,
        seeds=seeds,
        retries=retries,
        seed=base.seed,
        storage=storage,
        changes=dict(search or {}),
    )
    found = start(asked, base, finish=test_once, view=make_progress(progress))
    return Study(found.study.folder)


def configure(
    method: str,
    *,
    data: Data | None = None,
    domains: Sequence[str] | None = None,
    preset: str | None = None,
    seed: int | None = None,
    out: str | Path | None = None,
    backend: str | None = None,
    control: str | None = None,
    address: str | None = None,
    tracking_uri: str | None = None,
    settings: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
) -> RunConfig:
    """The configuration of a run whose values are given as Python objects; see `run`.

    Raises:
        CrossfedError: an unknown key, a wrong type or an impossible value, named with what is
            allowed.
    """
    values = {
        "data": data.path if isinstance(data, PreparedData) else data and Path(data),
        "domains": tuple(domains) if domains is not None else None,
        "seed": seed,
        "out": out and str(out),
        "backend": backend,
        "control": control,
        "resources.address": address,
        "tracking.uri": tracking_uri,
    }
    given = {**(config or {}), **(settings or {})}
    return build(str(method), preset=preset, values=values, settings=given)


def study_name(base: RunConfig) -> str:
    """A new study's name: method, data and time."""
    data = base.data.name if base.data else "synthetic"
    method = re.sub(r"[^A-Za-z0-9]+", "_", base.method)
    return f"{method}-{data}-{datetime.now(UTC).strftime('%Y%m%d-%H%M%S')}"
