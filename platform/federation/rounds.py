"""Walks a method's stages: runs phases, delivers messages along declared edges, counts bytes,
evaluates, commits.

What a run has done so far is a `Progress`; together with the nodes' own checkpoints it is all that
a resumed run needs.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from crossfed.platform.checkpoint import Checkpoints
from crossfed.platform.config.settings import RunConfig
from crossfed.platform.errors import CrossfedError
from crossfed.platform.federation.controls import SOLO
from crossfed.platform.federation.mirror import Mirror
from crossfed.platform.federation.node import Measured, Nodes, Plan
from crossfed.platform.federation.payloads import Entry, ShapeWatch, check_declarations, check_told
from crossfed.platform.federation.privacy import (
    RECORD,
    Accountant,
    check_releases,
    mend,
    messages_of,
    read_lines,
)
from crossfed.platform.layout import HISTORY, LEDGER
from crossfed.platform.method import SERVER, Direction, Method, MethodConfig, Phase, Stage

FEDERATION = "federation"
"""The scope of a best value that all domains share."""


@dataclass(frozen=True, slots=True)
class Round:
    """What one round did, as told to the tracker, the progress view and the tuner.

    Attributes:
        stage, round, rounds: where the run is. step: rounds finished since the run began.
        metrics: `train/<node>/<name>`, `val/<domain>/<metric>`, `val/mean/<metric>`; for methods
            that perturb what they send also `privacy/<domain>/epsilon_<counting>` and
            `privacy/max/epsilon_<counting>`: the totals so far.
        best: mean over domains of the selecting validation metric at the best rounds of this stage
            so far; None before the first evaluation. domains: the same metric of each domain at the
            round that would be selected now.
        bytes_up, bytes_down: sent and received by domains in this round; messages between domains
            count as both.
        seconds: wall-clock time.
    """

    stage: str
    round: int
    rounds: int
    step: int
    metrics: dict[str, float]
    best: float | None
    domains: dict[str, float]
    bytes_up: int
    bytes_down: int
    seconds: float


@dataclass(slots=True)
class Best:
    """The best evaluated round of a scope (one domain, or the federation)."""

    value: float
    stage: str
    round: int
    stale: int = 0
    values: dict[str, float] = field(default_factory=dict)
    """The metric of each member domain at that round."""


@dataclass(slots=True)
class Progress:
    """How far a run is. Plain values only: it is written to JSON at every commit."""

    stage: int = 0
    opened: bool = False
    round: int = 0
    step: int = 0
    commits: int = 0
    best: dict[str, Best] = field(default_factory=dict)
    selected: dict[str, dict[str, Any]] = field(default_factory=dict)
    latest: dict[str, float] = field(default_factory=dict)
    stopped: list[str] = field(default_factory=list)
    seconds: float = 0.0
    logs: dict[str, dict[str, Any]] = field(default_factory=dict)
    budget_stops: dict[str, int] = field(default_factory=dict)

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> Progress:
        """From the JSON of a commit."""
        return cls(**{**raw, "best": {name: Best(**best) for name, best in raw["best"].items()}})


def check_method(method: Method, config: MethodConfig) -> tuple[Stage, ...]:
    """The method's stages, after checking that its declarations hold together.

    Raises:
        CrossfedError: there is no stage, a stage name occurs twice, a phase runs at a server that
            the method lacks, edges name a server that is not there, a payload dimension is unknown,
            or a release speaks of what is not sent.
    """
    stages = method.stages(config)
    check_declarations(method, config)
    if not stages:
        raise CrossfedError(f"{method.name} has no stage: it would train nothing.")
    labels = [stage.name for stage in stages]
    if len(set(labels)) < len(labels):
        raise CrossfedError(f"{method.name}: two stages share a name: {labels}.")
    for stage in stages:
        at_server = any(phase.at == "server" for phase in (*stage.open, *stage.each, *stage.close))
        if (
            at_server or stage.edges & {Direction.UP, Direction.DOWN}
        ) and method.init_server is None:
            raise CrossfedError(
                f"{method.name}: stage {stage.name!r} uses a server, but the method has no "
                f"init_server."
            )
    check_releases(method, config, stages)
    return stages


class _Log:
    """An append-only file of JSON lines that goes back to what was committed of it.

    What is committed of it is its length in bytes and their SHA-256, kept along the way.
    """

    def __init__(self, path: Path):
        self.path, self._bytes, self._hash = path, 0, hashlib.sha256()

    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        data = "".join(json.dumps(row) + "\n" for row in rows).encode()
        try:
            with self.path.open("ab") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise CrossfedError(
                f"{self.path} cannot be written ({error.strerror}); the last committed round "
                f"stays. Free the disk and --resume."
            ) from error
        self._bytes += len(data)
        self._hash.update(data)

    def state(self) -> dict[str, Any]:
        """What a commit remembers."""
        return {"bytes": self._bytes, "sha256": self._hash.hexdigest()}

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise CrossfedError unless the file begins with what was committed of it."""
        if self._read(state["bytes"]).hexdigest() != state["sha256"]:
            raise CrossfedError(
                f"the first {state['bytes']:,} bytes of {self.path} differ from what was written"
            )

    def go_back(self, state: Mapping[str, Any] | None) -> None:
        """Forget what was written after a commit; everything with None."""
        self._bytes = state["bytes"] if state else 0
        self._hash = self._read(self._bytes)
        if self.path.exists():
            os.truncate(self.path, self._bytes)

    def _read(self, length: int) -> Any:
        """The hash over the first `length` bytes."""
        found, left = hashlib.sha256(), length
        if left:
            try:
                with self.path.open("rb") as file:
                    while left and (block := file.read(min(left, 1 << 20))):
                        found.update(block)
                        left -= len(block)
            except OSError as error:
                raise CrossfedError(f"{self.path} cannot be read ({error.strerror})") from error
        return found

    def rows(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.read_text(encoding="utf-8").splitlines()]


class Rounds:
    """The loop over stages and rounds of one run.

    Args:
        plan: the run.
        nodes: where steps run.
        told: called after every round.
        warn: told in a sentence what could not be used.
        mirror: where commits are copied to, if anywhere.
    """

    def __init__(
        self,
        plan: Plan,
        nodes: Nodes,
        told: Callable[[Round], None],
        warn: Callable[[str], None],
        mirror: Mirror | None = None,
    ):
        self.plan, self.nodes, self.told, self.warn, self.mirror = plan, nodes, told, warn, mirror
        self.config: RunConfig = plan.config
        self.stages = check_method(self.config.resolved, self.config.method_config())
        self.checkpoints = Checkpoints(plan.run_dir, plan.nodes)
        self.history, self.ledger = _Log(plan.run_dir / HISTORY), _Log(plan.run_dir / LEDGER)
        self.progress = Progress()
        self.mail: dict[str, dict[str, Any]] = {}
        self.rows: list[Entry] = []
        self.watch = ShapeWatch(self.config.resolved.fields)
        mend(plan.run_dir / RECORD)
        self.record = _Log(plan.run_dir / RECORD)  # never cut back: what left has left
        releases = self.config.resolved.releases(self.config.method_config())
        self.accountant = Accountant(
            self.config.privacy, releases, read_lines(plan.run_dir / RECORD)
        )

    # -- where the run is --------------------------------------------------------------------------

    def restore(self) -> bool:
        """Go to the last sound commit (or the beginning); True when there was one.

        Raises:
            CrossfedError: there are commits, and none of them is sound.
        """
        found = self.checkpoints.latest(self.warn, self._agree)
        self.progress = Progress.read(found[1]) if found else Progress()
        self._deadline("going back to a commit")
        self.mail = self.nodes.load_state(found[0]) if found else {}
        self.rows = []
        self.history.go_back(self.progress.logs.get("history"))
        self.ledger.go_back(self.progress.logs.get("ledger"))
        return found is not None

    def upcoming(self) -> str:
        """The round that comes next, in words; only before the last stage is over."""
        progress = self.progress
        stage = next(
            (stage for stage in self.stages[progress.stage :] if stage.rounds), self.stages[-1]
        )
        return (
            f"round {min(progress.round + 1, stage.rounds)} of {stage.rounds} of stage {stage.name}"
        )

    def at_the_end(self) -> bool:
        """Whether the last commit is sound, and that of a run whose stages are all over; asks no
        node.
        """
        try:
            found = self.checkpoints.latest(agree=self._agree)
        except CrossfedError:
            return False
        return found is not None and found[1]["stage"] >= len(self.stages)

    def _agree(self, progress: Mapping[str, Any]) -> None:
        """Raise CrossfedError where a commit's progress cannot be read or does not fit the logs."""
        try:
            logs = Progress.read(progress).logs
            self.history.check(logs["history"])
            self.ledger.check(logs["ledger"])
        except (AttributeError, KeyError, TypeError) as error:
            raise CrossfedError(
                f"a commit's progress is not one of this version ({error!r})"
            ) from error

    def commit(self) -> None:
        """Every node writes itself; once all have, this state becomes the one to continue from."""
        self.progress.commits += 1
        self._deadline(f"commit {self.progress.commits}")
        folder = self.checkpoints.open(self.progress.commits)
        files = self.nodes.save(folder, self.mail)
        self.progress.logs = {"history": self.history.state(), "ledger": self.ledger.state()}
        committed = self.checkpoints.commit(folder, asdict(self.progress), files)
        if self.mirror is not None:
            self.mirror.commit(committed)

    # -- running -----------------------------------------------------------------------------------

    def run(self) -> None:
        """Run from where `progress` stands to the end of the last stage."""
        for index in range(self.progress.stage, len(self.stages)):
            stage, progress = self.stages[index], self.progress
            if stage.rounds and (progress.opened or self._affordable(stage)):
                if not progress.opened:
                    self._deadline(f"the opening of stage {stage.name}")
                    self._phases(index, "open", stage.open, 0)
                    progress.opened = True
                while (
                    progress.round < stage.rounds
                    and self._active(stage)
                    and self._affordable(stage)
                ):
                    self._round(index, stage)
                    if progress.round % self.config.checkpoint_every == 0:
                        self.commit()
                self._deadline(f"the close of stage {stage.name}")
                if stage.evaluate and stage.keep_best:
                    self._call("restore_best", self.plan.nodes)
                self._phases(index, "close", stage.close, progress.round)
                self._write_ledger()
                self._remember(stage)
            self.mail = {}
            progress.stage, progress.opened, progress.round = index + 1, False, 0
            progress.best, progress.stopped, progress.latest = {}, [], {}
            self.commit()

    def _active(self, stage: Stage) -> list[str]:
        """Domains that still train; none when the stage is over."""
        if FEDERATION in self.progress.stopped:
            return []
        return [name for name in self.plan.domains if name not in self.progress.stopped]

    def _round(self, index: int, stage: Stage) -> None:
        began, progress = time.perf_counter(), self.progress
        active = self._active(stage)
        progress.round += 1
        progress.step += 1
        self._deadline(f"round {progress.round} of stage {stage.name}")
        metrics = (
            self._phases(index, "each", stage.each, progress.round) | self.accountant.metrics()
        )
        last = progress.round == stage.rounds or not self._affordable(stage)
        if stage.evaluate and (progress.round % self.config.evaluation.every == 0 or last):
            metrics |= self._evaluate(stage, active)
        up, down = self._write_ledger()
        seconds = time.perf_counter() - began
        progress.seconds += seconds
        scopes = progress.best.values()
        best = sum(scope.value for scope in scopes) / len(scopes) if scopes else None
        domains = {name: value for scope in scopes for name, value in scope.values.items()}
        row = Round(
            stage.name,
            progress.round,
            stage.rounds,
            progress.step,
            metrics,
            best,
            domains,
            up,
            down,
            seconds,
        )
        self.history.append([asdict(row)])
        self.told(row)

    def _deadline(self, what: str) -> None:
        self.nodes.deadline(self.config.resources.round_timeout, what)

    def _call(self, method: str, nodes: Sequence[str]) -> dict[str, Any]:
        return self.nodes.each(method, dict.fromkeys(nodes, ()))

    def _phases(
        self, index: int, part: str, phases: tuple[Phase, ...], round: int
    ) -> dict[str, float]:
        """Run phases in order; what one sends is what the receiver's next phase finds in its
        inbox.
        """
        metrics: dict[str, float] = {}
        for number, phase in enumerate(phases):
            domains = (
                list(self.plan.domains) if part == "close" else self._active(self.stages[index])
            )
            where = [SERVER] if phase.at == "server" else domains
            inboxes = {name: self.mail.pop(name, {}) for name in where}
            done = self.nodes.run_phase(index, part, number, round, inboxes)
            if phase.at == "server" and self.config.control == SOLO:  # a domain may have stopped
                done = {name: sent.only(domains) for name, sent in done.items()}
            for sender, sent in done.items():
                check_told(self.stages[index], sender, self.plan.nodes, sent.send, sent.rows)
                self.watch.check(sent.rows)
            rows = {name: sent.rows for name, sent in done.items()}
            self._account(self.stages[index].name, part, number, round, rows)
            for sender, sent in done.items():
                self.rows += sent.rows
                for receiver, handle in sent.send.items():
                    if sender in self.mail.setdefault(receiver, {}):
                        raise CrossfedError(
                            f"{sender} wrote to {receiver} twice before {receiver} read its inbox."
                        )
                    self.mail[receiver][sender] = handle
                metrics |= {f"train/{sender}/{name}": value for name, value in sent.metrics.items()}
        return metrics

    # -- privacy -----------------------------------------------------------------------------------

    def expect(self) -> list[str]:
        """What the run's perturbed messages will cost, in words; before any node is started.

        Raises:
            CrossfedError: the budget does not let the first round start.
        """
        if not self.checkpoints.committed():
            return self.accountant.expectation(self.stages, self.plan.domains)
        return [
            f"{name}: ε = {epsilon:g} so far" for name, epsilon in self.accountant.metrics().items()
        ]

    def _affordable(self, stage: Stage) -> bool:
        """Whether the budget lets the next round of a stage start; the stage that it ends is noted.

        Raises:
            CrossfedError: the run has nothing to keep yet.
        """
        parts = {"open": 0 if self.progress.opened else 1, "each": 1, "close": 1}
        over = self.accountant.over(self.accountant.planned(stage.name, parts, self._active(stage)))
        if over is None:
            return True
        if not self.progress.step:
            raise self.accountant.refused(stage.name, over)
        self.progress.budget_stops[stage.name] = self.progress.round
        return False

    def _account(
        self, stage: str, part: str, phase: int, round: int, rows: Mapping[str, Sequence[Entry]]
    ) -> None:
        """Record what leaves under noise in this phase. Nothing of it has been delivered yet."""
        lines = self.accountant.lines(stage, part, phase, round, rows)
        if (over := self.accountant.over(messages_of(lines))) is not None:
            raise CrossfedError(
                f"{over[0]} sent more differently perturbed messages in stage {stage!r} than "
                f"in the rounds before and would "
                f"pass privacy.budget with ε = {over[1]:g}; they were not delivered. The last "
                f"committed round stays."
            )
        if lines:
            self.record.append(lines)
            self.accountant.add(lines)
            if self.mirror is not None:
                self.mirror.record(RECORD)

    def _write_ledger(self) -> tuple[int, int]:
        up = sum(row.bytes for row in self.rows if row.direction != Direction.DOWN)
        down = sum(row.bytes for row in self.rows if row.direction != Direction.UP)
        if self.rows:
            self.ledger.append([asdict(row) for row in self.rows])
        self.rows = []
        return up, down

    # -- selecting ---------------------------------------------------------------------------------

    def _evaluate(self, stage: Stage, active: Sequence[str]) -> dict[str, float]:
        """Measure the validation split, keep the best states, decide who stops."""
        select, progress = self.config.evaluation.select, self.progress
        measured: dict[str, Measured] = self._call("evaluate", active)
        progress.latest |= {name: found.metrics[select] for name, found in measured.items()}
        alone = self.config.control == SOLO
        if stage.local or alone:
            scopes = {name: (progress.latest[name], [name]) for name in active}
        else:
            scopes = {
                FEDERATION: (
                    sum(progress.latest.values()) / len(progress.latest),
                    list(self.plan.nodes),
                )
            }
        for scope, (value, members) in scopes.items():
            best = progress.best.get(scope)
            if best is None or value > best.value:
                held = {name: progress.latest[name] for name in members if name in progress.latest}
                progress.best[scope] = Best(value, stage.name, progress.round, values=held)
                if stage.keep_best:
                    self._call("keep", members)
                    if alone and not stage.local and SERVER in self.plan.nodes:
                        self.nodes.each("keep", {SERVER: (scope,)})
            else:
                best.stale += 1
                if stage.patience is not None and best.stale >= stage.patience:
                    progress.stopped.append(scope)
        rows = {
            f"val/{name}/{key}": value
            for name, found in measured.items()
            for key, value in found.metrics.items()
        }
        rows[f"val/mean/{select}"] = sum(progress.latest.values()) / len(progress.latest)
        return rows

    def _remember(self, stage: Stage) -> None:
        """Note which round each domain's state comes from."""
        for scope, best in self.progress.best.items():
            for name in self.plan.domains if scope == FEDERATION else (scope,):
                told = (
                    {"stage": best.stage, "round": best.round, "value": best.value}
                    if stage.keep_best
                    else {}
                )
                self.progress.selected[name] = {**told, "rounds": self.progress.round}
