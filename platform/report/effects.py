"""What the differences between finished runs and the best baseline are worth; `comparison` makes
tables of it.

A row's value is its mean over seeds. Every row that is no baseline is set against the best baseline
of each column, twice: user by user (paired t-test and Wilcoxon's signed-rank test on values
averaged over each row's seeds) and seed by seed (paired t-test on the domain's metric, over the
seeds that both have). Each kind of test is corrected over the whole table by Holm's method.

A dagger over users needs both tests: most users' metrics are zero under both methods, which
Wilcoxon's test drops, so that it can call a difference significant while the interval of the mean,
which the table shows, holds zero.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import pandas as pd

from crossfed.platform.errors import CrossfedError
from crossfed.platform.evaluation.significance import Comparison, compare, holm
from crossfed.platform.report.finished import Finished, Split

LEVEL = 0.05
"""Adjusted p-values below it earn a dagger."""
OVER_USERS, OVER_SEEDS = "†", "‡"


@dataclass(frozen=True, slots=True)
class Effect:
    """One row less the best baseline, in one domain and metric.

    Attributes:
        difference: of the means over all seeds. base: the baseline's mean, to which `relative`
            relates.
        users: user by user; None for metrics without a value per user. users_p: the larger of its
            t-test's and Wilcoxon's p-values, each after Holm.
        seeds: seed by seed; None with fewer than two common seeds, or where the difference is the
            same for all of them. seeds_base: the baseline's mean over the common seeds. seeds_p:
            its t-test's p-value after Holm.
    """

    label: str
    against: str
    domain: str
    metric: str
    difference: float
    base: float
    users: Comparison | None
    users_p: float | None
    seeds: Comparison | None
    seeds_base: float
    seeds_p: float | None

    @property
    def relative(self) -> float:
        """The difference as a share of the baseline's mean; NaN where that is zero."""
        return self.difference / self.base if self.base else math.nan

    @property
    def mark(self) -> str:
        """Daggers: better by the test over users, and by the one over seeds."""
        up = self.difference > 0
        by_users = self.users is not None and self.users_p is not None and self.users_p < LEVEL
        # means and ranks can disagree
        agreed = up and self.users is not None and self.users.rank_biserial > 0
        paired = (
            up and self.seeds is not None and self.seeds.difference > 0
        )  # rows may have other seeds besides the common
        by_seeds = paired and self.seeds_p is not None and self.seeds_p < LEVEL
        return (OVER_USERS if agreed and by_users else "") + (OVER_SEEDS if by_seeds else "")


def grouped(runs: Sequence[Finished]) -> dict[str, list[Finished]]:
    """Runs by row, in the order given."""
    groups: dict[str, list[Finished]] = {}
    for run in runs:
        groups.setdefault(run.label, []).append(run)
    return groups


def value(run: Finished, domain: str, split: Split, metric: str) -> float:
    """One metric of a run.

    Raises:
        CrossfedError: it was not measured.
    """
    measured = run.result["domains"][domain].get(split, {})
    if metric not in measured:
        raise CrossfedError(
            f"{run.origin} has no {split} {metric} for {domain}; it has "
            f"{', '.join(measured) or 'no metrics of that split'}."
        )
    found = float(measured[metric])
    if not math.isfinite(found):
        raise CrossfedError(
            f"The {split} {metric} of {run.origin} for {domain} is {found}: its result is "
            f"damaged; run it again."
        )
    return found


def per_user(runs: Sequence[Finished], domain: str) -> pd.DataFrame:
    """Per-user test values of one row's runs, averaged over their seeds; index: user row number.

    Raises:
        CrossfedError: a run has no per-user values of this domain, or they are of different users.
    """
    tables = [_per_user(run.path, domain) for run in runs]
    if any(not table.index.equals(tables[0].index) for table in tables[1:]):
        raise CrossfedError(
            f"The runs of {runs[0].label} were measured on different users of {domain}."
        )
    return sum(tables[1:], start=tables[0]) / len(tables)


@lru_cache(maxsize=256)
def _per_user(path: Path, domain: str) -> pd.DataFrame:
    file = path / "per_user" / f"{domain}.test.parquet"
    if not file.is_file():
        raise CrossfedError(f"{path} holds no per-user test values of domain {domain!r}.")
    return pd.read_parquet(file).set_index("user").sort_index()


def default_metrics(runs: Sequence[Finished], split: Split = "test") -> list[str]:
    """The metric that selects, and the NDCG at its cut-off, as far as all runs measured them; else
    the first they all have.
    """
    shared = [
        name
        for name in next(iter(runs[0].result["domains"].values())).get(split, {})
        if all(name in row.get(split, {}) for run in runs for row in run.result["domains"].values())
    ]
    selects = str(runs[0].settings.get("evaluation.select", ""))
    wanted = [selects, f"ndcg_at_{selects.rpartition('_at_')[2]}"]
    if wanted[0] == wanted[1]:
        wanted[1] = f"hit_rate_at_{selects.rpartition('_at_')[2]}"
    return [name for name in dict.fromkeys(wanted) if name in shared] or shared[:2]


def baselines_of(runs: Sequence[Finished], named: Sequence[str] = ()) -> list[str]:
    """The rows that others are set against.

    Args:
        named: labels, or methods, which stand for all of their rows. Without any: methods that
            exchange nothing, and where there are none, or only such, the first row; never one that
            saw pooled data, unless there are only such.

    Raises:
        CrossfedError: there is no such row.
    """
    groups = grouped(runs)
    if named:
        chosen = []
        for name in named:
            of_method = [
                label for label, members in groups.items() if members[0].result["method"] == name
            ]
            rows = [name] if name in groups else of_method
            if not rows:
                raise CrossfedError(
                    f"There is no row {name!r} to compare with; there are {', '.join(groups)}."
                )
            chosen += rows
        return list(dict.fromkeys(chosen))
    local = [
        label for label, members in groups.items() if members[0].result.get("scope") == "local"
    ]
    private = [label for label, members in groups.items() if not members[0].pooled] or list(groups)
    return local if 0 < len(local) < len(private) else private[:1]


def effects(
    groups: dict[str, list[Finished]],
    columns: Sequence[tuple[str, str]],
    values: dict[str, dict[tuple[str, str], dict[int, float]]],
    base: Sequence[str],
) -> list[Effect]:
    """Every row that is no baseline against the best baseline of each column.

    Args:
        values: label -> (domain, metric) -> seed -> value.
    """
    found: dict[tuple[str, str, str], tuple[str, Comparison | None, Comparison | None]] = {}
    for domain, metric in columns:
        best = max(base, key=lambda label: statistics.fmean(values[label][domain, metric].values()))
        for label, members in groups.items():
            if label in base or members[0].pooled:
                continue
            own, other = values[label][domain, metric], values[best][domain, metric]
            found[label, domain, metric] = (
                best,
                _over_users(members, groups[best], domain, metric),
                _over_seeds(own, other),
            )
    paired = {key: users for key, (_, users, _) in found.items() if users is not None}
    by_t, by_rank = (
        holm({key: getattr(users, p) for key, users in paired.items()})
        for p in ("t_p", "wilcoxon_p")
    )
    by_seeds = holm({key: seeds.t_p for key, (_, _, seeds) in found.items() if seeds is not None})
    told = []
    for key, (best, users, seeds) in found.items():
        label, domain, metric = key
        mine, theirs = values[label][domain, metric], values[best][domain, metric]
        mean = statistics.fmean(theirs.values())
        difference = statistics.fmean(mine.values()) - mean
        told.append(
            Effect(
                label,
                best,
                domain,
                metric,
                difference,
                mean,
                users,
                max(by_t[key], by_rank[key]) if users else None,
                seeds,
                statistics.fmean([theirs[seed] for seed in theirs.keys() & mine.keys()] or [mean]),
                by_seeds.get(key),
            )
        )
    return told


def _over_users(
    own: Sequence[Finished], other: Sequence[Finished], domain: str, metric: str
) -> Comparison | None:
    mine, theirs = per_user(own, domain), per_user(other, domain)
    if metric not in mine or metric not in theirs:
        return None
    return compare(
        mine.index.to_numpy(),
        mine[metric].to_numpy(),
        theirs.index.to_numpy(),
        theirs[metric].to_numpy(),
    )


def _over_seeds(own: dict[int, float], other: dict[int, float]) -> Comparison | None:
    shared = np.array(sorted(own.keys() & other.keys()))
    mine, theirs = (np.array([row[seed] for seed in shared]) for row in (own, other))
    if len(shared) < 2:
        return None
    found = compare(shared, mine, shared, theirs)
    # what no seed moves is one observation, however often it is made
    return None if math.isinf(found.d) else found
