"""Tables of a study, for the terminal, Markdown and CSV, and the whole study at a glance.

Every table keeps trials that ran to their end apart from those that the scheduler stopped (see
`facts`).
"""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Self

import optuna
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

from crossfed.platform.console import number, span
from crossfed.platform.errors import CrossfedError
from crossfed.platform.report.tables import Cell, Grid
from crossfed.platform.report.tables import Column as GridColumn
from crossfed.tuning.report.facts import (
    STATUSES,
    Importance,
    StudyFacts,
    TrialFacts,
    importance,
    setting,
    value_text,
    wrapped,
)


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its name, how a value is written for people, and where it appears.

    Args:
        name: its heading; csv_name: its heading in CSV, where that differs.
        text: value -> text; an absent value is a dash.
        only: "text" leaves it out of CSV, "csv" out of the others.
        spare: in a terminal too narrow for the table, columns with the highest number go first;
            None stays.
    """

    name: str
    text: Callable[[Any], str] = str
    right: bool = True
    only: Literal["text", "csv"] | None = None
    csv_name: str | None = None
    spare: int | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """Rows with raw values; prints itself on a rich console, and writes itself as Markdown and CSV.

    Attributes:
        groups: rows that belong together; a line parts them in the terminal. A row has a value, or
            None, per column.
        caption: what the numbers are.
        best: indices of rows, counted over all groups, in bold.
    """

    title: str
    columns: tuple[Column, ...]
    groups: tuple[tuple[tuple[Any, ...], ...], ...]
    caption: str
    best: frozenset[int] = frozenset()

    @property
    def rows(self) -> list[tuple[Any, ...]]:
        """All rows, in order."""
        return [row for group in self.groups for row in group]

    def markdown(self) -> str:
        """A GitHub table, the best rows in bold, its caption below."""
        shown = self._for_people()
        lines = [
            [_plain(self.columns[i].name) for i in shown],
            ["---:" if self.columns[i].right else "---" for i in shown],
        ]
        for index, row in enumerate(self.rows):
            cells = [_plain(self._cell(row, i)) for i in shown]
            lines.append([f"**{cell}**" if cell and index in self.best else cell for cell in cells])
        body = "".join(f"| {' | '.join(line)} |\n" for line in lines) if self.rows else ""
        return f"{body}{chr(10) if body else ''}{_plain(self.caption)}\n"

    def csv(self) -> str:
        """Values as they are, unrounded, times in seconds; an absent value is empty."""
        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        kept = [i for i, column in enumerate(self.columns) if column.only != "text"]
        writer.writerow([self.columns[i].csv_name or self.columns[i].name for i in kept])
        for row in self.rows:
            writer.writerow(["" if row[i] is None else row[i] for i in kept])
        return buffer.getvalue()

    def grid(self) -> Grid:
        """The table for a page; its records are the lines of `csv`."""
        shown = self._for_people()
        kept = {c.csv_name or c.name: i for i, c in enumerate(self.columns) if c.only != "text"}
        return Grid(
            title=self.title,
            columns=tuple(
                GridColumn(self.columns[i].name, right=self.columns[i].right) for i in shown
            ),
            rows=tuple(
                tuple(Cell(self._cell(row, i), best=index in self.best) for i in shown)
                for index, row in enumerate(self.rows)
            ),
            caption=self.caption,
            records=tuple({name: row[i] for name, i in kept.items()} for row in self.rows),
        )

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        """In a terminal: as many columns as fit, and which were left out."""
        shown = self._for_people()
        left_out: list[str] = []
        while (
            Measurement.get(console, options.update(max_width=10_000), self._rich(shown)).maximum
            > options.max_width
        ):
            spare = [i for i in shown if self.columns[i].spare is not None]
            if not spare:
                break
            last = max(spare, key=lambda i: (self.columns[i].spare, i))
            shown.remove(last)
            left_out.insert(0, self.columns[last].name)
        if self.rows:
            yield self._rich(shown)
        yield Text(self.caption, style="dim")
        if left_out:
            yield Text(f"Left out for want of width: {', '.join(left_out)}.", style="dim")

    def _rich(self, shown: Sequence[int]) -> RichTable:
        table = RichTable(title=self.title, title_justify="left", title_style="bold")
        for i in shown:
            column = self.columns[i]
            table.add_column(
                Text(wrapped(column.name)),
                justify="right" if column.right else "left",
                overflow="fold",
            )
        for group in self.groups:
            for row in group:
                style = "bold" if len(table.rows) in self.best else ""
                table.add_row(*(Text(self._cell(row, i), style=style) for i in shown))
            table.add_section()
        return table

    def _for_people(self) -> list[int]:
        return [i for i, column in enumerate(self.columns) if column.only != "csv"]

    def _cell(self, row: tuple[Any, ...], i: int) -> str:
        return "–" if row[i] is None else self.columns[i].text(row[i])


def _plain(text: str) -> str:
    """Text that cannot break a Markdown table."""
    return text.replace("|", "\\|").replace("\n", " ")


def trials_table(study: optuna.Study) -> Table:
    """Every trial, grouped by what it came to, the best first within a group; the best finished
    ones in bold.
    """
    return _trials_table(StudyFacts.of(study))


def _trials_table(facts: StudyFacts) -> Table:
    columns = (
        Column("trial", only="text"),
        Column("trial", only="csv"),
        Column("paper", only="csv"),
        Column("status", right=False),
        *_measured(facts),
        *_settings(facts),
        Column("rounds", only="text"),
        Column("rounds", only="csv"),
        Column("max_rounds", only="csv"),
        Column("time", span, only="text", spare=3),
        *(
            Column(n, only="csv")
            for n in (
                "seconds",
                "cpu_seconds",
                "gpu_seconds",
                "bytes_up",
                "epsilon",
                "run_id",
                "reason",
            )
        ),
    )
    groups = [
        sorted(facts.of_status(status), key=lambda trial: _merit(facts, trial))
        for status in STATUSES
    ]
    order = [trial.number for group in groups for trial in group]
    best = {trial.number for trial in _winners(facts)}
    said = [f"Validation only; {facts.counts}; {facts.spared}."]
    if facts.scored("pruned"):
        said.append("A pruned trial's values are those it was stopped with.")
    if facts.paper is not None:
        said.append("* the paper's setting.")
    return Table(
        title="Trials",
        columns=columns,
        groups=tuple(
            tuple(_trial_row(facts, trial) for trial in group) for group in groups if group
        ),
        caption=" ".join(said),
        best=frozenset(index for index, which in enumerate(order) if which in best),
    )


def _trial_row(facts: StudyFacts, trial: TrialFacts) -> tuple[Any, ...]:
    return (
        _numbered(trial),
        trial.number,
        int(trial.paper),
        trial.status,
        *_cells(facts, trial),
        str(trial.rounds) if trial.max_rounds is None else f"{trial.rounds} / {trial.max_rounds}",
        trial.rounds,
        trial.max_rounds,
        trial.seconds,
        trial.seconds,
        trial.cpu_seconds,
        trial.gpu_seconds,
        trial.bytes_up,
        trial.epsilon,
        trial.run_id or None,
        trial.reason or None,
    )


def _measured(facts: StudyFacts) -> list[Column]:
    """A column per objective and, where there are several domains, one per domain."""
    objectives = [Column(name, partial(value_text, name)) for name in facts.objectives]
    return objectives + [
        Column(d, number, csv_name=f"{d} {facts.metric}", spare=2) for d in facts.domains
    ]


def _settings(facts: StudyFacts) -> list[Column]:
    return [Column(name, setting, spare=1) for name in facts.params]


def _cells(facts: StudyFacts, trial: TrialFacts) -> list[Any]:
    """Values of `_measured` and `_settings`."""
    held = [
        ("None" if trial.params[name] is None else trial.params[name])
        if name in trial.params
        else None
        for name in facts.params
    ]
    return [
        *(trial.values or (None,) * len(facts.objectives)),
        *(trial.domains.get(domain) for domain in facts.domains),
        *held,
    ]


def _numbered(trial: TrialFacts) -> str:
    return f"{'* ' if trial.paper else ''}{trial.number}"


def _merit(facts: StudyFacts, trial: TrialFacts) -> tuple[float, int]:
    """Ascending: the best first objective first, then by number."""
    return (math.inf if trial.values is None else -facts.signs[0] * trial.value(0), trial.number)


def _winners(facts: StudyFacts) -> tuple[TrialFacts, ...]:
    """The best finished trial, or the Pareto front where there are several objectives."""
    if len(facts.objectives) > 1:
        return facts.front()
    best = facts.best()
    return () if best is None else (best,)


def best_lines(study: optuna.Study) -> list[str]:
    """The best finished trial in words, for every objective: its settings, and what it gains over
    the paper's.
    """
    return _best_lines(StudyFacts.of(study))


def _best_lines(facts: StudyFacts) -> list[str]:
    lines = []
    for index, objective in enumerate(facts.objectives):
        best = facts.best(index)
        if best is None:
            return ["No trial finished: there is no best one."]
        told = f"Best {objective}: {value_text(objective, best.value(index))}, trial {best.number}"
        if best.paper:
            told += ", the paper's setting"
        if best.domains:
            told += (
                f" ({facts.metric}: "
                f"{', '.join(f'{d} {number(v)}' for d, v in best.domains.items())})"
            )
        lines.append(told)
        if best.params:
            lines.append(
                "  "
                + " ".join(
                    f"--set {name}={_argument(value)}" for name, value in best.params.items()
                )
            )
        if facts.paper is not None and not best.paper:
            lines.append(f"  {_against_paper(objective, best.value(index), facts.paper, index)}")
        ahead = [
            f"{t.number} ({value_text(objective, t.value(index))} after {t.rounds} rounds)"
            for t in facts.scored("pruned")
            # of costs, a shorter run always has less
            if facts.signs[index] > 0 and t.value(index) > best.value(index)
        ]
        if ahead:
            lines.append(
                f"  Stopped with more than that, and not counted: trial {', '.join(ahead)}."
            )
    return lines


def _against_paper(objective: str, value: float, paper: TrialFacts, index: int) -> str:
    if paper.values is None:
        return (
            f"The paper's setting, trial {paper.number}, is {paper.status} and has no value "
            f"to compare with."
        )
    own = paper.value(index)
    told = f"The paper's setting: {value_text(objective, own)}, trial {paper.number}"
    if paper.status == "pruned":
        return f"{told}, stopped after {paper.rounds} rounds, so not comparable."
    if own == value or not own or math.isinf(own) or math.isinf(value):
        return f"{told}."
    return (
        f"{told}; the best is {100 * abs(value - own) / abs(own):.1f} % "
        f"{'higher' if value > own else 'lower'}."
    )


def _argument(value: Any) -> str:
    """A value as `--set` reads it back (YAML)."""
    if isinstance(value, float) and math.isinf(value):
        return ".inf" if value > 0 else "-.inf"
    return (
        {None: "null", True: "true", False: "false"}[value]
        if value is None or isinstance(value, bool)
        else str(value)
    )


def reasons(study: optuna.Study) -> list[str]:
    """Why trials failed or were killed, one line each."""
    return _reasons(StudyFacts.of(study))


def _reasons(facts: StudyFacts) -> list[str]:
    return [
        f"Trial {t.number} {t.status}: {t.reason or 'no reason was recorded'}"
        for t in facts.of_status("failed", "killed")
    ]


def importance_table(study: optuna.Study) -> Table:
    """Share of importance per parameter and objective; the caption says what it rests on, or why
    there is none.
    """
    return _importance_table(importance(StudyFacts.of(study)))


def _importance_table(found: Sequence[Importance]) -> Table:
    names = list(dict.fromkeys(name for one in found for name in one.shares))
    notes = "; ".join(dict.fromkeys(one.note for one in found if one.note))
    basis = (
        f"PED-ANOVA over {found[0].trials} finished and pruned trials: what lifts a trial "
        f"into the best quarter"
    )
    return Table(
        title="Importance",
        columns=(
            Column("parameter", right=False),
            *(Column(one.objective, lambda share: f"{share:.2f}") for one in found),
        ),
        groups=(tuple((name, *(one.shares.get(name) for one in found)) for name in names),),
        caption=f"{basis}{'; ' if notes else ''}{notes}." if names else f"No importance: {notes}.",
    )


def pareto_table(study: optuna.Study) -> Table | None:
    """The Pareto front of the finished trials, by the first objective; None for a single
    objective.
    """
    return _pareto_table(StudyFacts.of(study))


def _pareto_table(facts: StudyFacts) -> Table | None:
    if len(facts.objectives) < 2:
        return None
    aims = ", ".join(
        f"{name} {_HIGHER[sign]}" for name, sign in zip(facts.objectives, facts.signs, strict=True)
    )
    return Table(
        title="Pareto front",
        columns=(
            Column("trial", only="text"),
            Column("trial", only="csv"),
            *_measured(facts),
            *_settings(facts),
            Column("run_id", only="csv"),
        ),
        groups=(
            tuple(
                (_numbered(t), t.number, *_cells(facts, t), t.run_id or None) for t in facts.front()
            ),
        ),
        caption=f"Finished trials that no other finished trial dominates; better is: {aims}.",
    )


_HIGHER = {1: "higher", -1: "lower"}


@dataclass(frozen=True, slots=True)
class Spent:
    """What one method's search cost and came to: a row of the budget table.

    Attributes:
        trials: status -> how many.
        rounds: over all trials, as are cpu_seconds and gpu_seconds, which are None where no trial
            recorded them.
        validation: the first objective of the best finished trial.
        test: the winner's test metric, run again at full budget, one value per seed; empty until it
            was measured.
    """

    method: str
    study: str
    data: str
    protocol: str
    objective: str
    trials: Mapping[str, int]
    rounds: int
    cpu_seconds: float | None
    gpu_seconds: float | None
    validation: float | None
    test: tuple[float, ...] = ()

    @classmethod
    def of(cls, study: optuna.Study, test: Sequence[float] = ()) -> Self:
        """From a study, and the test metric of its winner for each seed, as measured outside the
        search.
        """
        facts = StudyFacts.of(study)
        best = facts.best()
        return cls(
            method=facts.method,
            study=facts.name,
            data=facts.data,
            protocol=facts.protocol,
            objective=facts.objectives[0],
            trials={status: len(facts.of_status(status)) for status in STATUSES},
            rounds=sum(trial.rounds for trial in facts.trials),
            cpu_seconds=_total([trial.cpu_seconds for trial in facts.trials]),
            gpu_seconds=_total([trial.gpu_seconds for trial in facts.trials]),
            validation=None if best is None else best.value(0),
            test=tuple(test),
        )


def _total(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def budget_table(rows: Sequence[Spent]) -> Table:
    """What every method's search cost, the best validation value it found, and its winner's test
    metric over seeds.

    Raises:
        CrossfedError: nothing to show, or studies differ in data, protocol or first objective: such
            numbers do not compare.
    """
    if not rows:
        raise CrossfedError("No studies to make a budget table of.")
    for what in ("data", "protocol", "objective"):
        told = {getattr(row, what): row.study for row in rows}
        if len(told) > 1:
            each = "; ".join(f"{value} ({study})" for value, study in told.items())
            raise CrossfedError(
                f"The studies differ in {what} and do not belong in one table: {each}."
            )
    objective = rows[0].objective
    means = [statistics.fmean(row.test) if row.test else None for row in rows]
    deviations = [statistics.stdev(row.test) if len(row.test) > 1 else None for row in rows]
    body = tuple(
        (
            row.method,
            sum(row.trials.values()),
            *(row.trials.get(status, 0) for status in STATUSES[:4]),
            row.rounds,
            row.cpu_seconds,
            row.gpu_seconds,
            row.validation,
            None
            if mean is None
            else f"{mean:.4f}" + ("" if deviation is None else f" ± {deviation:.4f}"),
            mean,
            deviation,
            len(row.test),
            row.protocol,
            row.data,
            row.study,
        )
        for row, mean, deviation in zip(rows, means, deviations, strict=True)
    )
    top = max((mean for mean in means if mean is not None), default=None)
    return Table(
        title="Budget and results",
        columns=(
            Column("method", right=False),
            Column("trials"),
            *(Column(status) for status in STATUSES[:4]),
            Column("rounds"),
            Column("CPU time", span, csv_name="cpu_seconds"),
            Column("GPU time", span, csv_name="gpu_seconds"),
            Column(f"validation {objective}", number),
            Column(f"test {objective}", only="text"),
            Column("test_mean", only="csv"),
            Column("test_std", only="csv"),
            Column("seeds"),
            *(Column(name, only="csv") for name in ("protocol", "data", "study")),
        ),
        groups=(body,),
        caption=(
            f"Data {rows[0].data}, protocol {rows[0].protocol}. Validation: the best finished "
            f"trial's. Test: the winner run "
            "again at full budget, mean ± standard deviation over seeds. Rounds and times: of "
            "the search, stopped and failed "
            "trials included."
        ),
        best=frozenset(
            index for index, mean in enumerate(means) if mean is not None and mean == top
        ),
    )


def show(study: optuna.Study) -> RenderableType:
    """The whole study for the terminal: what it is, every trial, the best, the Pareto front and the
    importance.
    """
    facts = StudyFacts.of(study)
    aims = ", ".join(
        f"{'maximise' if sign > 0 else 'minimise'} {name}"
        for name, sign in zip(facts.objectives, facts.signs, strict=True)
    )
    parts: list[RenderableType] = [
        Text(f"Study {facts.name}: {facts.method}", style="bold"),
        Text(f"  data       {facts.data}"),
        Text(f"  protocol   {facts.protocol}, validation {facts.metric}"),
        Text(f"  objective  {aims}"),
    ]
    if not facts.trials:
        return Group(*parts, Text("  trials     none yet"))
    parts.append(_trials_table(facts))
    parts += [Text(line) for line in (*_reasons(facts), *_best_lines(facts))]
    parts += [
        table
        for table in (_pareto_table(facts), _importance_table(importance(facts)))
        if table is not None
    ]
    return Group(*parts)


def told(study: optuna.Study) -> tuple[list[str], list[Grid]]:
    """The whole study for a page: the best and what failed in words, then the tables."""
    facts = StudyFacts.of(study)
    about = (
        f"{facts.method} on {facts.data}, {facts.protocol}, validation {facts.metric}; "
        f"{facts.counts}; {facts.spared}."
    )
    if not facts.trials:
        return [about], []
    tables = (_trials_table(facts), _pareto_table(facts), _importance_table(importance(facts)))
    lines = [about, *(line.strip() for line in (*_best_lines(facts), *_reasons(facts)))]
    return lines, [table.grid() for table in tables if table is not None]


def markdown(study: optuna.Study) -> str:
    """The same as `show`, as a Markdown document."""
    facts = StudyFacts.of(study)
    parts = [
        f"# Study {_plain(facts.name)}\n\n{facts.method} · {facts.data} · {facts.protocol} · "
        f"validation {facts.metric}\n"
    ]
    if facts.trials:
        said = [*_best_lines(facts), *_reasons(facts)]
        parts.append(
            "## Best\n\n"
            + "".join(f"{'  ' * line.startswith(' ')}- {line.strip()}\n" for line in said)
        )
        for table in (
            _trials_table(facts),
            _pareto_table(facts),
            _importance_table(importance(facts)),
        ):
            if table is not None:
                parts.append(f"## {table.title}\n\n{table.markdown()}")
    return "\n".join(parts)
