"""What finished runs did round by round: quality against bytes sent, time, and the weights a server
averaged with.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from crossfed.platform.console import size, span
from crossfed.platform.errors import CrossfedError
from crossfed.platform.federation.privacy import read_lines
from crossfed.platform.method import SERVER
from crossfed.platform.report.analyses import Analysis, about
from crossfed.platform.report.effects import grouped
from crossfed.platform.report.figures import COLOURS, GREY, below, panels, styles
from crossfed.platform.report.finished import Finished, check_comparable
from crossfed.platform.report.tables import ABSENT, Column, Grid, pretty, spread
from crossfed.platform.yaml_text import load_yaml


def history(run: Finished) -> list[dict[str, Any]]:
    """A run's rounds, in order.

    Raises:
        CrossfedError: there is no record of them.
    """
    rows = read_lines(run.path / "history.jsonl")
    if not rows:
        raise CrossfedError(f"{run.origin} holds no record of its rounds (history.jsonl).")
    return rows


# -- quality against bytes -------------------------------------------------------------------------


def _course(run: Finished, metric: str) -> tuple[list[int], list[float]]:
    """Bytes that all domains had sent, and the validation mean over domains of the state that would
    be selected then.

    At every round that evaluated. What is selected begins anew with a stage, as in the run; the
    last value is of the state that was selected.
    """
    domains = run.result["domains"]
    keeps = all("value" in (row.get("selected") or {}) for row in domains.values())
    course: tuple[list[int], list[float]] = ([], [])
    sent, stage = 0, None
    before: tuple[Any, dict[str, Any]] = (None, {})
    held: dict[str, float] = {}
    rows = history(run)
    crossing = {row["stage"] for row in rows if row["bytes_up"] or row["bytes_down"]}
    for row in rows:
        sent += row["bytes_up"]
        if row["stage"] != stage:
            stage, before, held = row["stage"], (None, {}), {}
        now = {name: row["metrics"].get(f"val/{name}/{metric}") for name in domains}
        if all(value is None for value in now.values()):
            continue
        chosen = _chosen(row, before, row["stage"] not in crossing) if keeps else list(domains)
        held |= {name: value for name in chosen if (value := now[name]) is not None}
        before = (row["best"], row["domains"])
        if len(held) == len(domains):
            course[0].append(sent)
            course[1].append(statistics.fmean(held.values()))
    if not course[0]:
        raise CrossfedError(f"{run.origin} evaluated no validation {metric} in its rounds.")
    return course


def _chosen(
    row: Mapping[str, Any], before: tuple[float | None, Mapping[str, float]], local: bool
) -> list[str]:
    """The domains whose state after this round is the best of its stage so far, by the selecting
    metric.

    Args:
        before: at the evaluated round before, the mean of best values, and each domain's value at
            its best round.
        local: whether each domain selects for itself, as in a stage in which nothing crosses; a tie
            keeps the earlier round.
    """
    best, values = before
    if local:
        return [name for name, value in row["domains"].items() if value != values.get(name)]
    return list(row["domains"]) if row["best"] != best else []


def upload(runs: Sequence[Finished], metric: str, target: float | None = None) -> Analysis:
    """The validation metric of what would be selected against all bytes uploaded so far (as in
    FedCGR, Figure 5), and the bytes to a target.

    Args:
        metric: its mean over domains is shown; a line per seed, beginning anew with every stage.
        target: of the metric; by default 99 % of the best value of the run that comes to the least,
            so that all reach it.

    Raises:
        CrossfedError: the runs do not compare, or one has no record of its rounds.
    """
    check_comparable(runs, "validation")
    courses = {
        label: [_course(run, metric) for run in members] for label, members in grouped(runs).items()
    }
    if target is None:
        target = 0.99 * min(values[-1] for row in courses.values() for _, values in row)
    told = about(runs, "validation, mean of domains")
    figure, [axis] = panels(1, f"{pretty(metric)} against bytes uploaded", told)
    style, records, rows = styles(courses), [], []
    for label, row in courses.items():
        colour, marker = style[label]
        reached = []
        for (sent, values), run in zip(row, grouped(runs)[label], strict=True):
            # a later stage may begin lower
            below_ = [i for i, value in enumerate(values) if value < target]
            place = (below_[-1] + 1 if below_ else 0) if values[-1] >= target else None
            reached.append(math.nan if place is None else float(sent[place]))
            records += [
                {
                    "method": label,
                    "seed": run.result["seed"],
                    "evaluation": i + 1,
                    "bytes_up": b,
                    "metric": metric,
                    "best": v,
                }
                for i, (b, v) in enumerate(zip(sent, values, strict=True))
            ]
            if sent[-1]:
                every = max(1, len(sent) // 10)
                axis.plot(
                    sent,
                    values,
                    color=colour,
                    lw=1.5,
                    marker=marker,
                    ms=4,
                    markevery=every,
                    drawstyle="steps-post",
                )
                if place is not None:
                    axis.plot(
                        sent[place],
                        values[place],
                        "*",
                        color=colour,
                        ms=14,
                        mec="white",
                        mew=1,
                        zorder=5,
                    )
            else:
                axis.axhline(values[-1], color=colour, lw=1.4, ls="--")
        best = [values[-1] for _, values in row]
        known = [value for value in reached if not math.isnan(value)]
        to_target = (
            size(statistics.fmean(known))
            if len(known) == len(row)
            else f"{len(known)} of {len(row)} seeds get there"
        )
        deviation = statistics.stdev(best) if len(best) > 1 else None
        sent_in_all = size(statistics.fmean(sent[-1] for sent, _ in row))
        rows.append(
            (
                label,
                str(len(row)),
                spread(statistics.fmean(best), deviation),
                sent_in_all,
                to_target,
            )
        )
    axis.axhline(target, color=GREY, lw=1, ls=":")
    axis.set_ylabel(f"validation {pretty(metric)}, what would be selected")
    axis.set_xlabel("uploaded so far, all domains together")
    _bytes_axis(axis, [record["bytes_up"] for record in records])
    sends = {label: any(sent[-1] for sent, _ in row) for label, row in courses.items()}
    below(
        figure,
        [
            *(
                Line2D(
                    [],
                    [],
                    color=c,
                    marker=m if sends[n] else "",
                    ms=5,
                    ls="-" if sends[n] else "--",
                    label=n if sends[n] else f"{n} (sends nothing)",
                )
                for n, (c, m) in style.items()
            ),
            Line2D([], [], color=GREY, lw=1, ls=":", label=f"target {target:.4f}"),
            Line2D([], [], ls="", marker="*", color=GREY, ms=11, label="target reached"),
        ],
    )
    return Analysis(
        f"upload-{metric}",
        figure,
        Grid(
            title=f"{pretty(metric)} against bytes uploaded",
            columns=(
                Column("method", right=False),
                Column("seeds"),
                Column(f"best {pretty(metric)}"),
                Column("uploaded in all"),
                Column(f"bytes to {target:.4f}"),
            ),
            rows=tuple(rows),
            caption=f"Bytes of arrays sent by all domains together, to the server or to each "
            f"other; mean over seeds. {told}.",
            records=tuple(records),
        ),
    )


def _bytes_axis(axis: Axes, counts: Sequence[int]) -> None:
    """Bytes in proportion, or by their logarithm where rows differ by orders of magnitude."""
    sent = [count for count in counts if count]
    if sent and max(sent) > 200 * min(sent):
        axis.set_xscale("log")
    else:
        axis.set_xlim(left=0)
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: size(value)))


# -- time ------------------------------------------------------------------------------------------


def time(runs: Sequence[Finished]) -> Analysis:
    """What a method costs, by stage: seconds of a round and of a local epoch, bytes; and the most
    memory of a domain.

    Seconds are medians over rounds and seeds, with quartiles; bytes are what all domains together
    send and receive in a round, means (what opens a stage counts in its first round). A round of a
    stage that exchanges something holds as many epochs as the method's `local_epochs`, one where it
    has none; a round of a stage without exchange is one epoch.

    Raises:
        CrossfedError: a run has no record of its rounds.
    """
    rows, records, bars = [], [], []
    for label, members in grouped(runs).items():
        stages: dict[str, list[float]] = {}
        epochs: dict[str, int] = {}
        moved: dict[str, list[tuple[int, int]]] = {}
        for run in members:
            for row in history(run):
                stages.setdefault(row["stage"], []).append(row["seconds"])
                moved.setdefault(row["stage"], []).append((row["bytes_up"], row["bytes_down"]))
                several = run.result["config"].get("local_epochs", 1) if row["bytes_up"] else 1
                epochs[row["stage"]] = max(several, epochs.get(row["stage"], 1))
        total = [run.result["seconds"]["total"] for run in members]
        peak = _memory(members)
        for stage, seconds in stages.items():
            low, middle, high = np.quantile(seconds, (0.25, 0.5, 0.75)).tolist()
            rounds = len(seconds) / len(members)
            up, down = np.mean(moved[stage], axis=0).tolist()
            rows.append(
                (
                    label,
                    stage,
                    f"{rounds:.4g}",
                    span(middle),
                    f"{span(low)} to {span(high)}",
                    str(epochs[stage]),
                    span(middle / epochs[stage]),
                    size(up),
                    size(down),
                    ABSENT if peak is None else size(peak),
                    span(statistics.fmean(total)),
                )
            )
            records.append(
                {
                    "method": label,
                    "stage": stage,
                    "rounds": rounds,
                    "seconds_per_round": middle,
                    "lower_quartile": low,
                    "upper_quartile": high,
                    "epochs_per_round": epochs[stage],
                    "seconds_per_epoch": middle / epochs[stage],
                    "seconds_total": statistics.fmean(total),
                    "bytes_up_per_round": up,
                    "bytes_down_per_round": down,
                    "peak_memory": peak,
                    "threads": _threads(members[0]),
                    "devices": " ".join(
                        sorted(
                            {p["device"] for p in members[0].result.get("placement", {}).values()}
                        )
                    ),
                }
            )
            bars.append(
                (
                    f"{label}\n{stage}" if len(stages) > 1 else label,
                    low,
                    middle,
                    high,
                    epochs[stage],
                )
            )
    figure, [axis] = panels(
        1,
        "Time per round and per epoch",
        about(runs, _machine(runs)),
        height=0.55 * len(bars) + 1.2,
    )
    # where a round is an epoch everywhere, one bar says both
    apart = any(epochs_ > 1 for *_, epochs_ in bars)
    for place, (_, low, middle, high, epochs_) in enumerate(bars):
        shift = 0.2 if apart else 0.0
        axis.barh(-place + shift, middle, 0.36 if apart else 0.6, color=COLOURS[0])
        axis.errorbar(
            middle,
            -place + shift,
            xerr=[[middle - low], [high - middle]],
            color="black",
            lw=1,
            capsize=2,
        )
        axis.text(high, -place + shift, f"  {span(middle)}", va="center", fontsize=9)
        if apart:
            axis.barh(-place - shift, middle / epochs_, 0.36, color=COLOURS[4])
            axis.text(
                middle / epochs_,
                -place - shift,
                f"  {span(middle / epochs_)}",
                va="center",
                fontsize=9,
            )
    axis.set_yticks([-i for i in range(len(bars))], [name for name, *_ in bars])
    axis.set_xlim(0, 1.15 * max(high for _, _, _, high, _ in bars))
    axis.grid(axis="x", color="#dddddd", lw=0.8)
    axis.grid(axis="y", visible=False)
    axis.set_xlabel("seconds, evaluation and messages included")
    rounds_bar = Patch(
        color=COLOURS[0],
        label="round (median, quartiles)"
        if apart
        else "round, which is a local epoch (median, quartiles)",
    )
    below(
        figure,
        [rounds_bar, Patch(color=COLOURS[4], label="local epoch")] if apart else [rounds_bar],
    )
    return Analysis(
        "time",
        figure,
        Grid(
            title="Time, bytes and memory",
            columns=(
                Column("method", right=False),
                Column("stage", right=False),
                *(
                    Column(n)
                    for n in ("rounds", "a round", "quartiles", "epochs in it", "an epoch")
                ),
                *(Column(n) for n in ("sent a round", "received", "memory", "whole run")),
            ),
            rows=tuple(rows),
            caption="Wall-clock time, median over rounds and seeds, evaluation and messages "
            "included. Sent and received: by all "
            "domains, mean over rounds. Memory: the most that a domain held, allocated on its "
            "GPU or, without one, resident, "
            f"libraries included, since the run was last started{_shared_process(runs)}. "
            f"{_machine(runs)}.",
            records=tuple(records),
        ),
    )


def _memory(runs: Sequence[Finished]) -> int | None:
    """The most memory that a domain held, in bytes: on GPUs where there were any; None where no run
    has a record of it.
    """
    nodes = [
        row for run in runs for name, row in run.result.get("memory", {}).items() if name != SERVER
    ]
    found = [row["gpu"] for row in nodes if row["gpu"] is not None] or [
        row["process"] for row in nodes
    ]
    return max(found, default=None)


def _shared_process(runs: Sequence[Finished]) -> str:
    """A remark where the memory of a domain is not its own."""
    alone = {run.result.get("backend", "inprocess") == "ray" for run in runs}
    return "" if alone == {True} else "; with the back end inprocess, of all domains together"


def _machine(runs: Sequence[Finished]) -> str:
    """What the runs ran on, in words."""
    places = [place for run in runs for place in run.result.get("placement", {}).values()]
    devices = ", ".join(sorted({place["device"] for place in places})) or "device unknown"
    hosts = len({place["host"] for place in places})
    threads = sorted({_threads(run) for run in runs})
    ends = ", ".join(sorted({run.result.get("backend", "unknown") for run in runs}))
    told = f"{', '.join(map(str, threads))} thread{'s' * (threads != [1])} a node"
    return f"{devices}, {hosts} host{'s' * (hosts != 1)}, {told}, back end {ends}"


def _threads(run: Finished) -> int:
    """torch's threads at every node."""
    stored = load_yaml((run.path / "config.yaml").read_text(encoding="utf-8"))
    return int(stored["resources"]["threads"])


# -- weights ---------------------------------------------------------------------------------------


def weights(run: Finished) -> Analysis:
    """The weights that the server averaged with: a panel per receiving domain over the rounds, and
    the last round's matrix.

    Read from the metrics `weight_<receiver>_<sender>` of the server, or `weight_<sender>` where all
    receive the same.

    Raises:
        CrossfedError: the run's server reported none.
    """
    domains = list(run.result["domains"])
    table: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for row in history(run):
        for pair in itertools.product(domains, domains):
            for key in (f"weight_{pair[0]}_{pair[1]}", f"weight_{pair[1]}"):
                if (found := row["metrics"].get(f"train/{SERVER}/{key}")) is not None:
                    table.setdefault(pair, []).append((row["step"], float(found)))
                    break
    if not table:
        raise CrossfedError(
            f"{run.origin} reports no aggregation weights: its server averages nothing."
        )
    steps = [step for step, _ in next(iter(table.values()))]
    told = about([run], "as reported by the server")
    figure, axes = panels(
        len(domains) + 1,
        f"Aggregation weights of {run.label}",
        told,
        height=0.5 * len(domains) + 2.6,
    )
    heat = None
    for axis, receiver in zip(axes, domains, strict=False):
        values = np.array([[value for _, value in table[receiver, sender]] for sender in domains])
        heat = _heat(axis, values, (steps[0] - 0.5, steps[-1] + 0.5, len(domains) - 0.5, -0.5))
        axis.set_yticks(range(len(domains)), domains)
        axis.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
        axis.set_xlabel("round, over all stages")
        axis.set_ylabel("sender")
        axis.set_title(f"received by {receiver}", fontsize=12)
    last = np.array(
        [[table[receiver, sender][-1][1] for sender in domains] for receiver in domains]
    )
    heat = _heat(axes[-1], last, (-0.5, len(domains) - 0.5, len(domains) - 0.5, -0.5))
    for (i, j), value in np.ndenumerate(last):
        axes[-1].text(
            j,
            i,
            f"{value:.2f}",
            ha="center",
            va="center",
            fontsize=9,
            color="white" if value < 0.6 else "black",
        )
    axes[-1].set_yticks(range(len(domains)), domains)
    axes[-1].set_xticks(
        range(len(domains)), domains, rotation=30 if sum(map(len, domains)) > 20 else 0
    )
    axes[-1].set_ylabel("receiver")
    axes[-1].set_xlabel("sender")
    axes[-1].set_title(f"after round {steps[-1]}", fontsize=12)
    figure.colorbar(heat, ax=axes, label="weight", shrink=0.8)
    records = [
        {"round": step, "receiver": receiver, "sender": sender, "weight": value}
        for (receiver, sender), row in table.items()
        for step, value in row
    ]
    return Analysis(
        "weights",
        figure,
        Grid(
            title="Aggregation weights",
            columns=(
                Column("receiver", right=False),
                *(Column(f"from {sender}") for sender in domains),
            ),
            rows=tuple((r, *(f"{table[r, s][-1][1]:.4f}" for s in domains)) for r in domains),
            caption=f"Weights of the last round's average, {steps[-1]}. {told}.",
            records=tuple(records),
        ),
    )


def _heat(
    axis: Axes, values: np.ndarray[Any, Any], extent: tuple[float, float, float, float]
) -> Any:
    axis.grid(visible=False)
    return axis.imshow(
        values,
        vmin=0,
        vmax=1,
        cmap="viridis",
        aspect="auto",
        extent=extent,
        interpolation="nearest",
    )
