"""A tracker started for a test, and its store read back."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

from mlflow import MlflowClient

from crossfed.platform.config.settings import TrackingSettings
from crossfed.platform.tracking.tracker import DatasetInput, Tracker

DATASETS = [DatasetInput("Beauty", "d" * 64, "synthetic", {"users": 3, "items": 4})]


def start(
    run_dir: Path, warnings: list[str] | None = None, resume: str | None = None, **settings: Any
) -> Tracker:
    warn = None if warnings is None else warnings.append
    tags = {"seed": "7"}
    return Tracker.start(
        TrackingSettings(**settings), run_dir, "a run", {"alpha": 0.1}, tags, DATASETS, resume, warn
    )


def sqlite(run_dir: Path) -> MlflowClient:
    return MlflowClient(tracking_uri=f"sqlite:///{run_dir.parent / 'mlflow.db'}")


def history(client: MlflowClient, run_id: str, name: str) -> list[tuple[int, float]]:
    return [(m.step, m.value) for m in client.get_metric_history(run_id, name)]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
