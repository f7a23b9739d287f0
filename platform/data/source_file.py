"""One published file: its format, layout and columns recognised, and its rows in batches of
columns.
"""

from __future__ import annotations

import ast
import gzip
import json
import lzma
import re
import warnings
import zipfile
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.parquet as pq
from openpyxl import load_workbook
from openpyxl.utils.exceptions import InvalidFileException

from crossfed.platform.data.columns import NUMERIC
from crossfed.platform.data.delimited import (
    BLANKS,
    Parser,
    fields_of,
    like,
    sniff_quoting,
    sniff_separator,
)
from crossfed.platform.data.opened import Opened, encoding_hint
from crossfed.platform.data.source import Layout, Source
from crossfed.platform.errors import CrossfedError

_ROLES: dict[str, dict[str, str | int]] = {
    "amazon-reviews": {
        "user": "reviewerID",
        "item": "asin",
        "rating": "overall",
        "time": "unixReviewTime",
    },
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
    "recbole": {"user": "user_id", "item": "item_id", "time": "timestamp", "items": "item_id_list"},
    "sequence": {"user": 1, "items": 2},
    "table": {},
}
"""Which column plays which part; a name that is not here is a column's own name. Numbers count
columns from 1.
"""

_ASIN = re.compile(r"B[0-9A-Z]{9}|[0-9]{9}[0-9X]")
_TYPED = re.compile(r"(.+):(?:token|float|token_seq|float_seq)")
_EXCEL = re.compile(r'"?sep=(.)"?', re.IGNORECASE)
_HEADERS = ("user", "users", "user_id", "userid", "uid", "session", "session_id")
"""First words of a sequence file that make its first line a header."""
_LIST = re.compile(r"[\s,;|]+")
_ASCII_LIKE = ("utf-8", "utf8", "ascii", "latin", "iso8859", "iso-8859", "cp125", "windows-125")
_BLOCK = 8192
_ROWS = 1 << 18
"""Rows of a Parquet file at a time."""
_UNIT = "\x1f"
"""Stands for a separator of several characters while Arrow parses; a block that holds it is read
line by line.
"""

Batch = tuple[Sequence[int], list[Any]]
"""Line numbers of some rows, and their columns: Arrow arrays or sequences of Python values."""


@dataclass
class Progress:
    """Where a reader is in its file, and what it had to leave out.

    Attributes:
        line: the last line read (for Parquet, the row; in a JSON document, the record). rows: rows
            read. broken: lines that could not be read; first_broken, reason: the first of them.
            stray: rows in which a quotation mark that would not close was taken as a plain
            character.
    """

    line: int = 0
    rows: int = 0
    broken: int = 0
    first_broken: int | None = None
    reason: str = ""
    stray: int = 0

    def skip(self, reason: str) -> None:
        """Count the line just read as broken."""
        self.broken += 1
        if self.first_broken is None:
            self.first_broken, self.reason = self.line, reason

    def counts(self) -> dict[str, int]:
        """For the manifest."""
        counts = {"rows": self.rows, "broken_lines": self.broken}
        if self.first_broken is not None:
            counts["first_broken_line"] = self.first_broken
        return counts | ({"stray_quotation_marks": self.stray} if self.stray else {})


@contextmanager
def told(path: Path, progress: Progress) -> Iterator[None]:
    """Turn what libraries raise over a file into one sentence that names the file and the line."""
    try:
        yield
    except FileNotFoundError:
        raise CrossfedError(
            f"{path} does not exist; check the path and the directory of sources."
        ) from None
    except IsADirectoryError:
        raise CrossfedError(f"{path} is a directory; name a file.") from None
    except (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError) as error:
        raise CrossfedError(
            f"{path}: the compressed data are damaged or cut off after line {progress.line} "
            f"({error}); "
            "fetch the file again."
        ) from error
    except UnicodeDecodeError as error:
        raise CrossfedError(
            f"{path}, line {progress.line}: byte {error.object[error.start]:#04x} is not "
            f"{error.encoding}; "
            f"{encoding_hint(error.object)}."
        ) from error
    except (zipfile.BadZipFile, InvalidFileException, pa.ArrowException) as error:
        reason = str(error).splitlines()[0]
        raise CrossfedError(f"{path} cannot be read ({reason}); fetch the file again.") from error
    except OSError as error:
        raise CrossfedError(
            f"{path} cannot be read: {error.strerror or ' '.join(str(error).split())}."
        ) from error


def python_literal(text: str) -> Any:
    """`ast.literal_eval` without its warnings: texts hold backslashes that are no escapes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.literal_eval(text)


UNPARSABLE = (ValueError, SyntaxError, MemoryError, RecursionError)
"""What json.loads and ast.literal_eval raise; UnicodeDecodeError is a ValueError."""


class SourceFile:
    """A source with its format, its layout and its columns recognised.

    Attributes:
        kind: json or python (one record per line), document (one JSON array or object), delimited,
            xlsx or parquet.
        columns: the names found; for JSON and Python those of the first records.
        has_header: whether a delimited file begins with names. listed: whether a row holds a list
            of items.
        notes: what looks odd about the columns, for people.
    """

    def __init__(self, path: Path, source: Source) -> None:
        self.path, self.source = path, source
        self.separator, self.quoted, self.skipped = (
            source.separator or ",",
            source.quoting != "none",
            0,
        )
        self.has_header = not any(isinstance(column, int) for column in source.columns.values())
        self._by_user, self._sample = False, list[str]()
        with told(path, Progress(line=1)):
            with path.open("rb") as file:
                magic = file.read(4)
            if magic == b"PAR1":
                self.kind, self.columns = "parquet", list(pq.ParquetFile(path).schema_arrow.names)
            elif magic == b"PK\x03\x04":
                self.kind, self.columns = (
                    "xlsx",
                    [str(cell).strip() for cell in next(self._sheet(), ())],
                )
            else:
                self._opened = Opened(path, source.encoding)
                self.encoding = self._opened.encoding
                self._recognise_text()
        if not self.columns:
            raise CrossfedError(f"{path} is empty; give a file with rows.")
        self.layout: Layout = source.layout or self._recognise_layout()
        if self.layout in ("amazon-ratings", "amazon-ratings-2018") and self.has_header:
            self.has_header, self.skipped = False, self.skipped - 1
        if self.layout == "recbole":
            self.columns = [
                m[1] if (m := _TYPED.fullmatch(name)) else name for name in self.columns
            ]
        if self.layout == "online-retail" and self.kind == "delimited" and source.encoding is None:
            self.encoding = self._utf8_or_latin1()
        self.listed = (
            self._by_user
            or self.layout == "sequence"
            or "items" in source.columns
            or (self.layout == "recbole" and "item_id_list" in self.columns)
        )

    def _recognise_text(self) -> None:
        head = self._opened.head
        lines = [line for line in head.split(b"\n") if line and not line.isspace()]
        if not lines:
            self.kind, self.columns = "delimited", []
            return
        if lines[0].lstrip().startswith((b"{", b"[")) and self.source.layout != "sequence":
            self._recognise_records(lines[:200])
            return
        self.kind = "delimited"
        # what is not of the encoding is told when it is read, with its line; the layout may decide
        # the encoding
        raw = [line.decode(self.encoding, "replace").rstrip("\r") for line in head.split(b"\n")]
        if self.source.layout == "sequence":
            self.columns, self.has_header = ["user", "items"], False
            return
        self._recognise_delimited(raw)

    def _recognise_delimited(self, raw: list[str]) -> None:
        """Separator, quoting, header and first row; `raw` are the first lines as they are."""
        places = [place for place, line in enumerate(raw) if line.strip()]
        if (excel := _EXCEL.fullmatch(raw[places[0]].strip())) and len(places) > 1:
            if self.source.separator is None:
                self.separator = excel[1]
            places = places[1:]
        elif self.source.separator is None:
            plain = [raw[place] for place in places if not raw[place].startswith("#")]
            self.separator = sniff_separator(
                plain or [raw[place].lstrip("# \t") for place in places]
            )
        header = self._header(raw, places)
        self._opened.head.split(b"\n")[header].decode(self.encoding)
        first = (
            raw[header].lstrip("# \t")
            if raw[header].startswith("#") and self.has_header
            else raw[header]
        )
        self.columns = [name.strip() for name in fields_of(first, self.separator)]
        self.skipped = header + 1 if self.has_header else header
        body = [
            raw[place]
            for place in places
            if place > header or (not self.has_header and place == header)
        ]
        if self.source.quoting is None:
            self.quoted = sniff_quoting([first, *body], self.separator, self.source.max_lines)
        if not self.quoted:
            self.columns = [
                name.strip().strip('"') for name in fields_of(first, self.separator, False)
            ]
        self._sample = body[:100]

    def _header(self, raw: list[str], places: list[int]) -> int:
        """The place of the header, or without one of the first row.

        Lines that begin with # stand before it, or the last of them is it.
        """
        marked = 0
        while marked < len(places) and raw[places[marked]].startswith("#"):
            marked += 1
        if not marked or marked == len(places):
            return places[0]
        last, following = raw[places[marked - 1]], raw[places[marked]]
        fields, row = (
            fields_of(last.lstrip("# \t"), self.separator),
            fields_of(following, self.separator),
        )
        if not self.has_header:
            is_row = len(fields) == len(row) and like(fields_of(last, self.separator)[1:], row[1:])
            return places[0] if is_row and marked == 1 else places[marked]
        named = {str(column) for column in self.source.columns.values()} or {"user", "item"}
        if len(fields) == len(row) and not named <= {name.strip() for name in row}:
            return places[marked - 1]
        return places[marked]

    def _recognise_records(self, lines: list[bytes]) -> None:
        if lines[0].lstrip().startswith(b"{"):
            for kind, parse in (("json", json.loads), ("python", python_literal)):
                records = self._parsed(lines, parse)
                if (
                    len(records) == len(lines) == 1
                    and records[0]
                    and all(isinstance(v, dict) for v in records[0].values())
                ):
                    raise CrossfedError(
                        f"{self.path} is one JSON object of columns or of records by key "
                        f"(pandas' default); write one record "
                        "per line, with pandas by to_json(orient='records', lines=True)."
                    )
                if records and not self._users_to_items(records):
                    self.kind, self.columns = (
                        kind,
                        list(dict.fromkeys(key for record in records for key in record)),
                    )
                    return
        document = self._document()
        if isinstance(document, dict) and document and self._users_to_items([document]):
            self.kind, self.columns, self._by_user = "document", ["user", "items"], True
            return
        if isinstance(document, list) and all(
            isinstance(record, dict) for record in document[:200]
        ):
            self.kind = "document"
            self.columns = list(dict.fromkeys(key for record in document[:200] for key in record))
            return
        raise CrossfedError(
            f"{self.path}: none of the first lines is a JSON object or a Python dictionary, "
            f"and the whole is neither an array "
            "of objects nor an object of user: [items]; give a file with one record per line."
        )

    def _users_to_items(self, records: list[dict[str, Any]]) -> bool:
        """Whether records map users to their items: all values are lists of single values, and no
        key is a column asked for.
        """
        asked = {"user", "item", "asin", *map(str, self.source.columns.values())} - {"items"}
        return len(records) == 1 and all(
            isinstance(value, list)
            and not any(isinstance(one, (list, dict)) for one in value)
            and key not in asked
            for key, value in records[0].items()
        )

    def _document(self) -> Any:
        """The whole file as one JSON document; None where it is none."""
        try:
            return json.loads(b"".join(self._opened.blocks()).decode(self.encoding))
        except UNPARSABLE:
            return None

    def _parsed(self, lines: list[bytes], parse: Callable[[str], Any]) -> list[dict[str, Any]]:
        records = []
        for line in lines:
            try:
                record = parse(line.decode(self.encoding).strip())
            except UNPARSABLE:
                continue
            if isinstance(record, dict):
                records.append(record)
        return records

    def _recognise_layout(self) -> Layout:
        names = set(self.columns)
        if self._by_user:
            return "sequence"
        if {"reviewerID", "asin", "unixReviewTime"} <= names:
            return "amazon-reviews"
        if {"user_id", "parent_asin"} <= names:
            return "amazon-reviews-2023"
        if {"InvoiceNo", "StockCode"} <= names:
            return "online-retail"
        if self.kind == "python" and "asin" in names:
            return "amazon-meta-2014"
        if self.kind in ("json", "document") and "parent_asin" in names:
            return "amazon-meta-2023"
        if self.kind in ("json", "document") and "asin" in names:
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
        with told(self.path, Progress()):
            try:
                for block in self._opened.blocks():
                    block.decode(self.encoding)
            except UnicodeDecodeError:
                return "latin-1"
        return self.encoding

    @property
    def notes(self) -> list[str]:
        """What looks odd about the columns."""
        twice = [
            name for name in dict.fromkeys(self.columns) if name and self.columns.count(name) > 1
        ]
        if not twice or not (self.has_header or self.kind != "delimited"):
            return []
        return [
            f"its header names {', '.join(map(repr, twice))} more than once; the first is taken"
        ]

    def column(self, name: str) -> str | int:
        """The column that plays a part."""
        return self.source.columns.get(name) or _ROLES[self.layout].get(name, name)

    def has(self, name: str) -> bool:
        """Whether the column that plays a part is there."""
        column = self.column(name)
        return (
            1 <= column <= len(self.columns) if isinstance(column, int) else column in self.columns
        )

    @property
    def found(self) -> str:
        """What columns there are, in words."""
        named = self.has_header or self.kind != "delimited"
        return ", ".join(self.columns) if named else f"{len(self.columns)} columns without names"

    @property
    def described(self) -> str:
        """What the file was read as, in words."""
        if self.kind != "delimited" or self.layout == "sequence":
            return self.layout
        names = {"\t": "tabs", " ": "blanks", BLANKS: "blanks"}
        return f"{self.layout}, parted by {names.get(self.separator, self.separator)}"

    def require(self, names: Iterable[str]) -> None:
        """Raise CrossfedError for the first part whose column is not there."""
        for name in names:
            if self.listed and name == "item" and self.has("items"):
                continue
            if not self.has(name):
                column = self.column(name)
                what = f"column {column}" if isinstance(column, int) else f"column {column!r}"
                raise CrossfedError(
                    f"{self.path} (read as {self.layout}) has no {what} for {name}; it has "
                    f"{self.found}. "
                    f"Name the right one as `columns: {{{name}: …}}` of this source, or "
                    f"another `layout`."
                )

    def batches(
        self, names: Sequence[str], numbers: Iterable[str], unit: str | None, progress: Progress
    ) -> Iterator[Batch]:
        """The named parts in batches; None where a record lacks a key.

        Args:
            numbers: which of the parts are numbers. unit: that of the part `time`, as in
                `TimeColumn`.
        """
        if self.listed:
            rows: Iterator[tuple[Any, ...]] = self._listed_rows(names, progress)
        elif self.kind == "delimited":
            yield from self._delimited_batches(names, frozenset(numbers), unit, progress)
            return
        elif self.kind == "parquet":
            yield from self._parquet_batches(names, progress)
            return
        else:
            rows = self.rows(names, progress)
        while block := list(islice(rows, _BLOCK)):
            lines, *columns = zip(*block, strict=True)
            yield lines, columns

    def rows(
        self, names: Sequence[str], progress: Progress, skip: Callable[[bytes], bool] | None = None
    ) -> Iterator[tuple[Any, ...]]:
        """Row by row the line number and the values of the named parts; None where a record lacks a
        key.

        Args:
            skip: tells from the raw line of a record that it need not be parsed.
        """
        columns = [self.column(name) for name in names]
        match self.kind:
            case "json" | "python":
                yield from self._record_rows(columns, progress, skip)
            case "document":
                yield from self._document_rows(columns, progress)
            case "xlsx":
                yield from self._sheet_rows(self._indices(columns), progress)
            case "delimited":
                for lines, values in self._delimited_batches(
                    names, frozenset(), None, progress, arrow=False
                ):
                    yield from zip(lines, *values, strict=True)
            case _:
                for lines, values in self._parquet_batches(names, progress, dictionaries=False):
                    yield from zip(lines, *(value.to_pylist() for value in values), strict=True)

    def _indices(self, columns: Sequence[str | int]) -> list[int]:
        return [
            column - 1 if isinstance(column, int) else self.columns.index(column)
            for column in columns
        ]

    # -- records -----------------------------------------------------------------------------------

    def _record_rows(
        self, columns: Sequence[str | int], progress: Progress, skip: Callable[[bytes], bool] | None
    ) -> Iterator[tuple[Any, ...]]:
        parse = json.loads if self.kind == "json" else python_literal
        for line in self._opened.lines():
            progress.line += 1
            if line.isspace() or (skip is not None and skip(line)):
                continue
            try:
                record = parse(line.decode(self.encoding).strip())
            except UNPARSABLE as error:
                progress.skip(
                    f"not {self.encoding}"
                    if isinstance(error, UnicodeDecodeError)
                    else f"not {self.kind}"
                )
                continue
            if not isinstance(record, dict):
                progress.skip("not a record")
                continue
            yield (progress.line, *[record.get(column) for column in columns])

    def _document_rows(
        self, columns: Sequence[str | int], progress: Progress
    ) -> Iterator[tuple[Any, ...]]:
        for record in self._document():
            progress.line += 1
            if not isinstance(record, dict):
                progress.skip("not a record")
                continue
            yield (progress.line, *[record.get(column) for column in columns])

    # -- lists of items ----------------------------------------------------------------------------

    def _listed_rows(self, names: Sequence[str], progress: Progress) -> Iterator[tuple[Any, ...]]:
        """One row per item of a list, in its order; other parts are repeated, and `time` is a
        running number.
        """
        others = [name for name in names if name not in ("item", "time")]
        number = 0
        for line, items, *values in self._lists(others, progress):
            known = dict(zip(others, values, strict=True))
            if not items:
                progress.skip("no items")
            for item in items:
                row = known | {"item": item, "time": number}
                number += 1
                yield (line, *[row[name] for name in names])

    def _lists(self, others: Sequence[str], progress: Progress) -> Iterator[tuple[Any, ...]]:
        if self._by_user:
            for user, items in self._document().items():
                progress.line += 1
                yield (progress.line, items, *[user for _ in others])
            return
        if self.kind == "delimited" and self.layout == "sequence":
            for raw in self._opened.lines():
                progress.line += 1
                line = raw.decode(self.encoding).strip()
                if line and not line.startswith("#"):
                    user, *items = self._sequence_fields(line)
                    if progress.line == 1 and user.lower() in _HEADERS:
                        continue
                    yield (progress.line, items, *[user for _ in others])
            return
        last = self.has("item") and ("item" in self.source.columns or self.layout == "recbole")
        names = [*others, "items", *(["item"] if last else [])]
        for line, *values in self.rows(names, progress):
            items = _listed(values[len(others)])
            if last and values[-1] is not None:
                items = [*items, values[-1]]
            yield (line, items, *values[: len(others)])

    def _sequence_fields(self, line: str) -> list[str]:
        if self.source.separator is not None:
            return [part.strip() for part in fields_of(line, self.separator, self.quoted)]
        user, *items = [part for part in _LIST.split(line) if part]
        return [user.removesuffix(":") or user, *items]

    # -- delimited ---------------------------------------------------------------------------------

    def _delimited_batches(
        self,
        names: Sequence[str],
        numbers: frozenset[str],
        unit: str | None,
        progress: Progress,
        arrow: bool = True,
    ) -> Iterator[Batch]:
        indices = self._indices([self.column(name) for name in names])
        ids = [
            index for name, index in zip(names, indices, strict=True) if name in ("user", "item")
        ]
        parser = Parser(
            self.separator,
            self.quoted,
            len(self.columns),
            ids,
            self.source.max_lines,
            self._sample[:100],
        )
        plain = _Plain(self, names, indices, numbers, unit) if arrow else None
        blocks, skip = self._opened.blocks(), self.skipped
        for block in blocks:
            start = 0
            while skip and start < len(block):
                start = block.find(b"\n", start) + 1 or len(block)
                skip, progress.line = skip - 1, progress.line + 1
            block = block[start:] if start else block
            if not block:
                continue
            if plain is not None and (batch := plain.read(block, progress)) is not None:
                yield batch
                continue
            yield from self._line_by_line(block, blocks, indices, parser, progress)
        progress.stray = parser.stray

    def _line_by_line(
        self,
        block: bytes,
        blocks: Iterator[bytes],
        indices: Sequence[int],
        parser: Parser,
        progress: Progress,
    ) -> Iterator[Batch]:
        """Rows of a block, and of further blocks where a row reaches into them."""
        ahead = deque(self._text_lines(block, progress.line))
        pick = itemgetter(*indices) if len(indices) > 1 else lambda row: (row[indices[0]],)

        def peek(n: int) -> list[str]:
            while len(ahead) < n and (more := next(blocks, None)) is not None:
                ahead.extend(self._text_lines(more, progress.line + len(ahead)))
            return list(islice(ahead, n))

        lines: list[int] = []
        rows: list[tuple[str, ...]] = []
        while ahead:
            line = ahead.popleft()
            progress.line += 1
            if not line or not line.strip(" "):
                continue
            fields, n, reason = parser.parse(line, peek)
            if fields is None:
                progress.skip(reason)
            else:
                progress.line += n - 1
                for _ in range(n - 1):
                    ahead.popleft()
                lines.append(progress.line)
                rows.append(pick(fields))
            if len(rows) == _BLOCK:
                yield lines, list(zip(*rows, strict=True))
                lines, rows = [], []
        if rows:
            yield lines, list(zip(*rows, strict=True))

    def _text_lines(self, block: bytes, before: int) -> list[str]:
        try:
            text = block.decode(self.encoding)
        except UnicodeDecodeError:
            for number, line in enumerate(block.split(b"\n"), before + 1):
                try:
                    line.decode(self.encoding)
                except UnicodeDecodeError as error:
                    with told(self.path, Progress(line=number)):
                        raise error
            raise
        lines = text.replace("\r\n", "\n").split("\n")
        if not lines[-1]:
            lines.pop()
        return lines

    # -- workbooks and Parquet ---------------------------------------------------------------------

    def _sheet(self) -> Iterator[tuple[Any, ...]]:
        """Rows of the first sheet, read as a stream."""
        with self.path.open("rb") as file:  # a path would have to end in .xlsx
            try:
                book = load_workbook(file, read_only=True, data_only=True)
            except KeyError as error:
                raise CrossfedError(
                    f"{self.path} is a ZIP archive, but no Excel workbook; unpack it first."
                ) from error
            try:
                yield from book.worksheets[0].iter_rows(values_only=True)
            finally:
                book.close()

    def _sheet_rows(self, indices: Sequence[int], progress: Progress) -> Iterator[tuple[Any, ...]]:
        for row in self._sheet():
            progress.line += 1
            if progress.line > 1 and any(cell is not None for cell in row):
                yield (
                    progress.line,
                    *[row[index] if index < len(row) else None for index in indices],
                )

    def _parquet_batches(
        self, names: Sequence[str], progress: Progress, dictionaries: bool = True
    ) -> Iterator[Batch]:
        columns = [self.column(name) for name in names]
        wanted = [
            self.columns[column - 1] if isinstance(column, int) else column for column in columns
        ]
        for batch in pq.ParquetFile(self.path).iter_batches(
            batch_size=_ROWS, columns=list(dict.fromkeys(wanted))
        ):
            lines = range(progress.line + 1, progress.line + len(batch) + 1)
            progress.line += len(batch)
            arrays = [batch.column(name) for name in wanted]
            if dictionaries:
                arrays = [
                    array.dictionary_encode()
                    if name in ("user", "item") and not _nested(array.type)
                    else array
                    for name, array in zip(names, arrays, strict=True)
                ]
            yield lines, arrays

    def finish(self, progress: Progress) -> None:
        """Refuse a file with too many broken lines, or without rows."""
        total = progress.rows + progress.broken
        if progress.broken > self.source.max_broken * total:
            raise CrossfedError(
                f"{self.path}: {progress.broken} of {total} lines are broken, more than "
                f"{self.source.max_broken:.2%}; the "
                f"first is line {progress.first_broken} ({progress.reason}). Fetch the file "
                f"again, or set "
                f"{'`quoting: none` or ' if 'quotation' in progress.reason else ''}`max_broken`."
            )
        if not progress.rows:
            raise CrossfedError(f"{self.path} has no rows below its header; give a file with rows.")


def _nested(kind: pa.DataType) -> bool:
    return pa.types.is_nested(kind) or pa.types.is_dictionary(kind)


def _listed(value: Any) -> list[Any]:
    """The items of one list, which a delimited file holds as text."""
    if value is None:
        return []
    if not isinstance(value, str):
        return list(value) if isinstance(value, (list, tuple)) else [value]
    text = value.strip()
    if text.startswith(("[", "(")):
        for parse in (json.loads, python_literal):
            try:
                return list(parse(text))
            except (*UNPARSABLE, TypeError):
                continue
        text = text.strip("[]()")
    return [part.strip("'\"") for part in _LIST.split(text) if part.strip("'\"")]


class _Plain:
    """Parses blocks without quotation marks by Arrow; whatever is odd about one is left to the
    careful reader.
    """

    def __init__(
        self,
        file: SourceFile,
        names: Sequence[str],
        indices: Sequence[int],
        numbers: frozenset[str],
        unit: str | None,
    ) -> None:
        self._file, self._indices = file, [str(index) for index in indices]
        text = pa.dictionary(pa.int32(), pa.string())
        self._types = {
            str(i): pa.float64() if name in numbers else text
            for name, i in zip(names, indices, strict=True)
        }
        self._time = next(
            (str(i) for name, i in zip(names, indices, strict=True) if name == "time"), None
        )
        self._kinds: list[pa.DataType] = (
            [pa.int64(), pa.decimal128(28, 9), text] if unit is None or unit in NUMERIC else [text]
        )
        clash = len(set(indices)) < len(indices)
        encoding = file.encoding.lower().replace("_", "-")
        self._any_utf8 = encoding.replace("-", "") in ("utf8", "utf8sig", "ascii")
        separator = file.separator
        self._usable = not clash and separator != BLANKS and encoding.startswith(_ASCII_LIKE)
        self._usable &= separator.isascii() and separator not in ("\r", "\n")

    def read(self, block: bytes, progress: Progress) -> Batch | None:
        file = self._file
        if (
            not self._usable
            or (file.quoted and b'"' in block)
            or not (self._any_utf8 or block.isascii())
        ):
            return None
        if block.count(b"\r") != block.count(b"\r\n") or b"\0" in block:
            return None
        separator = file.separator
        if len(separator) > 1:
            if _UNIT.encode() in block:
                return None
            block, separator = block.replace(separator.encode(), _UNIT.encode()), _UNIT
        table = self._parsed(block, separator)
        if table is None:
            return None
        n = block.count(b"\n") + (not block.endswith(b"\n"))
        lines: Sequence[int] = range(progress.line + 1, progress.line + n + 1)
        if n != len(table):
            lines = [
                progress.line + k
                for k, line in enumerate(block.split(b"\n"), 1)
                if line and line != b"\r"
            ]
            if len(lines) != len(table):
                return None
        progress.line += n
        return lines, [_whole(table[index]) for index in self._indices]

    def _parsed(self, block: bytes, separator: str) -> pa.Table | None:
        while True:
            types = self._types | ({self._time: self._kinds[0]} if self._time is not None else {})
            try:
                return pc.read_csv(
                    pa.py_buffer(block),
                    read_options=pc.ReadOptions(
                        column_names=[str(i) for i in range(len(self._file.columns))],
                        block_size=len(block) + 16,
                        use_threads=False,
                    ),
                    parse_options=pc.ParseOptions(
                        delimiter=separator,
                        quote_char=False,
                        double_quote=False,
                        escape_char=False,
                        newlines_in_values=False,
                        ignore_empty_lines=True,
                    ),
                    convert_options=pc.ConvertOptions(
                        include_columns=list(types),
                        column_types=types,
                        null_values=[""],
                        strings_can_be_null=False,
                        check_utf8=True,
                    ),
                )
            except pa.ArrowInvalid as error:
                # another kind of time than in the blocks before: the next finer one, to the end of
                # the file
                if (
                    f"CSV column #{int(self._time or 0) + 1}:" not in str(error)
                    or len(self._kinds) == 1
                ):
                    return None
                del self._kinds[0]


def _whole(column: pa.ChunkedArray) -> pa.Array:
    return (
        column.chunk(0) if column.num_chunks == 1 else column.unify_dictionaries().combine_chunks()
    )


__all__ = ["UNPARSABLE", "Progress", "SourceFile", "python_literal", "told"]
