"""Tables as they are printed: Markdown, LaTeX (booktabs), and CSV with the numbers unrounded. Pages
print them as HTML.

What goes into a table is decided where it is made (`compare`, `analyses`).
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import RenderableType

ABSENT = "–"
"""What stands where there is no value."""

_WIDE = 4
"""A LaTeX table with more columns of numbers is scaled to the width of the text."""


@dataclass(frozen=True, slots=True)
class Cell:
    """What stands in one place: a text, in bold (the best) or underlined (the second), with a mark
    after it.
    """

    text: str
    best: bool = False
    second: bool = False
    mark: str = ""


@dataclass(frozen=True, slots=True)
class Column:
    """A column's heading, the heading above that it shares with its neighbours, and its
    alignment.
    """

    name: str
    group: str = ""
    right: bool = True


@dataclass(frozen=True, slots=True)
class Grid:
    """A table for people and its numbers for programs.

    Attributes:
        title: heading of the table on a page.
        rows: one cell per column; a plain text is a cell without emphasis.
        foot: rows set apart at the end.
        caption: what the numbers are, for people who see nothing else.
        records: the numbers behind it, one flat mapping per line of CSV, all with the same keys.
    """

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell | str, ...], ...]
    caption: str
    records: tuple[Mapping[str, Any], ...] = ()
    foot: tuple[tuple[Cell | str, ...], ...] = field(default=())

    def cells(self, row: Sequence[Cell | str]) -> list[Cell]:
        """A row's cells, all of them as such."""
        return [cell if isinstance(cell, Cell) else Cell(cell) for cell in row]

    def groups(self) -> list[tuple[str, int]]:
        """The shared headings and how many columns each spans; none where no column has one."""
        spans = [
            (name, len(list(run))) for name, run in groupby(column.group for column in self.columns)
        ]
        return spans if any(name for name, _ in spans) else []

    def markdown(self) -> str:
        """A GitHub table: the best in bold, the second underlined, the caption below."""
        head = [_plain(f"{column.group} {column.name}".strip()) for column in self.columns]
        lines = [head, ["---:" if column.right else "---" for column in self.columns]]
        for row in (*self.rows, *self.foot):
            lines.append(
                [
                    _emphasised(cell, _plain(cell.text), "**", "**", "<ins>", "</ins>")
                    for cell in self.cells(row)
                ]
            )
        return (
            "\n".join(f"| {' | '.join(line)} |" for line in lines) + f"\n\n{_plain(self.caption)}\n"
        )

    def terminal(self, width: int) -> RenderableType:
        """For a terminal: the best in bold, the second underlined, the caption below.

        Columns of numbers that a narrow terminal has no room for stand in further tables below.

        Args:
            width: of the terminal, in characters.
        """
        from rich.cells import cell_len
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        body = [self.cells(row) for row in (*self.rows, *self.foot)]
        heads = [
            f"{column.group}\n{column.name}" if self.groups() else column.name
            for column in self.columns
        ]
        widths = [
            max(
                cell_len(line)
                for text in (head, *(row[i].text + row[i].mark for row in body))
                for line in text.split("\n")
            )
            for i, head in enumerate(heads)
        ]
        named = [i for i, column in enumerate(self.columns) if not column.right]
        words = min(sum(widths[i] + 3 for i in named), max(width // 2, 18 * len(named)))
        parts: list[list[int]] = [[]]
        left = width - words - 1
        for i in (i for i, column in enumerate(self.columns) if column.right):
            if parts[-1] and left < widths[i] + 3:
                parts.append([])
                left = width - words - 1
            parts[-1].append(i)
            left -= widths[i] + 3
        tables: list[RenderableType] = []
        for number, part in enumerate(parts):
            title = f"{self.title}{f', {number + 1} of {len(parts)}' if len(parts) > 1 else ''}"
            table = Table(title=title, title_justify="left", title_style="bold")
            shown = sorted({*named, *part})
            for i in shown:
                right = self.columns[i].right
                table.add_column(
                    Text(heads[i]),
                    justify="right" if right else "left",
                    no_wrap=right,
                    overflow="fold",
                )
            for place, row in enumerate(body):
                if place == len(self.rows):
                    table.add_section()
                styles = [
                    "bold" if cell.best else "underline" if cell.second else "" for cell in row
                ]
                table.add_row(*(Text(row[i].text, styles[i]) + Text(row[i].mark) for i in shown))
            tables.append(table)
        return Group(*tables, Text(self.caption, "dim"), "")

    def latex(self) -> str:
        r"""A table environment; needs `\usepackage{booktabs}`, and graphicx where it is scaled."""
        lines = [
            "% \\usepackage{booktabs,graphicx}",
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{_latex(self.caption)}}}",
        ]
        wide = sum(column.right for column in self.columns) > _WIDE
        lines += [r"\resizebox{\textwidth}{!}{%"] if wide else []
        lines += [
            rf"\begin{{tabular}}{{{''.join('r' if column.right else 'l' for column in self.columns)}}}",  # noqa: E501
            r"\toprule",
        ]
        if groups := self.groups():
            lines.append(
                " & ".join(
                    rf"\multicolumn{{{span}}}{{c}}{{{_latex(name)}}}"
                    if name
                    else " & " * (span - 1)
                    for name, span in groups
                )
                + r" \\"
            )
            first = 1
            for name, span in groups:
                lines += [rf"\cmidrule(lr){{{first}-{first + span - 1}}}"] if name else []
                first += span
        lines += [" & ".join(_latex(column.name) for column in self.columns) + r" \\", r"\midrule"]
        lines += [self._latex_row(row) for row in self.rows]
        lines += [r"\midrule", *(self._latex_row(row) for row in self.foot)] if self.foot else []
        lines += [r"\bottomrule", r"\end{tabular}" + ("}" if wide else ""), r"\end{table}"]
        return "\n".join(lines) + "\n"

    def _latex_row(self, row: Sequence[Cell | str]) -> str:
        texts = [
            _emphasised(c, _latex(c.text), r"\textbf{", "}", r"\underline{", "}")
            for c in self.cells(row)
        ]
        return " & ".join(texts) + r" \\"

    def csv(self) -> str:
        """The records, unrounded; an absent value is empty."""
        buffer = io.StringIO()
        writer = csv.DictWriter(
            buffer, list(self.records[0]) if self.records else [], lineterminator="\n"
        )
        writer.writeheader()
        writer.writerows(self.records)
        return buffer.getvalue()


def _emphasised(cell: Cell, text: str, bold: str, bold_end: str, line: str, line_end: str) -> str:
    mark = _latex(cell.mark) if bold.startswith("\\") else cell.mark
    if cell.best:
        return f"{bold}{text}{bold_end}{mark}"
    return f"{line}{text}{line_end}{mark}" if cell.second else f"{text}{mark}"


def spread(mean: float, deviation: float | None, digits: int = 4) -> str:
    """Mean and standard deviation for printing; a single value has none."""
    return f"{mean:.{digits}f}" + ("" if deviation is None else f" ± {deviation:.{digits}f}")


def p_value(p: float) -> str:
    """A p-value for printing."""
    return "< 0.0001" if p < 0.0001 else f"{p:.4f}" if p < 0.01 else f"{p:.3f}"


def pretty(metric: str) -> str:
    """A metric's name as it is written in papers: `ndcg_at_20` becomes NDCG@20."""
    name, _, k = metric.partition("_at_")
    words = {"ndcg": "NDCG", "mrr": "MRR", "map": "MAP"}.get(
        name, name.replace("_", " ").capitalize()
    )
    return f"{words}@{k}" if k else words


def _plain(text: str) -> str:
    """Text that cannot break a Markdown table."""
    return text.replace("|", "\\|").replace("\n", " ")


_LATEX = {character: f"\\{character}" for character in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "−": "$-$",
    "–": "--",
    "…": r"\dots{}",
    "≤": r"$\leq$",
    "≥": r"$\geq$",
    "×": r"$\times$",
    "∞": r"$\infty$",
    "<": "$<$",
    ">": "$>$",
    "†": r"$^{\dagger}$",
    "‡": r"$^{\ddagger}$",
    "α": r"$\alpha$",
    "β": r"$\beta$",
    "γ": r"$\gamma$",
    "δ": r"$\delta$",
    "ε": r"$\varepsilon$",
    "λ": r"$\lambda$",
    "μ": r"$\mu$",
    "τ": r"$\tau$",
    "₀": "$_0$",
}


def _latex(text: str) -> str:
    escaped = "".join(_LATEX.get(character, character) for character in text)
    return re.sub(r"(?<![\w$])-(?=\d)", "$-$", escaped)  # a minus sign, not a hyphen
