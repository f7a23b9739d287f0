"""One file: its kind and columns recognised, and the same rows in batches and row by row."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from openpyxl import Workbook

from crossfed.platform.data.source import Source
from crossfed.platform.data.source_file import Progress, SourceFile, told
from crossfed.platform.errors import CrossfedError

RECORDS = [{"user": "al", "item": "x", "n": 1}, {"user": "bo", "item": "y", "n": 2}]
NAMES = ("user", "item")


def sheet(path) -> None:
    book = Workbook()
    for row in (list(RECORDS[0]), *(list(record.values()) for record in RECORDS)):
        book.active.append(row)
    book.save(path)


def lines(*texts: str):
    return lambda path: path.write_text("\n".join(texts) + "\n")


KINDS = {
    "json": lines(*map(json.dumps, RECORDS)),
    "python": lines(*map(str, RECORDS)),
    "document": lines(json.dumps(RECORDS)),
    "delimited": lines("user,item,n", "al,x,1", "bo,y,2"),
    "xlsx": sheet,
    "parquet": lambda path: pq.write_table(pa.Table.from_pylist(RECORDS), path),
}


def plain(column) -> list:
    """Arrow's columns, dictionaries and chunks among them, as Python values."""
    return column.to_pylist() if hasattr(column, "to_pylist") else list(column)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_recognised_and_read_alike(tmp_path, kind):
    path = tmp_path / "file"
    KINDS[kind](path)
    file = SourceFile(path, Source(path="file"))
    assert (file.kind, file.layout, file.columns) == (kind, "table", ["user", "item", "n"])
    assert file.has("user") and not file.has("time") and not file.notes
    by_row, in_batches = Progress(), Progress()
    rows = list(file.rows(NAMES, by_row))
    assert [row[1:] for row in rows] == [("al", "x"), ("bo", "y")]
    read = [
        row
        for places, columns in file.batches(NAMES, (), None, in_batches)
        for row in zip(places, *map(plain, columns), strict=True)
    ]
    assert read == rows
    assert by_row.broken == in_batches.broken == 0


@pytest.mark.parametrize(
    ("text", "columns", "separator"),
    [
        ("a;b\n1;2\n", ["a", "b"], ";"),
        ("a\tb c\n1\t2\n", ["a", "b c"], "\t"),
        ("a::b\n1::2\n", ["a", "b"], "::"),
        ("# made by hand\n# a,b\n1,2\n", ["a", "b"], ","),
        ('sep=|\na|"b"\n1|2\n', ["a", "b"], "|"),
    ],
)
def test_the_header_and_its_separator(tmp_path, text, columns, separator):
    (tmp_path / "f").write_text(text)
    file = SourceFile(tmp_path / "f", Source(path="f"))
    assert (file.columns, file.separator) == (columns, separator)
    assert [row[1:] for row in file.rows(columns, Progress())] == [("1", "2")]


def test_a_broken_line_is_counted_by_its_number_and_left_out(tmp_path):
    (tmp_path / "f").write_text('{"user": "al"}\n{"user": \n[1]\n{"user": "bo"}\n')
    file, progress = SourceFile(tmp_path / "f", Source(path="f")), Progress()
    assert list(file.rows(["user"], progress)) == [(1, "al"), (4, "bo")]
    assert (progress.broken, progress.first_broken, progress.reason) == (2, 2, "not json")
    assert progress.counts()["first_broken_line"] == 2


def test_a_part_without_its_column_is_named_with_what_there_is(tmp_path):
    (tmp_path / "f").write_text("who,what\na,b\n")
    file = SourceFile(tmp_path / "f", Source(path="f", columns={"user": "who"}))
    file.require(["user"])
    with pytest.raises(
        CrossfedError,
        match=r"read as table\) has no column 'item' for item; it has who, what\. Name the right "
        r"one as `columns: \{item: …\}`",
    ):
        file.require(["user", "item"])


def test_names_given_twice_are_told(tmp_path):
    (tmp_path / "f").write_text("user,item,item\nu,i,j\n")
    file = SourceFile(tmp_path / "f", Source(path="f"))
    assert file.notes == ["its header names 'item' more than once; the first is taken"]
    assert list(file.rows(["item"], Progress())) == [(2, "i")]


def test_what_a_library_raises_is_one_sentence_with_file_and_line(tmp_path):
    with (
        pytest.raises(CrossfedError, match="f, line 7: byte 0xff is not utf-8; set `encoding`"),
        told(tmp_path / "f", Progress(line=7)),
    ):
        b"a\xff".decode()
    with (
        pytest.raises(CrossfedError, match=r"f: the compressed data are damaged .* after line 7"),
        told(tmp_path / "f", Progress(line=7)),
    ):
        raise EOFError("cut off")
    (tmp_path / "f").write_bytes(b"")
    with pytest.raises(CrossfedError, match="f is empty; give a file with rows"):
        SourceFile(tmp_path / "f", Source(path="f"))
