"""Readers of published interaction and item files.

| layout | what | recognised by |
|---|---|---|
| `amazon-reviews` | Amazon reviews of 2014 and 2018, JSON lines | reviewerID, asin |
| `amazon-reviews-2023` | the same of 2023, JSON lines or CSV with a header; times in milliseconds | user_id, parent_asin |
| `amazon-ratings` | 2014 ratings only, CSV without a header: user, item, rating, time | four fields, the second an ASIN |
| `amazon-ratings-2018` | 2018 ratings only, which has item and user the other way round | four fields, the first an ASIN |
| `amazon-meta-2014` | item data as Python literals, absent keys left out | lines that are Python but not JSON |
| `amazon-meta-2018` | item data, JSON lines; description is a list | asin without reviewerID |
| `amazon-meta-2023` | item data, JSON lines | parent_asin without user_id |
| `online-retail` | UCI Online Retail as CSV (UTF-8 or latin-1) or XLSX | InvoiceNo, StockCode |
| `recbole` | RecBole atomic files: quoted TSV with typed headers | every header field ends in `:token`, `:float` … |
| `table` | any delimited file, JSON, Parquet or XLSX with a column mapping | anything else |

Compressed files (gzip, bzip2, xz, zstd, lz4) are read as they are, but for Parquet and XLSX. Files
are streamed: what stays in memory are the columns asked for, texts as one number per row plus the
distinct values, never the file. Blocks of a delimited file without quotation marks are parsed by
Arrow, all others line by line.
"""  # noqa: E501

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from crossfed.platform.data.columns import (
    POINT_ZERO,
    NumberColumn,
    TextColumn,
    Texts,
    TimeColumn,
    Times,
    Wrong,
    plain_ids,
    plain_text,
)
from crossfed.platform.data.source import Layout, Source
from crossfed.platform.data.source_file import (
    UNPARSABLE,
    Progress,
    SourceFile,
    python_literal,
    told,
)
from crossfed.platform.data.text import join_fields
from crossfed.platform.errors import CrossfedError

_TIMES = {"amazon-reviews-2023": "milliseconds", "online-retail": "%m/%d/%Y %H:%M"}
"""The unit or the format of a layout's times, where it is not the one of a table."""


@dataclass(frozen=True)
class Table:
    """The columns asked for, by the names they were asked under.

    Attributes:
        texts: name → Texts. numbers: name → float64 [n_rows], NaN where a row has none. times: of
            every row.
        time_kind: "seconds", "order" or "none", for the manifest.
        layout: the layout it was read as. progress: what was read and left out. described: the
            layout, in words for people.
        notes: what looks odd, in words for people. by_row: whether the times are the rows' places
            in this file.
    """

    texts: dict[str, Texts]
    numbers: dict[str, npt.NDArray[np.float64]]
    times: Times
    time_kind: str
    layout: Layout
    progress: Progress
    described: str = ""
    notes: tuple[str, ...] = ()
    by_row: bool = False


@dataclass(frozen=True)
class ItemTexts:
    """Texts of items.

    Attributes:
        texts: item id → cleaned, joined text ("" where no row of the item has text).
        with_field: text field → how many of these items have it.
        duplicates: rows of an item that already had one; the first that has text counts.
        layout, progress, described, notes: as in `Table`.
        others: two ids of the file that are not among the wanted.
    """

    texts: dict[str, str]
    with_field: dict[str, int]
    duplicates: int
    layout: Layout
    progress: Progress
    others: tuple[str, ...] = ()
    described: str = ""
    notes: tuple[str, ...] = ()


def read_table(
    path: Path,
    source: Source,
    texts: Sequence[str],
    numbers: Sequence[str] = (),
    missing_time: bool = False,
) -> Table:
    """Read the named columns and the times of a file of interactions.

    Args:
        path: where the file is. source: how to read it.
        texts, numbers: parts (user, item, rating …) or column names, to be read as text or as
            numbers.
        missing_time: whether a row may lack its time; `Table.times.missing` then says which do.

    Raises:
        CrossfedError: the file is missing, damaged, in another encoding, has too many broken lines,
            lacks a column, or has something in a column of numbers or times that is not one; told
            with the line.
    """
    path, progress = Path(path), Progress()
    file = SourceFile(path, source)
    timed = source.time not in ("row", "none")
    file.require([*texts, *numbers])
    untold = file.layout in ("table", "recbole") and "time" not in source.columns
    if timed and untold and not file.listed and not file.has("time"):
        raise CrossfedError(
            f"{path} (read as {file.layout}) has no column for time; it has {file.found}. "
            "Name one as `columns: {time: …}` of this source. Where the rows are in time order, "
            "`time: row` takes their order; where they have none, `time: none` says so."
        )
    if timed and not file.listed:
        file.require(["time"])
    unit = "order" if file.listed else source.time or _TIMES.get(file.layout)
    text_columns = {name: _text_column(file, name) for name in texts}
    number_columns = {name: NumberColumn() for name in numbers}
    columns: dict[str, TextColumn | NumberColumn | TimeColumn] = {**text_columns, **number_columns}
    time_column = TimeColumn(unit if timed else None, missing_time)
    if timed:
        columns["time"] = time_column
    with told(path, progress):
        for lines, values in file.batches(list(columns), numbers, unit, progress):
            for (name, column), some in zip(columns.items(), values, strict=True):
                _extend(file, name, column, lines, some)
            progress.rows += len(lines)
    file.finish(progress)
    kind = (
        "none"
        if source.time == "none"
        else "order"
        if file.listed or source.time in ("order", "row")
        else "seconds"
    )
    if timed:
        times = time_column.finish()
    else:
        times = Times(
            np.arange(progress.rows, dtype=np.int64)
            if kind == "order"
            else np.zeros(progress.rows, np.int64)
        )
    return Table(
        texts={name: _finished(file, name, column) for name, column in text_columns.items()},
        numbers={name: column.finish() for name, column in number_columns.items()},
        times=times,
        time_kind=kind,
        layout=file.layout,
        progress=progress,
        described=file.described,
        notes=(*file.notes, *_used_twice(file, columns)),
        by_row=file.listed or source.time == "row",
    )


def joined(tables: Sequence[Table]) -> Table:
    """The rows of several files one after the other, as one table.

    Raises:
        CrossfedError: one has times where another has an order or none.
    """
    if len(tables) == 1:
        return tables[0]
    kinds = sorted({table.time_kind for table in tables})
    if len(kinds) > 1:
        raise CrossfedError(
            f"The files of one domain have times of several kinds ({', '.join(kinds)}), which "
            f"cannot be put in one order; "
            "set the same `time` for each of them."
        )
    progress, before = Progress(), 0
    for table in tables:
        progress.rows += table.progress.rows
        progress.broken += table.progress.broken
        progress.stray += table.progress.stray
    whole = []
    for table in tables:
        whole.append(table.times.whole + (before if kinds == ["order"] and table.by_row else 0))
        before += table.progress.rows
    return replace(
        tables[0],
        texts={
            name: _joined_texts([table.texts[name] for table in tables]) for name in tables[0].texts
        },
        numbers={
            name: np.concatenate([table.numbers[name] for table in tables])
            for name in tables[0].numbers
        },
        times=Times(
            np.concatenate(whole),
            _filled([table.times.nanoseconds for table in tables], tables, np.int32),
            _filled([table.times.missing for table in tables], tables, np.bool_),
        ),
        progress=progress,
        notes=tuple(note for table in tables for note in table.notes),
    )


def _filled(parts: Sequence[npt.NDArray[Any] | None], tables: Sequence[Table], dtype: Any) -> Any:
    if all(part is None for part in parts):
        return None
    rows = [table.progress.rows for table in tables]
    return np.concatenate(
        [np.zeros(n, dtype) if part is None else part for n, part in zip(rows, parts, strict=True)]
    )


def _joined_texts(columns: Sequence[Texts]) -> Texts:
    values: dict[str, int] = {}
    codes = []
    for column in columns:
        code = [values.setdefault(value, len(values)) for value in column.values]
        codes.append(np.array([*code, -1], np.int32)[column.codes])
    return Texts(np.concatenate(codes), list(values))


def _text_column(file: SourceFile, name: str) -> TextColumn:
    if name in ("user", "item"):
        return TextColumn(
            plain_ids, file.layout == "online-retail" and file.column(name) == "CustomerID"
        )
    return TextColumn()


def _extend(
    file: SourceFile,
    name: str,
    column: TextColumn | NumberColumn | TimeColumn,
    lines: Sequence[int],
    values: Any,
) -> None:
    """Add a batch to a column; what does not belong there is told with its line."""
    try:
        column.extend(values)
    except Wrong as error:
        hint = f" ({error.hint})" if error.hint else ""
        value = "" if error.value is None and file.kind == "delimited" else error.value
        what = "time" if name == "time" else "number"
        raise CrossfedError(
            f"{file.path}, line {lines[error.row]}: {value!r} in {file.column(name)!r} is no "
            f"{what}{hint}; "
            f"correct the line or name another column for {name}."
        ) from error
    except TypeError as error:
        raise CrossfedError(
            f"{file.path}, lines {lines[0]} to {lines[-1]}: {name} holds a list or a record "
            f"where a single value is expected. "
            "A list of a user's items in time order is named as `columns: {items: …}`."
        ) from error


def _finished(file: SourceFile, name: str, column: TextColumn) -> Texts:
    try:
        return column.finish()
    except ValueError as error:
        raise CrossfedError(
            f"{file.path}: a value of {file.column(name)!r} {error}; write the column as text."
        ) from error


def _used_twice(file: SourceFile, names: Sequence[str] | dict[str, Any]) -> list[str]:
    """Parts that are the same column; user and item, or either and the time, hardly ever are."""
    parts = [
        name
        for name in ("user", "item", "time", "rating")
        if name in names and not (file.listed and name != "user")
    ]
    return [
        f"{one} and {other} are the same column {file.column(one)!r}"
        for place, one in enumerate(parts)
        for other in parts[place + 1 :]
        if file.column(one) == file.column(other)
    ]


def read_items(
    path: Path, source: Source, fields: Sequence[str], wanted: Container[str]
) -> ItemTexts:
    """Read, clean and join the text fields of the wanted items.

    Lines of other items are passed over without being parsed, and so are not among the broken
    lines.

    Args:
        fields: parts (title, description, brand, categories, features) or column names, in the
            order in which they are joined. In JSON and Python files a record may lack any of them.
        wanted: item ids, as `read_table` gives them.

    Raises:
        CrossfedError: as `read_table`.
    """
    path, progress = Path(path), Progress()
    file = SourceFile(path, source)
    file.require(["item"] if file.kind in ("json", "python", "document") else ["item", *fields])
    key = re.escape(str(file.column("item")).encode())
    pattern = re.compile(rb"""["']%s["']\s*:\s*(["'])((?:(?!\1)[^\\]|\\.)*)\1""" % key)
    found = _Found(wanted, fields)

    def unwanted(line: bytes) -> bool:
        ids = [match[1] for match in pattern.findall(line)]
        if not ids or any(b"\\" in one for one in ids):
            return False
        plain = [one.decode(file.encoding, errors="replace").strip() for one in ids]
        if any(found.asks(one) for one in plain):
            return False
        found.pass_over(plain[0])
        return True

    with told(path, progress):
        for line, item, *values in file.rows(["item", *fields], progress, unwanted):
            progress.rows += 1
            try:
                found.add(
                    plain_text(item),
                    [_sequence(v) for v in values] if file.layout == "recbole" else values,
                )
            except (TypeError, ValueError) as error:
                raise CrossfedError(
                    f"{path}, line {line}: the item or a text of it {error}; correct the line."
                ) from error
    if progress.rows:  # a file may well hold none of the wanted items; the caller counts them
        file.finish(progress)
    texts, with_field = found.finish()
    return ItemTexts(
        texts,
        with_field,
        found.duplicates,
        file.layout,
        progress,
        tuple(found.others),
        file.described,
        tuple(file.notes),
    )


@dataclass
class _Found:
    """Item texts as they come, under their ids as they stand.

    An item file's ids lose their `.0` where all of them have it, as in `plain_ids`; that shows at
    the end only.
    """

    wanted: Container[str]
    fields: Sequence[str]
    rows: dict[str, tuple[str, tuple[bool, ...]]] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)
    duplicates: int = 0
    all_point_zero: bool = True

    def asks(self, item: str) -> bool:
        return item in self.wanted or (
            POINT_ZERO.fullmatch(item) is not None and item.partition(".")[0] in self.wanted
        )

    def pass_over(self, item: str) -> None:
        if item:
            self.all_point_zero = self.all_point_zero and POINT_ZERO.fullmatch(item) is not None
        if item and len(self.others) < 2 and item not in self.others:
            self.others.append(item)

    def add(self, item: str, values: Sequence[Any]) -> None:
        self.all_point_zero = self.all_point_zero and (
            not item or POINT_ZERO.fullmatch(item) is not None
        )
        if not self.asks(item):
            self.pass_over(item)
            return
        if item in self.rows:
            self.duplicates += 1
            if self.rows[item][0]:
                return
        parts = [
            join_fields({name: value}, [name])
            for name, value in zip(self.fields, values, strict=True)
        ]
        self.rows[item] = (" ".join(part for part in parts if part), tuple(map(bool, parts)))

    def finish(self) -> tuple[dict[str, str], dict[str, int]]:
        rows = self.rows
        if self.all_point_zero:
            rows = {item.partition(".")[0]: row for item, row in rows.items()}
        rows = {item: row for item, row in rows.items() if item in self.wanted}
        has = [row[1] for row in rows.values()]
        with_field = {
            name: sum(row[place] for row in has) for place, name in enumerate(self.fields)
        }
        return {item: text for item, (text, _) in rows.items()}, with_field


def _sequence(value: Any) -> Any:
    """RecBole's token sequences are sometimes written as quoted, comma-separated parts."""
    if isinstance(value, str) and value.startswith(("'", '"')):
        try:
            return python_literal(f"[{value}]")
        except UNPARSABLE:
            return value
    return value


__all__ = [
    "ItemTexts",
    "Layout",
    "Progress",
    "Source",
    "Table",
    "Texts",
    "Times",
    "joined",
    "read_items",
    "read_table",
]
