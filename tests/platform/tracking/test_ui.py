"""The link that `crossfed ui` prints: a shared view of MLflow's table of runs, kept in the
store.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mlflow import MlflowClient
from typer.testing import CliRunner

from crossfed.platform.cli.main import app
from crossfed.platform.config.settings import TrackingSettings
from crossfed.platform.errors import CrossfedError
from crossfed.platform.tracking import ui
from crossfed.platform.tracking.tracker import Tracker


def test_the_links_open_runs_with_the_columns_that_matter(tmp_path: Path) -> None:
    tracker = Tracker.start(
        TrackingSettings(),
        tmp_path / "run",
        "a run",
        {"seed": 3, "data": "shops", "lr": 0.1, "protocol": "p"},
        {},
        [],
    )
    tracker.log(
        {"all/val_recall_at_20": 0.1, "all/best_recall_at_20": 0.1, "train/books/loss": 2.0}, 1
    )
    tracker.log({"all/test_recall_at_20": 0.2, "domain/books/test_recall_at_20": 0.2}, 1)
    tracker.finish("FINISHED")
    store = f"sqlite:///{tmp_path / 'mlflow.db'}"
    for _ in range(2):
        links = ui.links(store, "http://127.0.0.1:5000")
        client = MlflowClient(tracking_uri=store)
        experiment = client.get_experiment_by_name("crossfed")
        assert experiment is not None
        page = f"http://127.0.0.1:5000/#/experiments/{experiment.experiment_id}/runs?viewStateShareKey=crossfed&workflowType=machine_learning"
        assert links == {"crossfed": page}  # and none to an experiment without runs
        state = json.loads(experiment.tags["mlflow.sharedViewState.crossfed"])
        assert state["selectedColumns"] == [
            "params.`data`",
            "params.`seed`",
            "metrics.`all/test_recall_at_20`",
            "metrics.`all/best_recall_at_20`",
            "metrics.`domain/books/test_recall_at_20`",
            "params.`protocol`",
        ]
        assert state["columnOrder"] == state["selectedColumns"]


def test_the_command_prints_the_link_before_the_server_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Tracker.start(TrackingSettings(), tmp_path / "run", "a run", {}, {}, []).finish("FINISHED")
    started: list[tuple[str, Path, int]] = []
    monkeypatch.setattr(ui, "serve", lambda *args: started.append(args))
    done = CliRunner().invoke(app, ["ui", "--out", str(tmp_path), "--port", "5017"])
    assert done.exit_code == 0, done.output
    assert (
        "http://127.0.0.1:5017/#/experiments/1/runs?viewStateShareKey=crossfed&workflowType=machine_learning"
        in done.output
    )
    assert started == [(f"sqlite:///{tmp_path / 'mlflow.db'}", tmp_path / "mlartifacts", 5017)]


def test_without_a_store_there_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(CrossfedError, match="There is no tracking database"):
        CliRunner().invoke(app, ["ui", "--out", str(tmp_path)], catch_exceptions=False)
