"""MLflow's own UI on a store, opened on the runs, with the columns that matter.

A link can name a *shared view*: a tag of the experiment that holds the table's columns and order.
MLflow's own Share button makes such tags; here one is written whose key never changes, so that the
link stays the same.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from crossfed.platform.tracking import names as metric_names
from crossfed.platform.tracking.tracker import reading

KEY = "crossfed"
"""Of the shared view, in links and in the experiment's tag."""
_TAG = f"mlflow.sharedViewState.{KEY}"
_FIRST, _LAST = ("method", "data", "seed"), ("preset", "protocol")
_LOOKED_AT = 200


def view(metrics: list[str], params: list[str]) -> dict[str, Any]:
    """The state of MLflow's table of runs: what the tag of a shared view holds."""
    first, last = (
        [f"params.`{name}`" for name in names if name in params] for names in (_FIRST, _LAST)
    )
    chosen = [*first, *(f"metrics.`{name}`" for name in metric_names.columns(metrics)), *last]
    return {
        "orderByKey": "attributes.start_time",
        "orderByAsc": False,
        "searchFilter": "",
        "selectedColumns": chosen,
        "columnOrder": chosen,
        "columnWidths": {name: _width(name) for name in chosen},
    }


def _width(column: str) -> int:
    """Pixels that show a column's name."""
    return min(260, max(100, 8 * (len(column) - len("params.``")) + 24))


def links(store: str, address: str) -> dict[str, str]:
    """Links to the runs of every experiment that holds any, newest first: experiment's name ->
    link.

    Their shared views are written into the store.

    Raises:
        CrossfedError: the store is away.
    """
    found = {}
    with reading(store) as client:
        for experiment in client.search_experiments():
            runs = client.search_runs([experiment.experiment_id], max_results=_LOOKED_AT)
            if not runs:
                continue
            metrics = sorted({name for run in runs for name in run.data.metrics})
            params = sorted({name for run in runs for name in run.data.params})
            state = json.dumps(view(metrics, params))
            if experiment.tags.get(_TAG) != state:
                client.set_experiment_tag(experiment.experiment_id, _TAG, state)
            page = f"{address}/#/experiments/{experiment.experiment_id}/runs"
            found[experiment.name] = f"{page}?viewStateShareKey={KEY}&workflowType=machine_learning"
    return found


def serve(store: str, artifacts: Path, port: int) -> None:
    """Become the MLflow server, on the loopback interface; it prints warnings only."""
    server = [
        sys.executable,
        "-m",
        "mlflow",
        "server",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--workers",
        "1",
        "--uvicorn-opts",
        "--log-level warning",
        "--backend-store-uri",
        store,
        "--registry-store-uri",
        store,
        "--default-artifact-root",
        artifacts.as_uri(),
    ]
    os.environ |= {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_LOGGING_LEVEL": "WARNING",
        "PYTHONWARNINGS": "ignore",
    }
    os.execv(sys.executable, server)
