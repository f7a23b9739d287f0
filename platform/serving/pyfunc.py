"""What `mlflow models serve` and `mlflow.pyfunc.load_model` load: one domain's model, asked with the source's own ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from mlflow.exceptions import MlflowException
from mlflow.models import ModelSignature
from mlflow.pyfunc.model import PythonModel
from mlflow.types.schema import Array, ColSpec, DataType, Schema

from crossfed.platform.errors import CrossfedError
from crossfed.platform.serving.save import DomainModel, K

SIGNATURE = ModelSignature(
    inputs=Schema(
        [
            ColSpec(DataType.string, "user"),
            ColSpec(DataType.long, "k", required=False),
            ColSpec(Array(DataType.string), "exclude", required=False),
        ]
    ),
    outputs=Schema(
        [
            ColSpec(DataType.string, "user"),
            ColSpec(DataType.boolean, "known"),
            ColSpec(Array(DataType.string), "items"),
            ColSpec(Array(DataType.double), "scores"),
        ]
    ),
)
EXAMPLE = pd.DataFrame({"user": ["a user's id"], "k": [K]})
"""A real id would leave its domain; this one gets the fallback."""


class Recommender(PythonModel):
    """Recommends items to users; see `crossfed.platform.serving.save` for what it holds."""

    def load_context(self, context: Any) -> None:
        """Load the only domain that the model's directory holds."""
        root = Path(context.artifacts["config"]).parent
        (items,) = (root / "model").glob("*.items.parquet")
        self._model = DomainModel(root, items.name.removesuffix(".items.parquet"))

    def predict(self, context: Any, model_input: pd.DataFrame, params: dict[str, Any] | None = None) -> pd.DataFrame:
        """Recommend.

        Args:
            model_input: one request a row: `user` (the source's id), optionally `k` (default 10) and `exclude` (item ids to
                leave out, such as those already seen).

        Returns:
            In the same order `user`, `known` (False for the fallback: what ranks high for most users), `items` (at most k
            item ids, best first) and their `scores`.

        Raises:
            MlflowException: k below 1, an excluded item that the domain does not have; a server answers 400 with the reason.
        """
        try:
            counts = model_input["k"].fillna(K).astype(int).tolist() if "k" in model_input else None
            seen = model_input["exclude"] if "exclude" in model_input else [None] * len(model_input)
            exclude = [
                self._model.item_rows(items) if isinstance(items, list | tuple | np.ndarray) else [] for items in seen
            ]
            found = self._model.recommend(model_input["user"].astype(str).tolist(), counts, exclude)
        except CrossfedError as error:
            raise MlflowException.invalid_parameter_value(str(error)) from error
        return pd.DataFrame(
            {
                "user": [answer.user for answer in found],
                "known": [answer.known for answer in found],
                "items": [list(answer.items) for answer in found],
                "scores": [list(answer.scores) for answer in found],
            }
        )
