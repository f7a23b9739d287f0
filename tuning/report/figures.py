"""Figures of a study.

Drawn on matplotlib's object interface like the figures of a run. Optuna's own Matplotlib plots go
by a trial's state, which calls stopped trials complete (see `facts`), need pyplot's global state
and are marked experimental.

Finished trials are filled circles, pruned ones hollow triangles with the value they were stopped
at, the paper's setting a star.
"""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import matplotlib
import numpy as np
import numpy.typing as npt
import optuna
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator, ScalarFormatter

from crossfed.platform.console import size
from crossfed.platform.errors import CrossfedError
from crossfed.platform.report.figures import COLOURS, GREY, MARKERS, below, panels, save
from crossfed.platform.report.tables import pretty
from crossfed.tuning.report.facts import (
    Status,
    StudyFacts,
    TrialFacts,
    importance,
    many,
    setting,
    short,
    wrapped,
)

_MARK: dict[Status, dict[str, Any]] = {
    "finished": {"marker": "o", "ms": 6.5, "color": COLOURS[0], "mec": "white", "mew": 0.6},
    "pruned": {"marker": "v", "ms": 6, "color": "none", "mec": COLOURS[4], "mew": 1.4},
    "failed": {"marker": "x", "ms": 7, "color": COLOURS[1], "mew": 2},
    "killed": {"marker": "+", "ms": 8, "color": COLOURS[6], "mew": 2},
}
_LOST: tuple[Status, ...] = ("failed", "killed")
_SCORED: tuple[Status, ...] = ("pruned", "finished")  # in the order they are drawn
_WORDS: dict[Status, str] = {
    "finished": "finished",
    "pruned": "pruned (value when stopped)",
    "failed": "failed",
    "killed": "killed",
}
_STAR: dict[str, Any] = {"marker": "*", "ms": 15, "color": COLOURS[3], "mec": "black", "mew": 0.9}
_BAR: dict[Status, str] = {
    "finished": COLOURS[0],
    "pruned": COLOURS[4],
    "failed": COLOURS[1],
    "killed": COLOURS[6],
    "running": COLOURS[5],
}


_FEW = 8  # up to so many different values of a parameter stand one by one


class Scale:
    """Where the values of one parameter or objective stand on a straight axis.

    Numbers stand in proportion, or by their logarithm; categories one unit apart, numbers among
    them ascending. Infinite values stand beyond the last finite one, past a gap.

    Args:
        values: all values that are to be placed.
        log: by logarithm. category: one place per value.
        text: how a value is written.
    """

    def __init__(
        self,
        values: Sequence[Any],
        *,
        log: bool = False,
        category: bool = False,
        text: Callable[[Any], str] = setting,
    ) -> None:
        self.text = text
        numeric = all(
            isinstance(value, int | float) and not isinstance(value, bool) for value in values
        )
        self.category = category or not numeric
        self.log = log and not self.category
        if self.category:
            ordered = sorted(
                values, key=lambda v: (isinstance(v, str | bool) or v is None, _rank(v), str(v))
            )
            self.names = list(dict.fromkeys(text(value) for value in ordered))
            self.infinite = [
                float(place) for place, name in enumerate(self.names) if name == "∞" and place
            ]
            self.limits = (-0.5, len(self.names) - 0.5)
            return
        finite = [self._flat(value) for value in values if math.isfinite(value)]
        low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
        room = (high - low) or abs(high) * 0.1 or 1.0
        self.beyond = {math.inf: high + 0.2 * room, -math.inf: low - 0.2 * room}
        self.infinite = sorted({self.beyond[value] for value in values if math.isinf(value)})
        self.inner = (low, high)
        self.whole = all(isinstance(value, int) for value in values)
        ends = [low, high, *self.infinite]
        self.limits = (min(ends) - 0.06 * room, max(ends) + 0.06 * room)

    @classmethod
    def of_param(cls, facts: StudyFacts, name: str) -> Self:
        """For a parameter: as its distribution was declared, and one place per value for few whole
        numbers.
        """
        held = [trial for trial in facts.trials if name in trial.params]
        kinds = [trial.distributions[name] for trial in held]
        values = [trial.params[name] for trial in held]
        few = all(isinstance(value, int) for value in values) and len(set(values)) <= _FEW
        category = few or any(
            isinstance(kind, optuna.distributions.CategoricalDistribution) for kind in kinds
        )
        return cls(
            values, log=any(getattr(kind, "log", False) for kind in kinds), category=category
        )

    @classmethod
    def of_objective(cls, facts: StudyFacts, index: int) -> Self:
        """For an objective; by logarithm where it spans more than a factor of 100, and always for
        ε.
        """
        values = [trial.value(index) for trial in facts.scored("finished", "pruned")]
        finite = [value for value in values if math.isfinite(value)]
        objective = facts.objectives[index]
        wide = bool(finite) and max(finite) > 100 * min(finite)
        log = bool(finite) and min(finite) > 0 and (wide or objective == "epsilon")
        return cls(values, log=log, text=size if objective == "bytes" else setting)

    def _flat(self, value: float) -> float:
        return math.log10(value) if self.log else float(value)

    def place(self, value: Any) -> float:
        """The position of a value."""
        if self.category:
            return float(self.names.index(self.text(value)))
        return self.beyond[value] if math.isinf(value) else self._flat(value)

    def share(self, place: float) -> float:
        """A position as a share of the axis's length."""
        low, high = self.limits
        return (place - low) / (high - low)

    def ticks(self) -> list[tuple[float, str]]:
        """Positions and labels worth printing."""
        if self.category:
            return [(float(place), name) for place, name in enumerate(self.names)]
        low, high = self.inner
        if self.log:
            for multiples in ((1, 2, 5), (1, 3), (1,)):
                steps = [
                    m * 10.0**e
                    for e in range(math.floor(low) - 1, math.ceil(high) + 1)
                    for m in multiples
                ]
                raw = [value for value in steps if low - 1e-9 <= math.log10(value) <= high + 1e-9]
                if len(raw) < 7:
                    break
            raw = raw if len(raw) > 1 else sorted({10**low, 10**high})
        else:
            nice = MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
            raw = [
                float(f"{value:.6g}") for value in nice if low <= float(f"{value:.6g}") <= high
            ] or [low]
        ends = [(place, "∞" if place > high else "-∞") for place in self.infinite]
        return sorted([(self._flat(value), self.text(value)) for value in raw] + ends)

    def dress(self, axis: Axes, side: Literal["x", "y"]) -> None:
        """Give an axis this scale's limits and ticks, and a dotted line in the gap before an
        infinite value.
        """
        one: Axis = axis.xaxis if side == "x" else axis.yaxis
        (axis.set_xlim if side == "x" else axis.set_ylim)(*self.limits)
        if self.category or self.log or self.infinite:
            ticks = self.ticks()
            one.set_ticks([place for place, _ in ticks], [short(name, 16) for _, name in ticks])
        else:
            one.set_major_locator(MaxNLocator(nbins=6, integer=self.whole, min_n_ticks=1))
            plain = ScalarFormatter(useOffset=False)
            one.set_major_formatter(
                FuncFormatter(lambda value, _: size(value)) if self.text is size else plain
            )
        if (
            side == "x"
            and self.category
            and not _fits(axis, [short(name, 16) for name in self.names])
        ):
            axis.tick_params(axis="x", rotation=30)
        for place in self.infinite:
            gap = place - 0.5 if self.category else (place + self.inner[place > self.inner[1]]) / 2
            (axis.axvline if side == "x" else axis.axhline)(gap, color=GREY, lw=1, ls=":")


def _fits(axis: Axes, labels: Sequence[str]) -> bool:
    """Whether labels, written side by side, fit under an axis."""
    figure, columns = axis.get_figure(root=True), axis.get_gridspec().ncols  # type: ignore[union-attr]
    assert figure is not None
    return 0.09 * sum(len(label) + 1 for label in labels) < figure.get_figwidth() / columns - 1


def _rank(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else 0.0


def _spread(places: Sequence[float], category: bool) -> list[float]:
    """Points of one category side by side, so that none hides another."""
    if not category:
        return list(places)
    found = []
    for index, place in enumerate(places):
        same = [i for i, other in enumerate(places) if other == place]
        width = min(0.5, 0.08 * (len(same) - 1))
        found.append(
            place + width * ((same.index(index) / (len(same) - 1) - 0.5) if len(same) > 1 else 0.0)
        )
    return found


def _draw(
    axis: Axes, trials: Sequence[TrialFacts], xs: Sequence[float], ys: Sequence[float]
) -> None:
    """Finished and pruned trials apart, the paper's setting on top."""
    for status in _SCORED:
        chosen = [i for i, trial in enumerate(trials) if trial.status == status and not trial.paper]
        axis.plot(
            [xs[i] for i in chosen], [ys[i] for i in chosen], ls="", gid=status, **_MARK[status]
        )
    for i, trial in enumerate(trials):
        if trial.paper:
            axis.plot(xs[i], ys[i], ls="", gid="paper", zorder=5, **_STAR)


def _legend(
    figure: Figure, facts: StudyFacts, more: Sequence[Line2D] = (), lost: bool = False
) -> None:
    shown: tuple[Status, ...] = (
        ("finished", "pruned", "failed", "killed") if lost else ("finished", "pruned")
    )
    handles = [
        Line2D([], [], ls="", label=_WORDS[s], **_MARK[s]) for s in shown if facts.of_status(s)
    ]
    if facts.paper is not None and facts.paper.values is not None:
        handles.append(Line2D([], [], ls="", label="the paper's setting", **_STAR))
    _below(figure, [*handles, *more])


def _below(figure: Figure, handles: Sequence[Any]) -> None:
    if handles:
        below(figure, handles)


def _figure(
    count: int, title: str, facts: StudyFacts, note: str = "", height: float = 4.2
) -> tuple[Figure, list[Axes]]:
    """Panels in the product's style, headed by what the study is about, its counts and a note."""
    width = 104 if count == 1 else 150
    about = [f"{facts.method} · {facts.data} · {facts.protocol} · study {facts.name}", facts.counts]
    if note:
        joined = f"{facts.counts}; {note}"
        about[1:] = [joined] if len(joined) <= width else [facts.counts, note]
    filled = [textwrap.fill(line, width, break_on_hyphens=False) for line in about]
    return panels(count, title, "\n".join(filled), height)


def _nothing(axis: Axes, text: str) -> None:
    """An empty panel that says why it is empty."""
    axis.text(
        0.5,
        0.5,
        text,
        transform=axis.transAxes,
        ha="center",
        va="center",
        color=GREY,
        fontsize=11,
        wrap=True,
    )
    axis.set_xticks([])
    axis.set_yticks([])
    axis.spines[:].set_visible(False)
    axis.grid(False)


def optimisation_history(study: optuna.Study) -> Figure:
    """Value per trial and the best finished one so far; one panel per objective.

    Failed and killed trials have no value: they are marked at the foot of the panel.
    """
    facts = StudyFacts.of(study)
    figure, axes = _figure(len(facts.objectives), "Optimisation history", facts)
    trials = facts.scored("finished", "pruned")
    for index, (axis, objective) in enumerate(zip(axes, facts.objectives, strict=True)):
        scale, sign = Scale.of_objective(facts, index), facts.signs[index]
        places = [scale.place(trial.value(index)) for trial in trials]
        _draw(axis, trials, [trial.number for trial in trials], places)
        done = [
            (trial.number, place)
            for trial, place in zip(trials, places, strict=True)
            if trial.status == "finished"
        ]
        if done:
            best = sign * np.maximum.accumulate([sign * place for _, place in done])
            numbers = [*(number for number, _ in done), facts.trials[-1].number + 0.5]
            axis.step(
                numbers, [*best, best[-1]], where="post", color=GREY, lw=1.5, zorder=1, gid="best"
            )
        if facts.paper is not None and facts.paper.values is not None:
            axis.axhline(
                scale.place(facts.paper.value(index)),
                color=COLOURS[3],
                lw=1,
                ls=(0, (4, 3)),
                zorder=1,
            )
        scale.dress(axis, "y")
        if facts.of_status("failed", "killed") and trials:  # room for the marks at the foot
            low, high = axis.get_ylim()
            axis.set_ylim(low - 0.06 * (high - low), high)
        for status in _LOST:
            own = [trial.number for trial in facts.of_status(status)]
            at = axis.get_xaxis_transform()
            axis.plot(own, [0.03] * len(own), ls="", gid=status, transform=at, **_MARK[status])
        axis.set_xlim(-0.7, max(len(facts.trials) - 0.3, 0.7))
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axis.set_xlabel("trial")
        axis.set_ylabel(facts.label(objective))
        if not trials:
            axis.set_yticks([])
            axis.text(
                0.5,
                0.5,
                "no trial came to a value",
                transform=axis.transAxes,
                ha="center",
                color=GREY,
            )
    best_line = Line2D([], [], color=GREY, lw=1.5, label="best finished so far")
    _legend(figure, facts, [best_line] if facts.scored("finished") else [], lost=True)
    return figure


def _colours(facts: StudyFacts) -> tuple[Colormap, Normalize]:
    """Colours of the first objective over the finished trials' range, darker where better.

    Viridis, which is told apart with any colour vision, without its yellow end, which is hard to
    see on white.
    """
    points = np.linspace(0.0, 0.88, 64)
    colours = matplotlib.colormaps["viridis"](points[:: -facts.signs[0]])
    finite: list[float] = []
    for chosen in (facts.scored("finished"), facts.scored(*_SCORED)):
        finite = finite or [trial.value(0) for trial in chosen if math.isfinite(trial.value(0))]
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    room = 0.0 if high > low else abs(low) * 0.05 or 0.5
    return LinearSegmentedColormap.from_list("value", colours), Normalize(
        low - room, high + room, clip=True
    )


_UNUSED = -0.1  # where a line crosses the axis of a parameter that its trial has not


def parallel_coordinates(study: optuna.Study) -> Figure | None:
    """One line per trial over all parameters and objectives: finished solid, pruned faint, coloured
    by the first objective.

    Returns:
        The figure, or None when no trial came to a value.
    """
    facts = StudyFacts.of(study)
    trials = facts.scored(*_SCORED)
    if not trials:
        return None
    names = facts.params
    scales = [Scale.of_param(facts, name) for name in names]
    scales += [Scale.of_objective(facts, index) for index in range(len(facts.objectives))]
    figure, [axis] = _figure(1, "Parallel coordinates", facts, "darker is better", height=4.8)
    figure.set_figwidth(max(8.0, 1.5 * len(scales) + 2.5))
    heights = []
    for position, scale in enumerate(scales):
        if position < len(names):
            raw = [trial.params.get(names[position], _UNUSED) for trial in trials]
            held = [names[position] in trial.params for trial in trials]
        else:
            raw, held = (
                [trial.value(position - len(names)) for trial in trials],
                [True] * len(trials),
            )
        places = [
            scale.place(value) if there else math.nan
            for value, there in zip(raw, held, strict=True)
        ]
        shares = [scale.share(place) for place in _spread(places, scale.category)]
        heights.append(
            [share if there else _UNUSED for share, there in zip(shares, held, strict=True)]
        )
    colours, norm = _colours(facts)
    across = range(len(scales))
    for place, trial in sorted(enumerate(trials), key=lambda pair: _SCORED.index(pair[1].status)):
        ys = [column[place] for column in heights]
        style: dict[str, Any] = {"lw": 1.7, "alpha": 0.9}
        if trial.status == "pruned":
            style = {"lw": 1.1, "alpha": 0.45, "ls": "--"}
        axis.plot(across, ys, color=colours(norm(trial.value(0))), gid=trial.status, **style)
        if trial.paper:
            axis.plot(across, ys, ls="", gid="paper", zorder=5, **(_STAR | {"ms": 11}))
    for position, scale in enumerate(scales):
        axis.axvline(position, color="#bbbbbb", lw=1, zorder=0)
        ticks = [(scale.share(place), short(name, 12)) for place, name in scale.ticks()]
        if _UNUSED in heights[position]:
            ticks.append((_UNUSED, "not used"))
        for height, name in ticks:
            axis.text(
                position - 0.04, height, name, ha="right", va="center", fontsize=8.5, zorder=4,
                bbox={"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 0.8},
            )  # fmt: skip
    labels = [
        *map(wrapped, names),
        *(facts.label(objective).replace(", ", ",\n") for objective in facts.objectives),
    ]
    axis.set_xticks(across, labels)
    axis.set_xlim(-0.6, len(scales) - 0.85)
    axis.set_ylim(_UNUSED - 0.05 if any(_UNUSED in column for column in heights) else -0.03, 1.03)
    axis.set_yticks([])
    axis.grid(False)
    axis.spines[:].set_visible(False)
    below = any(trial.value(0) < (norm.vmin or 0.0) for trial in trials)
    above = any(trial.value(0) > (norm.vmax or 0.0) for trial in trials)
    extend = {(True, False): "min", (False, True): "max", (True, True): "both"}.get(
        (below, above), "neither"
    )
    bar = figure.colorbar(
        ScalarMappable(norm, colours), ax=axis, pad=0.02, fraction=0.04, extend=extend
    )
    bar.set_label(facts.label(facts.objectives[0]))
    drawn = {"finished": Line2D([], [], color=GREY, lw=1.7, label=_WORDS["finished"])}
    drawn["pruned"] = Line2D([], [], color=GREY, lw=1.1, alpha=0.6, ls="--", label=_WORDS["pruned"])
    handles = [drawn[status] for status in _SCORED[::-1] if facts.scored(status)]
    if facts.paper in trials:
        handles.append(Line2D([], [], ls="", label="the paper's setting", **(_STAR | {"ms": 11})))
    _below(figure, handles)
    return figure


def slices(study: optuna.Study, params: Sequence[str] | None = None) -> Figure | None:
    """Value against each parameter, one panel per parameter and objective, with the median of
    finished trials per category.

    Args:
        params: which; by default all that any trial has.

    Returns:
        The figure, or None when no trial came to a value.

    Raises:
        CrossfedError: no trial has one of the parameters.
    """
    facts = StudyFacts.of(study)
    names = tuple(params) if params is not None else facts.params
    for name in names:
        _known(facts, name)
    if not names or not facts.scored("finished", "pruned"):
        return None
    title = f"Slice: {short(names[0], 40)}" if len(names) == 1 else "Slices"
    figure, axes = _figure(len(names) * len(facts.objectives), title, facts)
    cells = [(name, index) for name in names for index in range(len(facts.objectives))]
    medians = False
    for axis, (name, index) in zip(axes, cells, strict=True):
        trials = [trial for trial in facts.scored("finished", "pruned") if name in trial.params]
        across, up = Scale.of_param(facts, name), Scale.of_objective(facts, index)
        xs = [across.place(trial.params[name]) for trial in trials]
        ys = [up.place(trial.value(index)) for trial in trials]
        if across.category:
            for place in sorted(set(xs)):
                own = [
                    y
                    for x, y, t in zip(xs, ys, trials, strict=True)
                    if x == place and t.status == "finished"
                ]
                if len(own) > 1:
                    medians = True
                    axis.plot(
                        [place - 0.32, place + 0.32],
                        [statistics.median(own)] * 2,
                        color=GREY,
                        lw=1.6,
                        gid="median",
                    )
        _draw(axis, trials, _spread(xs, across.category), ys)
        across.dress(axis, "x")
        up.dress(axis, "y")
        axis.set_xlabel(wrapped(name, 40))
        axis.set_ylabel(facts.label(facts.objectives[index]).replace(", ", ",\n"))
    _legend(
        figure,
        facts,
        [Line2D([], [], color=GREY, lw=1.6, label="median of finished")] if medians else [],
    )
    return figure


def _known(facts: StudyFacts, name: str) -> None:
    if name not in facts.params:
        raise CrossfedError(
            f"study {facts.name} does not search {name}; it searches "
            f"{', '.join(facts.params) or 'nothing'}."
        )


def importances(study: optuna.Study) -> Figure:
    """Importance of each parameter as bars, one panel per objective; a note where nothing can be
    said.
    """
    facts = StudyFacts.of(study)
    found = importance(facts)
    note = (
        f"PED-ANOVA over {found[0].trials} finished and pruned trials: what lifts a trial "
        f"into the best quarter"
    )
    rows = max(len(one.shares) for one in found)
    height = max(2.2, 0.45 * rows + 1)
    figure, axes = _figure(
        len(found), "Importance of hyperparameters", facts, note if rows else "", height
    )
    for axis, one in zip(axes, found, strict=True):
        if not one.shares:
            _nothing(axis, f"No importance for {facts.label(one.objective)}:\n{one.note}.")
            continue
        names, shares = list(one.shares)[::-1], list(one.shares.values())[::-1]
        bars = axis.barh(range(len(names)), shares, color=COLOURS[0], height=0.65)
        axis.bar_label(bars, [f"{share:.2f}" for share in shares], padding=4, fontsize=9)
        axis.set_yticks(range(len(names)), [wrapped(name, 24) for name in names])
        axis.set_xlim(0, max(shares) * 1.15)
        axis.grid(False)
        axis.set_xlabel(
            f"share of importance for {facts.label(one.objective)}"
            + (f"\n{one.note}" if one.note else "")
        )
    return figure


def pareto_front(study: optuna.Study) -> Figure | None:
    """Trials in the plane of two objectives and the front of the finished ones; a grid of all pairs
    for three and more.

    Returns:
        The figure, or None for a single objective or when no trial came to a value.
    """
    facts = StudyFacts.of(study)
    count = len(facts.objectives)
    trials = facts.scored("finished", "pruned")
    if count < 2 or not trials:
        return None
    front = facts.front()
    pairs = [(x, y) for y in range(1, count) for x in range(y)]
    note = f"{many(len(front), 'finished trial')} on the front" + (
        "" if count == 2 else f" of all {count} objectives"
    )
    figure, axes = _figure(len(pairs), "Pareto front", facts, note, height=4.8)
    scales = [Scale.of_objective(facts, index) for index in range(count)]
    for axis, (x, y) in zip(axes, pairs, strict=True):
        at = {
            trial.number: (scales[x].place(trial.value(x)), scales[y].place(trial.value(y)))
            for trial in trials
        }
        _draw(axis, trials, [p for p, _ in at.values()], [q for _, q in at.values()])
        scales[x].dress(axis, "x")
        scales[y].dress(axis, "y")
        held = [at[trial.number] for trial in front]
        ring: dict[str, Any] = {
            "marker": "o",
            "ms": 11,
            "color": "none",
            "mec": COLOURS[2],
            "mew": 1.8,
        }
        axis.plot([p for p, _ in held], [q for _, q in held], ls="", gid="front", zorder=4, **ring)
        for trial in front:
            axis.annotate(
                str(trial.number),
                at[trial.number],
                xytext=(7, 7),
                textcoords="offset points",
                fontsize=10,
                zorder=6,
            )
        if count == 2 and held:
            steps = _staircase(held, facts.signs, axis.get_xlim(), axis.get_ylim())
            axis.plot(
                [p for p, _ in steps],
                [q for _, q in steps],
                color=COLOURS[2],
                lw=1.5,
                zorder=1,
                gid="staircase",
            )
        axis.grid(True, color="#dddddd", lw=0.8)
        axis.set_xlabel(f"{facts.label(facts.objectives[x])} ({_BETTER[facts.signs[x]]} is better)")
        axis.set_ylabel(
            f"{facts.label(facts.objectives[y])}\n({_BETTER[facts.signs[y]]} is better)"
        )
    ring_handle = Line2D(
        [],
        [],
        ls="-" if count == 2 else "",
        lw=1.5,
        color=COLOURS[2],
        marker="o",
        ms=10,
        mfc="none",
        mew=1.8,
        label="Pareto front, with trial numbers",
    )
    _legend(figure, facts, [ring_handle] if front else [])
    return figure


_BETTER = {1: "higher", -1: "lower"}


def _staircase(
    front: Sequence[tuple[float, float]],
    signs: Sequence[int],
    xs: tuple[float, float],
    ys: tuple[float, float],
) -> list[tuple[float, float]]:
    """Border of what the front dominates, from the worst end of x to the worst end of y.

    A point dominates all that is worse in both, so between two neighbours the border has a corner
    at the worse value of each.
    """
    worst_x, worst_y = (
        low if sign > 0 else high for sign, (low, high) in zip(signs, (xs, ys), strict=True)
    )
    # from worst to best x: best to worst y
    points = sorted(set(front), key=lambda point: signs[0] * point[0])
    path = [(worst_x, points[0][1])]
    for (x, y), following in zip(points, [*points[1:], None], strict=True):
        path += [(x, y), (x, following[1] if following else worst_y)]
    return path


def sensitivity(study: optuna.Study, param: str) -> Figure | None:
    """The validation metric against one parameter: a panel per domain, mean ± one standard
    deviation over the other settings.

    Finished trials only. Values of a continuous parameter, where there are more than eight, are
    gathered into up to five groups of equal size; the trials themselves are drawn faintly behind.

    Returns:
        The figure, or None where finished trials have not at least two values of the parameter, or
        no domain was measured.

    Raises:
        CrossfedError: no trial has the parameter.
    """
    facts = StudyFacts.of(study)
    _known(facts, param)
    trials = [
        trial for trial in facts.of_status("finished") if param in trial.params and trial.domains
    ]
    distinct = {setting(trial.params[param]) for trial in trials}
    if len(distinct) < 2:
        return None
    kinds = [trial.distributions[param] for trial in trials]
    grouped = len(distinct) > _FEW and not any(
        isinstance(k, optuna.distributions.CategoricalDistribution) for k in kinds
    )
    scale = Scale(
        [t.params[param] for t in trials],
        log=any(getattr(k, "log", False) for k in kinds),
        category=not grouped,
    )
    note = "mean ± 1 standard deviation over the finished trials' other settings"
    if grouped:
        note += ", of neighbouring values together"
    figure, axes = _figure(
        len(facts.domains), f"{pretty(facts.metric)} against {short(param, 40)}", facts, note
    )
    for index, (axis, domain) in enumerate(zip(axes, facts.domains, strict=True)):
        held = [trial for trial in trials if domain in trial.domains]
        places = np.array([scale.place(trial.params[param]) for trial in held])
        values = np.array([trial.domains[domain] for trial in held], float)
        colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
        beside = _spread(places.tolist(), scale.category)
        axis.plot(
            beside,
            values,
            ls="",
            marker=marker,
            ms=4,
            color=colour,
            alpha=0.35,
            mew=0,
            gid="trials",
        )
        groups = (
            _groups(places)
            if grouped
            else [np.flatnonzero(places == place) for place in np.unique(places)]
        )
        at = [float(places[group].mean()) for group in groups]
        means = [float(values[group].mean()) for group in groups]
        bars = [float(values[group].std(ddof=1)) if len(group) > 1 else 0.0 for group in groups]
        axis.errorbar(at, means, yerr=bars, color=colour, marker=marker, ms=6, capsize=3, lw=1.6)
        scale.dress(axis, "x")
        if not grouped:
            names = [short(name, 16) for _, name in scale.ticks()]
            counts = [f"n={int((places == place).sum())}" for place, _ in scale.ticks()]
            if _fits(axis, [max(pair, key=len) for pair in zip(names, counts, strict=True)]):
                names = [f"{name}\n{count}" for name, count in zip(names, counts, strict=True)]
            axis.set_xticks([place for place, _ in scale.ticks()], names)
        if facts.paper is not None and param in facts.paper.params:
            _mark_paper(axis, facts.paper, scale, param, domain)
        axis.set_title(domain, fontsize=12)
        axis.set_xlabel(wrapped(param, 40))
        axis.set_ylabel(pretty(facts.metric))
    handles = [
        Line2D([], [], color=GREY, marker="o", ms=6, lw=1.6, label="mean ± 1 standard deviation"),
        Line2D([], [], ls="", marker="o", ms=4, color=GREY, alpha=0.5, mew=0, label="one trial"),
    ]
    if facts.paper is not None and param in facts.paper.params:
        told = f"the paper's value: {setting(facts.paper.params[param])}"
        star = {key: value for key, value in _STAR.items() if key != "color"} | {
            "mfc": _STAR["color"]
        }
        # only the line is drawn for a trial that did not finish
        star = star if facts.paper in trials else {}
        handles.append(Line2D([], [], color=COLOURS[3], ls="--", lw=1.2, label=told, **star))
    _below(figure, handles)
    return figure


def _mark_paper(axis: Axes, paper: TrialFacts, scale: Scale, param: str, domain: str) -> None:
    value = paper.params[param]
    if scale.category and scale.text(value) not in scale.names:
        return
    axis.axvline(scale.place(value), color=COLOURS[3], lw=1.2, ls="--", zorder=1, gid="paper value")
    if paper.status == "finished" and domain in paper.domains:
        axis.plot(scale.place(value), paper.domains[domain], ls="", gid="paper", zorder=5, **_STAR)


def _groups(places: npt.NDArray[np.float64]) -> list[npt.NDArray[np.intp]]:
    """Indices of neighbouring places, in up to five groups of equal size."""
    order = np.argsort(places, kind="stable")
    return list(np.array_split(order, max(1, min(5, len(order) // 3))))


def rounds_run(study: optuna.Study) -> Figure | None:
    """Rounds run against the most a full run takes, a bar per trial.

    Returns:
        The figure, or None when no trial ran a round.
    """
    facts = StudyFacts.of(study)
    trials = [trial for trial in facts.trials if trial.rounds or trial.status in _BAR]
    if not any(trial.rounds for trial in trials):
        return None
    figure, [axis] = _figure(1, "Rounds run", facts, facts.spared)
    full = [max(trial.max_rounds or 0, trial.rounds) for trial in trials]
    numbers = [trial.number for trial in trials]
    apart = len(trials) <= 60  # beyond that, edges and hatches would hide the bars
    axis.bar(
        numbers,
        full,
        color="#eeeeee",
        edgecolor="#cccccc",
        linewidth=float(apart),
        width=0.8,
        gid="max",
    )
    for status, colour in _BAR.items():
        own = [trial for trial in trials if trial.status == status]
        axis.bar(
            [t.number for t in own],
            [t.rounds for t in own],
            color=colour,
            width=0.8,
            gid=status,
            hatch="//" if apart and status == "pruned" else None,
            edgecolor="white",
            linewidth=0,
        )
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axis.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axis.set_xlabel("trial")
    axis.set_ylabel("rounds")
    handles = [
        Patch(color=colour, label=status)
        for status, colour in _BAR.items()
        if facts.of_status(status)
    ]
    handles.append(Patch(facecolor="#eeeeee", edgecolor="#cccccc", label="at most, in a full run"))
    _below(figure, handles)
    return figure


def figures(study: optuna.Study) -> dict[str, Figure]:
    """Every figure that the study has something to show in, by file name without its ending."""
    names = StudyFacts.of(study).params
    found: dict[str, Figure | None] = {
        "optimisation_history": optimisation_history(study),
        "parallel_coordinates": parallel_coordinates(study),
        "importance": importances(study),
        "pareto_front": pareto_front(study),
        "rounds": rounds_run(study),
    }
    found |= {f"slice_{_file(name)}": slices(study, [name]) for name in names}
    found |= {f"sensitivity_{_file(name)}": sensitivity(study, name) for name in names}
    return {name: figure for name, figure in found.items() if figure is not None}


def save_figures(study: optuna.Study, folder: Path) -> list[Path]:
    """Write every figure as PNG under its name in `figures`; the folder is made."""
    return [save(figure, folder / f"{name}.png") for name, figure in figures(study).items()]


def _file(name: str) -> str:
    """A parameter's name as part of a file name."""
    return "".join(c if c.isalnum() or c in "._-" else "_" for c in name)
