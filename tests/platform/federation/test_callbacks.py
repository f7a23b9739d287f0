"""Who watches a run hears of its start, every round and its end or failure, in that order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from crossfed.platform.config.settings import build
from crossfed.platform.errors import CrossfedError
from crossfed.platform.federation.callbacks import Callback, Ended, Started, Status
from crossfed.platform.federation.rounds import Round
from crossfed.platform.federation.run import run_federation


class Watcher(Callback):
    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []

    def on_start(self, run: Started) -> None:
        self.heard.append(("start", run.resumed, run.plan.domains, [s.name for s in run.stages]))

    def on_round(self, row: Round) -> None:
        self.heard.append(("round", row.stage, row.round))

    def on_end(self, done: Ended) -> None:
        self.heard.append(("end", len(done.history), sorted(done.result["domains"])))
        assert done.ledger["bytes"].sum() == sum(done.result["bytes"]["up"].values()) + sum(
            done.result["bytes"]["down"].values()
        )

    def on_failure(self, status: Status, reason: str, outcome: str) -> None:
        self.heard.append(("failure", status, reason))


def run(
    shops: Path, out: Path, *watchers: Callback, method: str = "toys:AVERAGE", **how: Any
) -> Any:
    values = {"data": shops, "out": out, "backend": "inprocess"}
    config = build(method, sets=["rounds=2"], values=values)
    return run_federation(config, callbacks=watchers, **how)


def test_a_run_is_heard_of_from_start_to_end(shops: Path, tmp_path: Path) -> None:
    """A callback that leaves everything out changes nothing."""
    watcher, domains = Watcher(), ("books", "films", "games")
    run(shops, tmp_path, Callback(), watcher)
    assert watcher.heard == [
        ("start", False, domains, ["mean"]),
        ("round", "mean", 1),
        ("round", "mean", 2),
        ("end", 2, list(domains)),
    ]


def test_a_run_that_fails_is_heard_of_with_its_reason(shops: Path, tmp_path: Path) -> None:
    def refuse(row: Round) -> None:
        raise CrossfedError("no more of this")

    watcher = Watcher()
    with pytest.raises(CrossfedError, match="no more of this"):
        run(shops, tmp_path, watcher, on_round=refuse)
    assert [entry[0] for entry in watcher.heard] == ["start", "round", "failure"]
    assert watcher.heard[-1] == ("failure", "FAILED", "no more of this")


def test_what_a_callback_raises_ends_the_run(shops: Path, tmp_path: Path) -> None:
    class Broken(Callback):
        def on_round(self, row: Round) -> None:
            raise CrossfedError("the record is full")

    watcher = Watcher()
    with pytest.raises(CrossfedError, match="the record is full"):
        run(shops, tmp_path, Broken(), watcher)
    assert [entry[0] for entry in watcher.heard] == ["start", "failure"]
