"""What watches a run from outside: a tracker, a tuner, whatever wants to know of its start, rounds
and end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from crossfed.platform.console import Progress
from crossfed.platform.data.store import PreparedData
from crossfed.platform.federation.node import Plan
from crossfed.platform.federation.rounds import Round
from crossfed.platform.method import Stage

if TYPE_CHECKING:
    import pandas as pd

Status = Literal["FINISHED", "FAILED", "KILLED"]
"""How a run ended, in MLflow's words."""


@dataclass(frozen=True, slots=True)
class Started:
    """A run that begins.

    Attributes:
        plan: its configuration, data, domains and directory.
        data: the prepared data.
        stages: the method's stages.
        resumed: whether it goes on from its last commit.
        view: where notes and warnings go.
    """

    plan: Plan
    data: PreparedData
    stages: tuple[Stage, ...]
    resumed: bool
    view: Progress


@dataclass(frozen=True, slots=True)
class Ended:
    """A run that has its result.

    Attributes:
        plan: as in `Started`.
        result: what `result.json` holds.
        history: a row per round.
        ledger: a row per array that crossed.
        view: where notes and warnings go.
    """

    plan: Plan
    result: dict[str, Any]
    history: list[dict[str, Any]]
    ledger: pd.DataFrame
    view: Progress


class Callback:
    """Watches a run; every method may be left out. An exception raised here ends the run."""

    def on_start(self, run: Started) -> None:
        """Nodes can be placed; nothing is computed yet."""

    def on_round(self, row: Round) -> None:
        """A round is over."""

    def on_end(self, done: Ended) -> None:
        """The result is written, nodes have ended."""

    def on_failure(self, status: Status, reason: str, outcome: str) -> None:
        """The run ends without a result: how, why, and in a word."""

    def notes(self) -> Sequence[str]:
        """Lines to show at the very end."""
        return ()
