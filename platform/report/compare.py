"""Finished runs side by side: one table over seeds, paired tests against one of them, cohorts by activity."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from crossfed.platform.evaluation.cohorts import Cohort, by_activity
from crossfed.platform.evaluation.metrics import metric_name
from crossfed.platform.evaluation.significance import Comparison, compare, holm
from crossfed.platform.seam import CrossfedError


@dataclass(frozen=True, slots=True)
class Finished:
    """A finished run: where it is, what `result.json` holds, and the name of its row in a table."""

    path: Path
    result: dict[str, Any]
    label: str


@dataclass(frozen=True, slots=True)
class Paired:
    """One row of the paired tests: `label` less `against`, in one domain; p-values adjusted by Holm over all rows."""

    label: str
    domain: str
    relative: float
    comparison: Comparison
    adjusted_p: float


def load_runs(paths: Sequence[Path]) -> list[Finished]:
    """Read finished runs and name them: by method, and by whatever settings differ among runs of one method.

    Raises:
        CrossfedError: a directory holds no result.
    """
    results = []
    for path in paths:
        file = path / "result.json"
        if not file.is_file():
            raise CrossfedError(f"{path} holds no result.json: it is no run, or one that has not finished.")
        results.append(json.loads(file.read_text(encoding="utf-8")))
    return [Finished(path, result, _label(result, results)) for path, result in zip(paths, results, strict=True)]


def _label(result: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> str:
    """The method, and the settings in which the runs of this method differ."""
    same = [other["config"] for other in results if other["method"] == result["method"]]
    differing = [key for key in result["config"] if any(config.get(key) != result["config"][key] for config in same)]
    told = ", ".join(f"{key}={result['config'][key]}" for key in differing)
    return f"{result['method']} ({told})" if told else str(result["method"])


def per_user(runs: Sequence[Finished], domain: str) -> pd.DataFrame:
    """Per-user test values of one row's runs, averaged over their seeds; index: user row number.

    Raises:
        CrossfedError: a run has no per-user values of this domain.
    """
    tables = []
    for run in runs:
        file = run.path / "per_user" / f"{domain}.test.parquet"
        if not file.is_file():
            raise CrossfedError(f"{run.path} holds no per-user test values of domain {domain!r}.")
        tables.append(pd.read_parquet(file).set_index("user"))
    return pd.concat(tables).groupby(level="user").mean()


def grouped(runs: Sequence[Finished]) -> dict[str, list[Finished]]:
    """Runs by label, in the order given."""
    groups: dict[str, list[Finished]] = {}
    for run in runs:
        groups.setdefault(run.label, []).append(run)
    return groups


def paired(runs: Sequence[Finished], metric: str, against: str | None = None) -> list[Paired]:
    """Paired tests of every row against one of them, per domain, user by user (values averaged over seeds first).

    Args:
        runs: as from `load_runs`.
        metric: any spelling `metric_name` accepts.
        against: a label; the first row's by default.

    Raises:
        CrossfedError: there is no such row, or the rows were not measured on the same users.
    """
    groups, name = grouped(runs), metric_name(metric)
    base = against if against is not None else next(iter(groups))
    if base not in groups:
        raise CrossfedError(f"There is no row {base!r} to compare with; there are {', '.join(groups)}.")
    found: list[tuple[str, str, float, Comparison]] = []
    for domain in runs[0].result["domains"]:
        reference = per_user(groups[base], domain)
        for label, members in groups.items():
            if label == base:
                continue
            values = per_user(members, domain)
            other = compare(
                values.index.to_numpy(), values[name].to_numpy(), reference.index.to_numpy(), reference[name].to_numpy()
            )
            mean = float(reference[name].mean())
            found.append((label, domain, other.difference / mean if mean else float("nan"), other))
    adjusted = holm({f"{label}\x1f{domain}": row.wilcoxon_p for label, domain, _, row in found})
    return [Paired(label, domain, share, row, adjusted[f"{label}\x1f{domain}"]) for label, domain, share, row in found]


def cohorts(runs: Sequence[Finished], metric: str) -> dict[tuple[str, str], list[Cohort]]:
    """(label, domain) -> the metric for cold, warm and active users, by their training interactions."""
    name, found = metric_name(metric), {}
    for domain in runs[0].result["domains"]:
        for label, members in grouped(runs).items():
            table = per_user(members, domain)
            activity = np.rint(table["n_train"].to_numpy()).astype(np.int64)
            found[label, domain] = by_activity({name: table[name].to_numpy()}, activity)
    return found
