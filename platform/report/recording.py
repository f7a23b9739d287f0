"""What MLflow is told of a run besides its rounds: what it is at the start, files, figures, models
and a page at the end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crossfed.platform.config.settings import RunConfig
from crossfed.platform.console import Progress
from crossfed.platform.data.store import PreparedData
from crossfed.platform.evaluation.protocols import told_protocol
from crossfed.platform.federation.callbacks import Callback, Ended, Started, Status
from crossfed.platform.federation.node import Plan
from crossfed.platform.federation.rounds import Round
from crossfed.platform.federation.run import RunResult, run_federation, shared
from crossfed.platform.layout import CONFIG, DATA, RESULT, RUN_ID
from crossfed.platform.registry import method_name
from crossfed.platform.tokeniser import tokenise
from crossfed.platform.tracking import names
from crossfed.platform.tracking.spool import State
from crossfed.platform.tracking.tracker import DatasetInput, Tracker, resolve_uri

if TYPE_CHECKING:
    pass


def _params(config: RunConfig, data: str) -> dict[str, Any]:
    """What the tracker shows as the run's parameters."""
    known = {
        "method": config.method,
        "data": data,
        "seed": config.seed,
        "protocol": config.evaluation.protocol,
        "select": config.evaluation.select,
    } | ({"preset": config.preset} if config.preset else {})
    if config.tracking.params is not None:
        return {name: config.config[name] for name in config.tracking.params} | known
    apart = {"control": (config.control, "none"), "train_share": (config.evaluation.train_share, 1)}
    unusual = {name: value for name, (value, usual) in apart.items() if value != usual}
    return (
        unusual
        | tokenise.parameters(config)
        | config.config
        | known
        | {"config_hash": config.hash()}
    )


def run_title(config: RunConfig, run_dir: Path, data: str) -> str:
    """What MLflow calls a run: its directory, its study and method where the directory does not say
    them, its data.
    """
    study = config.tracking.tags.get("study")
    return " ".join([run_dir.name, *([study, method_name(config.method)] if study else []), data])


def model_title(config: RunConfig, data: str, domain: str) -> str:
    """What MLflow calls a domain's model: method, data, domain, and the study that it comes from.
    """
    study = config.tracking.tags.get("study")
    return "-".join([method_name(config.method), data, domain, *([study] if study else [])])


def track(
    config: RunConfig,
    run_dir: Path,
    data: PreparedData,
    domains: tuple[str, ...],
    resumed: bool,
    view: Progress,
) -> Tracker:
    """Open the run's record, or go on with it: parameters, tags and the domains' data.

    Args:
        resumed: whether the run goes on from its last commit. view: where warnings go.

    Raises:
        CrossfedError: the store cannot be used, or is out of reach with `tracking.require`.
    """
    known = run_dir / RUN_ID
    kind = "synthetic" if data.synthetic else "prepared"
    return Tracker.start(
        config.tracking,
        run_dir,
        run_title(config, run_dir, data.path.name),
        _params(config, data.path.name),
        {
            "method": method_name(config.method),
            "data": data.path.name,
        }
        | config.tracking.tags,
        [
            DatasetInput(
                data.path.name,
                data.fingerprint[:12],
                f"{kind} data {data.path.name}, domains {', '.join(domains)}",
                {name: data.manifest["domains"][name] for name in domains},
            )
        ],
        resume_run_id=known.read_text(encoding="utf-8").strip()
        if resumed and known.exists()
        else None,
        warn=view.warn,
    )


def track_beside(
    config: RunConfig,
    run_dir: Path,
    data: PreparedData,
    domains: tuple[str, ...],
    resumed: bool,
    view: Progress,
) -> Callable[[], Tracker]:
    """`track` in a thread, because MLflow takes seconds to import and to make its database.

    What a user can have got wrong is told at once, as is a store that is away with
    `tracking.require`; a store that is away otherwise is warned of from the thread.

    Returns:
        Gives the tracker, and waits for it where it must.

    Raises:
        CrossfedError: as `track`.
    """
    opened = Future[Tracker]()

    def work() -> None:
        try:
            opened.set_result(track(config, run_dir, data, domains, resumed, view))
        except BaseException as error:  # raised where the tracker is asked for
            opened.set_exception(error)

    if config.tracking.enabled:
        resolve_uri(config.tracking, run_dir.parent)
        State.read(run_dir)
    threading.Thread(target=work, name="tracking", daemon=True).start()
    if config.tracking.require or not config.tracking.enabled:
        opened.result()
    return opened.result


def record(
    plan: Plan,
    result: dict[str, Any],
    history: list[dict[str, Any]],
    tracker: Tracker,
) -> None:
    """Final metrics, files, figures, models and the run's page.

    Args:
        result: what `result.json` holds. history: a row per round.
    """
    run_dir, last = plan.run_dir, max((row["step"] for row in history), default=0)
    tracker.log(names.of_result(result, plan.config.evaluation.select), last)
    tracker.describe(_described(result, plan.config.evaluation.select))
    if not plan.config.tracking.artifacts:
        return
    for file in (CONFIG, DATA, "placement.json", "history.jsonl", "ledger.parquet", RESULT):
        tracker.artifact(run_dir / file)
    if (run_dir / "per_user").is_dir():
        tracker.artifact(run_dir / "per_user", "per_user")
    from crossfed.platform.report import figures  # here, because it takes seconds to import
    from crossfed.platform.report.automatic import run_analyses
    from crossfed.platform.serving import save

    drawn = figures.run_figures(history, result) | figures.model_figures(
        run_dir / "model", plan.domains, result
    )
    drawn |= run_analyses(run_dir) if history else {}
    for name, figure in drawn.items():
        tracker.figure(figure, name)
    for name in plan.domains:
        registered = f"{result['method']}-{result['data']['name']}-{name}".replace(
            "/", "_"
        ).replace(":", "_")
        title = model_title(plan.config, result["data"]["name"], name)
        tracker.model(
            save.save,
            run_dir,
            name,
            last,
            registered if plan.config.tracking.register_models else None,
            title,
        )


class Recording(Callback):
    """Keeps MLflow's record of a run: opened beside the rest, a step per round, files and models at
    the end.
    """

    def on_start(self, run: Started) -> None:
        config, self._plan, self._stages = run.plan.config, run.plan, run.stages
        self._tracker = track_beside(
            config, run.plan.run_dir, run.data, run.plan.domains, run.resumed, run.view
        )

    def on_round(self, row: Round) -> None:
        number = next(i for i, stage in enumerate(self._stages, 1) if stage.name == row.stage)
        selects = self._stages[number - 1].keep_best
        select = self._plan.config.evaluation.select
        self._tracker().log(
            names.of_round(asdict(row), select, number, self._plan.domains, selects), row.step
        )

    def on_end(self, done: Ended) -> None:
        record(done.plan, done.result, done.history, self._tracker())
        self._tracker().finish("FINISHED")

    def on_failure(self, status: Status, reason: str, outcome: str) -> None:
        self._tracker().finish(status, reason, outcome)

    def notes(self) -> Sequence[str]:
        tracker = self._tracker()
        return (f"tracking   {tracker.status}" + (f": {tracker.url}" if tracker.url else ""),)


def run_recorded(config: RunConfig, *, callbacks: Sequence[Callback] = (), **how: Any) -> RunResult:
    """`run_federation` with its record in MLflow, as `config.tracking` has it, and its figures.

    Args:
        callbacks: what watches besides. how: as for `run_federation`.

    Raises:
        CrossfedError: as `run_federation`.
    """
    return run_federation(config, callbacks=(Recording(), *callbacks), **how)


def _described(result: dict[str, Any], select: str) -> str:
    """The run's page in the UI: what it is, and its numbers."""
    kind = "synthetic data" if result["data"]["synthetic"] else "data"
    rows = [
        f"| {name} | {row['validation'][select]:.4f} | {row['test'][select]:.4f} | "
        f"{result['candidates'][name]} |"
        if "test" in row
        else f"| {name} | {row['validation'][select]:.4f} | – | {result['candidates'][name]} |"
        for name, row in result["domains"].items()
    ]
    control = (
        "" if (told := result.get("control", "none")) == "none" else f" under the control {told}"
    )
    share = shared(result.get("train_share", 1.0))
    where = (
        f"{kind} {result['data']['name']}{share}, protocol {told_protocol(result)}, seed "
        f"{result['seed']}"
    )
    head = f"**{result['method']}**{control}, {where}"
    return "\n".join(
        [
            head,
            "",
            f"| domain | validation {select} | test {select} | candidates |",
            "|---|---|---|---|",
            *rows,
        ]
    )
