"""What a run says of its length before its first round: by hand, and of the methods that declare
it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from crossfed.platform.config.settings import build
from crossfed.platform.console import make_progress
from crossfed.platform.errors import CrossfedError
from crossfed.platform.federation import pace
from crossfed.platform.registry import method_file, method_names
from crossfed.platform.report.recording import run_recorded

BLOCK = """
presets: {small: {dim: 2}}
pace: {speed: {default: 10, small: 400}, work: [rounds, K], sizes: [dim], quick: small}
"""
MODULE = (
    "from dataclasses import replace\nfrom toys import AVERAGE\nMETHOD = replace(AVERAGE, "
    'name="slow")\n'
)


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A method that says it is slow: 4 rounds × K = 2, ten interactions a second."""
    (tmp_path / "slow_of_test.py").write_text(MODULE)
    (tmp_path / "slow.yaml").write_text(BLOCK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))  # where this folder is added
    yield tmp_path
    sys.modules.pop("slow_of_test", None)


def told(
    *sets: str, preset: str | None = None, interactions: int = 1200, cores: float = 2
) -> str | None:
    return pace.announcement(
        build("slow_of_test:METHOD", preset=preset, sets=sets), interactions, cores
    )


def test_the_length_of_a_run_is_work_over_speed(slow: Path) -> None:
    """4 · 2 · 1200 / 10 / 2 = 480 s; the quick preset 4 · 2 · 1200 / 400 / 2 = 12 s."""
    assert told() == (
        "about 8:00 on 2 cores like those it was measured on, unless it stops early; "
        "--preset small is quick, about 12 s"
    )
    assert (told("rounds=8") or "").startswith("about 16:00 on")


def test_nothing_is_said_of_short_runs_and_of_sizes_that_were_not_measured(slow: Path) -> None:
    assert told(interactions=700) is None  # 280 s
    assert told(preset="small") is None
    assert told("dim=64") is None
    assert pace.announcement(build("toys:AVERAGE"), 10**9, 1) is None


def test_a_long_run_of_the_quick_preset_names_no_other(slow: Path) -> None:
    assert (
        told(preset="small", interactions=10**6)
        == "about 2:46:40 on 2 cores like those it was measured on, unless it stops early"
    )


def test_it_is_said_before_the_first_round(slow: Path, shops: Path) -> None:
    """The shops have 1,200 interactions."""
    view, notes, rounds = make_progress("quiet"), list[str](), list[int]()
    view.note = lambda line: notes.append(f"{len(rounds)} {line}")  # type: ignore[method-assign]
    values = {
        "data": shops,
        "out": slow / "runs",
        "backend": "inprocess",
        "tracking.enabled": False,
    }
    config = build("slow_of_test:METHOD", values=values)
    run_recorded(config, view=view, on_round=lambda row: rounds.append(row.round))
    assert any(line.startswith("0 time       about 16:00 on 1 cores") for line in notes), notes


def test_a_block_that_is_none_is_one_sentence(slow: Path) -> None:
    (slow / "slow.yaml").write_text("pace: {speed: {default: fast}, work: [rounds]}")
    with pytest.raises(
        CrossfedError,
        match=r"pace: of slow_of_test:METHOD: speed\.default = "
        r"'fast' is not possible",
    ):
        told()


@pytest.mark.parametrize("name", [name for name in method_names() if "pace" in method_file(name)])
def test_a_declared_pace_names_keys_and_presets_that_there_are(name: str) -> None:
    shipped = method_file(name)
    block = pace.Pace.model_validate(shipped["pace"])
    keys = build(name).config
    assert {*block.work, *block.sizes} <= set(keys)
    assert {*block.speed, block.quick or "default"} <= {"default", *shipped["presets"]}


def test_the_papers_sizes_of_fedcgr_are_announced_on_the_shops() -> None:
    """Two cores, the shops' interactions: longer than a quarter of an hour, and a preset that is
    quick.
    """
    said = pace.announcement(build("fedcgr"), 15_000, 2)
    assert said is not None and "--preset small is quick" in said
