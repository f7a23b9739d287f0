"""The books of one trial: what its facts are, and how they are told."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from crossfed.platform.config.settings import build
from crossfed.tuning.scheduler import _lost
from crossfed.tuning.trial import FederationTrial, TrialRecord


@pytest.mark.parametrize(
    ("restarts", "told"),
    [(0, ""), (1, ", 1 restart after a lost node"), (2, ", 2 restarts after a lost node")],
)
def test_what_a_run_lost_is_told(restarts: int, told: str, tmp_path: Path) -> None:
    book = TrialRecord(build("toys:AVERAGE", values={"out": tmp_path}), 0, 1.0, 0.0)
    measured = {"validation": {"recall_at_20": 0.25}, "test": {"recall_at_20": 0.5}}
    result: dict[str, Any] = {"domains": {"books": measured}, "restarts": restarts}
    book.end(result)
    facts = json.loads(book.json())
    assert facts["domains"] == {"books": 0.25} and facts["test"] == {"books": 0.5}
    assert facts.get("restarts", 0) == restarts and _lost(facts) == told


def test_what_was_done_before_an_interrupt_counts_and_a_repeated_round_once(tmp_path: Path) -> None:
    clock = iter([100.0, 103.0])
    book = TrialRecord(
        build("toys:AVERAGE", values={"out": tmp_path}), 0, 0.5, 0.25, clock=lambda: next(clock)
    )
    rows = [
        {"step": 1, "seconds": 2.0, "bytes_up": 10},
        {"step": 1, "seconds": 4.0, "bytes_up": 10},
    ]
    (tmp_path / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    book.recall(tmp_path / "history.jsonl")
    facts = json.loads(book.json())
    assert facts["seconds"] == 9.0 and facts["bytes_up"] == 10
    assert (facts["cpu_seconds"], facts["gpu_seconds"]) == (4.5, 2.25)


def test_a_process_that_is_set_up_in_vain_opens_no_run(tmp_path: Path) -> None:
    """After a lost machine Tune may set up a second one for a trial that has finished by then."""
    run = build("toys:AVERAGE", values={"out": tmp_path})
    config = {"number": 0, "run": run, "name": "trial-0000", "cap": None, "cpus": 1.0, "gpus": 0.0}
    before = threading.active_count()
    trial = FederationTrial.__new__(FederationTrial)
    trial.setup(config)
    assert trial.reset_config(config)
    trial.cleanup()
    assert threading.active_count() == before and not list(tmp_path.iterdir())
