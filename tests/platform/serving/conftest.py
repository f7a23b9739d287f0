"""A real run and the models that it logged, one a domain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlflow
import pytest
from mlflow import MlflowClient

from crossfed.platform.config.settings import build
from crossfed.platform.report.recording import run_recorded


@pytest.fixture(scope="session")
def run_dir(shops: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs")
    values = {"data": shops, "out": out, "backend": "inprocess", "tracking.register_models": True}
    return run_recorded(build("lightgcn", sets=["epochs=2"], values=values)).run_dir


@pytest.fixture(scope="session")
def store(run_dir: Path) -> MlflowClient:
    return MlflowClient(tracking_uri=f"sqlite:///{run_dir.parent}/mlflow.db")


@pytest.fixture(scope="session")
def uris(run_dir: Path, store: MlflowClient) -> dict[str, str]:
    """Where each domain's logged model is, as the tracker left it in the store."""
    run_id = (run_dir / "mlflow_run_id").read_text().strip()
    found = {}
    for output in store.get_run(run_id).outputs.model_outputs:
        model = store.get_logged_model(output.model_id)
        assert (model.status, model.source_run_id) == ("READY", run_id)
        found[model.name.removeprefix("lightgcn-shops-")] = model.artifact_location
    return found


@pytest.fixture(scope="session")
def films(uris: dict[str, str]) -> Any:
    return mlflow.pyfunc.load_model(uris["films"])
