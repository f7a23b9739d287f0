"""What MLflow is told of a run: its parameters, names, rounds, and how it ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from crossfed.platform.config.settings import RunConfig, build
from crossfed.platform.errors import CrossfedError
from crossfed.platform.report import recording
from crossfed.platform.report.recording import model_title, run_recorded, run_title


def config(data: Path, out: Path, *sets: str) -> RunConfig:
    values = {"data": data, "out": out, "backend": "inprocess", "seed": 7}
    return build(
        "toys:AVERAGE", sets=["rounds=3", "tracking.artifacts=false", *sets], values=values
    )


def test_parameters_are_the_methods_and_what_is_unusual(tmp_path: Path) -> None:
    usual = recording._params(config(tmp_path, tmp_path), "shops")
    assert (usual["method"], usual["data"], usual["seed"], usual["rounds"]) == (
        "average", "shops", 7, 3,
    )  # fmt: skip
    assert "train_share" not in usual and "control" not in usual
    unusual = config(tmp_path, tmp_path, "evaluation.train_share=0.5", "control=noise")
    told = recording._params(unusual, "shops")
    assert (told["train_share"], told["control"]) == (0.5, "noise")
    assert told["config_hash"] == unusual.hash() != usual["config_hash"]
    few = config(tmp_path, tmp_path, "tracking.params=[step]")
    assert set(recording._params(few, "shops")) == {
        "step", "method", "data", "seed", "protocol", "select",
    }  # fmt: skip


def test_names_say_study_method_data_and_domain(tmp_path: Path) -> None:
    alone, studied = (
        config(tmp_path, tmp_path, *sets) for sets in ((), ("tracking.tags={study: s1}",))
    )
    assert run_title(alone, tmp_path / "r1", "shops") == "r1 shops"
    assert run_title(studied, tmp_path / "r1", "shops") == "r1 s1 average shops"
    assert model_title(alone, "shops", "books") == "average-shops-books"
    assert model_title(studied, "shops", "books") == "average-shops-books-s1"


def test_a_run_that_ends_and_one_that_fails_are_recorded(shops: Path, tmp_path: Path) -> None:
    """A step per round; the end as it was, with its reason."""

    def refuse(row: Any) -> None:
        if row.round == 2:
            raise CrossfedError("no more of this")

    done = run_recorded(config(shops, tmp_path))
    with pytest.raises(CrossfedError, match="no more of this"):
        run_recorded(config(shops, tmp_path, "step=0.25"), on_round=refuse)
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.get_experiment_by_name("crossfed")
    assert experiment is not None
    by = {run.info.status: run for run in client.search_runs([experiment.experiment_id])}
    finished, failed = by["FINISHED"], by["FAILED"]
    assert (done.run_dir / "mlflow_run_id").read_text().strip() == finished.info.run_id
    assert finished.data.params["rounds"] == "3" and finished.data.tags["data"] == "shops"
    steps = [m.step for m in client.get_metric_history(finished.info.run_id, "traffic/bytes_up")]
    assert steps == [1, 2, 3]
    assert failed.data.tags["crossfed.reason"] == "no more of this"
