"""The names of a run directory's files."""

from __future__ import annotations

CONFIG, DATA, RESULT = "config.yaml", "data.json", "result.json"
"""The whole configuration; what data and domains it was started on; what came of it."""


PLACEMENT = "placement.json"
"""Where every node runs; written as soon as all are up."""


ENDING = ".ending"
"""There while a result is being recorded and copied; a run that was killed then is not over yet."""


TRAINED = "trained.json"
"""Where a model is measured again: the `result.json` of the run that trained it."""


HISTORY, LEDGER = "history.jsonl", "ledger.jsonl"
"""A line per committed round; a line per array that crossed."""


RUN_ID = "mlflow_run_id"
"""The MLflow run that records it."""
