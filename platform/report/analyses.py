"""The papers' analyses of finished runs, for any method on any data: a figure, the numbers behind
it, and a table to read.

Every function takes runs as `sources.gather` gives them and hands back an `Analysis`. Values are
means over each row's seeds. Metrics against settings and ε are in `settings`, what is read from a
run's rounds in `courses`, maps of item vectors in `maps`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from crossfed.platform.checkpoint import writing
from crossfed.platform.errors import CrossfedError
from crossfed.platform.evaluation.cohorts import BOUNDS, NAMES, by_activity
from crossfed.platform.evaluation.protocols import told_protocol
from crossfed.platform.registry import find_method, nearest
from crossfed.platform.report.comparison import Compared, comparison
from crossfed.platform.report.effects import grouped, per_user
from crossfed.platform.report.figures import (
    COLOURS,
    GREY,
    MARKERS,
    below,
    hatch,
    panels,
    save,
    styles,
)
from crossfed.platform.report.finished import Finished, check_comparable, relabelled
from crossfed.platform.report.tables import ABSENT, Column, Grid, pretty, spread


@dataclass(frozen=True, slots=True)
class Analysis:
    """One analysis: its name as a file, the figure, and the table whose records are the numbers
    behind it.
    """

    name: str
    figure: Figure
    grid: Grid

    def save(self, folder: Path) -> list[Path]:
        """Write `<name>.png` and `<name>.csv`; the folder is made.

        Raises:
            CrossfedError: the disk is full or cannot be written.
        """
        with writing(folder):
            picture = save(self.figure, folder / f"{self.name}.png")
            numbers = folder / f"{self.name}.csv"
            numbers.write_text(self.grid.csv(), encoding="utf-8")
        return [picture, numbers]


def about(runs: Sequence[Finished], split: str) -> str:
    """The line under a figure's title."""
    result = runs[0].result
    kind = "synthetic " if result["data"].get("synthetic") else ""
    seeds = sorted({run.result["seed"] for run in runs})
    told = f"seeds {', '.join(map(str, seeds))}" if len(seeds) > 1 else f"seed {seeds[0]}"
    return f"{kind}{result['data']['name']} · {told_protocol(result)} · {split} · {told}"


def cohorts(runs: Sequence[Finished], metric: str, bounds: Sequence[int] = BOUNDS) -> Analysis:
    """A metric for users of little, some and much training activity (as in FedCGR, Figure 3), with
    95 % intervals over users.

    Args:
        bounds: the largest activity of every cohort but the last.

    Raises:
        CrossfedError: the runs do not compare, or hold no per-user values of the metric.
    """
    check_comparable(runs)
    if len(shares := {run.settings.get("evaluation.train_share", 1.0) for run in runs}) > 1:
        raise CrossfedError(
            "Cohorts are by training interactions, and these runs trained on different shares "
            "of them "
            f"(evaluation.train_share: {', '.join(map(str, sorted(shares)))})."
        )
    names = (
        NAMES
        if len(bounds) + 1 == len(NAMES)
        else tuple(str(i + 1) for i in range(len(bounds) + 1))
    )
    groups, domains = grouped(runs), list(runs[0].result["domains"])
    ranges = [
        f"≤ {bounds[0]}",
        *(f"{a + 1}–{b}" for a, b in pairwise(bounds)),
        f"≥ {bounds[-1] + 1}",
    ]
    figure, axes = panels(
        len(domains), f"{pretty(metric)} by training interactions", about(runs, "test")
    )
    style, rows, records = styles(groups), [], []
    width = 0.8 / len(groups)
    for axis, domain in zip(axes, domains, strict=True):
        counts: list[int] = []
        for place, (label, members) in enumerate(groups.items()):
            table = per_user(members, domain)
            if metric not in table:
                raise CrossfedError(f"{metric} has no value per user, which cohorts are made of.")
            activity = np.rint(table["n_train"].to_numpy()).astype(np.int64)
            found = by_activity(
                {metric: table[metric].to_numpy(np.float64)}, activity, bounds, names
            )
            counts = [cohort.n_users for cohort in found]
            for position, cohort in enumerate(found):
                mean = cohort.means.get(metric, math.nan)
                low, high = cohort.intervals.get(metric, (math.nan, math.nan))
                x = position + (place - (len(groups) - 1) / 2) * width
                axis.bar(
                    x,
                    mean,
                    width * 0.92,
                    color=style[label][0],
                    hatch=hatch(place),
                    edgecolor="white",
                    lw=0,
                )
                axis.errorbar(
                    x, mean, [[mean - low], [high - mean]], color="black", lw=1, capsize=2
                )
                records.append(
                    {
                        "method": label,
                        "domain": domain,
                        "cohort": cohort.name,
                        "interactions": ranges[position],
                        "metric": metric,
                        "mean": mean,
                        "low": low,
                        "high": high,
                        "users": cohort.n_users,
                        "share": cohort.share,
                    }
                )
            rows.append(
                (
                    label,
                    domain,
                    *(spread(c.means[metric], None) if c.means else ABSENT for c in found),
                )
            )
        axis.set_xticks(
            range(len(names)),
            [f"{n}\n{r}, {c:,} users" for n, r, c in zip(names, ranges, counts, strict=True)],
        )
        axis.set_title(domain, fontsize=12)
        axis.set_ylabel(pretty(metric))
    top = max(axis.get_ylim()[1] for axis in axes)
    for axis in axes:
        axis.set_ylim(0, top)
    below(
        figure,
        [
            *(
                Patch(
                    facecolor=style[label][0],
                    hatch=hatch(place),
                    edgecolor="white",
                    lw=0,
                    label=label,
                )
                for place, label in enumerate(groups)
            ),
            error_bars("95 % interval over users"),
        ],
    )
    return Analysis(
        f"cohorts-{metric}",
        figure,
        Grid(
            title=f"{pretty(metric)} by training interactions",
            columns=(
                Column("method", right=False),
                Column("domain", right=False),
                *(Column(f"{n} ({r})") for n, r in zip(names, ranges, strict=True)),
            ),
            rows=tuple(rows),
            caption=f"Means over users of values averaged over seeds, by training "
                    f"interactions. {about(runs, 'test')}.",
            records=tuple(records),
        ),
    )  # fmt: skip


def error_bars(label: str, marker: str = "|") -> Line2D:
    """A legend's entry for error bars, upright or (marker `_`) lying."""
    return Line2D([], [], color="black", lw=1, marker=marker, ms=9, mew=1.4, ls="", label=label)


# -- differences -----------------------------------------------------------------------------------


def ablation(runs: Sequence[Finished], key: str, metrics: Sequence[str] = ()) -> Analysis:
    """One method with parts switched off, every row against the whole method, on the test split.

    Args:
        key: the setting that switches parts off; its default is the whole method.

    Raises:
        CrossfedError: the runs are of several methods or differ in more than the setting, or none
            of them is the whole method.
    """
    method = runs[0].result.get("method_from", runs[0].result["method"])
    fields = find_method(method).Config.model_fields
    if key not in fields:
        raise CrossfedError(f"{method} has no setting {key!r}{nearest(key, fields)}")
    rest = relabelled(runs, key)
    if len(others := list(grouped(rest))) > 1:
        raise CrossfedError(
            f"An ablation is of one method, and its runs differ in {key} alone; these are "
            f"{', '.join(others)}."
        )
    whole = fields[key].default
    named = [
        replace(
            run,
            label=method if run.settings[key] == whole else f"{method}, {key}={run.settings[key]}",
        )
        for run in rest
    ]
    if method not in grouped(named):
        raise CrossfedError(
            f"None of these runs is the whole {method}, with {key}={whole}; add one."
        )
    found = comparison(named, metrics, "test", [method])
    figure = forest(found, f"Ablations of {method}", about(runs, "test"))
    if figure is None:
        raise CrossfedError(
            f"There is nothing to set against the whole {method}: name runs with other values "
            f"of {key}."
        )
    return Analysis(file_name(key), figure, found.table)


def forest(found: Compared, title: str, told: str) -> Figure | None:
    """Every difference of a comparison with its 95 % interval over users, a panel per column, in
    per cent of the baseline.

    Returns:
        The figure; None where nothing was tested.
    """
    effects = [
        effect
        for effect in found.effects
        if effect.users is not None and not math.isnan(effect.relative)
    ]
    if not effects:
        return None
    columns = list(dict.fromkeys((effect.domain, effect.metric) for effect in effects))
    labels = list(dict.fromkeys(effect.label for effect in effects))
    figure, axes = panels(len(columns), title, told, height=max(2.4, 0.45 * len(labels) + 1.2))
    for axis, column in zip(axes, columns, strict=True):
        own = [effect for effect in effects if (effect.domain, effect.metric) == column]
        for effect in own:
            assert effect.users is not None
            place = -labels.index(effect.label)
            low, high = effect.users.low / effect.base, effect.users.high / effect.base
            colour = COLOURS[0] if low > 0 else COLOURS[1] if high < 0 else GREY
            axis.plot([100 * low, 100 * high], [place, place], color=colour, lw=2)
            axis.plot(100 * effect.relative, place, MARKERS[0], color=colour, ms=6)
        axis.axvline(0, color="black", lw=0.8)
        axis.set_yticks([-i for i in range(len(labels))], labels)
        axis.set_ylim(-len(labels) + 0.4, 0.6)
        axis.grid(axis="x", color="#dddddd", lw=0.8)
        axis.set_title(f"{column[0]}, {pretty(column[1])}", fontsize=12)
        against = own[0].against
        axis.set_xlabel(f"change against {against}, %")
    handles = [
        Line2D([], [], color=c, marker=MARKERS[0], lw=2, label=text)
        for c, text in (
            (COLOURS[0], "better"),
            (COLOURS[1], "worse"),
            (GREY, "the interval holds zero"),
        )
    ]
    below(figure, [*handles, error_bars("95 % interval over users", "_")])
    return figure


def file_name(name: str) -> str:
    """A setting's name as part of a file name."""
    return "".join(c if c.isalnum() or c in "._-" else "_" for c in name)
