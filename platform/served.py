"""The trained model as an MLflow pyfunc: the run's configuration and every domain's exported tensors, loaded without pickle.

    model = mlflow.pyfunc.load_model("models:/m-…")          # or the run's runs:/<id>/recommender
    model.predict(pandas.DataFrame({"domain": ["Beauty"], "user": [7], "k": [10]}))

It loads in a fresh process without the run, its data or a network. Interactions never leave their domain, so the model does not
know what a user has already seen: items are left out only when the caller names them in `exclude`. Users and items are the
row numbers of the prepared data.
"""

from __future__ import annotations

import importlib.metadata
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlflow.pyfunc
import numpy as np
import pandas as pd
import torch
from mlflow.models import ModelSignature
from mlflow.pyfunc.model import PythonModel
from mlflow.types.schema import Array, ColSpec, DataType, Schema

from crossfed.platform.seam import CrossfedError

K = 10
"""How many items are recommended where the request does not say."""

SIGNATURE = ModelSignature(
    inputs=Schema(
        [
            ColSpec(DataType.string, "domain"),
            ColSpec(DataType.long, "user"),
            ColSpec(DataType.long, "k", required=False),
            ColSpec(Array(DataType.long), "exclude", required=False),
        ]
    ),
    outputs=Schema(
        [
            ColSpec(DataType.string, "domain"),
            ColSpec(DataType.long, "user"),
            ColSpec(Array(DataType.long), "items"),
            ColSpec(Array(DataType.double), "scores"),
        ]
    ),
)

_CODE = """from crossfed.platform.served import Recommender
from mlflow.models import set_model

set_model(Recommender())
"""
_BLOCK = 256


class Recommender(PythonModel):
    """Recommends items to users; see the module's docstring for how it is called."""

    def load_context(self, context: Any) -> None:
        """Find the run's files in the model's directory."""
        self._root = Path(context.artifacts["config"]).parent
        self._scorers: dict[str, Callable[[np.ndarray], torch.Tensor]] = {}

    def predict(self, context: Any, model_input: pd.DataFrame, params: dict[str, Any] | None = None) -> pd.DataFrame:
        """Recommend.

        Args:
            model_input: one request a row: `domain`, `user` (row number), optionally `k` (default 10) and `exclude` (item
                row numbers to leave out, such as those already seen).

        Returns:
            In the same order, `domain`, `user`, `items` (at most k row numbers, best first; equal scores by row number)
            and their `scores`.

        Raises:
            CrossfedError: an unknown domain, a user outside the domain, k below 1, an excluded item outside the domain.
        """
        if missing := {"domain", "user"} - set(model_input.columns):
            raise CrossfedError(
                f"the request lacks the column {' and '.join(sorted(missing))}; it needs domain and user"
            )
        requests = model_input.reset_index(drop=True)
        items: list[list[int]] = [[]] * len(requests)
        scores: list[list[float]] = [[]] * len(requests)
        for domain, rows in requests.groupby("domain", sort=False):
            for first in range(0, len(rows), _BLOCK):
                block = rows.iloc[first : first + _BLOCK]
                for row, found in zip(block.index, self._recommend(str(domain), block), strict=True):
                    items[row], scores[row] = found
        return pd.DataFrame(
            {
                "domain": requests["domain"].astype(str),
                "user": requests["user"].astype("int64"),
                "items": items,
                "scores": scores,
            }
        )

    def _recommend(self, domain: str, block: pd.DataFrame) -> list[tuple[list[int], list[float]]]:
        users = np.array(block["user"], np.int64)  # a copy: what pandas gives is read-only
        if users.min() < 0:
            raise CrossfedError(f"user {users.min()} is not a row number of domain {domain}")
        counts = block["k"].fillna(K).to_numpy(np.int64) if "k" in block else np.full(len(block), K)
        if counts.min() < 1:
            raise CrossfedError(f"k is {counts.min()} in a request for domain {domain}; it must be 1 or more")
        try:
            values = self._scorer(domain)(users).detach().to("cpu", torch.float32).clone()
        except IndexError as error:
            raise CrossfedError(f"user {users.max()} is not a row number of domain {domain}") from error
        if "exclude" in block:
            for row, seen in enumerate(block["exclude"]):
                if isinstance(seen, list | tuple | np.ndarray) and len(seen):
                    left_out = np.asarray(seen, np.int64)
                    if left_out.min() < 0 or left_out.max() >= values.shape[1]:
                        raise CrossfedError(
                            f"exclude names an item outside domain {domain}, which has rows 0 to {values.shape[1] - 1}"
                        )
                    values[row, left_out] = -torch.inf
        values, order = values.sort(dim=1, descending=True, stable=True)
        found = []
        for row, count in enumerate(counts):
            kept = min(int(count), int((values[row] > -torch.inf).sum()))
            found.append((order[row, :kept].tolist(), values[row, :kept].tolist()))
        return found

    def _scorer(self, domain: str) -> Callable[[np.ndarray], torch.Tensor]:
        if domain not in self._scorers:
            from crossfed.platform.run import load_scorer

            self._scorers[domain] = load_scorer(self._root, domain)
        return self._scorers[domain]


def save(run_dir: Path, domains: Sequence[str], path: Path) -> None:
    """Write the model of a finished run as an MLflow model directory.

    Args:
        run_dir: holds `config.yaml` and `model/<domain>.safetensors`.
        domains: the domains it serves; the first one is in the example.
        path: the directory to make; must not exist.
    """
    with tempfile.TemporaryDirectory() as folder:
        code = Path(folder) / "recommender.py"
        code.write_text(_CODE, "utf-8")
        mlflow.pyfunc.save_model(
            path=path,
            python_model=str(code),
            artifacts={"config": str(run_dir / "config.yaml"), "model": str(run_dir / "model")},
            signature=SIGNATURE,
            input_example=pd.DataFrame({"domain": [domains[0]], "user": [0], "k": [K]}),
            pip_requirements=[_requirement(name) for name in ("crossfed", "mlflow", "torch")],
            metadata={"domains": list(domains)},
        )


def _requirement(package: str) -> str:
    """The installed version, without a local part such as +cpu that no index carries."""
    return f"{package}=={importlib.metadata.version(package).partition('+')[0]}"
