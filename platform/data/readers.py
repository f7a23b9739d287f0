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
| `table` | any CSV, TSV, JSON lines, Parquet or XLSX with a column mapping | anything else |

All may be gzip-compressed except Parquet and XLSX. Files are streamed: what stays in memory are the columns asked for, texts
as one number per row plus the distinct values, never the file.
"""

from __future__ import annotations

import ast
import codecs
import csv
import gzip
import json
import re
import warnings
import zipfile
import zlib
from array import array
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, date, datetime, time
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from openpyxl import load_workbook
from openpyxl.utils.exceptions import InvalidFileException
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from crossfed.platform.data.text import join_fields
from crossfed.platform.errors import CrossfedError

Layout = Literal[
    "amazon-reviews",
    "amazon-reviews-2023",
    "amazon-ratings",
    "amazon-ratings-2018",
    "amazon-meta-2014",
    "amazon-meta-2018",
    "amazon-meta-2023",
    "online-retail",
    "recbole",
    "table",
]

_ROLES: dict[str, dict[str, str | int]] = {
    "amazon-reviews": {"user": "reviewerID", "item": "asin", "rating": "overall", "time": "unixReviewTime"},
    "amazon-reviews-2023": {"user": "user_id", "item": "parent_asin", "time": "timestamp"},
    "amazon-ratings": {"user": 1, "item": 2, "rating": 3, "time": 4},
    "amazon-ratings-2018": {"item": 1, "user": 2, "rating": 3, "time": 4},
    "amazon-meta-2014": {"item": "asin"},
    "amazon-meta-2018": {"item": "asin", "categories": "category", "features": "feature"},
    "amazon-meta-2023": {"item": "parent_asin", "brand": "store"},
    "online-retail": {
        "user": "CustomerID",
        "item": "StockCode",
        "time": "InvoiceDate",
        "quantity": "Quantity",
        "order": "InvoiceNo",
    },
    "recbole": {"user": "user_id", "item": "item_id", "time": "timestamp"},
    "table": {},
}
"""Which column plays which part; a name that is not here is a column's own name. Numbers count columns from 1."""

_TIMES = {"amazon-reviews-2023": "milliseconds", "online-retail": "%m/%d/%Y %H:%M"}
_UNITS = ("seconds", "milliseconds", "days", "order", "row")
_FAR_FUTURE = 1e11  # the year 5138 in seconds; any time beyond it is in milliseconds or finer
_ASIN = re.compile(r"B[0-9A-Z]{9}|[0-9]{9}[0-9X]")
_TYPED = re.compile(r"(.+):(?:token|float|token_seq|float_seq)")
_HEAD = 1 << 18
_BLOCK = 8192


def _line_based(name: str) -> str:
    try:
        usable = "\n".encode(name) == b"\n"
    except LookupError:
        usable = False
    if not usable:
        raise ValueError(
            f"{name!r} is not an encoding whose line break is one byte; take e.g. utf-8, latin-1 or cp1252"
        )
    return name


def _time_format(name: str) -> str:
    if name not in _UNITS and "%" not in name:
        raise ValueError(f"{name!r} is neither one of {', '.join(_UNITS)} nor a date format such as %Y-%m-%d %H:%M:%S")
    return name


class Source(BaseModel):
    """One file and how to read it.

    Attributes:
        path: relative to the spec's directory, or to the directory of sources.
        layout: None recognises it by content.
        columns: part → column name (or its number from 1 in a CSV without a header). Parts are user, item, time, rating,
            quantity, order (the order number that marks a cancellation) and text fields; what is not given comes from the
            layout.
        time: seconds (since 1970), milliseconds, days, order (a running number), row (the place in the file), or a date
            format in UTC. None takes the layout's own; for a table numbers are seconds and anything else an ISO date.
        encoding: None is UTF-8, and for Online Retail latin-1 where the file is not UTF-8.
        separator: of a CSV; None recognises tab, comma, semicolon and bar.
        max_broken: the share of lines that may be broken before the file is refused.
        published: where the file is published; for people.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str
    layout: Layout | None = None
    columns: dict[str, str | Annotated[int, Field(ge=1)]] = {}
    time: Annotated[str, AfterValidator(_time_format)] | None = None
    encoding: Annotated[str, AfterValidator(_line_based)] | None = None
    separator: Annotated[str, Field(min_length=1, max_length=1)] | None = None
    max_broken: Annotated[float, Field(ge=0, le=1)] = 0.01
    published: str | None = None


@dataclass
class Progress:
    """Where a reader is in its file, and what it had to leave out.

    Attributes:
        line: the last line read (for Parquet, the row). rows: rows read. broken: lines that could not be read;
        first_broken, reason: the first of them.
    """

    line: int = 0
    rows: int = 0
    broken: int = 0
    first_broken: int | None = None
    reason: str = ""

    def skip(self, reason: str) -> None:
        """Count the line just read as broken."""
        self.broken += 1
        if self.first_broken is None:
            self.first_broken, self.reason = self.line, reason

    def counts(self) -> dict[str, int]:
        """For the manifest."""
        counts = {"rows": self.rows, "broken_lines": self.broken}
        return counts if self.first_broken is None else counts | {"first_broken_line": self.first_broken}


@dataclass(frozen=True)
class Texts:
    """A text column: `values[codes[row]]`, and code -1 where a row has none.

    Attributes:
        codes: int32 [n_rows]. values: the distinct non-empty texts in the order of their first row.
    """

    codes: npt.NDArray[np.int32]
    values: list[str]


@dataclass(frozen=True)
class Table:
    """The columns asked for, by the names they were asked under.

    Attributes:
        texts: name → Texts. numbers: name → float64 [n_rows], NaN where a row has none. times: int64 [n_rows] in the unit
            of `time_step`.
        time_step: how many of the times' units make a second; 1000 where the source has milliseconds.
        time_kind: "seconds" or "order", for the manifest.
        layout: the layout it was read as. progress: what was read and left out.
    """

    texts: dict[str, Texts]
    numbers: dict[str, npt.NDArray[np.float64]]
    times: npt.NDArray[np.int64]
    time_step: int
    time_kind: str
    layout: Layout
    progress: Progress


@dataclass(frozen=True)
class ItemTexts:
    """Texts of items.

    Attributes:
        texts: item id → cleaned, joined text ("" where the row has no text).
        with_field: text field → how many of these items have it.
        duplicates: rows of an item that already had one; the first row counts.
        layout, progress: as in `Table`.
    """

    texts: dict[str, str]
    with_field: dict[str, int]
    duplicates: int
    layout: Layout
    progress: Progress


@contextmanager
def _told(path: Path, progress: Progress) -> Iterator[None]:
    """Turn what libraries raise over a file into one sentence that names the file and the line."""
    try:
        yield
    except FileNotFoundError:
        raise CrossfedError(f"{path} does not exist; check the path and the directory of sources.") from None
    except IsADirectoryError:
        raise CrossfedError(f"{path} is a directory; name a file.") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise CrossfedError(
            f"{path}: the gzip data are damaged or cut off after line {progress.line} ({error}); fetch the file again."
        ) from error
    except UnicodeDecodeError as error:
        raise CrossfedError(
            f"{path}, line {progress.line}: byte {error.object[error.start]:#04x} is not {error.encoding}; "
            "set `encoding` of this source, e.g. latin-1."
        ) from error
    except (zipfile.BadZipFile, InvalidFileException, pa.ArrowException) as error:
        reason = str(error).splitlines()[0]
        raise CrossfedError(f"{path} cannot be read ({reason}); fetch the file again.") from error
    except OSError as error:
        raise CrossfedError(f"{path} cannot be read: {error.strerror or ' '.join(str(error).split())}.") from error


def _open(path: Path) -> BinaryIO:
    """The file's bytes, decompressed where they are gzip."""
    with path.open("rb") as file:
        compressed = file.read(2) == b"\x1f\x8b"
    return cast(BinaryIO, gzip.open(path, "rb") if compressed else path.open("rb"))


def _python_literal(text: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # texts hold backslashes that are no escapes: Python warns, and keeps them
        return ast.literal_eval(text)


_UNPARSABLE = (ValueError, SyntaxError, MemoryError, RecursionError)
"""What json.loads and ast.literal_eval raise; UnicodeDecodeError is a ValueError."""


class _File:
    """A source with its format, its layout and its columns recognised.

    Attributes:
        kind: json or python (one record per line), delimited, xlsx or parquet. columns: the names found; for the first two
            those of the first lines. has_header: whether a delimited file begins with names.
    """

    def __init__(self, path: Path, source: Source) -> None:
        self.path, self.source = path, source
        self.encoding = source.encoding or "utf-8"
        self.separator = source.separator or ","
        self.has_header = not any(isinstance(column, int) for column in source.columns.values())
        with _told(path, Progress(line=1)):
            with path.open("rb") as file:
                magic = file.read(4)
            if magic == b"PAR1":
                self.kind, self.columns = "parquet", list(pq.ParquetFile(path).schema_arrow.names)
            elif magic == b"PK\x03\x04":
                self.kind, self.columns = "xlsx", [str(cell).strip() for cell in next(self._sheet(), ())]
            else:
                self._recognise_text()
        if not self.columns:
            raise CrossfedError(f"{path} is empty; give a file with rows.")
        self.layout: Layout = source.layout or self._recognise_layout()
        if self.layout in ("amazon-ratings", "amazon-ratings-2018"):
            self.has_header = False
        if self.layout == "recbole":
            self.columns = [m[1] if (m := _TYPED.fullmatch(name)) else name for name in self.columns]
        if self.layout == "online-retail" and self.kind == "delimited" and source.encoding is None:
            self.encoding = self._utf8_or_latin1()

    def _recognise_text(self) -> None:
        with _open(self.path) as file:
            block = file.read(_HEAD)
        lines = block.splitlines(keepends=True)
        if len(block) == _HEAD and len(lines) > 1:
            lines.pop()  # cut off
        head = [line for line in lines if not line.isspace()]
        if not head:
            self.kind, self.columns = "delimited", []
            return
        head[0] = head[0].removeprefix(codecs.BOM_UTF8)
        if head[0].lstrip()[:4] in (b"PAR1", b"PK\x03\x04"):
            raise CrossfedError(f"{self.path} is a compressed Parquet or Excel file; decompress it first.")
        if head[0].lstrip().startswith((b"{", b"[")):
            for kind, parse in (("json", json.loads), ("python", _python_literal)):
                records = self._parsed(head[:200], parse)
                if records:
                    self.kind, self.columns = kind, list(dict.fromkeys(key for record in records for key in record))
                    return
            raise CrossfedError(
                f"{self.path}: none of the first lines is a JSON object or a Python dictionary; give a file with one "
                "record per line."
            )
        first = head[0].decode(self.encoding)
        if self.source.separator is None:
            self.separator = max("\t,;|", key=first.count)
        fields = next(csv.reader([first], delimiter=self.separator))
        self.kind, self.columns = "delimited", [field.strip() for field in fields]

    def _parsed(self, lines: list[bytes], parse: Callable[[str], Any]) -> list[dict[str, Any]]:
        records = []
        for line in lines:
            try:
                record = parse(line.decode(self.encoding).strip())
            except _UNPARSABLE:
                continue
            if isinstance(record, dict):
                records.append(record)
        return records

    def _recognise_layout(self) -> Layout:
        names = set(self.columns)
        if {"reviewerID", "asin", "unixReviewTime"} <= names:
            return "amazon-reviews"
        if {"user_id", "parent_asin"} <= names:
            return "amazon-reviews-2023"
        if {"InvoiceNo", "StockCode"} <= names:
            return "online-retail"
        if self.kind == "python" and "asin" in names:
            return "amazon-meta-2014"
        if self.kind == "json" and "parent_asin" in names:
            return "amazon-meta-2023"
        if self.kind == "json" and "asin" in names:
            return "amazon-meta-2018"
        if self.kind == "delimited" and all(_TYPED.fullmatch(name) for name in names):
            return "recbole"
        if self.kind == "delimited" and not self.source.columns and len(self.columns) == 4:
            first, second, *_ = (bool(_ASIN.fullmatch(value)) for value in self.columns)
            if first != second:
                return "amazon-ratings-2018" if first else "amazon-ratings"
        return "table"

    def _utf8_or_latin1(self) -> str:
        """Reads the file once through: the first pound sign may come late."""
        decoder = codecs.getincrementaldecoder("utf-8")()
        with _told(self.path, Progress()), _open(self.path) as file:
            try:
                while block := file.read(1 << 20):
                    decoder.decode(block)
                decoder.decode(b"", final=True)
            except UnicodeDecodeError:
                return "latin-1"
        return "utf-8"

    def column(self, name: str) -> str | int:
        """The column that plays a part."""
        return self.source.columns.get(name) or _ROLES[self.layout].get(name, name)

    def has(self, name: str) -> bool:
        """Whether the column that plays a part is there."""
        column = self.column(name)
        return 1 <= column <= len(self.columns) if isinstance(column, int) else column in self.columns

    @property
    def found(self) -> str:
        """What columns there are, in words."""
        named = self.has_header or self.kind != "delimited"
        return ", ".join(self.columns) if named else f"{len(self.columns)} columns without names"

    def require(self, names: Iterable[str]) -> None:
        """Raise CrossfedError for the first part whose column is not there."""
        for name in names:
            if not self.has(name):
                column = self.column(name)
                what = f"column {column}" if isinstance(column, int) else f"column {column!r}"
                raise CrossfedError(
                    f"{self.path} (read as {self.layout}) has no {what} for {name}; it has {self.found}. "
                    f"Name the right one as `columns: {{{name}: …}}` of this source, or another `layout`."
                )

    def rows(
        self, names: Sequence[str], progress: Progress, skip: Callable[[bytes], bool] | None = None
    ) -> Iterator[tuple[Any, ...]]:
        """Row by row the line number and the values of the named parts; None where a record lacks a key.

        Args:
            skip: tells from the raw line of a record that it need not be parsed.
        """
        columns = [self.column(name) for name in names]
        match self.kind:
            case "json" | "python":
                yield from self._record_rows(columns, progress, skip)
            case "delimited":
                yield from self._delimited_rows(self._indices(columns), progress)
            case "xlsx":
                yield from self._sheet_rows(self._indices(columns), progress)
            case _:
                yield from self._parquet_rows(columns, progress)

    def _indices(self, columns: Sequence[str | int]) -> list[int]:
        return [column - 1 if isinstance(column, int) else self.columns.index(column) for column in columns]

    def _lines(self, progress: Progress) -> Iterator[bytes]:
        with _open(self.path) as file:
            for line in file:
                progress.line += 1
                yield line if progress.line > 1 else line.removeprefix(codecs.BOM_UTF8)

    def _record_rows(
        self, columns: Sequence[str | int], progress: Progress, skip: Callable[[bytes], bool] | None
    ) -> Iterator[tuple[Any, ...]]:
        parse = json.loads if self.kind == "json" else _python_literal
        for line in self._lines(progress):
            if line.isspace() or (skip is not None and skip(line)):
                continue
            try:
                record = parse(line.decode(self.encoding).strip())
            except _UNPARSABLE as error:
                progress.skip(f"not {self.encoding}" if isinstance(error, UnicodeDecodeError) else f"not {self.kind}")
                continue
            if not isinstance(record, dict):
                progress.skip("not a record")
                continue
            yield (progress.line, *[record.get(column) for column in columns])

    def _delimited_rows(self, indices: Sequence[int], progress: Progress) -> Iterator[tuple[Any, ...]]:
        csv.field_size_limit(1 << 24)  # the default of 128 KiB is less than some published descriptions
        width = len(self.columns)
        pick = itemgetter(*indices) if len(indices) > 1 else lambda row: (row[indices[0]],)
        lines = (line.decode(self.encoding) for line in self._lines(progress))
        reader = csv.reader(lines, delimiter=self.separator, strict=True)
        begun = not self.has_header
        last = 0  # the last line of the record before
        while True:
            try:
                for row in reader:
                    last = progress.line
                    if len(row) == width and begun:
                        yield (last, *pick(row))
                    elif not begun:
                        begun = bool(row)
                    elif row:
                        progress.skip(f"{len(row)} fields where {width} are expected")
                return
            except csv.Error as error:  # the reader can go on with the next line
                if "unexpected end" in str(error) or "field limit" in str(error):
                    raise CrossfedError(
                        f"{self.path}, line {last + 1}: a quotation mark that opens here or in this record is never "
                        "closed; correct the line."
                    ) from error
                progress.skip(str(error))
                last = progress.line

    def _sheet(self) -> Iterator[tuple[Any, ...]]:
        """Rows of the first sheet, read as a stream."""
        with self.path.open("rb") as file:  # a path would have to end in .xlsx
            try:
                book = load_workbook(file, read_only=True, data_only=True)
            except KeyError as error:
                raise CrossfedError(f"{self.path} is a ZIP archive, but no Excel workbook; unpack it first.") from error
            try:
                yield from book.worksheets[0].iter_rows(values_only=True)
            finally:
                book.close()

    def _sheet_rows(self, indices: Sequence[int], progress: Progress) -> Iterator[tuple[Any, ...]]:
        for row in self._sheet():
            progress.line += 1
            if progress.line > 1 and any(cell is not None for cell in row):
                yield (progress.line, *[row[index] if index < len(row) else None for index in indices])

    def _parquet_rows(self, columns: Sequence[str | int], progress: Progress) -> Iterator[tuple[Any, ...]]:
        names = [self.columns[column - 1] if isinstance(column, int) else column for column in columns]
        for batch in pq.ParquetFile(self.path).iter_batches(batch_size=_BLOCK, columns=list(dict.fromkeys(names))):
            for row in zip(*(batch.column(name).to_pylist() for name in names), strict=True):
                progress.line += 1
                yield (progress.line, *row)

    def finish(self, progress: Progress) -> None:
        """Refuse a file with too many broken lines, or without rows."""
        total = progress.rows + progress.broken
        if progress.broken > self.source.max_broken * total:
            raise CrossfedError(
                f"{self.path}: {progress.broken} of {total} lines are broken, more than {self.source.max_broken:.2%}; the "
                f"first is line {progress.first_broken} ({progress.reason}). Fetch the file again, or set `max_broken`."
            )
        if not progress.rows:
            raise CrossfedError(f"{self.path} has no rows below its header; give a file with rows.")


class _TextColumn:
    """Collects one text column as codes; the distinct values are cleaned once, at the end."""

    def __init__(self, strip_point_zero: bool) -> None:
        self._strip = strip_point_zero
        self._numbers: dict[Any, int] = {}
        self._codes = array("i")

    def extend(self, values: Iterable[Any]) -> None:
        numbers = self._numbers
        self._codes.extend([numbers.setdefault(value, len(numbers)) for value in values])

    def _plain(self, value: Any) -> str:
        if value is None or (isinstance(value, float) and value != value):
            return ""
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        text = str(value).strip()
        return text.removesuffix(".0") if self._strip and text.removesuffix(".0").isdigit() else text

    def finish(self) -> Texts:
        values: dict[str, int] = {"": -1}
        codes = np.array([values.setdefault(self._plain(v), len(values) - 1) for v in self._numbers], np.int32)
        del values[""]
        return Texts(codes[np.frombuffer(self._codes, np.int32)], list(values))


class _NumberColumn:
    """Collects one column of numbers; a missing one is NaN."""

    def __init__(self) -> None:
        self._values = array("d")

    def extend(self, values: Sequence[Any]) -> None:
        try:
            self._values.extend(np.array(values, np.float64))
        except (TypeError, ValueError):
            for value in values:  # up to the one that is wrong: the length tells the caller which
                missing = value is None or (isinstance(value, str) and not value.strip())
                self._values.append(float("nan") if missing else float(value))

    def __len__(self) -> int:
        return len(self._values)

    def finish(self) -> npt.NDArray[np.float64]:
        return np.frombuffer(self._values, np.float64)


class _TimeColumn:
    """Collects times as integers: seconds, milliseconds or an order."""

    def __init__(self, unit: str | None) -> None:
        self.unit = unit
        self._values = array("q")
        self._dates: dict[Any, int] = {}

    @property
    def step(self) -> int:
        """Units per second."""
        return 1000 if self.unit == "milliseconds" else 1

    def extend(self, values: Sequence[Any]) -> None:
        if self.unit is None or self.unit in _UNITS:
            try:
                numbers = np.array(values, np.float64)
            except (TypeError, ValueError):
                numbers = None
            if numbers is not None and np.isfinite(numbers).all() and self._plausible(numbers):
                scale = 86400 if self.unit == "days" else 1
                self._values.extend(np.floor(numbers * scale).astype(np.int64))
                return
        for value in values:  # up to the one that is wrong: the length tells the caller which
            self._values.append(self._one(value))

    def _plausible(self, numbers: npt.NDArray[np.float64]) -> bool:
        return self.unit not in (None, "seconds") or bool((np.abs(numbers) < _FAR_FUTURE).all())

    def _one(self, value: Any) -> int:
        if isinstance(value, str):
            value = value.strip()
        if value not in self._dates:
            if len(self._dates) > 1 << 16:
                self._dates.clear()
            self._dates[value] = self._parse(value)
        return self._dates[value]

    def _parse(self, value: Any) -> int:
        if self.unit is None or self.unit in _UNITS:
            try:
                number = float(value)
            except (TypeError, ValueError):
                if self.unit is not None:
                    raise
            else:
                if not np.isfinite(number):
                    raise ValueError("no time")
                if not self._plausible(np.array([number])):
                    raise ValueError("no time in seconds: if the source has milliseconds, set `time: milliseconds`")
                return int(np.floor(number * (86400 if self.unit == "days" else 1)))
        if isinstance(value, str):
            try:
                value = datetime.strptime(value, self.unit or "%Y-%m-%dT%H:%M:%S")
            except ValueError:
                value = datetime.fromisoformat(value)
        elif isinstance(value, date) and not isinstance(value, datetime):
            value = datetime.combine(value, time())
        if not isinstance(value, datetime):
            raise ValueError("no time")
        return int((value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp())

    def __len__(self) -> int:
        return len(self._values)

    def finish(self) -> npt.NDArray[np.int64]:
        return np.frombuffer(self._values, np.int64)


def read_table(path: Path, source: Source, texts: Sequence[str], numbers: Sequence[str] = ()) -> Table:
    """Read the named columns and the times of a file of interactions.

    Args:
        path: where the file is. source: how to read it.
        texts, numbers: parts (user, item, rating …) or column names, to be read as text or as numbers.

    Raises:
        CrossfedError: the file is missing, damaged, in another encoding, has too many broken lines, lacks a column, or has
            something in a column of numbers or times that is not one; told with the line.
    """
    path, progress = Path(path), Progress()
    file = _File(path, source)
    by_row = source.time == "row"
    file.require([*texts, *numbers])
    if not by_row and not file.has("time") and "time" not in source.columns and file.layout in ("table", "recbole"):
        raise CrossfedError(
            f"{path} (read as {file.layout}) has no column for time; it has {file.found}. "
            "Name one as `columns: {time: …}` of this source, or set `time: row` to take the order of its rows."
        )
    names = [*texts, *numbers, *(() if by_row else ("time",))]
    file.require(names[len(texts) + len(numbers) :])
    text_columns = [_TextColumn(file.layout == "online-retail" and file.column(n) == "CustomerID") for n in texts]
    number_columns = [_NumberColumn() for _ in numbers]
    time_column = _TimeColumn(source.time or _TIMES.get(file.layout))
    checked: list[_NumberColumn | _TimeColumn] = [*number_columns, *(() if by_row else (time_column,))]
    with _told(path, progress):
        rows = file.rows(names, progress)
        while block := list(islice(rows, _BLOCK)):
            lines, *columns = zip(*block, strict=True)
            for column, name, values in zip(text_columns, texts, columns, strict=False):
                try:
                    column.extend(values)
                except TypeError as error:
                    raise CrossfedError(
                        f"{path}, lines {lines[0]} to {lines[-1]}: {name} holds a list or a record where a single "
                        "value is expected."
                    ) from error
            for collected, name, values in zip(checked, names[len(texts) :], columns[len(texts) :], strict=True):
                before = len(collected)
                try:
                    collected.extend(values)
                except (TypeError, ValueError, OverflowError) as error:
                    row = len(collected) - before
                    hint = f" ({error})" if "`time:" in str(error) else ""
                    what = "time" if name == "time" else "number"
                    raise CrossfedError(
                        f"{path}, line {lines[row]}: {values[row]!r} in {file.column(name)!r} is no {what}{hint}; "
                        f"correct the line or name another column for {name}."
                    ) from error
            progress.rows += len(block)
    file.finish(progress)
    return Table(
        texts={name: column.finish() for name, column in zip(texts, text_columns, strict=True)},
        numbers={name: column.finish() for name, column in zip(numbers, number_columns, strict=True)},
        times=np.arange(progress.rows, dtype=np.int64) if by_row else time_column.finish(),
        time_step=time_column.step,
        time_kind="order" if source.time in ("order", "row") else "seconds",
        layout=file.layout,
        progress=progress,
    )


def read_items(path: Path, source: Source, fields: Sequence[str], wanted: Container[str]) -> ItemTexts:
    """Read, clean and join the text fields of the wanted items.

    Lines of other items are passed over without being parsed, and so are not among the broken lines.

    Args:
        fields: parts (title, description, brand, categories, features) or column names, in the order in which they are
            joined. In JSON and Python files a record may lack any of them.
        wanted: item ids.

    Raises:
        CrossfedError: as `read_table`.
    """
    path, progress = Path(path), Progress()
    file = _File(path, source)
    file.require(["item"] if file.kind in ("json", "python") else ["item", *fields])
    pattern = re.compile(rb"""["']%s["']\s*:\s*["']([^"']*)["']""" % re.escape(str(file.column("item")).encode()))

    def unwanted(line: bytes) -> bool:
        ids = pattern.findall(line)
        return bool(ids) and not any(b"\\" in i or i.decode(errors="replace") in wanted for i in ids)

    found: dict[str, str] = {}
    with_field = dict.fromkeys(fields, 0)
    duplicates = 0
    with _told(path, progress):
        for _, item, *values in file.rows(["item", *fields], progress, unwanted):
            progress.rows += 1
            item = str(item).strip()
            if item not in wanted:
                continue
            if item in found:
                duplicates += 1
                continue
            if file.layout == "recbole":
                values = [_sequence(value) for value in values]
            parts = [join_fields({field: value}, [field]) for field, value in zip(fields, values, strict=True)]
            for field, part in zip(fields, parts, strict=True):
                with_field[field] += bool(part)
            found[item] = " ".join(part for part in parts if part)
    if progress.rows:  # a file may well hold none of the wanted items; the caller counts them
        file.finish(progress)
    return ItemTexts(found, with_field, duplicates, file.layout, progress)


def _sequence(value: str) -> Any:
    """RecBole's token sequences are sometimes written as quoted, comma-separated parts."""
    if value.startswith(("'", '"')):
        try:
            return _python_literal(f"[{value}]")
        except _UNPARSABLE:
            return value
    return value


__all__ = ["ItemTexts", "Layout", "Progress", "Source", "Table", "Texts", "read_items", "read_table"]
