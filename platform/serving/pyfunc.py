"""What `mlflow models serve` and `mlflow.pyfunc.load_model` load: one domain's model, asked with
the source's own ids.

The model declares no input schema, on purpose. With one, MLflow changes requests before the model
sees them: it takes columns apart, turns null into the text `None`, and refuses text/csv where a
column holds lists. Everything is checked here instead, so that every input format gives the same
answer, or a reason.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from mlflow.exceptions import MlflowException
from mlflow.models import ModelSignature
from mlflow.pyfunc.model import PythonModel
from mlflow.types.schema import Array, ColSpec, DataType, ParamSchema, ParamSpec, Schema

from crossfed.platform.errors import CrossfedError
from crossfed.platform.serving.model import DomainModel, K

KEYS = ("user", "k", "exclude")
"""What a request may say."""
SIGNATURE = ModelSignature(
    outputs=Schema(
        [
            ColSpec(DataType.string, "user"),
            ColSpec(DataType.boolean, "known"),
            ColSpec(Array(DataType.string), "items"),
            ColSpec(Array(DataType.double), "scores"),
        ]
    ),
    params=ParamSchema(
        [
            ParamSpec("k", DataType.long, K),
            ParamSpec("exclude", DataType.string, [], shape=(-1,)),
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

    def predict(
        self, context: Any, model_input: pd.DataFrame, params: dict[str, Any] | None = None
    ) -> pd.DataFrame:
        """Recommend.

        Args:
            model_input: requests, in any form that `requests_of` takes (MLflow wants this hint):
                `user` (the source's id, text), optionally `k` and `exclude` (item ids to leave out,
                such as those already seen); null is the same as absent.
            params: `k` and `exclude` of the requests that do not say.

        Returns:
            In the same order `user`, `known` (False for the fallback: what ranks high for most
            users), `items` (at most k item ids, best first) and their `scores`.

        Raises:
            MlflowException: a request is not understood, or excludes an item that the domain does
                not have; a server answers 400 with the reason.
        """
        params = params or {}
        general = {"k": params.get("k"), "exclude": params.get("exclude")}
        try:
            requests = requests_of(model_input)
            asked = [_checked(request, general, place) for place, request in enumerate(requests)]
            answers = self._model.recommend(
                [user for user, _, _ in asked],
                [k for _, k, _ in asked],
                [self._model.item_rows(items) for _, _, items in asked],
            )
        except CrossfedError as error:
            raise MlflowException.invalid_parameter_value(str(error)) from error
        return pd.DataFrame(
            {
                "user": [answer.user for answer in answers],
                "known": [answer.known for answer in answers],
                "items": [list(answer.items) for answer in answers],
                "scores": [list(answer.scores) for answer in answers],
            }
        )


def requests_of(model_input: Any) -> list[dict[str, Any]]:
    """Requests, one dictionary each, from any form in which MLflow hands them on.

    Args:
        model_input: a data frame; rows (a list of dictionaries); columns (a dictionary of lists,
            or of single values for one request); users (a list of ids); or one user's id.

    Raises:
        CrossfedError: it is none of these, or its columns differ in length.
    """
    if isinstance(model_input, pd.DataFrame):
        if not model_input.columns.is_unique:
            raise CrossfedError("two columns have the same name")
        columns = {name: model_input[name].tolist() for name in model_input.columns}
        return [{name: columns[name][row] for name in columns} for row in range(len(model_input))]
    if isinstance(model_input, Mapping):
        return _from_columns({name: _plain(value) for name, value in model_input.items()})
    model_input = _plain(model_input)
    if isinstance(model_input, str):
        return [{"user": model_input}]
    if isinstance(model_input, list):
        if all(isinstance(row, Mapping) for row in model_input):
            return [{name: _plain(value) for name, value in row.items()} for row in model_input]
        return [{"user": _plain(value)} for value in model_input]
    raise CrossfedError(
        f'the input is {_words(model_input)}; give rows such as {{"user": "A2X3", "k": 10}}'
    )


def _from_columns(columns: Mapping[Any, Any]) -> list[dict[str, Any]]:
    """Requests from columns; a single value goes for all of them."""
    if not isinstance(columns.get("user"), list):
        return [dict(columns)]
    count = len(columns["user"])
    for name, values in columns.items():
        if isinstance(values, list) and len(values) != count:
            raise CrossfedError(
                f"there are {count} users, but {len(values)} values of {name}: where some rows "
                f"say less "
                "than others, write null there, or send dataframe_records or a list as inputs"
            )
    return [
        {name: value[row] if isinstance(value, list) else value for name, value in columns.items()}
        for row in range(count)
    ]


def _plain(value: Any) -> Any:
    """The same without NumPy and pandas, in lists too: MLflow makes arrays of arrays without a
    dimension.
    """
    if isinstance(value, np.ndarray | np.generic | pd.Series):
        value = value.tolist()
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _absent(value: Any) -> bool:
    return value is None or value is pd.NA or (isinstance(value, float) and value != value)


def _checked(
    request: Mapping[Any, Any], general: Mapping[str, Any], place: int
) -> tuple[str, int, list[str]]:
    """User, k and excluded items of one request.

    Raises:
        CrossfedError: one of them is not what it must be; the sentence names the row.
    """
    row = {name: value for name, value in request.items() if not _absent(value)}
    where = f"row {place + 1}: "
    if unknown := [str(name) for name in request if name not in KEYS]:
        raise CrossfedError(f"{where}there is no {unknown[0]!r}; a row may hold {', '.join(KEYS)}")
    k, exclude = (row.get(name, general[name]) for name in ("k", "exclude"))
    return _user(row.get("user"), where), _count(k, where), _items(exclude, where)


def _user(user: Any, where: str) -> str:
    if isinstance(user, str):
        return user
    if user is None:
        raise CrossfedError(f"{where}user is missing or null; every row needs one user's id")
    if isinstance(user, Real) and not isinstance(user, bool):
        raise CrossfedError(
            f"{where}user is the number {user}; an id is text, since 1, 01 and 1.0 may be "
            f"three users: "
            "write it in quotation marks (in text/csv, MLflow reads digits as a number: send JSON)"
        )
    raise CrossfedError(
        f"{where}user is {_words(user)}; give one user's id as text, one row a user"
    )


def _count(k: Any, where: str) -> int:
    if _absent(k):
        return K
    if isinstance(k, bool) or not isinstance(k, Real):
        raise CrossfedError(f"{where}k is {_words(k)}; it must be a whole number")
    if not (isinstance(k, Integral) or float(k).is_integer()):
        raise CrossfedError(f"{where}k is {k}; it must be a whole number")
    if k < 1:
        raise CrossfedError(f"{where}k is {int(float(k))}; it must be 1 or more")
    return int(float(k))


def _items(exclude: Any, where: str) -> list[str]:
    if _absent(exclude):
        return []
    shown = exclude
    if isinstance(exclude, str):  # a cell of text/csv can hold no list
        try:
            exclude = json.loads(exclude)
        except json.JSONDecodeError:
            exclude = None
    exclude = _plain(exclude)
    if not isinstance(exclude, list):
        raise CrossfedError(
            f"{where}exclude is {_words(shown)}; it must be a list of item ids, in text/csv as "
            f"JSON "
            'such as ["B01","B02"]'
        )
    for item in exclude:
        if not isinstance(item, str | Integral) or isinstance(item, bool):
            raise CrossfedError(
                f"{where}exclude holds {_words(item)}; it must be a list of item ids"
            )
    return [str(item) for item in exclude]


def _words(value: Any) -> str:
    """A value as a message shows it."""
    if value is None:
        return "null"
    text = json.dumps(value, default=str, ensure_ascii=False)
    text = text if len(text) <= 60 else f"{text[:57]}…"
    kinds = {bool: "", str: "the text ", list: "the list ", dict: "the object ", int: "the number "}
    return f"{kinds.get(type(value), '')}{text}"
