"""Finished runs side by side: one table over seeds with best, second and daggers, and the tests
behind it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from crossfed.platform.errors import CrossfedError
from crossfed.platform.evaluation.metrics import metric_name
from crossfed.platform.evaluation.protocols import told_protocol
from crossfed.platform.evaluation.significance import Comparison
from crossfed.platform.report.doubt import chance_line, doubts
from crossfed.platform.report.effects import (
    LEVEL,
    OVER_SEEDS,
    OVER_USERS,
    Effect,
    baselines_of,
    default_metrics,
    effects,
    grouped,
    value,
)
from crossfed.platform.report.finished import Finished, Split, candidates, check_comparable
from crossfed.platform.report.tables import ABSENT, Cell, Column, Grid, p_value, pretty, spread


@dataclass(frozen=True, slots=True)
class Compared:
    """A comparison: the table, and the tests behind its daggers: over users and over seeds, as far
    as any were made.
    """

    table: Grid
    tests: tuple[Grid, ...]
    effects: tuple[Effect, ...]


def comparison(
    runs: Sequence[Finished],
    metrics: Sequence[str] = (),
    split: Split = "test",
    against: Sequence[str] = (),
    domains: Sequence[str] | None = None,
    floors: bool = True,
) -> Compared:
    """One table of all runs, and the tests of its rows against the best baseline.

    Args:
        runs: as from `sources.gather`.
        metrics: in any spelling `metric_name` accepts; by default `default_metrics`.
        split: only the test split is tested.
        against: the baselines, see `baselines_of`.
        domains: which, all by default.
        floors: whether popularity and, under a sampled protocol, chance stand below the table.

    Raises:
        CrossfedError: the runs do not compare, or lack something that is asked for.
    """
    check_comparable(runs, split)
    names = [metric_name(name) for name in metrics] or default_metrics(runs, split)
    known = list(runs[0].result["domains"])
    if unknown := [name for name in domains or () if name not in known]:
        raise CrossfedError(
            f"There is no domain {unknown[0]!r} in these runs; there are {', '.join(known)}."
        )
    columns = [(domain, name) for domain in domains or known for name in names]
    groups = grouped(runs)
    base = baselines_of(runs, against)
    values = {
        label: {
            (d, m): {run.result["seed"]: value(run, d, split, m) for run in members}
            for d, m in columns
        }
        for label, members in groups.items()
    }
    means = {
        label: {c: statistics.fmean(v.values()) for c, v in row.items()}
        for label, row in values.items()
    }
    found: list[Effect] = []
    if split == "test":
        found = effects(groups, columns, values, base)
    table = _table(runs, groups, columns, values, means, base, found, split)
    if floors:
        table = replace(table, foot=(*table.foot, *_floors(runs, columns, split)))
    if doubtful := doubts(groups, columns, split):
        table = replace(table, caption=" ".join([table.caption, "To be doubted:", *doubtful]))
    what = _called(groups, base)
    tests = (_over_users(found, what), _over_seeds(found, what))
    return Compared(table, tuple(grid for grid in tests if grid.rows), tuple(found))


def _called(groups: dict[str, list[Finished]], base: Sequence[str]) -> str:
    """What the rows are called that others are set against: a method is no baseline of itself."""
    of = {label: members[0].result["method"] for label, members in groups.items()}
    others = {method for label, method in of.items() if label not in base}
    return "reference row" if others & {of[label] for label in base} else "baseline"


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
        column: sorted({means[label][column] for label in ranked}, reverse=True)
        for column in columns
    }
    rows, records = [], []
    for label, members in groups.items():
        seeds = sorted(run.result["seed"] for run in members)
        cells: list[Cell | str] = [label, str(len(seeds))]
        for column in columns:
            mean, numbers = means[label][column], list(values[label][column].values())
            deviation = statistics.stdev(numbers) if len(numbers) > 1 else None
            best = label in ranked and mean == top[column][0] and len(groups) > 1
            second = label in ranked and len(top[column]) > 1 and mean == top[column][1]
            effect = marks.get((label, *column))
            cells.append(Cell(spread(mean, deviation), best, second, effect.mark if effect else ""))
            records.append(
                _record(members[0], column, split, mean, deviation, best, seeds) | _tested(effect)
            )
        rows.append(tuple(cells))
    foot: list[Cell | str] = [f"best over {_called(groups, base)}", ""]
    for column in columns:
        own = max((means[label][column] for label in ranked if label not in base), default=math.nan)
        best_base = max(means[label][column] for label in base)
        foot.append(
            f"{100 * (own - best_base) / best_base:+.1f} %"
            if best_base and not math.isnan(own)
            else ABSENT
        )
    return Grid(
        title=f"{split.capitalize()} metrics",
        columns=(
            Column("method", right=False),
            Column("seeds"),
            *(Column(pretty(metric), domain) for domain, metric in columns),
        ),
        rows=tuple(rows),
        caption=_caption(runs, groups, [domain for domain, _ in columns], split, base, found),
        records=tuple(records),
        foot=(tuple(foot),) if len(groups) > len(base) else (),
    )


def _floors(
    runs: Sequence[Finished], columns: Sequence[tuple[str, str]], split: Split
) -> list[tuple[Cell | str, ...]]:
    """Rows of what nobody has to learn: popularity, where the runs measured it, and chance under a
    sampled protocol.
    """
    found: list[tuple[Cell | str, ...]] = []
    if split == "test":
        measured = [
            next(
                (v for run in runs if (v := _popularity(run, domain).get(metric)) is not None), None
            )
            for domain, metric in columns
        ]
        if any(number is not None for number in measured):
            found.append(("popularity", "", *(_number(number) for number in measured)))
    line = chance_line(runs[0].result, [metric for _, metric in columns])
    if line is not None:
        found.append(("chance", "", *(_number(number) for number in line)))
    return found


def _popularity(run: Finished, domain: str) -> dict[str, float]:
    return run.result["domains"][domain].get("popularity") or {}


def _number(value: float | None) -> str:
    return ABSENT if value is None else f"{value:.4f}"


def _caption(
    runs: Sequence[Finished],
    groups: dict[str, list[Finished]],
    domains: Sequence[str],
    split: Split,
    base: Sequence[str],
    found: Sequence[Effect],
) -> str:
    result = runs[0].result
    kind = "synthetic data" if result["data"].get("synthetic") else "data"
    among = ", ".join(
        f"{name} {candidates(result, name, split)}" for name in dict.fromkeys(domains)
    )
    told = [
        f"{split.capitalize()} metrics, mean ± standard deviation over seeds"
        f"{'; best in bold, second underlined' if len(groups) > 1 else ''}. "
        f"{kind.capitalize()} {result['data']['name']} ({result['data_fingerprint'][:12]}), "
        f"protocol {told_protocol(result)}, "
        f"split seed {result.get('split_seed', 'unknown')}; candidates {among}."
    ]
    if any(run.pooled for run in runs):
        told.append(
            "Rows that are not private saw all domains' interactions together and are not ranked."
        )
    if found:
        told.append(
            f"Better than the best {_called(groups, base)} ({', '.join(base)}), p < {LEVEL:g} "
            f"after Holm: "
            f"{OVER_USERS} over users (paired t and Wilcoxon, both), {OVER_SEEDS} over seeds "
            f"(paired t)."
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
        "seeds_difference": seeds.difference if seeds else None,
        "seeds_low": seeds.low if seeds else None,
        "seeds_high": seeds.high if seeds else None,
        "seeds_t_p": seeds.t_p if seeds else None,
        "seeds_p_holm": effect.seeds_p if effect else None,
        "seeds_cohens_d": seeds.d if seeds else None,
    }


def _over_users(found: Sequence[Effect], what: str) -> Grid:
    rows = [
        (
            *_difference(effect),
            _interval(users),
            _p(effect.users_p),
            f"{users.d:+.3f}",
            f"{users.rank_biserial:+.3f}",
            f"{users.n:,}",
        )
        for effect in found
        if (users := effect.users) is not None
    ]
    return Grid(
        title="Differences over users",
        columns=(
            *_COMPARED,
            Column("95 % interval"),
            Column("p"),
            Column("Cohen's d"),
            Column("rank-biserial"),
            Column("users"),
        ),
        rows=tuple(rows),
        caption=(
            f"Method less the best {what} of each column, test split, user by user; values "
            f"averaged over each row's seeds. 95 % "
            "interval of the mean difference by Student's t; p is the larger of those of the "
            "paired t-test and of Wilcoxon's "
            "signed-rank test, each adjusted by Holm's method over this table; Cohen's d is "
            "mean by standard deviation of the "
            "differences."
        ),
        records=_records(found),
    )


def _over_seeds(found: Sequence[Effect], what: str) -> Grid:
    rows = [
        (
            *_difference(_paired(effect, seeds)),
            _interval(seeds),
            _p(effect.seeds_p),
            f"{seeds.d:+.2f}",
            str(seeds.n),
        )
        for effect in found
        if (seeds := effect.seeds) is not None
    ]
    return Grid(
        title="Differences over seeds",
        columns=(
            *_COMPARED,
            Column("95 % interval"),
            Column("p"),
            Column("Cohen's d"),
            Column("seeds"),
        ),
        rows=tuple(rows),
        caption=(
            f"Method less the best {what} of each column, test split, seed by seed on the "
            f"seeds of both. 95 % interval by "
            "Student's t; p of the paired t-test, adjusted by Holm's method over this table."
        ),
        records=_records(found),
    )


_COMPARED = (
    Column("method", right=False),
    Column("against", right=False),
    Column("domain", right=False),
    Column("metric", right=False),
    Column("difference"),
    Column("relative"),
)


def _difference(effect: Effect) -> tuple[str, ...]:
    relative = ABSENT if math.isnan(effect.relative) else f"{100 * effect.relative:+.1f} %"
    return (
        effect.label,
        effect.against,
        effect.domain,
        pretty(effect.metric),
        f"{effect.difference:+.4f}",
        relative,
    )


def _paired(effect: Effect, seeds: Comparison) -> Effect:
    """An effect with the difference on the seeds of both rows in place of that of the rows'
    means.
    """
    return replace(effect, difference=seeds.difference, base=effect.seeds_base)


def _p(p: float | None) -> str:
    return ABSENT if p is None else p_value(p)


def _records(found: Sequence[Effect]) -> tuple[dict[str, Any], ...]:
    return tuple(
        {"method": e.label, "domain": e.domain, "metric": e.metric, **_tested(e)} for e in found
    )


def _interval(found: Comparison) -> str:
    return f"{found.low:+.4f} to {found.high:+.4f}"
