"""What MLflow is told of a run besides its rounds: what it is at the start, files, figures, models and a page at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from crossfed.platform.config.settings import RunConfig
from crossfed.platform.console import Progress
from crossfed.platform.data.store import PreparedData
from crossfed.platform.evaluation.protocols import told_protocol
from crossfed.platform.federation.node import Plan
from crossfed.platform.federation.runs import CONFIG, DATA, RESULT
from crossfed.platform.registry import method_name
from crossfed.platform.report import figures
from crossfed.platform.report.automatic import run_analyses
from crossfed.platform.tokeniser import tokenise
from crossfed.platform.tracking.spool import RUN_ID
from crossfed.platform.tracking.tracker import DatasetInput, Tracker


def told_share(share: float) -> str:
    """How much of the training data a run trains on, for the end of a phrase; nothing where it is all."""
    return "" if share == 1 else f", {share:.3g} of the training interactions"


def _params(config: RunConfig) -> dict[str, Any]:
    """What the tracker shows as the run's parameters."""
    if config.tracking.params is not None:
        return {name: config.config[name] for name in config.tracking.params}
    apart = {"control": (config.control, "none"), "train_share": (config.evaluation.train_share, 1)}
    told = {name: value for name, (value, usual) in apart.items() if value != usual}
    return {"config_hash": config.hash()} | told | tokenise.parameters(config) | config.config


def track(
    config: RunConfig, run_dir: Path, data: PreparedData, domains: tuple[str, ...], resumed: bool, view: Progress
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
        run_dir.name,
        _params(config),
        {
            "method": method_name(config.method),
            "seed": str(config.seed),
            "protocol": config.evaluation.protocol,
            "data": data.path.name,
            "data_kind": kind,
            "data_fingerprint": data.fingerprint,
            "preset": config.preset or "none",
            "backend": config.backend,
            "control": config.control,
            "train_share": str(config.evaluation.train_share),
            "config_hash": config.hash(),
        }
        | config.tracking.tags,
        [
            DatasetInput(
                name,
                f"{data.fingerprint[:20]}-{name}"[:36],
                f"{kind} data {data.path.name}",
                data.manifest["domains"][name],
            )
            for name in domains
        ],
        resume_run_id=known.read_text(encoding="utf-8").strip() if resumed and known.exists() else None,
        warn=view.warn,
    )


def record(
    plan: Plan,
    result: dict[str, Any],
    history: list[dict[str, Any]],
    ledger: pd.DataFrame,
    tracker: Tracker,
    view: Progress,
) -> None:
    """Final metrics, files, figures, models and the run's page; also writes `ledger.parquet` beside the result.

    Args:
        result: what `result.json` holds. history: a row per round. ledger: a row per array that crossed.
    """
    run_dir, last = plan.run_dir, max((row["step"] for row in history), default=0)
    ledger.to_parquet(run_dir / "ledger.parquet", index=False)
    for name, row in result["privacy"]["domains"].items():
        totals = {f"final/privacy/{name}/{key}": value for key, value in row.items() if key.startswith("epsilon_")}
        tracker.log(totals, last)
    for name, row in result["domains"].items():
        tracker.log({f"final/audit/{name}/{key}": value for key, value in row.get("audit", {}).items()}, last)
        tracker.log(
            {
                f"final/{split}/{name}/{key}": value
                for split in ("validation", "test")
                for key, value in row.get(split, {}).items()
            },
            last,
        )
    peaks = {f"final/memory/{kind}/{name}": row[kind] for name, row in result.get("memory", {}).items() for kind in row}
    tracker.log({key: peak for key, peak in peaks.items() if peak is not None}, last)
    tracker.describe(_described(result, plan.config.evaluation.select))
    if not plan.config.tracking.artifacts:
        return
    for file in (CONFIG, DATA, "placement.json", "history.jsonl", "ledger.parquet", RESULT):
        tracker.artifact(run_dir / file)
    if (run_dir / "per_user").is_dir():
        tracker.artifact(run_dir / "per_user", "per_user")
    drawn = figures.run_figures(history, result) | figures.model_figures(run_dir / "model", plan.domains, result)
    drawn |= run_analyses(run_dir) if history else {}
    for name, figure in drawn.items():
        tracker.figure(figure, name)
    for name in plan.domains:
        registered = f"{result['method']}-{result['data']['name']}-{name}".replace("/", "_").replace(":", "_")
        tracker.model(run_dir, name, last, registered if plan.config.tracking.register_models else None)


def _described(result: dict[str, Any], select: str) -> str:
    """The run's page in the UI: what it is, and its numbers."""
    kind = "synthetic data" if result["data"]["synthetic"] else "data"
    rows = [
        f"| {name} | {row['validation'][select]:.4f} | {row['test'][select]:.4f} | {result['candidates'][name]} |"
        if "test" in row
        else f"| {name} | {row['validation'][select]:.4f} | – | {result['candidates'][name]} |"
        for name, row in result["domains"].items()
    ]
    control = "" if (told := result.get("control", "none")) == "none" else f" under the control {told}"
    share = told_share(result.get("train_share", 1.0))
    where = f"{kind} {result['data']['name']}{share}, protocol {told_protocol(result)}, seed {result['seed']}"
    head = f"**{result['method']}**{control}, {where}"
    return "\n".join(
        [head, "", f"| domain | validation {select} | test {select} | candidates |", "|---|---|---|---|", *rows]
    )
