"""Lines of delimited files: which separator and quoting they have, and line by line their fields.

Quotation marks are the trap: one that opens and is never meant to close takes the rows after it
into its field. So a quoted field may span only so many lines, none of which may look like a row of
its own; where it does, the line is read by itself, its marks as plain characters, and what cannot
be read is counted line by line.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

BLANKS = "blanks"
"""The separator of fields that runs of spaces or tabs part."""

_SEPARATORS = ("\t", "::", ",", ";", "|", " ", BLANKS)  # of equally good ones the first
_SAMPLE = 100
_QUOTING_SAMPLE = 2000
_CONSISTENT = 0.9

csv.field_size_limit(1 << 24)  # the default of 128 KiB is less than some published descriptions


def split(line: str, separator: str) -> list[str]:
    """The fields of a line without quoting."""
    return line.split() if separator == BLANKS else line.split(separator)


def fields_of(line: str, separator: str, quoted: bool = True) -> list[str]:
    """The fields of one line; a quotation mark that does not close ends with the line."""
    if not quoted or '"' not in line or len(separator) > 1:
        return split(line, separator)
    return next(csv.reader([line], delimiter=separator), [])


def sniff_separator(lines: Sequence[str]) -> str:
    """The separator that parts most lines into as many fields as the first line; a comma where none
    does.

    Args:
        lines: the first lines that are not blank, without line breaks.
    """
    best, found = (False, 1), ","
    for separator in _SEPARATORS:
        widths = [len(fields_of(line, separator)) for line in lines[:_SAMPLE]]
        share = sum(width == widths[0] for width in widths) / len(widths)
        if separator in (" ", BLANKS) and best[0]:
            break  # blanks also stand in titles and between words of a date
        if widths[0] > 1 and (share >= _CONSISTENT, widths[0]) > best:
            best, found = (share >= _CONSISTENT, widths[0]), separator
    return found


def _shape(field: str) -> str:
    """What a field looks like: a number, or its digits and letters as one each."""
    try:
        float(field)
    except ValueError:
        return re.sub(r"[^\W\d_]+", "a", re.sub(r"\d+", "0", field.strip()))
    return "number"


def like(fields: Sequence[str], others: Sequence[str]) -> bool:
    """Whether two rows' fields look alike: numbers where the other has numbers, dates where it has
    dates.
    """
    return [_shape(field) for field in fields] == [_shape(field) for field in others]


class Parser:
    """Reads the lines of a delimited file.

    Attributes:
        stray: rows whose quotation marks were taken as plain characters.

    Args:
        separator: of the fields. quoted: whether quotation marks quote. width: fields of a row.
        ids: places of the fields in which a stray quotation mark makes a line broken.
        max_lines: how many lines one row may span. sample: some of the first lines, to know how a
            row looks.
    """

    def __init__(
        self,
        separator: str,
        quoted: bool,
        width: int,
        ids: Iterable[int],
        max_lines: int,
        sample: Sequence[str] = (),
    ) -> None:
        self.separator, self.quoted, self.width = separator, quoted and len(separator) == 1, width
        self._ids, self._max_lines = tuple(ids), max_lines
        self.stray = 0
        rows = [fields_of(line, separator, self.quoted) for line in sample]
        shapes = [[_shape(field) for field in row] for row in rows if len(row) == width]
        self._stable = {
            place: shapes[0][place]
            for place in range(width if shapes else 0)
            if "0" in (first := shapes[0][place]) or first == "number"
            if sum(row[place] == first for row in shapes) > _CONSISTENT * len(shapes)
        }

    def _like_a_row(self, line: str) -> bool:
        fields = fields_of(line, self.separator)
        if len(fields) != self.width:
            fields = split(line, self.separator)
        return len(fields) == self.width and all(
            _shape(fields[place]) == shape for place, shape in self._stable.items()
        )

    def parse(
        self, line: str, peek: Callable[[int], Sequence[str]]
    ) -> tuple[list[str] | None, int, str]:
        """The fields of the row that begins with a line.

        Args:
            line: without its line break. peek: the next n lines without taking them.

        Returns:
            The fields, None where the line is broken; how many lines they took; why it is broken.
        """
        if not self.quoted or '"' not in line:
            fields = split(line, self.separator)
            if len(fields) == self.width:
                return fields, 1, ""
            return None, 1, f"{len(fields)} fields where {self.width} are expected"
        reason = ""
        try:
            fields = next(csv.reader([line], delimiter=self.separator, strict=True))
            if len(fields) == self.width:
                return fields, 1, ""
            reason = f"{len(fields)} fields where {self.width} are expected"
        except csv.Error as error:
            reason = str(error)
            if "unexpected end" in reason:
                reason = "a quotation mark that opens here is not closed where it should"
                if (spanned := self._spanned(line, peek)) is not None:
                    return (*spanned, "")
        fields = split(line, self.separator)
        if len(fields) == self.width and not any('"' in fields[place] for place in self._ids):
            self.stray += 1
            return fields, 1, ""
        return None, 1, reason

    def _spanned(
        self, line: str, peek: Callable[[int], Sequence[str]]
    ) -> tuple[list[str], int] | None:
        """The row that begins with a line and ends in a later one; None where that would take rows
        into a field.
        """
        taken = [line, *islice(peek(self._max_lines - 1), self._max_lines - 1)]
        reader = csv.reader((f"{one}\n" for one in taken), delimiter=self.separator, strict=True)
        try:
            fields = next(reader)
        except (csv.Error, StopIteration):
            return None
        n = reader.line_num
        if len(fields) != self.width or any(self._like_a_row(one) for one in taken[1:n]):
            return None
        return fields, n


def sniff_quoting(lines: Sequence[str], separator: str, max_lines: int) -> bool:
    """Whether quotation marks quote: not where tabs part lines that are whole without it and marks
    stand inside fields.

    Args:
        lines: the first lines, without line breaks; the first decides how many fields there are.
    """
    lines = [line for line in lines[:_QUOTING_SAMPLE] if line]
    if separator != "\t" or not any('"' in line for line in lines):
        return len(separator) == 1
    width = len(fields_of(lines[0], separator))
    if any(len(split(line, separator)) != width for line in lines):
        return True
    parser, start, quoting = Parser(separator, True, width, (), max_lines, lines[:_SAMPLE]), 0, 0
    while start < len(lines):
        _, n, _ = parser.parse(lines[start], lambda k: lines[start + 1 : start + 1 + k])  # noqa: B023
        quoting += any(field[:1] == field[-1:] == '"' for field in split(lines[start], separator))
        start += n
    return quoting > parser.stray


__all__ = ["BLANKS", "Parser", "fields_of", "like", "sniff_quoting", "sniff_separator", "split"]
