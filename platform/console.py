"""Progress of a run: a live view in a terminal, one plain line per round anywhere else.

The caller tells what happens; nothing is measured here. Metrics are named `val/<domain>/<metric>`
and `train/<domain>/<name>`; of a domain's validation metrics the first one is shown.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

Mode = Literal["auto", "live", "plain", "quiet"]


@dataclass(frozen=True, slots=True)
class SummaryRow:
    """One domain in the final table.

    Args:
        domain: its name.
        validation, test: metric -> value; the same metrics in every row.
        protocol: how it was measured, in words (split, candidates).
        candidates: the candidate set: "all items", or the size and hash of the stored sample.
    """

    domain: str
    validation: Mapping[str, float]
    test: Mapping[str, float]
    protocol: str
    candidates: str = "all items"


def number(value: float) -> str:
    """Four significant digits: 0.1234, 12.35, 1235; counts from ten on as they are; a dash for
    NaN.
    """
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if value and not 1e-4 <= abs(value) < 1e6:
        return f"{value:.3e}"
    if abs(value) >= 10 and value == int(value):  # a count
        return f"{value:.0f}"
    digits = 4 if abs(value) < 1 else max(0, 3 - math.floor(math.log10(abs(value))))
    return f"{value:.{digits}f}"


def size(count: float) -> str:
    """Bytes for people, in powers of 1000: 1.23 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 999.5:
            return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def span(seconds: float) -> str:
    """A length of time for people: 0.42 s, 12 s, 3:05, 2:03:04."""
    if seconds < 10:
        return f"{seconds:.2g} s" if seconds >= 0.0095 else "0 s"
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def make_progress(mode: Mode = "auto", stream: TextIO | None = None) -> Progress:
    """The view for this place: "auto" is live on a terminal outside continuous integration, plain
    elsewhere.

    Args:
        mode: "live" and "plain" force one; "quiet" shows warnings and the final table only.
        stream: where to write, standard output by default. Warnings go to standard error.
    """
    stream = stream or sys.stdout
    if mode == "auto":
        dumb = os.environ.get("TERM", "") in ("dumb", "unknown")
        mode = "live" if stream.isatty() and not dumb and not os.environ.get("CI") else "plain"
    return Progress(mode, stream)


class Progress:
    """Shows a run; made by `make_progress`, used as a context manager, which always gives the
    terminal back.
    """

    def __init__(self, mode: Literal["live", "plain", "quiet"], stream: TextIO) -> None:
        self._mode = mode
        self._stream = stream
        # a file has no width of its own: the final table gets one that its seven usual metrics fit
        known = stream.isatty() or "COLUMNS" in os.environ
        self._console = Console(
            file=stream,
            force_terminal=True if mode == "live" else None,
            highlight=False,
            soft_wrap=mode != "live",
            width=None if known else 140,
        )
        self._errors = Console(stderr=True, highlight=False, soft_wrap=True)
        self._live: Live | None = None
        self._lock = threading.Lock()
        self._stage: tuple[str, int] | None = None
        self._round = 0
        self._seconds: list[float] = []
        self._since = time.monotonic()
        self._best: dict[str, float] = {}
        self._last: dict[str, dict[str, float]] = {}
        self._bytes = (0.0, 0.0)
        self._encoding: dict[str, tuple[int, int, float]] = {}
        self._told: dict[str, int] = {}

    def __enter__(self) -> Self:
        if self._mode == "live":
            # What others print (Ray relays its workers' output) goes above the view; the view
            # itself leaves no trace.
            self._live = Live(
                console=self._console,
                get_renderable=self._render,
                refresh_per_second=4,
                transient=True,
            )
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._summarise_stage()
        self._close()

    def _close(self) -> None:
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()

    def start(self, title: str, lines: Sequence[str] = ()) -> None:
        """What runs: a heading and a few lines (data, seed, protocol, where it runs)."""
        if self._mode == "quiet":
            return
        self._console.print(Text(title, style="bold"))
        for line in lines:
            self._console.print(Text(f"  {line}"))

    def encoding(self, domain: str, done: int, total: int) -> None:
        """Text encoding of a domain: `done` of `total` items."""
        with self._lock:
            began = self._encoding.get(domain, (0, 0, time.monotonic()))[2]
            self._encoding[domain] = (done, total, began)
            finished = done >= total
            elapsed = time.monotonic() - began
            if finished:
                del self._encoding[domain]
        if self._mode == "plain":
            tenth = 10 * done // total if total else 10
            if finished or tenth > self._told.get(domain, 0):
                self._told[domain] = tenth
                self._console.print(
                    Text(f"text of {domain}: {done}/{total} items, {span(elapsed)}")
                )
        elif self._mode == "live" and finished:
            self._console.print(
                Text(f"  text of {domain}: {total} items in {span(elapsed)}", style="dim")
            )

    def stage(self, name: str, rounds: int) -> None:
        """A stage begins."""
        self._summarise_stage()
        with self._lock:
            self._stage, self._round, self._seconds, self._since = (
                (name, rounds),
                0,
                [],
                time.monotonic(),
            )
            self._last, self._best, self._bytes = {}, {}, (0.0, 0.0)
        if self._mode == "plain":
            self._console.print(Text(f"stage {name}: up to {rounds} round{'s' * (rounds != 1)}"))

    def round(
        self,
        stage: str,
        round: int,
        rounds: int,
        metrics: Mapping[str, float],
        seconds: float,
        bytes_up: float,
        bytes_down: float,
    ) -> None:
        """A round is over. `seconds` and bytes are those of this round alone."""
        with self._lock:
            self._stage, self._round, self._since = (stage, rounds), round, time.monotonic()
            self._seconds.append(seconds)
            self._bytes = (self._bytes[0] + bytes_up, self._bytes[1] + bytes_down)
            for name, value in metrics.items():
                kind, _, rest = name.partition("/")
                domain, _, metric = rest.rpartition("/")
                if kind not in ("val", "train") or not domain:
                    continue
                self._last.setdefault(domain, {})[f"{kind}/{metric}"] = value
                if (
                    kind == "val"
                    and not value <= self._best.get(name, -math.inf)
                    and not math.isnan(value)
                ):
                    self._best[name] = value
        if self._mode == "plain":
            self._console.print(Text(self._line(metrics, seconds, bytes_up, bytes_down)))

    def note(self, text: str) -> None:
        """Something worth knowing."""
        if self._mode != "quiet":
            self._console.print(Text(text))

    def warn(self, text: str) -> None:
        """Something that needs attention; shown in every mode."""
        console = self._console if self._mode == "live" else self._errors
        console.print(Text(f"warning: {text}", style="yellow"))

    def finish(self, summary_rows: Sequence[SummaryRow], title: str = "Result") -> None:
        """End of the run: validation and test of every domain, and how they were measured.

        Shown are the metrics at the cut-off of the first metric, as many as fit.
        """
        self._summarise_stage()
        self._close()
        if not summary_rows:
            return
        names = list(
            dict.fromkeys(name for row in summary_rows for name in (*row.validation, *row.test))
        )
        cut = names[0].rpartition("_at_")[2]
        width = max(len(row.domain) for row in summary_rows) + len("validation") + 7
        shown: list[str] = []
        for name in names:
            if name.rpartition("_at_")[2] == cut and (
                not shown or width + len(name) + 3 <= self._console.width
            ):
                shown.append(name)
                width += len(name) + 3
        hidden = [name for name in names if name.rpartition("_at_")[2] == cut and name not in shown]
        table = Table()
        table.add_column("domain")
        table.add_column("split")
        for name in shown:
            table.add_column(Text(name), justify="right")
        for row in summary_rows:
            for split, values in (("validation", row.validation), ("test", row.test)):
                if values:
                    cells = [number(values[name]) if name in values else "" for name in shown]
                    table.add_row(*(Text(cell) for cell in (row.domain, split, *cells)))
            table.add_section()
        self._console.print(Text(title, style="bold"))
        self._console.print(table, soft_wrap=False)
        if hidden:
            self._console.print(
                Text(
                    f"more at over {self._console.width} characters: {', '.join(hidden)}",
                    style="yellow",
                )
            )
        told = {(row.protocol, row.candidates) for row in summary_rows}
        for row in summary_rows[: 1 if len(told) == 1 else None]:
            domain = "" if len(told) == 1 else f"{row.domain}: "
            self._console.print(
                Text(f"{domain}{row.protocol}; candidates: {row.candidates}", style="dim")
            )

    def _line(self, metrics: Mapping[str, float], seconds: float, up: float, down: float) -> str:
        """One round as one line."""
        assert self._stage is not None
        name, rounds = self._stage
        parts = [f"{name} {self._round}/{rounds}"]
        for kind in ("val", "train"):
            # of the validation metrics the first, of what the steps reported the first loss
            names = [k.rpartition("/")[2] for k in metrics if k.startswith(f"{kind}/")]
            shown = next((n for n in names if kind == "val" or "loss" in n), None)
            values = []
            for domain in self._last:
                key = f"{kind}/{domain}/{shown}"
                if key in metrics:
                    best = self._best.get(key, -math.inf)
                    behind = best > -math.inf and not metrics[key] >= best
                    values.append(
                        f"{domain} {number(metrics[key])}"
                        + (f" (best {number(best)})" if behind else "")
                    )
            if values:
                parts.append(f"{shown}: {', '.join(values)}")
        if up or down:
            parts.append(f"up {size(up)} down {size(down)}")
        parts.append(span(seconds))
        if left := self._left():
            parts.append(f"{left} left")
        return "  ".join(parts)

    def _left(self) -> str | None:
        """The time that the rest of the stage takes at the pace of its last ten rounds, unless it
        stops early.
        """
        if self._stage is None or not self._seconds or self._round >= self._stage[1]:
            return None
        recent = self._seconds[-10:]
        return span(sum(recent) / len(recent) * (self._stage[1] - self._round))

    def _summarise_stage(self) -> None:
        """In a live view, leave the stage that ends on the screen, as text that scrolls."""
        if self._mode == "live" and self._stage is not None and self._last:
            self._console.print(self._stage_table())
        self._stage = None

    def _stage_table(self) -> Group:
        assert self._stage is not None
        name, rounds = self._stage
        heading = f"{name}  round {self._round}/{rounds}  {span(sum(self._seconds))}"
        if left := self._left():
            heading += f"  {left} left"
        if any(self._bytes):
            heading += f"  up {size(self._bytes[0])}  down {size(self._bytes[1])}"
        losses = list(
            dict.fromkeys(k for v in self._last.values() for k in v if k.startswith("train/"))
        )
        metric = next((k for v in self._last.values() for k in v if k.startswith("val/")), None)
        table = Table(box=None, padding=(0, 2, 0, 0))
        table.add_column("domain")
        if metric is not None:
            table.add_column(metric.partition("/")[2], justify="right")
            table.add_column("best", justify="right")
        for loss in losses:
            table.add_column(Text(loss.partition("/")[2]), justify="right")
        for domain, values in self._last.items():
            row = [domain]
            if metric is not None:
                best = self._best.get(f"val/{domain}/{metric.partition('/')[2]}")
                row += [
                    number(values[metric]) if metric in values else "",
                    "" if best is None else number(best),
                ]
            row += [number(values[k]) if k in values else "" for k in losses]
            table.add_row(*(Text(cell) for cell in row))
        return Group(Text(heading, style="bold"), table)

    def _render(self) -> RenderableType:
        with self._lock:
            parts: list[RenderableType] = []
            for domain, (done, total, began) in self._encoding.items():
                elapsed = time.monotonic() - began
                bar = Table.grid(padding=(0, 1))
                left = f"{span(elapsed / done * (total - done))} left" if done else ""
                bar.add_row(
                    Text(f"text of {domain}"),
                    ProgressBar(total=total, completed=done, width=30),
                    f"{done}/{total}",
                    left,
                )
                parts.append(bar)
            if self._stage is not None:
                name, rounds = self._stage
                bar = Table.grid(padding=(0, 1))
                bar.add_row(
                    Text(name),
                    ProgressBar(total=max(rounds, 1), completed=self._round, width=30),
                    f"round {min(self._round + 1, rounds)}/{rounds} running for "
                    f"{span(time.monotonic() - self._since)}",
                )
                if self._last:
                    parts.append(self._stage_table())
                parts.append(bar)
            return Group(*parts)
