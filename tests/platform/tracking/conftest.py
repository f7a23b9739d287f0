"""A store with its tables made, which takes seconds, to be copied."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from mlflow import MlflowClient


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with its tables made, to be copied: making them takes seconds."""
    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    MlflowClient(tracking_uri=f"sqlite:///{path}").get_experiment("0")
    return path


@pytest.fixture
def out(tmp_path: Path, empty_store: Path) -> Path:
    """A folder of runs whose store exists already."""
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    return tmp_path
