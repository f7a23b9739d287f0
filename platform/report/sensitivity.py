"""A metric against one setting of a method, and against the privacy budget that a run spent."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from crossfed.platform.errors import CrossfedError
from crossfed.platform.report.analyses import Analysis, about, file_name
from crossfed.platform.report.effects import grouped, value
from crossfed.platform.report.figures import below, no_closer, panels, styles
from crossfed.platform.report.finished import Finished, Split, check_comparable, relabelled
from crossfed.platform.report.tables import ABSENT, Cell, Column, Grid, pretty, spread


def sensitivity(
    runs: Sequence[Finished], key: str, metric: str, split: Split = "test", named: str | None = None
) -> Analysis:
    """A metric against one setting: a panel per domain, a line per row, mean ± one standard
    deviation over seeds.

    Args:
        key: one of the methods' values, or a dotted key of the run. Runs of a method without it, or
            with a single value of it, are drawn as a level; with a single value of a key that every
            run has, as a point.
        named: what the setting is called in the figure.

    Raises:
        CrossfedError: the runs do not compare, or no row has two values of the setting.
    """
    check_comparable(runs, split)
    lines = _varied(runs, key)
    title = f"{pretty(metric)} against {named or key}"
    numbers = {
        label: {
            at: {
                domain: [value(run, domain, split, metric) for run in members]
                for domain in runs[0].result["domains"]
            }
            for at, members in points.items()
        }
        for label, points in lines.items()
    }
    every = all(key in run.settings for run in runs)
    values = [at for points in lines.values() if len(points) > 1 or every for at in points]
    scale = _Scale(values)
    figure, axes = panels(len(runs[0].result["domains"]), title, about(runs, split))
    style, records = styles(lines), []
    for axis, domain in zip(axes, runs[0].result["domains"], strict=True):
        for label, points in numbers.items():
            colour, marker = style[label]
            ordered = sorted(points, key=scale.place) if len(points) > 1 else list(points)
            means = [statistics.fmean(points[at][domain]) for at in ordered]
            spreads = [
                statistics.stdev(points[at][domain]) if len(points[at][domain]) > 1 else None
                for at in ordered
            ]
            if len(points) > 1 or every:
                bars = [s or 0.0 for s in spreads]
                places = [scale.place(at) for at in ordered]
                axis.errorbar(
                    places,
                    means,
                    bars if any(bars) else None,
                    color=colour,
                    marker=marker,
                    ms=6,
                    capsize=3,
                    lw=1.6,
                )
            else:
                axis.axhline(means[0], color=colour, lw=1.4, ls="--")
            records += [
                {
                    "method": label,
                    "domain": domain,
                    "setting": key,
                    "value": at,
                    "split": split,
                    "metric": metric,
                    "mean": mean,
                    "std": sd,
                    "seeds": len(points[at][domain]),
                }
                for at, mean, sd in zip(ordered, means, spreads, strict=True)
            ]
        scale.dress(axis)
        no_closer(axis)
        axis.set_title(domain, fontsize=12)
        axis.set_xlabel(named or key)
        axis.set_ylabel(pretty(metric))
    below(
        figure,
        _line_handles(style, {label: len(points) > 1 or every for label, points in lines.items()}),
    )
    return Analysis(
        f"{file_name(key)}-{metric}",
        figure,
        _sensitivity_grid(title, key, records, about(runs, split)),
    )


def _varied(runs: Sequence[Finished], key: str) -> dict[str, dict[Any, list[Finished]]]:
    """Row (without the setting in its name) -> value of the setting -> its runs."""
    lines: dict[str, dict[Any, list[Finished]]] = {}
    for run in relabelled(runs, key):
        lines.setdefault(run.label, {}).setdefault(_hashable(run.settings.get(key)), []).append(run)
    if all(len(points) < 2 for points in lines.values()):
        held = sorted({name for run in runs for name in run.settings})
        apart = [
            n
            for n in held
            if len({repr(run.settings.get(n)) for run in runs if n in run.settings}) > 1
        ]
        others = ", ".join(name for name in apart if name != key) or "nothing else"
        if key in apart:
            raise CrossfedError(
                f"No two of these runs differ in {key} alone, but in {others} as well."
            )
        told = (
            f"it is the same in all of them, which differ in {others}"
            if key in held
            else "none of them has it"
        )
        raise CrossfedError(f"These runs cannot show what {key} does: {told}.")
    return lines


def _hashable(found: Any) -> Any:
    return found if isinstance(found, int | float | str | bool | None) else str(found)


class _Scale:
    """Where values of a setting stand: in proportion or by their logarithm where they are numbers,
    else one unit apart.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = list(dict.fromkeys(values))
        self.numeric = all(
            isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v)
            for v in self.values
        )
        if self.numeric:
            self.values.sort()
        positive = self.numeric and self.values[0] > 0
        self.log = positive and self.values[-1] >= 20 * self.values[0]

    def place(self, at: Any) -> float:
        return float(at) if self.numeric else float(self.values.index(at))

    def dress(self, axis: Axes) -> None:
        if self.log:
            axis.set_xscale("log")
            axis.xaxis.set_minor_locator(NullLocator())
        labels = [f"{v:g}" if self.numeric else str(v) for v in self.values]
        axis.set_xticks([self.place(v) for v in self.values], labels)
        if len(labels) > 8 or sum(map(len, labels)) > 40:
            axis.tick_params(axis="x", rotation=30)


def _sensitivity_grid(title: str, key: str, records: list[dict[str, Any]], told: str) -> Grid:
    domains = list(dict.fromkeys(record["domain"] for record in records))
    table: dict[tuple[str, Any], dict[str, dict[str, Any]]] = {}
    for record in records:
        table.setdefault((record["method"], record["value"]), {})[record["domain"]] = record
    top = {d: max(row[d]["mean"] for row in table.values()) for d in domains}
    return Grid(
        title=title,
        columns=(
            Column("method", right=False),
            Column(key),
            Column("seeds"),
            *(Column(domain) for domain in domains),
        ),
        rows=tuple(
            (
                label,
                ABSENT if at is None else str(at),
                str(row[domains[0]]["seeds"]),
                *(
                    Cell(spread(row[d]["mean"], row[d]["std"]), row[d]["mean"] == top[d])
                    for d in domains
                ),
            )
            for (label, at), row in table.items()
        ),
        caption=f"Mean ± standard deviation over seeds. {told}.",
        records=tuple(records),
    )


def _line_handles(style: Mapping[str, tuple[str, str]], lines: Mapping[str, bool]) -> list[Line2D]:
    """Legend entries: lines with markers, dashed levels without."""
    return [
        Line2D(
            [],
            [],
            color=c,
            marker=m if lines[label] else "",
            ms=5,
            lw=1.7,
            ls="-" if lines[label] else "--",
            label=label,
        )
        for label, (c, m) in style.items()
    ]


# -- against the privacy budget --------------------------------------------------------------------

COUNTINGS = ("paper", "whole", "tight")


def utility(
    runs: Sequence[Finished], metric: str, counting: str = "whole", split: Split = "test"
) -> Analysis:
    """A metric against the ε that a run spent, a panel per domain and a line per method; runs that
    spent none are levels.

    Args:
        counting: "paper", "whole" or "tight", as in `crossfed privacy`.

    Raises:
        CrossfedError: the runs do not compare, or none perturbs what it sends.
    """
    check_comparable(runs, split)
    if counting not in COUNTINGS:
        raise CrossfedError(f"ε is counted as {', '.join(COUNTINGS)}, not {counting!r}.")
    domains, key = list(runs[0].result["domains"]), f"epsilon_{counting}"
    records: list[dict[str, Any]] = []
    for label, members in grouped(runs).items():
        for domain in domains:
            spent = [e for run in members if (e := _epsilon(run, domain, key)) is not None]
            found = [value(run, domain, split, metric) for run in members]
            records.append(
                {
                    "method": members[0].result["method"],
                    "row": label,
                    "domain": domain,
                    key: statistics.fmean(spent) if spent else None,
                    "split": split,
                    "metric": metric,
                    "mean": statistics.fmean(found),
                    "std": statistics.stdev(found) if len(found) > 1 else None,
                    "seeds": len(found),
                }
            )
    noisy = [record for record in records if record[key] is not None]
    if not noisy:
        raise CrossfedError(
            "None of these runs perturbs what it sends: there is no ε to set the metric against."
        )
    figure, axes = panels(len(domains), f"{pretty(metric)} against ε", about(runs, split))
    lines = list(
        dict.fromkeys(
            record["row"] if record[key] is None else record["method"] for record in records
        )
    )
    style = styles(lines)
    for axis, domain in zip(axes, domains, strict=True):
        own = [record for record in records if record["domain"] == domain]
        for name, (colour, marker) in style.items():
            for level in (r for r in own if r[key] is None and r["row"] == name):
                axis.axhline(level["mean"], color=colour, lw=1.4, ls="--")
            points = sorted(
                (r for r in own if r[key] is not None and r["method"] == name),
                key=lambda r: float(r[key]),
            )
            if points:
                axis.errorbar(
                    [r[key] for r in points],
                    [r["mean"] for r in points],
                    [r["std"] or 0.0 for r in points],
                    color=colour,
                    marker=marker,
                    ms=6,
                    capsize=3,
                    lw=1.4,
                )
        reached = [float(record[key]) for record in noisy if record["domain"] == domain]
        if max(reached) >= 20 * min(reached):
            axis.set_xscale("log")
        axis.set_title(domain, fontsize=12)
        no_closer(axis)
        axis.set_xlabel(f"ε of the whole run ({_COUNTED[counting]})")
        axis.set_ylabel(pretty(metric))
    below(
        figure,
        _line_handles(style, {name: any(r["method"] == name for r in noisy) for name in lines}),
    )
    rows = [
        (
            r["row"], r["domain"], ABSENT if r[key] is None else f"{r[key]:,.4g}", str(r["seeds"]),
            spread(r["mean"], r["std"]),
        )
        for r in records
    ]  # fmt: skip
    return Analysis(
        f"utility-{metric}",
        figure,
        Grid(
            title=f"{pretty(metric)} against ε",
            columns=(
                Column("method", right=False),
                Column("domain", right=False),
                Column("ε"),
                Column("seeds"),
                Column(pretty(metric)),
            ),
            rows=tuple(rows),
            caption=f"ε of the whole run ({_COUNTED[counting]}), mean ± deviation over seeds. "
            f"{about(runs, split)}.",
            records=tuple(records),
        ),
    )


_COUNTED = {
    "paper": "as the paper counts it",
    "whole": "every release, basic composition",
    "tight": "tight composition at δ",
}


def _epsilon(run: Finished, domain: str, key: str) -> float | None:
    told = (run.result.get("privacy") or {}).get("domains", {}).get(domain, {}).get(key)
    return float(told) if told else None
