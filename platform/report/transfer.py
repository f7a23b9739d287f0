"""What is transferred, and how much of a gain survives when what is received is meaningless: the
numbers and the table.

Transfer is joint less solo in the test metric m, paired over users and seeds: per user averaged
over seeds, with a bootstrap interval over users, and per seed averaged over users, with Student's
interval over seeds where there are two or more. It is beyond chance where the test over users says
so and, of several seeds, their interval does not hold 0 either.

Per domain, with the test metric m averaged over seeds: the gain of an arm is m(arm) - m(local), and
what survives a control is the share gain(control) / gain(honest). Its interval is a bootstrap over
users (values averaged over seeds first), each resample of users being the same for all arms. Every
arm is also tested against the honest run, user by user, by the paired t-test and by Wilcoxon's
signed-rank test; each family is corrected by Holm's method over all rows, and the larger p counts.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from crossfed.platform.errors import CrossfedError
from crossfed.platform.evaluation.metrics import metric_name
from crossfed.platform.evaluation.significance import compare, holm
from crossfed.platform.federation.controls import SOLO
from crossfed.platform.federation.transfer import ARMS, HONEST, LOCAL, Arm
from crossfed.platform.report.effects import LEVEL, per_user, value
from crossfed.platform.report.finished import Finished, check_comparable, load_runs
from crossfed.platform.report.tables import ABSENT, Cell, Column, Grid, p_value, pretty, spread

RECEIVED = {
    LOCAL: "nothing: trained alone",
    SOLO: "nothing: a federation of one",
    HONEST: "what was sent",
    "noise": "noise",
    "shuffle": "shuffled rows",
    "stale": "the first round's",
    "peers-noise": "noise for others' part",
}
"""What the domains of an arm received."""


def measure(arms: Sequence[Arm], metric: str) -> dict[str, Any]:
    """The numbers, as they are kept in `controls.json`.

    Returns:
        "transfer" (domain -> joint less solo, see `_transfer`; without a domain where solo has no
        result), "metric", "seeds", "problems" (arm -> seed -> why there is no result), "runs" (arm
        -> seed -> directory's name) and "domains": domain -> arm -> its values by seed, mean,
        deviation, gain and relative gain over local, what survives ("share", with its interval),
        and the test of arm less honest. Arms that lack a seed have no gain and no test.

    Raises:
        CrossfedError: runs do not compare, or lack the metric or its values per user.
    """
    name = metric_name(metric)
    finished = [arm for arm in arms if arm.problem is None]
    runs = [
        replace(run, label=arm.name)
        for arm, run in zip(finished, load_runs([arm.path for arm in finished]), strict=True)
    ]
    check_comparable(runs)
    groups = {arm: [run for run in runs if run.label == arm] for arm in ARMS}
    whole = [
        arm for arm in ARMS if groups[arm] and all(a.problem is None for a in arms if a.name == arm)
    ]
    seeds = sorted({arm.seed for arm in arms})
    domains = {domain: _domain(groups, whole, domain, name) for domain in runs[0].result["domains"]}
    tests = {
        (d, arm): row["test"]
        for d, rows in domains.items()
        for arm, row in rows.items()
        if row["test"]
    }
    by_mean, by_rank = (
        holm({key: test[p] for key, test in tests.items()}) for p in ("t_p", "wilcoxon_p")
    )
    for key, test in tests.items():
        test["p_holm"] = max(by_mean[key], by_rank[key])
    moved = {domain: _transfer(rows) for domain, rows in domains.items() if SOLO in whole}
    for rows in domains.values():
        # a share of a gain that may be chance says nothing
        if rows[LOCAL]["test"] is None or not gains(rows):
            for row in rows.values():
                row |= {"share": None, "share_low": None, "share_high": None}
    local = groups[LOCAL][0].result
    return {
        "method": groups[HONEST][0].result["method"],
        "config": groups[HONEST][0].result["config"],
        "local": {"method": local["method"], "config": local["config"]},
        "metric": name,
        "protocol": local["protocol"],
        "data": {**local["data"], "fingerprint": local["data_fingerprint"]},
        "candidates": local["candidates"],
        "seeds": seeds,
        "runs": {arm: {a.seed: a.path.name for a in arms if a.name == arm} for arm in ARMS},
        "problems": {
            arm: told
            for arm in ARMS
            if (told := {a.seed: a.problem for a in arms if a.name == arm and a.problem})
        },
        "transfer": moved,
        "domains": domains,
    }


def _transfer(rows: Mapping[str, Any]) -> dict[str, Any]:
    """Joint less solo in one domain: "difference", "low", "high" and "p_holm" over users; "seeds"
    (seed -> difference), "seeds_low", "seeds_high" (None with one seed); "beyond_chance"."""
    test, joint, solo = rows[SOLO]["test"], rows[HONEST]["values"], rows[SOLO]["values"]
    seeds = {seed: joint[seed] - solo[seed] for seed in joint}
    low, high = _over_seeds(list(seeds.values()))
    agree = low is None or high is None or low > 0 or high < 0
    return {
        # subtracted from nought, since -0.0 would be printed with its sign
        "difference": 0.0 - test["difference"],
        "low": None if test["high"] is None else 0.0 - test["high"],
        "high": None if test["low"] is None else 0.0 - test["low"],
        "p_holm": test["p_holm"],
        "seeds": seeds,
        "seeds_low": low,
        "seeds_high": high,
        "beyond_chance": bool(test["p_holm"] < LEVEL and agree),
    }


def _over_seeds(differences: Sequence[float]) -> tuple[float | None, float | None]:
    """Student's 95 % interval of the mean; none for fewer than two."""
    n = len(differences)
    if n < 2:
        return None, None
    from scipy import stats  # here, because it takes a second to import

    mean = statistics.fmean(differences)
    half = float(stats.t.ppf(0.975, n - 1)) * statistics.stdev(differences) / math.sqrt(n)
    return mean - half, mean + half


def _domain(
    groups: Mapping[str, list[Finished]], whole: Sequence[str], domain: str, metric: str
) -> dict[str, Any]:
    """One domain's arms; p-values not corrected yet."""
    users = {arm: per_user(groups[arm], domain) for arm in whole}
    for arm, table in users.items():
        if metric not in table:
            raise CrossfedError(
                f"{groups[arm][0].origin} has no {metric} per user; choose another --metric."
            )
    rows: dict[str, Any] = {}
    joint = statistics.fmean(value(run, domain, "test", metric) for run in groups[HONEST])
    for arm in (arm for arm in ARMS if groups[arm]):
        values = {run.result["seed"]: value(run, domain, "test", metric) for run in groups[arm]}
        mean = statistics.fmean(values.values())
        deviation = statistics.stdev(values.values()) if len(values) > 1 else None
        rows[arm] = {
            "values": values,
            "mean": mean,
            "deviation": deviation,
            "gain": None,
            "relative": None,
        }
        rows[arm] |= {"share": None, "share_low": None, "share_high": None, "test": None}
        if arm not in whole:
            continue
        base = rows[LOCAL]["mean"]
        if arm != LOCAL:
            rows[arm]["gain"], rows[arm]["relative"] = (
                mean - base,
                (mean - base) / base if base else None,
            )
        if arm == HONEST:
            continue
        own, honest, alone = (users[name][metric] for name in (arm, HONEST, LOCAL))
        found = compare(
            own.index.to_numpy(), own.to_numpy(), honest.index.to_numpy(), honest.to_numpy()
        )
        rows[arm]["test"] = {
            key: told if math.isfinite(told) else None for key, told in asdict(found).items()
        }
        if arm != LOCAL and joint > base:
            rows[arm]["share"] = (mean - base) / (joint - base)
            low, high = _share_interval((own - alone).to_numpy(), (honest - alone).to_numpy())
            rows[arm]["share_low"], rows[arm]["share_high"] = low, high
    return rows


def _share_interval(
    kept: npt.NDArray[np.float64],
    gained: npt.NDArray[np.float64],
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[float | None, float | None]:
    """95 % bootstrap interval (percentiles) of mean(kept) / mean(gained) over users; none where a
    resample has no gain.

    Args:
        kept: control less local, per user. gained: honest less local, for the same users in the
            same order.
    """

    from scipy import stats  # here, because it takes a second to import

    def share(
        a: npt.NDArray[np.float64], b: npt.NDArray[np.float64], axis: int
    ) -> npt.NDArray[np.float64]:
        gain = b.mean(axis=axis)
        return a.mean(axis=axis) / np.where(gain > 0, gain, np.nan)

    found = stats.bootstrap(
        (kept, gained),
        share,
        n_resamples=resamples, batch=max(1, 2**22 // len(kept)), paired=True, method="percentile",
        rng=np.random.default_rng(seed),
    )  # fmt: skip
    if not np.isfinite(found.bootstrap_distribution).all():
        return None, None
    return float(found.confidence_interval.low), float(found.confidence_interval.high)


def gains(rows: Mapping[str, Any]) -> bool:
    """Whether the honest run is better than the local one by more than chance, so that there is a
    gain that can survive.
    """
    test = rows[LOCAL]["test"]
    return bool(rows[HONEST]["gain"] > 0 and test["p_holm"] < LEVEL and test["rank_biserial"] < 0)


def table(block: Mapping[str, Any]) -> Grid:
    """The comparison as one table: a row per domain and arm."""
    rows: list[tuple[Cell | str, ...]] = []
    records = []
    for domain, arms in block["domains"].items():
        best = max(row["mean"] for row in arms.values())
        for arm, row in arms.items():
            test = row["test"]
            rows.append(
                (
                    domain,
                    arm,
                    RECEIVED[arm],
                    str(len(row["values"])),
                    Cell(spread(row["mean"], row["deviation"]), row["mean"] == best),
                    ABSENT
                    if row["gain"] is None
                    else f"{row['gain']:+.4f}" + _percent(row["relative"]),
                    _survives(arm, row, arms),
                    ABSENT
                    if test is None
                    else f"{test['difference']:+.4f} [{test['low']:+.4f}, {test['high']:+.4f}]",
                    ABSENT if test is None else p_value(test["p_holm"]),
                )
            )
            flat = {
                key: row[key]
                for key in (
                    "mean",
                    "deviation",
                    "gain",
                    "relative",
                    "share",
                    "share_low",
                    "share_high",
                )
            }
            tested = {
                f"less_honest_{key}": (test or {}).get(key)
                for key in ("difference", "low", "high", "p_holm")
            }
            records.append(
                {"domain": domain, "arm": arm, "seeds": len(row["values"]), **flat, **tested}
            )
        lost = [arm for arm in block["problems"] if arm not in arms]
        rows += [(domain, arm, RECEIVED[arm], "0", *[ABSENT] * 5) for arm in lost]
    metric = pretty(block["metric"])
    return Grid(
        title="What transfer is worth",
        columns=(
            *(Column(name, right=False) for name in ("domain", "run", "receives")),
            Column("seeds"), Column(metric), Column("over local"), Column("gain that survives"),
            Column("less honest, 95 % interval"), Column("p"),
        ),
        rows=tuple(rows),
        caption=caption(block),
        records=tuple(records),
    )  # fmt: skip


def _percent(relative: float | None) -> str:
    return "" if relative is None else f" ({100 * relative:+.1f} %)"


def _survives(arm: str, row: Mapping[str, Any], rows: Mapping[str, Any]) -> str:
    if arm in (LOCAL, SOLO, HONEST) or row["gain"] is None:
        return ABSENT
    if not gains(rows):
        return "no gain to lose"
    interval = (
        ""
        if row["share_low"] is None
        else (f" [{100 * row['share_low']:.0f}, {100 * row['share_high']:.0f}]")
    )
    return f"{100 * row['share']:.0f} %{interval}"


def caption(block: Mapping[str, Any]) -> str:
    """What the table's numbers are."""
    data = block["data"]
    synthetic = "synthetic " if data.get("synthetic") else ""
    among = ", ".join(f"{domain} {told}" for domain, told in block["candidates"].items())
    return (
        f"{block['method']} on {synthetic}data {data['name']} ({data['fingerprint'][:12]}), "
        f"protocol {block['protocol']}; "
        f"candidates {among}; local is {block['local']['method']}, solo the method itself, every "
        f"domain alone. Test {pretty(block['metric'])} of the state selected on "
        f"validation, mean ± standard deviation over seeds "
        f"{', '.join(map(str, block['seeds']))}. A gain survives by the "
        "share of (honest - local) that (control - local) still has, with a 95 % bootstrap "
        "interval over users where every "
        f"resample has a gain; a share is given where honest is better than local (p < "
        f"{LEVEL:g}). What all domains share before "
        "the first round (a tokeniser made of all texts) is not replaced. p: the run against "
        "honest over users, values averaged "
        "over seeds; the larger of the paired t-test's and Wilcoxon's, adjusted by Holm's "
        "method over all rows."
    )


def sentences(block: Mapping[str, Any]) -> list[str]:
    """What the table says, domain by domain."""
    told, metric, alone = [], pretty(block["metric"]), block["local"]["method"]
    told += [_moved(domain, row, metric) for domain, row in block.get("transfer", {}).items()]
    for domain, rows in block["domains"].items():
        honest, local = rows[HONEST], rows[LOCAL]
        if gains(rows):
            parts = [
                f"{domain}: {honest['gain']:+.4f}{_percent(honest['relative'])} in "
                f"{metric} over {alone}."
            ]
        else:
            worse = honest["gain"] < 0 and local["test"]["p_holm"] < LEVEL
            parts = [
                f"{domain}: {'worse' if worse else 'not better'} in {metric} than {alone} "
                f"({honest['mean']:.4f} against "
                f"{local['mean']:.4f}), so that there is no gain to lose."
            ]
        for arm in (arm for arm in rows if rows[arm]["test"] and arm not in (LOCAL, SOLO)):
            row, test = rows[arm], rows[arm]["test"]
            share = f"{_survives(arm, row, rows)} of the gain survives, " if gains(rows) else ""
            if test["difference"] == test["low"] == test["high"] == 0:
                parts.append(f"{arm}: {share}no user's value differs from the honest run's.")
                continue
            chance = "no more than chance, " if test["p_holm"] >= LEVEL else ""
            parts.append(
                f"{arm}: {share}{test['difference']:+.4f} from honest ({chance}p "
                f"{_is(test['p_holm'])})."
            )
        told.append(" ".join(parts))
    for arm, problems in block["problems"].items():
        seeds = ", ".join(map(str, problems))
        told.append(f"Under {arm}, seed {seeds} has no result: {next(iter(problems.values()))}")
    return told


def _moved(domain: str, row: Mapping[str, Any], metric: str) -> str:
    """The transfer of one domain in a sentence."""
    users = f"users [{row['low']:+.4f}, {row['high']:+.4f}]" if row["low"] is not None else "users"
    seeds = "one seed"
    if row["seeds_low"] is not None:
        seeds = f"{len(row['seeds'])} seeds [{row['seeds_low']:+.4f}, {row['seeds_high']:+.4f}]"
    if row["difference"] == 0:
        verdict = "nothing"
    elif not row["beyond_chance"]:
        verdict = "no more than chance"
    else:
        verdict = "beyond chance" if row["difference"] > 0 else "beyond chance, and a loss"
    return (
        f"{domain}: transfer (joint less solo) is {row['difference']:+.4f} in {metric}, over "
        f"{users} and "
        f"{seeds}: {verdict} (p {_is(row['p_holm'])})."
    )


def _is(p: float) -> str:
    text = p_value(p)
    return text if text.startswith("<") else f"= {text}"
