"""Data frames into a prepared data directory, through the same recipe as files."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from crossfed.platform.data.prepare import prepare as prepare_files
from crossfed.platform.data.store import PreparedData
from crossfed.platform.errors import CrossfedError

Frame = Any
"""A pandas or Polars data frame, or anything else that PyArrow makes a table of."""


def prepare(
    domains: Mapping[str, Frame | tuple[Frame, Frame]],
    *,
    out: str | Path,
    user: str = "user",
    item: str = "item",
    time: str | None = "time",
    text: tuple[str, ...] = (),
    columns: Mapping[str, str] | None = None,
    time_unit: str | None = None,
    users: str = "all",
    recipe: Mapping[str, Any] | None = None,
    report: Callable[[str], None] = print,
) -> PreparedData:
    """Prepare data frames, as `crossfed data prepare` prepares files.

    Args:
        domains: by domain its interactions, or its interactions and its items; one row each.
        out: the directory to make.
        user: the column of user ids.
        item: the column of item ids, in both frames.
        time: the column of times; None where there are none and rows are in order.
        text: the columns of item text, joined in this order; in the items where they are given,
            else in the interactions.
        columns: other columns by part, e.g. `{"rating": "stars"}`.
        time_unit: what numbers in the time column count: seconds (the default), milliseconds, days,
            order, or a date format.
        users: `all`, or `shared` for those in every domain only.
        recipe: keys of a spec's recipe, such as `user_core`, `item_core`, `min_rating`.
        report: is given a line about each step.

    Returns:
        The prepared data; `crossfed.run(…, data=…)` takes it.

    Raises:
        CrossfedError: a column is missing, a frame is none, a domain is left empty, or `out` cannot
            be written.

    Examples:
        >>> import crossfed, pandas as pd
        >>> books = pd.DataFrame({"user": ["a"] * 3, "item": ["x", "y", "z"], "time": [1, 2, 3]})
        >>> games = pd.DataFrame({"user": ["b"] * 3, "item": ["u", "v", "w"], "time": [1, 2, 3]})
        >>> recipe = {"user_core": 0, "item_core": 0}
        >>> data = crossfed.prepare({"books": books, "games": games}, out=tmp, recipe=recipe, report=str)
        >>> data.sizes("books")
        (1, 3)
    """  # noqa: E501
    parts = {"user": user, "item": item, **(columns or {})}
    if time is not None:
        parts["time"] = time
    with tempfile.TemporaryDirectory(prefix="crossfed-frames-") as folder:
        described: dict[str, Any] = {}
        for name, given in domains.items():
            interactions, items = given if isinstance(given, tuple) else (given, None)
            source: dict[str, Any] = {"layout": "table", "columns": dict(parts)}
            source["time"] = "row" if time is None else time_unit
            described[name] = {
                "interactions": _written(interactions, f"{name}", Path(folder), source)
            }
            if items is not None:
                table = {"layout": "table", "columns": {"item": item}}
                described[name]["items"] = [_written(items, f"{name}-items", Path(folder), table)]
        spec = {
            "name": Path(out).name,
            "description": "from data frames",
            "users": users,
            "recipe": {"text": list(text), **(recipe or {})},
            "domains": described,
        }
        file = Path(folder) / "spec.yaml"
        file.write_text(yaml.safe_dump(spec, sort_keys=False), encoding="utf-8")
        return prepare_files(file, Path(out), report=report)


def _written(frame: Frame, name: str, folder: Path, source: dict[str, Any]) -> dict[str, Any]:
    """Write one frame as Parquet; its source entry in the spec."""
    table = _table(frame, name)
    missing = [column for column in source["columns"].values() if column not in table.column_names]
    if missing:
        known = ", ".join(table.column_names)
        raise CrossfedError(f"{name}: there is no column {missing[0]!r}; the frame has {known}.")
    pq.write_table(table, folder / f"{name}.parquet")
    return {
        "path": f"{name}.parquet",
        **{key: value for key, value in source.items() if value is not None},
    }


def _table(frame: Frame, name: str) -> pa.Table:
    if isinstance(frame, pa.Table):
        return frame
    try:
        if hasattr(frame, "to_arrow"):  # Polars
            return frame.to_arrow()
        return pa.Table.from_pandas(frame, preserve_index=False)
    except (AttributeError, TypeError, ValueError, pa.ArrowException) as error:
        raise CrossfedError(f"{name}: not a table that PyArrow can read: {error}.") from error
