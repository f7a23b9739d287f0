"""Figures over a setting and over epsilon, read back from the drawn objects."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analysed import RECALL, both, records
from crossfed.platform.errors import CrossfedError
from crossfed.platform.report import sensitivity
from crossfed.platform.report.finished import Finished, load_runs
from made_runs import make_run


@pytest.fixture
def varied(tmp_path: Path) -> list[Finished]:
    """FedCRF at K of 10, 40 and 400 (two seeds at 40), and LightGCN, which has no K."""
    asked = [
        ("fedcrf", 0, 400, 0.35),
        ("fedcrf", 0, 10, 0.2),
        ("fedcrf", 0, 40, 0.3),
        ("fedcrf", 1, 40, 0.4),
    ]
    paths = [
        make_run(tmp_path / f"{m}{s}{k}", m, s, both(mean, s), sets=(f"K={k}",))
        for m, s, k, mean in asked
    ]
    return load_runs([*paths, make_run(tmp_path / "l", "lightgcn", 0, both(0.25))])


def test_sensitivity(varied: list[Finished]) -> None:
    found = sensitivity.sensitivity(varied, "K", RECALL)
    shown = [r for r in records(found) if r["domain"] == "books"]
    assert [(r["method"], r["value"], r["seeds"]) for r in shown] == [
        ("fedcrf", "10", "1"), ("fedcrf", "40", "2"), ("fedcrf", "400", "1"), ("lightgcn", "", "1")
    ]  # fmt: skip
    at_40 = [both(mean, seed)["books"][RECALL].mean() for seed, mean in ((0, 0.3), (1, 0.4))]
    assert float(shown[1]["mean"]) == pytest.approx(np.mean(at_40))
    assert float(shown[1]["std"]) == pytest.approx(np.std(at_40, ddof=1)) and shown[0]["std"] == ""
    axis = found.figure.axes[0]
    line = axis.containers[0].lines[0]
    assert list(line.get_xdata()) == [10, 40, 400] and line.get_ydata()[1] == pytest.approx(
        np.mean(at_40)
    )
    assert axis.get_xscale() == "log" and axis.get_xlabel() == "K" and axis.get_title() == "books"
    level = [each for each in axis.lines if each.get_linestyle() == "--"]
    assert level[0].get_ydata()[0] == pytest.approx(both(0.25)["books"][RECALL].mean())


@pytest.mark.parametrize(("other", "least"), [(0.30003, 0.02), (0.9, 0.6)])
def test_a_small_difference_looks_small(other: float, least: float, tmp_path: Path) -> None:
    flat = {0.2: np.full(9, 0.3), 0.4: np.full(9, other)}
    runs = [
        make_run(
            tmp_path / str(alpha),
            "fedcrf",
            0,
            {"books": {RECALL: values}},
            sets=(f"alpha={alpha}",),
        )
        for alpha, values in flat.items()
    ]
    low, high = sensitivity.sensitivity(load_runs(runs), "alpha", RECALL).figure.axes[0].get_ylim()
    assert low < 0.3 < other < high and high - low >= least * (low + high) / 2 * 0.999
    assert high - low < 1.2 * max(least * (low + high) / 2, other - 0.3)


def test_a_row_with_one_value_of_what_every_run_has_is_a_point(tmp_path: Path) -> None:
    """A baseline that saw all of the data is no level beside a method that saw a fifth."""
    runs = [
        make_run(
            tmp_path / f"{m}{share}", m, 0, both(0.3), sets=(f"evaluation.train_share={share}",)
        )
        for m, share in (("fedcrf", 0.2), ("fedcrf", 1.0), ("lightgcn", 1.0))
    ]
    axis = sensitivity.sensitivity(load_runs(runs), "evaluation.train_share", RECALL).figure.axes[0]
    assert [list(bar.lines[0].get_xdata()) for bar in axis.containers] == [[0.2, 1.0], [1.0]]
    assert not [line for line in axis.lines if line.get_linestyle() == "--"]


def test_sensitivity_of_words(tmp_path: Path) -> None:
    """Values that are no numbers stand side by side in the order of the runs; other settings make
    lines of their own.
    """
    paths = [
        make_run(
            tmp_path / f"{e}{k}", "fedcrf", 0, both(0.3, k), sets=(f"text.encoder={e}", f"K={k}")
        )
        for k in (10, 20)
        for e in ("minilm", "hashing:64")
    ]
    found = sensitivity.sensitivity(load_runs(paths), "text.encoder", RECALL)
    assert found.name == "text.encoder-recall_at_20"
    assert {r["method"] for r in records(found)} == {"fedcrf (K=10)", "fedcrf (K=20)"}
    assert [label.get_text() for label in found.figure.axes[0].get_xticklabels()] == [
        "minilm",
        "hashing:64",
    ]
    line = found.figure.axes[0].containers[0].lines[0]
    assert list(line.get_xdata()) == [0, 1]


def test_runs_that_do_not_differ_in_the_setting_are_refused(varied: list[Finished]) -> None:
    with pytest.raises(
        CrossfedError, match="what alpha does: it is the same in all of them, which differ in K"
    ):
        sensitivity.sensitivity(varied[:4], "alpha", RECALL)
    with pytest.raises(CrossfedError, match="what nonsense does: none of them has it"):
        sensitivity.sensitivity(varied, "nonsense", RECALL)
    both_ways = [
        replace(run, settings=run.settings | {"alpha": 0.1 * i}) for i, run in enumerate(varied[:3])
    ]
    with pytest.raises(CrossfedError, match="differ in K alone, but in alpha as well"):
        sensitivity.sensitivity(both_ways, "K", RECALL)


def private(epsilon: float) -> dict[str, Any]:
    totals = {
        f"epsilon_{how}": epsilon * factor
        for how, factor in (("paper", 1), ("whole", 32), ("tight", 20))
    }
    return {"note": "", "domains": dict.fromkeys(("books", "toys"), totals)}


def test_utility_against_epsilon(tmp_path: Path) -> None:
    paths = [
        make_run(
            tmp_path / f"p{eps}{seed}",
            "p2p_iagr",
            seed,
            both(mean, seed),
            sets=(f"epsilon0={eps}",),
            privacy=private(30 * eps),
        )
        for eps, seed, mean in ((5.0, 0, 0.4), (0.1, 0, 0.2), (0.1, 1, 0.24))
    ]
    runs = load_runs([*paths, make_run(tmp_path / "l", "lightgcn", 0, both(0.25))])
    found = sensitivity.utility(runs, RECALL, "whole")
    shown = [
        (r["method"], r["epsilon_whole"], r["seeds"])
        for r in records(found)
        if r["domain"] == "toys"
    ]
    assert shown == [("p2p_iagr", "4800.0", "1"), ("p2p_iagr", "96.0", "2"), ("lightgcn", "", "1")]
    axis = found.figure.axes[0]
    line = axis.containers[0].lines[0]
    assert list(line.get_xdata()) == [96, 4800] and line.get_ydata()[0] < line.get_ydata()[1]
    assert axis.get_xscale() == "log" and "ε of the whole run" in axis.get_xlabel()
    assert float(records(sensitivity.utility(runs, RECALL, "paper"))[0]["epsilon_paper"]) == 150
    with pytest.raises(CrossfedError, match="None of these runs perturbs"):
        sensitivity.utility(runs[3:], RECALL)
    with pytest.raises(CrossfedError, match="counted as paper, whole, tight, not 'tigth'"):
        sensitivity.utility(runs, RECALL, "tigth")
