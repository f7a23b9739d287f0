"""Faults on four Ray machines: one case of each kind for two methods; `matrix.py` by itself runs
them all.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from faults.matrix import FEDERATED, Case, cases, moments

MATRIX = Path(__file__).with_name("matrix.py")


def row(stage: str, step: int) -> dict[str, object]:
    return {"stage": stage, "step": step}


def test_moments_are_the_first_middle_and_last_round_of_every_stage() -> None:
    rows = [*(row("a", step) for step in range(1, 6)), row("b", 6), row("c", 7), row("c", 8)]
    assert list(moments(rows)) == [
        ("a", "first", 1),
        ("a", "middle", 3),
        ("a", "last", 5),
        ("b", "first", 6),
        ("c", "first", 7),
        ("c", "last", 8),
    ]


def test_the_matrix_holds_every_fault_at_every_moment() -> None:
    found = cases(
        "x",
        [row("a", 1), row("a", 2), row("a", 3)],
        ["server", "books", "films"],
        ["first", "last"],
    )
    faults = {"kill server", "kill books", "kill films", "remove machine of books", "kill driver"}
    assert {case.fault for case in found} == faults and len(found) == 2 * len(faults)
    assert {(case.moment, case.step) for case in found} == {("first", 1), ("last", 3)}
    assert Case("x", "kill films", "a", "last", 3).kind == "kill a domain"
    assert {"fedcrf", "fedcgr", "p2p_iagr"} <= set(FEDERATED) and not {"lightgcn", "sasrec"} & set(
        FEDERATED
    )


def run(*args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(MATRIX), *map(str, args)], capture_output=True, text=True, check=False
    )


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_fault_of_every_kind_changes_no_number(tmp_path: Path) -> None:
    out = tmp_path / "outcomes.json"
    done = run(
        "--methods",
        "p2p_iagr,fedcrf",
        "--moments",
        "last",
        "--each",
        1,
        "--limit",
        1800,
        "--out",
        out,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    found = json.loads(out.read_text())
    assert len(found) == 3 + 4, "p2p_iagr has no server"
    assert {row["outcome"] for row in found} == {"same"}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_one_domain_per_machine() -> None:
    done = run("--spread", "--methods", "fedcrf,fedcgr,p2p_iagr")
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.count("one machine each: True   one GPU each: True") == 3
