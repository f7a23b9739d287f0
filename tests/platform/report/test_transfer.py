"""What transfer is worth, from runs of given numbers whose answer is worked out by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from crossfed.platform.federation.transfer import Arm
from crossfed.platform.report.transfer import gains, measure, sentences, table
from made_runs import make_run, users

BASE = users(0, 0.3, 80)
LUCK = users(1, 0.0, 80, 0.01)


def arms(folder: Path, added: dict[str, float], seeds: tuple[int, ...] = (0,)) -> list[Arm]:
    """A run per arm and seed: every user's value is that of local and `added`, but for some luck
    that differs from seed to seed; local has none.
    """
    made = []
    for name, more in added.items():
        for seed in seeds:
            values = BASE + (more + LUCK * (seed + 1) if more else 0.0)
            method = "lightgcn" if name == "local" else "fedcrf"
            sets = () if name in ("local", "honest") else (f"control={name}",)
            path = make_run(
                folder / f"{name}-{seed}",
                method,
                seed,
                {"books": {"recall_at_20": values}},
                sets=sets,
            )
            made.append(Arm(name, seed, path))
    return made


WORTH = {"local": 0.0, "solo": 0.1, "honest": 0.4, "noise": 0.1, "stale": 0.4}


def test_gain_share_and_transfer_by_hand(tmp_path: Path) -> None:
    """Honest gains 0.4 and noise 0.1 of it, a quarter; joint less solo is 0.4 - 0.1 = 0.3."""
    luck = LUCK.mean()
    block = measure(arms(tmp_path, WORTH), "Recall@20")
    rows = block["domains"]["books"]
    assert gains(rows) and rows["local"]["mean"] == pytest.approx(BASE.mean())
    assert rows["honest"]["gain"] == pytest.approx(0.4 + luck)
    assert rows["honest"]["relative"] == pytest.approx((0.4 + luck) / BASE.mean())
    assert rows["noise"]["share"] == pytest.approx((0.1 + luck) / (0.4 + luck))
    assert rows["noise"]["share_low"] <= rows["noise"]["share"] <= rows["noise"]["share_high"]
    assert rows["stale"]["share"] == 1 and rows["stale"]["test"]["difference"] == 0
    moved = block["transfer"]["books"]
    assert moved["difference"] == pytest.approx(0.3) and moved["seeds"][0] == pytest.approx(0.3)
    assert moved["beyond_chance"] and moved["seeds_low"] is None, "one seed has no interval"
    first, second = sentences(block)
    assert first.startswith("books: transfer (joint less solo) is +0.3000 in Recall@20")
    assert first.endswith("one seed: beyond chance (p < 0.0001).")
    assert "stale: 100 % [100, 100] of the gain survives, no user's value differs" in second
    shown = {row[1]: row for row in table(block).rows}
    assert [*shown] == [*WORTH] and shown["local"][5:7] == ("–", "–")
    assert shown["stale"][6] == "100 % [100, 100]" and shown["solo"][6] == "–"


def test_seeds_have_students_interval(tmp_path: Path) -> None:
    """Per seed joint less solo is 0.3 in both: no spread, so the interval is the point."""
    moved = measure(arms(tmp_path, WORTH, (0, 1)), "recall_at_20")["transfer"]["books"]
    assert moved["seeds_low"] == pytest.approx(0.3) and moved["seeds_high"] == pytest.approx(0.3)


def test_without_a_gain_nothing_survives(tmp_path: Path) -> None:
    block = measure(arms(tmp_path, WORTH | {"honest": -0.1}), "recall_at_20")
    rows = block["domains"]["books"]
    assert not gains(rows) and rows["noise"]["share"] is None
    assert {row[6] for row in table(block).rows} == {"–", "no gain to lose"}
    assert "books: worse in Recall@20 than lightgcn (" in sentences(block)[1]
    assert "beyond chance, and a loss" in sentences(block)[0]


def test_an_arm_without_a_result_is_told_and_has_no_share(tmp_path: Path) -> None:
    made = arms(tmp_path, WORTH)
    lost = Arm("shuffle", 0, tmp_path / "shuffle-0", "the loss is not a number")
    block = measure([*made, lost], "recall_at_20")
    assert sentences(block)[-1] == ("Under shuffle, seed 0 has no result: the loss is not a number")
    (row,) = [row for row in table(block).rows if row[1] == "shuffle"]
    assert row[3:] == ("0", "–", "–", "–", "–", "–")
    assert np.isfinite(block["domains"]["books"]["honest"]["gain"])
