"""Runs beside controls and a local variant: what is declared, found again, continued; and what the
table says of toys.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from crossfed.platform.checkpoint import read_json, write_json
from crossfed.platform.config.settings import RunConfig, build
from crossfed.platform.errors import CrossfedError
from crossfed.platform.federation import transfer
from crossfed.platform.federation.controls import CONTROLS
from crossfed.platform.federation.final import test_once as final_test
from crossfed.platform.federation.transfer import Arm, LocalVariant, local_variant, run_arms
from crossfed.platform.federation.transfer import arms as all_arms
from crossfed.platform.report.recording import run_recorded
from crossfed.platform.report.transfer import gains, measure, sentences, table
from toy_controls import twins

ARMS = ("local", "solo", "honest", *CONTROLS)
"""Those of a toy without a server."""


def config(method: str, data: Path, out: Path, *sets: str, seed: int = 0) -> RunConfig:
    values = {
        "data": data,
        "out": out,
        "backend": "inprocess",
        "seed": seed,
        "tracking.enabled": False,
    }
    return build(method, sets=["tracking.artifacts=false", *sets], values=values)


def beside(
    run_dir: Path,
    seeds: int,
    finish: Any = final_test,
    said: list[str] | None = None,
    launch: Any = run_recorded,
) -> list[Arm]:
    alone = local_variant(transfer.stored_config(run_dir), "toy_controls:ALONE")
    say = [].append if said is None else said.append
    return run_arms(run_dir, seeds, finish, alone, say=say, launch=launch)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return twins(tmp_path_factory.mktemp("twins") / "twins")


@pytest.fixture(scope="module")
def copies(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Arm]]:
    """The toy that copies, over two seeds with all arms, in a folder in which other runs lie,
    too.
    """
    out = tmp_path_factory.mktemp("copies")
    for sets, seed in ((("rounds=2",), 0), ((), 2)):
        run_recorded(config("toy_controls:COPIES", data, out, *sets, seed=seed), finish=final_test)
    run_dir = run_recorded(config("toy_controls:COPIES", data, out), finish=final_test).run_dir
    return run_dir, beside(run_dir, 2)


# -- running ---------------------------------------------------------------------------------------


def test_every_arm_is_one_run_per_seed(copies: tuple[Path, list[Arm]]) -> None:
    run_dir, arms = copies
    assert [(arm.name, arm.seed) for arm in arms] == [
        (name, seed) for seed in (0, 1) for name in ARMS
    ]
    assert arms[2].path == run_dir and len({arm.path for arm in arms}) == 12
    for arm in arms:
        result = read_json(arm.path / "result.json")
        assert result["seed"] == arm.seed and result["config"]["rounds"] == 3
        assert result["control"] == (arm.name if arm.name not in ("local", "honest") else "none")
        assert result["method"] == ("alone" if arm.name == "local" else "copies")


def test_what_has_finished_is_not_run_again(
    copies: tuple[Path, list[Arm]], data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is it beside a run that differs in the attack at its end only."""
    run_dir, arms = copies
    attacked = config("toy_controls:COPIES", data, run_dir.parent, "evaluation.audit=true")
    other = run_recorded(attacked, finish=final_test).run_dir

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("ran again")

    assert beside(run_dir, 2, launch=never) == arms
    assert beside(other, 2, launch=never) == [
        replace(arm, path=other) if arm.path == run_dir else arm for arm in arms
    ]


def test_an_interrupt_is_gone_on_from(copies: tuple[Path, list[Arm]], tmp_path: Path) -> None:
    """Ctrl-C in the second new run, before it has read the test split: it is continued, and the
    first is kept.
    """
    run_dir, arms = copies
    here = tmp_path / run_dir.name
    shutil.copytree(run_dir, here)
    calls = []

    def interrupted(plan: Any, nodes: Any) -> Any:
        calls.append(plan.run_dir)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return final_test(plan, nodes)

    with pytest.raises(KeyboardInterrupt):
        beside(here, 1, interrupted)
    said: list[str] = []
    again = beside(here, 1, said=said)
    assert [arm.path for arm in again[:3]] == [calls[0], calls[1], here]
    assert said[0].endswith(f"{calls[0]}, which is there already") and said[1].endswith(
        f"going on with {calls[1]}"
    )
    assert len(list(tmp_path.glob("*/result.json"))) == 6
    for mine, other in zip(again, arms[:6], strict=True):
        assert (
            read_json(mine.path / "result.json")["domains"]
            == read_json(other.path / "result.json")["domains"]
        )


def test_a_control_that_breaks_the_method_is_told_and_the_others_go_on(
    data: Path, tmp_path: Path
) -> None:
    run_dir = run_recorded(
        config("toy_controls:COPIES", data, tmp_path, "fault=true"), finish=final_test
    ).run_dir
    arms = beside(run_dir, 1)
    problems = {arm.name: arm.problem for arm in arms if arm.problem}
    assert list(problems) == ["noise"] and "NaN" in str(problems["noise"])
    assert str(problems["noise"]).startswith(
        "Under control=noise, which replaces what is received: Domain left"
    )
    block = measure(arms, "recall_at_20")
    assert (
        "noise" not in block["domains"]["left"] and block["domains"]["left"]["stale"]["share"] == 0
    )
    rows = [row for row in table(block).rows if row[1] == "noise"]
    assert [row[3:] for row in rows] == [("0", *["–"] * 5)] * 2
    assert f"Under noise, seed 0 has no result: {problems['noise']}" in sentences(block)


def test_what_cannot_be_compared_is_refused(
    copies: tuple[Path, list[Arm]], data: Path, tmp_path: Path
) -> None:
    _, arms = copies
    with pytest.raises(CrossfedError, match="ran under the control noise; name the honest run"):
        beside(arms[3].path, 1)
    trial = run_recorded(config("toy_controls:COPIES", data, tmp_path)).run_dir
    with pytest.raises(
        CrossfedError,
        match="has no test metrics: it has not finished, or it is a trial of a search",
    ):
        beside(trial, 1)


# -- the local variant -----------------------------------------------------------------------------


def test_values_of_a_declared_variant() -> None:
    """Fixed values win over products, products over the run's own."""
    own = {"a": 1, "b": 2, "c": 3, "none": None}
    block = LocalVariant(
        same=("a", "b"), product={"b": ("b", "c"), "d": ("c", "none"), "e": ("c",)}, config={"e": 9}
    )
    assert block.values(own) == {"a": 1, "b": 6, "d": None, "e": 9}


def test_the_variant_of_a_shipped_method(data: Path, tmp_path: Path) -> None:
    run = config("fedsasrec", data, tmp_path, "rounds=7", "local_epochs=2", "dim=8", "mu=0.5")
    found = local_variant(run.model_copy(update={"control": "noise"}))
    assert (found.method, found.control, found.preset) == ("sasrec", "none", None)
    assert (found.config["epochs"], found.config["patience"], found.config["dim"]) == (14, 20, 8)
    assert (found.data, found.seed, found.evaluation.protocol) == (
        run.data,
        run.seed,
        run.evaluation.protocol,
    )


def test_a_variant_of_the_method_itself_keeps_the_runs_values(data: Path, tmp_path: Path) -> None:
    found = local_variant(config("fedcrf", data, tmp_path, "dim=8"), "fedcrf", ["ablation=fed"])
    assert found.config["dim"] == 8 and found.config["ablation"] == "fed"


def test_a_variant_that_cannot_be_is_told(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = config("toy_controls:COPIES", data, tmp_path)
    with pytest.raises(CrossfedError, match=r"COPIES declares no local variant .*--local METHOD"):
        local_variant(run)
    with pytest.raises(CrossfedError, match="unknown key in 'epohcs=3'; did you mean epochs"):
        local_variant(run, "lightgcn", ["epohcs=3"])
    for block, told in [
        ({"methd": "lightgcn"}, "local: of toy_controls:COPIES: unknown key 'methd'"),
        (
            {"method": "lightgcn", "same": ["dim"]},
            "local: of toy_controls:COPIES: toy_controls:COPIES has no key 'dim'",
        ),
        (
            {"method": "lightgcn", "config": {"dim": 0}},
            "local: of toy_controls:COPIES: dim = 0 is not possible",
        ),
    ]:
        monkeypatch.setattr(transfer, "method_file", lambda name, block=block: {"local": block})
        with pytest.raises(CrossfedError, match=told):
            local_variant(run)


# -- what it says ----------------------------------------------------------------------------------


def test_a_copied_gain_does_not_survive(copies: tuple[Path, list[Arm]]) -> None:
    block = measure(copies[1], "Recall@20")
    for rows in block["domains"].values():
        assert gains(rows) and rows["honest"]["mean"] == 1.0
        assert (
            rows["stale"]["share"]
            == rows["stale"]["share_low"]
            == rows["stale"]["share_high"]
            == 0.0
        )
        assert rows["stale"]["mean"] == rows["local"]["mean"]
        for control in ("noise", "shuffle"):
            row = rows[control]
            assert row["share"] < 0.1 and row["share_low"] <= row["share"] <= row["share_high"]
            assert row["test"]["p_holm"] < 1e-6 and row["test"]["difference"] < -0.8
    text = table(block).markdown()
    assert "| left | stale | the first round's | 2 |" in text and "| 0 % [0, 0] |" in text
    assert sentences(block)[2].startswith("left: +0.9") and "p < 0.0001" in sentences(block)[2]


def test_what_is_transferred_leads(copies: tuple[Path, list[Arm]]) -> None:
    """Joint less solo from the files: per seed, and its Student's interval over the two seeds,
    t(.975, 1) = 12.7062.
    """
    _, arms = copies
    block = measure(arms, "recall_at_20")
    for domain, row in block["transfer"].items():
        values = {
            (a.name, a.seed): read_json(a.path / "result.json")["domains"][domain]["test"][
                "recall_at_20"
            ]
            for a in arms
        }
        one, two = (values["honest", seed] - values["solo", seed] for seed in (0, 1))
        assert row["seeds"] == {0: pytest.approx(one), 1: pytest.approx(two)}
        assert row["difference"] == pytest.approx((one + two) / 2)
        half = 12.7062 * abs(one - two) / np.sqrt(2) / np.sqrt(2)
        assert row["seeds_low"] == pytest.approx(row["difference"] - half, abs=1e-6)
        assert row["low"] <= row["difference"] <= row["high"] and row["low"] > 0.8
        assert (
            row["beyond_chance"]
            and block["domains"][domain]["solo"]["mean"]
            == block["domains"][domain]["local"]["mean"]
        )
    first = sentences(block)[0]
    assert first.startswith("left: transfer (joint less solo) is +0.9") and "2 seeds [+0" in first
    assert first.endswith(": beyond chance (p < 0.0001).")


def test_transfer_that_seeds_do_not_agree_on_is_chance(copies: tuple[Path, list[Arm]]) -> None:
    """With honest and solo swapped in one of two seeds the mean is about nought over users, and the
    seeds contradict.
    """
    other = {"honest": "solo", "solo": "honest"}
    swapped = [
        Arm(other.get(a.name, a.name) if a.seed else a.name, a.seed, a.path) for a in copies[1]
    ]
    row = measure(swapped, "recall_at_20")["transfer"]["left"]
    assert row["seeds"][0] > 0.8 and row["seeds"][1] < -0.8
    assert row["seeds_low"] < 0 < row["seeds_high"] and not row["beyond_chance"]


def test_what_mixes_at_a_server_is_also_run_with_others_part_replaced(
    data: Path, tmp_path: Path
) -> None:
    for method, extra in (("COPIES", ()), ("SUMS", ("peers-noise",))):
        run = config(f"toy_controls:{method}", data, tmp_path)
        found = all_arms(run, run.model_copy(update={"method": "toy_controls:ALONE"}))
        assert tuple(found) == (*ARMS, *extra)
        assert all(
            one.control == name for name, one in found.items() if name not in ("local", "honest")
        )


def test_numbers_by_hand(copies: tuple[Path, list[Arm]]) -> None:
    """Mean and deviation over two seeds, the gain, and its share, from the files themselves."""
    _, arms = copies
    row = measure(arms, "recall_at_20")["domains"]["right"]
    values = {
        name: [
            read_json(a.path / "result.json")["domains"]["right"]["test"]["recall_at_20"]
            for a in arms
            if a.name == name
        ]
        for name in ARMS
    }
    one, two = values["noise"]
    assert row["noise"]["values"] == {0: one, 1: two}
    assert row["noise"]["deviation"] == pytest.approx(abs(one - two) / np.sqrt(2))
    local, honest, noise = (np.mean(values[name]) for name in ("local", "honest", "noise"))
    assert row["honest"]["gain"] == pytest.approx(honest - local)
    assert row["honest"]["relative"] == pytest.approx((honest - local) / local)
    assert row["noise"]["share"] == pytest.approx((noise - local) / (honest - local))
    users = [
        pd.concat(
            [
                pd.read_parquet(a.path / "per_user" / "right.test.parquet")
                for a in arms
                if a.name == name
            ]
        )
        .groupby("user")["recall_at_20"]
        .mean()
        for name in ("noise", "honest")
    ]
    assert row["noise"]["test"]["difference"] == pytest.approx((users[0] - users[1]).mean())


def test_p_values_are_corrected_over_all_rows(copies: tuple[Path, list[Arm]]) -> None:
    """Five tests in each of two domains. Holm's adjusted value of p is the largest (m - number
    smaller) · q of all q ≤ p.
    """
    _, arms = copies
    raw: dict[tuple[str, str], tuple[float, float]] = {}
    for domain in ("left", "right"):
        users = {
            name: sum(
                pd.read_parquet(arm.path / "per_user" / f"{domain}.test.parquet").set_index("user")[
                    "recall_at_20"
                ]
                for arm in arms
                if arm.name == name
            )
            for name in ARMS
        }
        for name in set(ARMS) - {"honest"}:
            difference = (users[name] - users["honest"]) / 2
            raw[domain, name] = (
                stats.ttest_1samp(difference, 0).pvalue,
                stats.wilcoxon(difference).pvalue,
            )
    block = measure(arms, "recall_at_20")
    for (domain, name), own in raw.items():
        adjusted = [
            max(
                (10 - sum(r[kind] < q[kind] for r in raw.values())) * q[kind]
                for q in raw.values()
                if q[kind] <= own[kind]
            )
            for kind in (0, 1)
        ]
        assert block["domains"][domain][name]["test"]["p_holm"] == pytest.approx(
            max(adjusted), rel=1e-6, abs=0
        )


def test_a_deaf_method_keeps_all_of_its_gain(data: Path, tmp_path: Path) -> None:
    run_dir = run_recorded(config("toy_controls:DEAF", data, tmp_path), finish=final_test).run_dir
    block = measure(beside(run_dir, 1), "recall_at_20")
    for rows in block["domains"].values():
        assert gains(rows)
        for control in ("solo", *CONTROLS):
            row = rows[control]
            assert row["share"] == row["share_low"] == row["share_high"] == 1.0
            assert row["test"]["difference"] == 0.0 and row["test"]["p_holm"] == 1.0
    assert (
        "noise: 100 % [100, 100] of the gain survives, no user's value differs from the"
        in sentences(block)[2]
    )
    assert (
        sentences(block)[0].startswith("left: transfer (joint less solo) is +0.0000")
        and ": nothing (p" in sentences(block)[0]
    )
    assert not any(row["beyond_chance"] for row in block["transfer"].values())


def test_without_a_gain_there_is_no_share(copies: tuple[Path, list[Arm]]) -> None:
    """The copy and the guess change places: what is called honest is worse than what is called
    local.
    """
    other = {"local": "honest", "honest": "local"}
    block = measure(
        [Arm(other.get(a.name, a.name), a.seed, a.path) for a in copies[1]], "recall_at_20"
    )
    assert (
        not gains(block["domains"]["left"]) and block["domains"]["left"]["noise"]["share"] is None
    )
    assert {row[6] for row in table(block).rows} == {"–", "no gain to lose"}
    assert sentences(block)[2].startswith("left: worse in Recall@20 than copies (")


def test_the_numbers_survive_the_way_through_a_file(
    copies: tuple[Path, list[Arm]], tmp_path: Path
) -> None:
    block = measure(copies[1], "recall_at_20")
    write_json(tmp_path / "controls.json", block)
    again = read_json(tmp_path / "controls.json")
    assert table(again) == table(block) and sentences(again) == sentences(block)
