"""Finished runs side by side: one table over seeds, and what the differences from the best baseline are worth.

A row's value is its mean over seeds. Every row that is no baseline is set against the best baseline of each column, twice: user
by user (paired t-test and Wilcoxon's signed-rank test on values averaged over each row's seeds) and seed by seed (paired t-test
on the domain's metric, over the seeds that both have). Each kind of test is corrected over the whole table by Holm's method.

A dagger over users needs both tests: most users' metrics are zero under both methods, which Wilcoxon's test drops, so that it
can call a difference significant while the interval of the mean, which the table shows, holds zero.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from crossfed.platform.evaluation.metrics import metric_name
from crossfed.platform.evaluation.significance import Comparison, compare, holm
from crossfed.platform.report.sources import Finished, Split, candidates, check_comparable
from crossfed.platform.report.tables import ABSENT, Cell, Column, Grid, p_value, pretty, spread
from crossfed.platform.seam import CrossfedError

LEVEL = 0.05
"""Adjusted p-values below it earn a dagger."""
OVER_USERS, OVER_SEEDS = "†", "‡"


@dataclass(frozen=True, slots=True)
class Effect:
    """One row less the best baseline, in one domain and metric.

    Attributes:
        difference, relative: of the means over all seeds; relative to the baseline's, NaN where that is zero.
        users: user by user; None for metrics without a value per user. users_p: the larger of its t-test's and Wilcoxon's
            p-values, each after Holm.
        seeds: seed by seed; None with fewer than two common seeds, or where the difference is the same for all of them.
            seeds_p: its t-test's p-value after Holm.
    """

    label: str
    against: str
    domain: str
    metric: str
    difference: float
    relative: float
    users: Comparison | None
    users_p: float | None
    seeds: Comparison | None
    seeds_p: float | None

    @property
    def mark(self) -> str:
        """Daggers: better by the test over users, and by the one over seeds."""
        up = self.difference > 0
        by_users = self.users is not None and self.users_p is not None and self.users_p < LEVEL
        agreed = up and self.users is not None and self.users.rank_biserial > 0  # means and ranks can disagree
        by_seeds = up and self.seeds_p is not None and self.seeds_p < LEVEL
        return (OVER_USERS if agreed and by_users else "") + (OVER_SEEDS if by_seeds else "")


@dataclass(frozen=True, slots=True)
class Compared:
    """A comparison: the table, and the tests behind its daggers (None where nothing was tested)."""

    table: Grid
    tests: Grid | None
    effects: tuple[Effect, ...]


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
            f"{run.origin} has no {split} {metric} for {domain}; it has {', '.join(measured) or 'no metrics of that split'}."
        )
    return float(measured[metric])


def per_user(runs: Sequence[Finished], domain: str) -> pd.DataFrame:
    """Per-user test values of one row's runs, averaged over their seeds; index: user row number.

    Raises:
        CrossfedError: a run has no per-user values of this domain, or they are of different users.
    """
    tables = [_per_user(run.path, domain) for run in runs]
    if any(not table.index.equals(tables[0].index) for table in tables[1:]):
        raise CrossfedError(f"The runs of {runs[0].label} were measured on different users of {domain}.")
    return sum(tables[1:], start=tables[0]) / len(tables)


@lru_cache(maxsize=256)
def _per_user(path: Path, domain: str) -> pd.DataFrame:
    file = path / "per_user" / f"{domain}.test.parquet"
    if not file.is_file():
        raise CrossfedError(f"{path} holds no per-user test values of domain {domain!r}.")
    return pd.read_parquet(file).set_index("user").sort_index()


def default_metrics(runs: Sequence[Finished], split: Split = "test") -> list[str]:
    """The metric that selects, and the NDCG at its cut-off, as far as all runs measured them; else the first they all have."""
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
        named: labels, or methods, which stand for all of their rows. Without any: methods that exchange nothing, and where
            there are none, or only such, the first row.

    Raises:
        CrossfedError: there is no such row.
    """
    groups = grouped(runs)
    if named:
        chosen = []
        for name in named:
            of_method = [label for label, members in groups.items() if members[0].result["method"] == name]
            rows = [name] if name in groups else of_method
            if not rows:
                raise CrossfedError(f"There is no row {name!r} to compare with; there are {', '.join(groups)}.")
            chosen += rows
        return list(dict.fromkeys(chosen))
    local = [label for label, members in groups.items() if members[0].result.get("scope") == "local"]
    return local if 0 < len(local) < len(groups) else [next(iter(groups))]


def comparison(
    runs: Sequence[Finished],
    metrics: Sequence[str] = (),
    split: Split = "test",
    against: Sequence[str] = (),
    domains: Sequence[str] | None = None,
) -> Compared:
    """One table of all runs, and the tests of its rows against the best baseline.

    Args:
        runs: as from `sources.gather`.
        metrics: in any spelling `metric_name` accepts; by default `default_metrics`.
        split: only the test split is tested.
        against: the baselines, see `baselines_of`.
        domains: which, all by default.

    Raises:
        CrossfedError: the runs do not compare, or lack something that is asked for.
    """
    check_comparable(runs, split)
    names = [metric_name(name) for name in metrics] or default_metrics(runs, split)
    known = list(runs[0].result["domains"])
    if unknown := [name for name in domains or () if name not in known]:
        raise CrossfedError(f"There is no domain {unknown[0]!r} in these runs; there are {', '.join(known)}.")
    columns = [(domain, name) for domain in domains or known for name in names]
    groups = grouped(runs)
    base = baselines_of(runs, against)
    values = {
        label: {(d, m): {run.result["seed"]: value(run, d, split, m) for run in members} for d, m in columns}
        for label, members in groups.items()
    }
    means = {label: {c: statistics.fmean(v.values()) for c, v in row.items()} for label, row in values.items()}
    found: list[Effect] = []
    if split == "test":
        found = effects(groups, columns, values, base)
    table = _table(runs, groups, columns, values, means, base, found, split)
    return Compared(table, _tests(found) if found else None, tuple(found))


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
            if label in base:
                continue
            own, other = values[label][domain, metric], values[best][domain, metric]
            found[label, domain, metric] = (
                best,
                _over_users(members, groups[best], domain, metric),
                _over_seeds(own, other),
            )
    paired = {key: users for key, (_, users, _) in found.items() if users is not None}
    by_t, by_rank = (holm({key: getattr(users, p) for key, users in paired.items()}) for p in ("t_p", "wilcoxon_p"))
    by_seeds = holm({key: seeds.t_p for key, (_, _, seeds) in found.items() if seeds is not None})
    told = []
    for key, (best, users, seeds) in found.items():
        label, domain, metric = key
        mean = statistics.fmean(values[best][domain, metric].values())
        difference = statistics.fmean(values[label][domain, metric].values()) - mean
        told.append(
            Effect(
                label, best, domain, metric, difference, difference / mean if mean else math.nan,
                users, max(by_t[key], by_rank[key]) if users else None, seeds, by_seeds.get(key),
            )
        )  # fmt: skip
    return told


def _over_users(own: Sequence[Finished], other: Sequence[Finished], domain: str, metric: str) -> Comparison | None:
    mine, theirs = per_user(own, domain), per_user(other, domain)
    if metric not in mine or metric not in theirs:
        return None
    return compare(mine.index.to_numpy(), mine[metric].to_numpy(), theirs.index.to_numpy(), theirs[metric].to_numpy())


def _over_seeds(own: dict[int, float], other: dict[int, float]) -> Comparison | None:
    shared = np.array(sorted(own.keys() & other.keys()))
    mine, theirs = (np.array([row[seed] for seed in shared]) for row in (own, other))
    if len(shared) < 2:
        return None
    found = compare(shared, mine, shared, theirs)
    return None if math.isinf(found.d) else found  # what no seed moves is one observation, however often it is made


# -- as tables ---------------------------------------------------------------------------------------------------


def _table(
    runs: Sequence[Finished],
    groups: dict[str, list[Finished]],
    columns: Sequence[tuple[str, str]],
    values: dict[str, dict[tuple[str, str], dict[int, float]]],
    means: dict[str, dict[tuple[str, str], float]],
    base: Sequence[str],
    found: Sequence[Effect],
    split: Split,
) -> Grid:
    marks = {(effect.label, effect.domain, effect.metric): effect for effect in found}
    ranked = [label for label, members in groups.items() if not members[0].pooled] or list(groups)
    top: dict[tuple[str, str], list[float]] = {
        column: sorted({means[label][column] for label in ranked}, reverse=True) for column in columns
    }
    rows, records = [], []
    for label, members in groups.items():
        seeds = sorted(run.result["seed"] for run in members)
        cells: list[Cell | str] = [label, str(len(seeds))]
        for column in columns:
            mean, numbers = means[label][column], list(values[label][column].values())
            deviation = statistics.stdev(numbers) if len(numbers) > 1 else None
            best = label in ranked and mean == top[column][0]
            second = label in ranked and len(top[column]) > 1 and mean == top[column][1]
            effect = marks.get((label, *column))
            cells.append(Cell(spread(mean, deviation), best, second, effect.mark if effect else ""))
            records.append(_record(members[0], column, split, mean, deviation, best, seeds) | _tested(effect))
        rows.append(tuple(cells))
    foot: list[Cell | str] = ["best over baseline", ""]
    for column in columns:
        own = max((means[label][column] for label in ranked if label not in base), default=math.nan)
        best_base = max(means[label][column] for label in base)
        foot.append(f"{100 * (own - best_base) / best_base:+.1f} %" if best_base and not math.isnan(own) else ABSENT)
    return Grid(
        title=f"{split.capitalize()} metrics",
        columns=(
            Column("method", right=False),
            Column("seeds"),
            *(Column(pretty(metric), domain) for domain, metric in columns),
        ),
        rows=tuple(rows),
        caption=_caption(runs, [domain for domain, _ in columns], split, base, found),
        records=tuple(records),
        foot=(tuple(foot),) if len(groups) > len(base) else (),
    )


def _caption(
    runs: Sequence[Finished], domains: Sequence[str], split: Split, base: Sequence[str], found: Sequence[Effect]
) -> str:
    result = runs[0].result
    kind = "synthetic data" if result["data"].get("synthetic") else "data"
    among = ", ".join(f"{name} {candidates(result, name, split)}" for name in dict.fromkeys(domains))
    told = [
        f"{split.capitalize()} metrics, mean ± standard deviation over seeds; best in bold, second underlined. "
        f"{kind.capitalize()} {result['data']['name']} ({result['data_fingerprint'][:12]}), protocol {result['protocol']}, "
        f"split seed {result.get('split_seed', 'unknown')}; candidates {among}."
    ]
    if any(run.pooled for run in runs):
        told.append("Rows that are not private saw all domains' interactions together and are not ranked.")
    if found:
        told.append(
            f"Better than the best baseline ({', '.join(base)}), p < {LEVEL:g} after Holm: {OVER_USERS} over users (paired t and "
            f"Wilcoxon, both), {OVER_SEEDS} over seeds (paired t)."
        )
    return " ".join(told)


def _record(
    run: Finished,
    column: tuple[str, str],
    split: Split,
    mean: float,
    deviation: float | None,
    best: bool,
    seeds: Sequence[int],
) -> dict[str, Any]:
    domain, metric = column
    result = run.result
    return {
        "method": run.label,
        "private": int(not run.pooled),
        "domain": domain,
        "split": split,
        "metric": metric,
        "mean": mean,
        "std": deviation,
        "best": int(best),
        "seeds": " ".join(map(str, seeds)),
        "protocol": result["protocol"],
        "split_seed": result.get("split_seed"),
        "candidates": candidates(result, domain, split),
        "data": result["data"]["name"],
        "data_fingerprint": result["data_fingerprint"],
    }


def _tested(effect: Effect | None) -> dict[str, Any]:
    users, seeds = (effect.users, effect.seeds) if effect else (None, None)
    return {
        "against": effect.against if effect else None,
        "difference": effect.difference if effect else None,
        "relative": effect.relative if effect else None,
        "users": users.n if users else None,
        "users_low": users.low if users else None,
        "users_high": users.high if users else None,
        "users_wilcoxon_p": users.wilcoxon_p if users else None,
        "users_p_holm": effect.users_p if effect else None,
        "users_t_p": users.t_p if users else None,
        "users_cohens_d": users.d if users else None,
        "users_rank_biserial": users.rank_biserial if users else None,
        "paired_seeds": seeds.n if seeds else None,
        "seeds_low": seeds.low if seeds else None,
        "seeds_high": seeds.high if seeds else None,
        "seeds_t_p": seeds.t_p if seeds else None,
        "seeds_p_holm": effect.seeds_p if effect else None,
        "seeds_cohens_d": seeds.d if seeds else None,
    }


_OVER_USERS = ("95 % interval", "p (t, Wilcoxon)", "Cohen's d", "rank-biserial", "users")
_OVER_SEEDS = ("95 % interval", "p (t)", "Cohen's d", "seeds")


def _tests(found: Sequence[Effect]) -> Grid:
    rows = []
    for effect in found:
        users, seeds = effect.users, effect.seeds
        rows.append(
            (
                effect.label, effect.against, effect.domain, pretty(effect.metric), f"{effect.difference:+.4f}",
                ABSENT if math.isnan(effect.relative) else f"{100 * effect.relative:+.1f} %",
                _interval(users), ABSENT if effect.users_p is None else p_value(effect.users_p),
                f"{users.d:+.3f}" if users else ABSENT, f"{users.rank_biserial:+.3f}" if users else ABSENT,
                f"{users.n:,}" if users else ABSENT,
                _interval(seeds), ABSENT if effect.seeds_p is None else p_value(effect.seeds_p),
                f"{seeds.d:+.2f}" if seeds else ABSENT, str(seeds.n) if seeds else ABSENT,
            )
        )  # fmt: skip
    return Grid(
        title="Differences from the best baseline",
        columns=(
            Column("method", right=False),
            Column("against", right=False),
            Column("domain", right=False),
            Column("metric", right=False),
            Column("difference"),
            Column("relative"),
            *(Column(name, "over users") for name in _OVER_USERS),
            *(Column(name, "over seeds") for name in _OVER_SEEDS),
        ),
        rows=tuple(rows),
        caption=(
            "Method less the best baseline of each column, test split. Over users: values averaged over each row's seeds, 95 % "
            "interval of the mean difference by Student's t; the larger p of the paired t-test and Wilcoxon's signed-rank test. "
            "Over seeds: paired t-test on the seeds that both have. p-values adjusted by Holm's method over this table, by kind "
            "of test. Cohen's d is mean by standard deviation of the paired differences."
        ),
        records=tuple(
            {"method": e.label, "domain": e.domain, "metric": e.metric, **_tested(e)} for e in found
        ),
    )  # fmt: skip


def _interval(found: Comparison | None) -> str:
    return ABSENT if found is None else f"{found.low:+.4f} to {found.high:+.4f}"
