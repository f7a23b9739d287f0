"""The metrics that MLflow shows of a run or a study: chosen, named and read here, and nowhere else.

MLflow draws a chart for every name and sorts its groups (what stands before the last `/`) by the
alphabet, names without a group towards the end. So what a run is judged by is the group `all`, the
same by domain follows, and losses come last:

    all/best_M, …/test_M, …/val_M      means over domains, M being the selecting metric and one companion
    domain/DOMAIN/test_M, …/val_M      the same of one domain
    privacy/epsilon_COUNTING           the most that any sender has spent
    time/…, traffic/…                  seconds of a round, bytes that domains sent and received in it
    train/NODE/loss…                   what a method minimises

`all/best_M` is the validation mean of the state that is selected: in a round, of the one that would
be selected if the stage ended there, so it starts anew with every stage (`all/stage` counts them).
All else is in `history.jsonl` and `result.json`.
"""  # noqa: E501

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

STAGE = "all/stage"
_COMPANIONS = ("ndcg", "recall", "hit_rate", "mrr")


@dataclass(frozen=True, slots=True)
class Name:
    """One name, read.

    Attributes:
        split: "val", "test" or "best".
        metric: such as "recall_at_20".
        domain: None for the mean over domains.
    """

    split: str
    metric: str
    domain: str | None = None

    def __str__(self) -> str:
        last = f"{self.split}_{self.metric}"
        return f"all/{last}" if self.domain is None else f"domain/{self.domain}/{last}"


def parse(name: str) -> Name | None:
    """What a name says; None for one that is not a quality metric. Reads those of earlier versions,
    too.
    """
    parts = name.split("/")
    # final/validation/DOMAIN/METRIC, final/test/DOMAIN/METRIC
    if len(parts) > 3 and parts[:1] == ["final"]:
        split = {"validation": "best", "test": "test"}.get(parts[1])
        return None if split is None else Name(split, parts[-1], "/".join(parts[2:-1]))
    if len(parts) > 2 and parts[0] == "val":  # val/DOMAIN/METRIC, val/mean/METRIC
        domain = "/".join(parts[1:-1])
        return Name("val", parts[-1], None if domain == "mean" else domain)
    split, _, metric = parts[-1].partition("_")
    if split not in ("best", "test", "val") or "_at_" not in metric:
        return None
    if len(parts) == 2 and parts[0] == "all":
        return Name(split, metric)
    return (
        Name(split, metric, "/".join(parts[1:-1]))
        if len(parts) > 2 and parts[0] == "domain"
        else None
    )


def shown(select: str, measured: Iterable[str]) -> list[str]:
    """The selecting metric, and the first of nDCG, recall, hit rate and reciprocal rank beside it
    at the same cut-off.
    """
    kind, _, cut = select.rpartition("_at_")
    others = (f"{other}_at_{cut}" for other in _COMPANIONS if other != kind)
    return [select, *[other for other in others if other in set(measured)][:1]]


def of_round(
    row: Mapping[str, Any], select: str, stage: int, domains: Iterable[str], selects: bool = True
) -> dict[str, float]:
    """What MLflow is told of a round.

    Args:
        row: the round as `history.jsonl` holds it. select: the selecting metric. stage: its number,
            from 1.
        domains: of the run. selects: whether the stage keeps its best round; else the last one
            counts.
    """
    metrics, names = row["metrics"], list(domains)
    told: dict[str, float] = {}
    read = {key: name for key in metrics if (name := parse(key)) is not None}
    for metric in shown(select, {name.metric for name in read.values()}):
        values = {name.domain: metrics[key] for key, name in read.items() if name.metric == metric}
        mean = values.pop(None, None)
        if mean is None and all(domain in values for domain in names):
            mean = statistics.fmean(values[domain] for domain in names)
        if mean is not None:
            told[str(Name("val", metric))] = mean
        told |= {str(Name("val", metric, domain)): value for domain, value in values.items()}
    best = row["best"] if selects else told.get(str(Name("val", select)))
    if best is not None:
        told = {
            str(Name("best", select)): best
        } | told  # MLflow's list of a run's metrics is in the order of their coming
    told[STAGE] = float(stage)
    for key, value in metrics.items():
        group, _, rest = key.partition("/")
        if group == "train" and rest.rpartition("/")[2].startswith("loss"):
            told[key] = value
        elif group == "privacy" and rest.startswith("max/"):
            told[f"privacy/{rest.removeprefix('max/')}"] = value
    traffic = {"traffic/bytes_up": row["bytes_up"], "traffic/bytes_down": row["bytes_down"]}
    return told | traffic | {"time/seconds_per_round": row["seconds"]}


def of_result(result: Mapping[str, Any], select: str) -> dict[str, float]:
    """What MLflow is told at the end of a run: the test split, once, and what the run spent of its
    privacy budget.
    """
    rows = result["domains"]
    told: dict[str, float] = {}
    measured = {name: row["test"] for name, row in rows.items() if row.get("test")}
    for metric in shown(select, next(iter(measured.values()), {})):
        values = {name: row[metric] for name, row in measured.items() if metric in row}
        if len(values) == len(rows):
            told[str(Name("test", metric))] = statistics.fmean(values.values())
        told |= {str(Name("test", metric, name)): value for name, value in values.items()}
    for row in result["privacy"]["domains"].values():
        for key, value in row.items():
            if key.startswith("epsilon_") and value is not None:
                told[f"privacy/{key}"] = max(value, told.get(f"privacy/{key}", value))
    return told


def of_study(summary: Mapping[str, Any]) -> dict[str, float]:
    """What MLflow is told of a study: means over the winner's final runs; without those, what
    selected the winner.
    """
    metric, told = summary["metric"], dict[str, float]()
    if summary["finals"]:
        selected = statistics.fmean(row["validation"]["mean"] for row in summary["finals"].values())
        told[str(Name("best", metric))] = selected
    elif summary["objectives"][0] == "mean":
        told[str(Name("best", metric))] = float(summary["winner"]["values"][0])
    tests = {name: row["test"]["mean"] for name, row in summary["finals"].items() if "test" in row}
    if tests:
        told[str(Name("test", metric))] = statistics.fmean(tests.values())
    return told | {str(Name("test", metric, name)): value for name, value in tests.items()}


def columns(names: Iterable[str]) -> list[str]:
    """The metrics that matter in a table of runs, best first: tests, then what was selected, then
    tests by domain.
    """
    read = {
        name: found for name in names if (found := parse(name)) is not None and found.split != "val"
    }
    order = {"test": 0, "best": 1}
    general = sorted(
        (name for name in read if read[name].domain is None),
        key=lambda name: (order[read[name].split], name),
    )
    if general:
        metric = next(
            (read[name].metric for name in general if read[name].split == "best"),
            read[general[0]].metric,
        )
        general.sort(key=lambda name: read[name].metric != metric)
        apart = [
            name
            for name, found in read.items()
            if found.domain is not None and found.metric == metric
        ]
    else:  # runs of an earlier version
        apart = [name for name, found in read.items() if found.split == "test"]
    return [*general, *sorted(apart)[:6]]
