"""Figures of a run, drawn on matplotlib's object interface (no global state, no display).

A history is a list of rows, one per round: {"stage", "round", "step", "metrics", "bytes_up",
"bytes_down", "seconds"}, where `step` counts rounds over all stages and `metrics` holds
`val/<domain>/<metric>` and `train/<node>/<name>`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from crossfed.platform.console import size
from crossfed.platform.evaluation.protocols import told_protocol
from crossfed.platform.method import SERVER, Array
from crossfed.platform.report.tables import pretty

History = Sequence[Mapping[str, Any]]

# Okabe and Ito's palette: told apart with any colour vision; markers tell apart in print.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "os^Dv<>PX*"
GREY = "#666666"
TYPE = 11
"""Points of what is written in a figure; a page shows the widest ones at half their size."""


@dataclass(frozen=True, slots=True)
class About:
    """What a figure is about; printed under its title.

    Args:
        method: the method's name, with its preset and the control it ran under.
        data: name of the data; must say so where it is synthetic.
        protocol: split and candidates.
        seed: the run's seed, or several.
    """

    method: str
    data: str
    protocol: str
    seed: str

    @classmethod
    def of(cls, result: Mapping[str, Any]) -> About:
        """From a run's `result.json`."""
        control = result.get("control", "none")
        told = [
            part
            for part in (result.get("preset"), "" if control == "none" else f"control {control}")
            if part
        ]
        synthetic = "synthetic " if result["data"]["synthetic"] else ""
        name = result["data"]["name"]
        return cls(
            result["method"] + (f" ({', '.join(told)})" if told else ""),
            name if name.startswith("synthetic") else f"{synthetic}{name}",
            told_protocol(result),
            str(result["seed"]),
        )

    def line(self) -> str:
        return f"{self.method} · {self.data} · {self.protocol} · seed {self.seed}"


def run_figures(history: History, result: Mapping[str, Any]) -> dict[str, Figure]:
    """All figures that a run's history has something to show in, by file name."""
    about = About.of(result)
    steps = {(row["stage"], row["round"]): row["step"] for row in history}
    selected = {}
    for domain, told in result["domains"].items():
        chosen = told.get("selected") or {}
        if (step := steps.get((chosen.get("stage"), chosen.get("round")))) is not None:
            selected[domain] = step
    found = {
        "validation": validation_curves(history, about, selected),
        "losses": loss_curves(history, about),
        "diagnostics": diagnostics(history, about),
        "codebook": codebook_use(told, about) if (told := result.get("tokeniser")) else None,
        "bytes": bytes_per_round(history, about),
    }
    return {name: figure for name, figure in found.items() if figure is not None}


def save(figure: Figure, path: Path) -> Path:
    """Write a figure as PNG; the folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def validation_curves(
    history: History,
    about: About,
    selected: Mapping[str, int],
    metrics: Sequence[str] | None = None,
) -> Figure | None:
    """Validation metrics against rounds, one panel per metric and one line per domain, the selected
    round marked.

    Args:
        selected: domain -> the step whose state the run selected; a domain without one has no mark.
        metrics: e.g. ("recall_at_20",). By default the metric that selects and, beside it, an NDCG
            at the same cut-off.

    Returns:
        The figure, or None when nothing was evaluated.
    """
    recorded = _series(history, "val")
    metrics = tuple(metrics) if metrics is not None else _main_metrics(recorded)
    shown = {
        m: {d: s for (d, name), s in recorded.items() if name == m and d != "mean"} for m in metrics
    }
    shown = {m: lines for m, lines in shown.items() if lines}
    if not shown:
        return None
    figure, axes = _grid(len(shown), "Validation", about)
    style = styles(d for lines in shown.values() for d in lines)
    for axis, (metric, lines) in zip(axes, shown.items(), strict=True):
        for domain, (steps, values) in lines.items():
            colour, marker = style[domain]
            _line(axis, steps, values, colour, marker)
            for place in np.flatnonzero(steps == selected.get(domain)):
                axis.plot(
                    steps[place],
                    values[place],
                    "*",
                    color=colour,
                    ms=15,
                    mec="white",
                    mew=1.2,
                    zorder=5,
                )
        _stages(axis, history)
        axis.set_ylabel(pretty(metric))
    first = next(iter(shown))
    labels = {}
    for domain in style:
        steps, values = shown[first].get(domain, (np.array([]), np.array([])))
        value = values[steps == selected.get(domain)]
        labels[domain] = f"{domain}  ({pretty(first)} {value[0]:.4f})" if len(value) else domain
    star = Line2D([], [], ls="", marker="*", color=GREY, ms=12, label="selected round")
    _legend(figure, style, labels, [star] if selected else [])
    return figure


def loss_curves(history: History, about: About) -> Figure | None:
    """The losses that the steps reported against rounds: one panel per name, one line per node.

    Returns:
        The figure, or None when the steps reported none.
    """
    recorded = _series(history, "train")
    names = sorted(
        {name for _, name in recorded if "loss" in name}, key=lambda name: (name != "loss", name)
    )
    return _reported(history, recorded, names[:9], "Training", about)


def diagnostics(history: History, about: About) -> Figure | None:
    """What else the steps reported (gates, use of experts …) against rounds, as `loss_curves`.

    Values of pairs of domains, `weight_…` and `cosine_…`, are left to heat maps.

    Returns:
        The figure, or None when there is nothing.
    """
    recorded = _series(history, "train")
    apart = ("weight_", "cosine_", "seconds")
    names = sorted(
        {name for _, name in recorded if "loss" not in name and not name.startswith(apart)}
    )
    return _reported(history, recorded, names[:9], "Diagnostics", about)


def _reported(
    history: History,
    recorded: Mapping[tuple[str, str], tuple[Array, Array]],
    names: Sequence[str],
    title: str,
    about: About,
) -> Figure | None:
    if not names:
        return None
    figure, axes = _grid(len(names), title, about)
    style = styles(node for node, name in recorded if name in names)
    for axis, name in zip(axes, names, strict=True):
        lines = {node: s for (node, n), s in recorded.items() if n == name}
        for node, (steps, values) in lines.items():
            _line(axis, steps, values, *style[node])
        positive = np.concatenate([v[np.isfinite(v)] for _, v in lines.values()])
        if len(positive) and positive.min() > 0 and positive.max() > 30 * positive.min():
            axis.set_yscale("log")
        _stages(axis, history)
        axis.set_ylabel(name.replace("_", " "))
    _legend(figure, style, {n: n for n in style})
    return figure


def codebook_use(tokeniser: Mapping[str, Any], about: About) -> Figure:
    """How semantic IDs use their codebooks: perplexity and dead codes per level, and colliding
    items per domain.

    Args:
        tokeniser: a run's `result["tokeniser"]`.
    """
    figure, axes = panels(3, "Semantic IDs", about.line(), 3.6)
    levels = np.arange(1, tokeniser["levels"] + 1)
    for axis, key, label in (
        (axes[0], "perplexity", "perplexity"),
        (axes[1], "dead_codes", "codes without an item"),
    ):
        axis.bar(levels, tokeniser[key], color=COLOURS[0], width=0.6)
        axis.set_xticks(levels)
        axis.set_xlabel("level")
        axis.set_ylabel(f"{label}, of {tokeniser['codebook']} codes")
        axis.set_ylim(0, tokeniser["codebook"])
    rates = tokeniser["collision_rate"]
    axes[2].bar(
        range(len(rates)), [100 * rate for rate in rates.values()], color=COLOURS[1], width=0.6
    )
    axes[2].set_xticks(
        range(len(rates)), list(rates), rotation=20 if sum(map(len, rates)) > 30 else 0
    )
    axes[2].set_ylabel("items that share an ID, %")
    return figure


def bytes_per_round(history: History, about: About) -> Figure | None:
    """Bytes sent up to the server or to other domains, and received, in every round of the stages
    that send anything.

    Returns:
        The figure, or None when nothing was ever sent.
    """
    sending = {row["stage"] for row in history if row["bytes_up"] or row["bytes_down"]}
    silent = [
        stage for stage in dict.fromkeys(row["stage"] for row in history) if stage not in sending
    ]
    history = [row for row in history if row["stage"] in sending]
    steps = np.array([row["step"] for row in history], float)
    counts = {
        side: np.array([row[f"bytes_{side}"] for row in history], float) for side in ("up", "down")
    }
    if not sending:
        return None
    figure, [axis] = _grid(1, "Bytes per round", about)
    for offset, (side, colour) in zip(
        (-0.2, 0.2), (("up", COLOURS[0]), ("down", COLOURS[4])), strict=True
    ):
        label = f"{side}  (total {size(counts[side].sum())})"
        if len(steps) <= 60:
            axis.bar(steps + offset, counts[side], width=0.4, color=colour, label=label)
        else:
            axis.step(steps, counts[side], where="mid", color=colour, label=label)
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: size(value)))
    axis.set_ylim(bottom=0)
    axis.set_ylabel("bytes, all domains together")
    _stages(axis, history)
    if silent:
        axis.set_xlabel(f"round, over all stages (nothing is sent in {', '.join(silent)})")
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return figure


def prototypes(vectors: Mapping[str, Array], kind: str, about: About) -> Figure:
    """Cosine heat map and principal components of each domain's prototypes (as in P2P-IAGR, Figure
    6).

    Args:
        vectors: domain -> float [K, d]. kind: what they are, e.g. "user prototypes".
    """
    from sklearn.decomposition import PCA

    figure, axes = panels(
        2 * len(vectors), kind.capitalize(), about.line(), columns=max(2, len(vectors))
    )
    if len(vectors) == 1:
        maps, scatters = axes[:1], axes[1:]
    else:
        maps, scatters = axes[: len(vectors)], axes[len(vectors) :]
    shown = None
    for (name, table), heat, plane in zip(vectors.items(), maps, scatters, strict=True):
        cosine = cosines(table)
        shown = heat.imshow(cosine, vmin=-1, vmax=1, cmap="RdBu_r")
        heat.grid(visible=False)
        heat.set_xlabel("prototype")
        heat.set_ylabel("prototype")
        others = np.abs(cosine[~np.eye(len(cosine), dtype=bool)])
        told = (
            f": mean |cos| {others.mean():.2f}, largest {others.max():.2f}"
            if len(cosine) > 1
            else ""
        )
        heat.set_title(f"{name}{told}", fontsize=10)
        components = min(2, *table.shape)
        places = PCA(components).fit_transform(table) if len(table) > 1 else np.zeros((1, 2))
        x, y = places[:, 0], places[:, 1] if places.shape[1] > 1 else np.zeros(len(places))
        plane.scatter(x, y, marker="*", s=90, color=COLOURS[1], edgecolors="white", linewidths=0.5)
        for index, place in enumerate(zip(x, y, strict=True)):
            plane.annotate(
                str(index), place, xytext=(4, 4), textcoords="offset points", fontsize=7, color=GREY
            )
        plane.xaxis.set_major_locator(MaxNLocator(nbins=5))
        plane.set_xlabel("first principal component")
        plane.set_ylabel("second principal component")
    if shown is not None:
        figure.colorbar(shown, ax=maps, label="cosine", shrink=0.8)
    return figure


def cosines(table: Array) -> Array:
    """Cosine similarities [K, K] of the rows of [K, d]; a row of zeros has none with any."""
    table = np.asarray(table, np.float64)
    unit = table / np.maximum(np.linalg.norm(table, axis=1, keepdims=True), 1e-12)
    return np.asarray(unit @ unit.T)


def model_figures(
    folder: Path, domains: Sequence[str], result: Mapping[str, Any]
) -> dict[str, Figure]:
    """Figures of what a run exported: one for every tensor whose name ends in `_prototypes`, by
    file name.

    Args:
        folder: holds `<domain>.safetensors`.
    """
    from safetensors.numpy import load_file

    found: dict[str, dict[str, Array]] = {}
    for name in domains:
        for key, value in load_file(folder / f"{name}.safetensors").items():
            if key.endswith("_prototypes") and value.ndim == 2:
                found.setdefault(key, {})[name] = value
    return {
        key: prototypes(vectors, key.replace("_", " "), About.of(result))
        for key, vectors in found.items()
    }


def _series(history: History, kind: str) -> dict[tuple[str, str], tuple[Array, Array]]:
    """(node, name) -> steps and values, for all metrics `kind/<node>/<name>`; NaN between stages,
    which breaks the line.
    """
    found: dict[tuple[str, str], tuple[list[float], list[float]]] = {}
    stage = None
    for row in history:
        if stage is not None and row["stage"] != stage:
            for steps, values in found.values():
                steps.append(row["step"] - 0.5)
                values.append(math.nan)
        stage = row["stage"]
        for key, value in row["metrics"].items():
            head, _, rest = key.partition("/")
            node, _, name = rest.rpartition("/")
            if head == kind and node:
                steps, values = found.setdefault((node, name), ([], []))
                steps.append(row["step"])
                values.append(value)
    return {
        key: (np.array(steps), np.array(values, float)) for key, (steps, values) in found.items()
    }


def _main_metrics(recorded: Mapping[tuple[str, str], Any]) -> tuple[str, ...]:
    """The metric that selects (the only one with a mean over domains) and the NDCG at its
    cut-off.
    """
    names = list(dict.fromkeys(name for _, name in recorded))
    chosen = [name for node, name in recorded if node == "mean"][:1] or names[:1]
    chosen += [
        n
        for n in names
        if chosen and n == f"ndcg_at_{chosen[0].rpartition('_at_')[2]}" and n not in chosen
    ]
    return tuple(chosen)


def panels(
    count: int,
    title: str,
    about: str,
    height: float = 4.2,
    columns: int | None = None,
    each: float = 2.8,
) -> tuple[Figure, list[Axes]]:
    """A figure in the product's style: panels in rows, a title, and a line that says what it is
    about.

    Args:
        count: number of panels.
        about: the line under the title. A line break in it takes room of its own.
        height: of a single row, in inches.
        columns: panels in a row; up to three by default.
        each: height of a row where there are several, in inches.
    """
    columns = columns or {4: 2}.get(count, min(count, 3))
    rows = math.ceil(count / columns)
    width = {1: 8.0, 2: 11.0}.get(columns, 14.0)
    head = 0.7 + 0.17 * about.count("\n")
    tall = 0.6 + head + (height if rows == 1 else each * rows)
    figure = Figure(figsize=(width, tall), dpi=110, layout="constrained")
    figure.text(0.1 / width, 1 - 0.12 / tall, title, fontsize=15, fontweight="bold", va="top")
    figure.text(0.1 / width, 1 - 0.44 / tall, about, fontsize=9.5, color=GREY, va="top")
    engine = figure.get_layout_engine()
    assert engine is not None
    engine.set(rect=(0, 0, 1, 1 - head / tall), w_pad=0.1, h_pad=0.08)  # type: ignore[call-arg]
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for spare in axes[count:]:
        spare.remove()
    for axis in axes[:count]:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#dddddd", lw=0.8)
        axis.set_axisbelow(True)
        axis.tick_params(labelsize=TYPE)
        axis.xaxis.label.set_size(TYPE + 1)
        axis.yaxis.label.set_size(TYPE + 1)
    return figure, axes[:count]


def _grid(count: int, title: str, about: About, height: float = 4.2) -> tuple[Figure, list[Axes]]:
    """Panels over the rounds of a run."""
    figure, axes = panels(count, title, about.line(), height)
    for axis in axes:
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.set_xlabel("round, over all stages")
    return figure, axes


def _line(axis: Axes, steps: Array, values: Array, colour: str, marker: str) -> None:
    axis.plot(
        steps,
        values,
        color=colour,
        lw=1.8,
        marker=marker,
        ms=4.5,
        markevery=max(1, len(steps) // 12),
    )


def _stages(axis: Axes, history: History) -> None:
    """The whole run's range of rounds, a line where one stage ends and the next begins, and the
    stages' names on top.
    """
    first, last = history[0]["step"], history[-1]["step"]
    margin = 0.5 + 0.01 * (last - first)
    axis.set_xlim(first - margin, last + margin)
    stages = list(dict.fromkeys(row["stage"] for row in history))
    if len(stages) < 2:
        return
    for position, stage in enumerate(stages):
        steps = [row["step"] for row in history if row["stage"] == stage]
        if position:
            axis.axvline(min(steps) - 0.5, color=GREY, lw=1, ls=(0, (4, 3)), zorder=1)
        axis.text(
            (min(steps) + max(steps)) / 2,
            1.01,
            stage,
            transform=axis.get_xaxis_transform(),
            ha="center",
            va="bottom",
            fontsize=9,
            color=GREY,
        )


def styles(names: Any) -> dict[str, tuple[str, str]]:
    """Name -> colour and marker, by order of appearance; the server last, so that domains look the
    same everywhere.
    """
    unique = sorted(dict.fromkeys(names), key=lambda name: name == SERVER)
    return {n: (COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]) for i, n in enumerate(unique)}


def hatch(place: int) -> str:
    """What tells bars apart whose colours have come round again."""
    return ("", "///", "...")[place // len(COLOURS) % 3]


def no_closer(axis: Axes, share: float = 0.02) -> None:
    """Let an axis of values show at least that share of what stands in its middle, so that nothing
    looks like much.
    """
    low, high = axis.get_ylim()
    middle, half = (low + high) / 2, share * abs(low + high) / 4
    if high - low < 2 * half:
        axis.set_ylim(middle - half, middle + half)


def _legend(
    figure: Figure,
    style: Mapping[str, tuple[str, str]],
    labels: Mapping[str, str],
    more: Sequence[Line2D] = (),
) -> None:
    handles = [
        Line2D([], [], color=c, marker=m, ms=5, lw=1.8, label=labels[n])
        for n, (c, m) in style.items()
    ]
    below(figure, [*handles, *more])


def below(figure: Figure, handles: Sequence[Artist]) -> None:
    """A legend under the panels, in as many columns as its texts leave room for."""
    longest = max((len(str(handle.get_label())) for handle in handles), default=1)
    room = figure.get_figwidth() * 12  # characters of its font
    columns = max(1, min(len(handles), int(room / (longest + 6)), 4))
    figure.legend(
        handles=list(handles),
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        fontsize=TYPE,
    )
