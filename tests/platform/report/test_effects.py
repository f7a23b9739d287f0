"""Comparisons: every number of the tables against scipy and statsmodels, straight from the raw
per-user values.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.weightstats import DescrStatsW

from analysed import METRICS, csv_of, raw
from crossfed.platform.errors import CrossfedError
from crossfed.platform.report.comparison import comparison
from crossfed.platform.report.effects import baselines_of, default_metrics
from crossfed.platform.report.finished import Finished, load_runs
from made_runs import make_run, users


def test_every_number_against_scipy_and_statsmodels(made: list[Finished]) -> None:
    found = comparison(made, METRICS)
    records = {(r["method"], r["domain"], r["metric"]): r for r in csv_of(found.table.csv())}
    assert len(records) == 4 * 2 * 2
    keys = [(m, d, n) for m in ("fedcrf", "p2p_iagr") for d in ("books", "toys") for n in METRICS]
    expected: dict[tuple[str, str, str], dict[str, float]] = {}
    for method, domain, metric in keys:
        own = raw(made, method, domain, metric)
        base = max(
            (raw(made, name, domain, metric) for name in ("lightgcn", "sasrec")),
            key=lambda by_seed: np.mean([column.mean() for column in by_seed.values()]),
        )
        difference = np.mean(list(own.values()), axis=0) - np.mean(list(base.values()), axis=0)
        told = DescrStatsW(difference)
        low, high = told.tconfint_mean(0.05)
        expected[method, domain, metric] = {
            "difference": float(difference.mean()),
            "relative": float(difference.mean() / np.mean(list(base.values()))),
            "users": len(difference),
            "users_low": low,
            "users_high": high,
            "users_wilcoxon_p": stats.wilcoxon(difference).pvalue,
            "users_t_p": told.ttest_mean(0)[1],
            "users_cohens_d": difference.mean() / difference.std(ddof=1),
        }
        if method == "fedcrf":
            seeds = sorted(own)
            mine, theirs = ([by_seed[seed].mean() for seed in seeds] for by_seed in (own, base))
            test = stats.ttest_rel(mine, theirs)
            interval = test.confidence_interval(0.95)
            expected[method, domain, metric] |= {
                "paired_seeds": 3,
                "seeds_t_p": test.pvalue,
                "seeds_low": interval.low,
                "seeds_high": interval.high,
            }
    by_t, by_rank = (
        multipletests([expected[key][p] for key in keys], method="holm")[1]
        for p in ("users_t_p", "users_wilcoxon_p")
    )
    seeded = [key for key in keys if "seeds_t_p" in expected[key]]
    by_seeds = multipletests([expected[key]["seeds_t_p"] for key in seeded], method="holm")[1]
    for key, p in zip(keys, np.maximum(by_t, by_rank), strict=True):
        expected[key]["users_p_holm"] = p
    for key, p in zip(seeded, by_seeds, strict=True):
        expected[key]["seeds_p_holm"] = p
    for key in keys:
        for name, value in expected[key].items():
            assert float(records[key][name]) == pytest.approx(value), (key, name)
        method, domain, metric = key
        seeds_of = [column.mean() for column in raw(made, method, domain, metric).values()]
        assert float(records[key]["mean"]) == pytest.approx(np.mean(seeds_of))
        if method == "fedcrf":
            assert float(records[key]["std"]) == pytest.approx(np.std(seeds_of, ddof=1))
        else:
            assert (
                records[key]["std"]
                == records[key]["seeds_t_p"]
                == records[key]["seeds_p_holm"]
                == ""
            )
        better = bool(expected[key]["difference"] > 0)
        marks = "†" * bool(better and expected[key]["users_p_holm"] < 0.05)
        marks += "‡" * bool(better and expected[key].get("seeds_p_holm", 1) < 0.05)
        assert mark(found, *key) == marks
    # the data show all that can happen
    assert {mark(found, *key) for key in keys} == {"", "†", "†‡"}
    assert records["lightgcn", "books", "recall_at_20"]["against"] == ""


def mark(found: Any, label: str, domain: str, metric: str) -> str:
    effect = next(
        e for e in found.effects if (e.label, e.domain, e.metric) == (label, domain, metric)
    )
    return effect.mark


def test_baselines(made: list[Finished]) -> None:
    assert baselines_of(made) == ["lightgcn", "sasrec"]  # exchange nothing
    assert baselines_of(made, ["sasrec"]) == ["sasrec"]
    federated = [run for run in made if run.result["scope"] == "federated"]
    assert baselines_of(federated) == ["fedcrf"]  # nobody stands for a baseline: the first
    assert baselines_of([run for run in made if run.result["scope"] == "local"]) == ["lightgcn"]
    with pytest.raises(
        CrossfedError, match="There is no row 'nobody' to compare with; there are lightgcn, sasrec"
    ):
        baselines_of(made, ["nobody"])


def test_a_metric_without_values_per_user_is_tested_over_seeds_alone(tmp_path: Path) -> None:
    paths = []
    for method, base in (("lightgcn", 0.2), ("fedcrf", 0.3)):
        for seed in range(3):
            path = make_run(
                tmp_path / f"{method}{seed}",
                method,
                seed,
                {"books": {"recall_at_20": users(seed, base)}},
            )
            result = json.loads((path / "result.json").read_text())
            result["domains"]["books"]["test"]["coverage_at_20"] = base + 0.01 * seed**2 * (
                method == "fedcrf"
            )
            (path / "result.json").write_text(json.dumps(result))
            paths.append(path)
    [effect] = comparison(load_runs(paths), ["coverage@20"]).effects
    assert effect.users is None and effect.seeds is not None and effect.mark == "‡"


def test_seeds_without_spread_have_no_test(tmp_path: Path) -> None:
    """Methods that no seed moves: the same difference thrice is one observation, not three."""
    paths = [
        make_run(
            tmp_path / f"{method}{seed}",
            method,
            seed,
            {"books": {"recall_at_20": users(0, base, spread=0)}},
        )
        for method, base in (("lightgcn", 0.25), ("fedcrf", 0.5))
        for seed in range(3)
    ]
    [effect] = comparison(load_runs(paths), METRICS[:1]).effects
    assert effect.seeds is None and effect.mark == "†"


def test_differences_over_seeds_are_those_of_the_common_seeds(tmp_path: Path) -> None:
    """A third seed of one row moves its mean, and nothing in the paired table."""

    def made(method: str, seed: int, level: float) -> Path:
        values = {"books": {"recall_at_20": np.full(60, level)}}
        return make_run(tmp_path / f"{method}{seed}", method, seed, values)

    paths = [
        made("lightgcn", 0, 0.40),
        made("lightgcn", 1, 0.42),
        made("fedcrf", 0, 0.45),
        made("fedcrf", 1, 0.50),
    ]
    found = comparison(load_runs([*paths, made("fedcrf", 2, 0.90)]), METRICS[:1])
    [effect], [_, over_seeds] = found.effects, found.tests
    assert effect.difference == pytest.approx(0.6167 - 0.41, abs=1e-4)
    assert effect.seeds is not None and effect.seeds.difference == pytest.approx(0.065)
    assert over_seeds.rows[0][4:6] == ("+0.0650", "+15.9 %")
    assert float(csv_of(over_seeds.csv())[0]["seeds_difference"]) == pytest.approx(0.065)
    more = comparison(load_runs([*paths, made("lightgcn", 7, 0.80)]), METRICS[:1])
    assert more.tests[1].rows[0][4:6] == ("+0.0650", "+15.9 %"), (
        "relative to the baseline on those seeds"
    )


def test_a_dagger_needs_the_mean_as_well(tmp_path: Path) -> None:
    """49 users gain a little, 11 lose a lot: Wilcoxon's test sees a gain, the mean is nearly the
    same.
    """
    base = users(0, 0.5)
    gain = np.r_[np.linspace(0.1, 0.15, 49), np.full(11, -0.5)]
    paths = [
        make_run(tmp_path / name, name, 0, {"books": {"recall_at_20": values}})
        for name, values in (("lightgcn", base), ("fedcrf", base + gain))
    ]
    [effect] = comparison(load_runs(paths), METRICS[:1]).effects
    assert effect.users is not None and effect.users.wilcoxon_p < 0.05 and effect.difference > 0
    assert effect.users.low < 0 and effect.mark == ""


def test_worse_is_never_marked(tmp_path: Path) -> None:
    paths = [
        make_run(
            tmp_path / f"{method}{seed}",
            method,
            seed,
            {"books": {"recall_at_20": users(seed + shift, base)}},
        )
        for method, base, shift in (("lightgcn", 0.5, 0), ("fedcrf", 0.2, 9))
        for seed in range(3)
    ]
    [effect] = comparison(load_runs(paths), METRICS[:1]).effects
    assert effect.users_p is not None and effect.users_p < 0.05 and effect.mark == ""
    assert effect.seeds_p is not None and effect.seeds_p < 0.05


def test_default_metrics(made: list[Finished], tmp_path: Path) -> None:
    assert default_metrics(made) == ["recall_at_20", "ndcg_at_20"]
    sets = (
        "evaluation.ks=[1,10]",
        "evaluation.metrics=[hit_rate,ndcg]",
        "evaluation.select=ndcg@10",
    )
    values = {
        "books": {f"{m}_at_{k}": users(0, 0.3) for m in ("hit_rate", "ndcg") for k in (1, 10)}
    }
    assert default_metrics(
        load_runs([make_run(tmp_path / "a", "lightgcn", 0, values, sets=sets)])
    ) == ["ndcg_at_10", "hit_rate_at_10"]
