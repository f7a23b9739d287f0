"""One trial: a whole federated run inside a Tune trial, reporting every round.

`run_federation` runs in a thread of the trial's process and waits after every round for the
scheduler's word. The process and its nodes' processes are used again for the next trial.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ray import tune

from crossfed.platform.config.settings import RunConfig
from crossfed.platform.errors import CrossfedError
from crossfed.platform.federation.node import Artifacts
from crossfed.platform.federation.rounds import Round
from crossfed.platform.federation.run import Finish, Stopped
from crossfed.platform.federation.runs import stored_config
from crossfed.platform.report.recording import run_recorded

STOPPED = "stopped"
"""A file in a trial's run directory: why the driver stopped it."""


class FederationTrial(tune.Trainable):  # type: ignore[misc]
    """A Tune trial whose steps are the rounds of one federation.

    Its configuration:
        number: the trial's. run: RunConfig, whose `out` holds the trial's directory. name: that
        directory's name. cap: rounds after which the trial is over; None runs to the end. cpus,
        gpus: what it reserves, for the books.
    """

    def setup(
        self,
        config: dict[str, Any],
        artifacts: Artifacts | None = None,
        finish: Finish | None = None,
    ) -> None:
        self._artifacts, self._finish = artifacts, finish
        self._config = config
        self._thread: threading.Thread | None = None

    def _begin(self) -> threading.Thread:
        self._rows: queue.Queue[dict[str, Any] | Exception] = queue.Queue(1)
        self._go, self._halt = threading.Semaphore(0), threading.Event()
        self._asked = False
        thread = threading.Thread(target=self._work, args=(dict(self._config),), daemon=True)
        thread.start()
        return thread

    def step(self) -> dict[str, Any]:
        """The next round, or the end."""
        if self._thread is None:
            # not before: after a lost machine Tune may set up a process for a trial that another
            # one has finished meanwhile
            self._thread = self._begin()
        if self._asked:
            self._go.release()
        row = self._rows.get()
        if isinstance(row, Exception):
            raise row
        self._asked = not row["done"]
        return row

    def cleanup(self) -> None:
        if self._thread is not None:
            self._halt.set()
            self._go.release()
            self._thread.join()
            self._thread = None

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self.cleanup()
        self._config = new_config
        return True

    # No checkpoint of Tune's: a run commits its own, and a trial that starts again finds them in
    # its directory.
    def save_checkpoint(self, checkpoint_dir: str) -> None:
        return None

    def load_checkpoint(self, checkpoint: Any) -> None:
        return None

    # -- in the thread -----------------------------------------------------------------------------

    def _work(self, config: dict[str, Any]) -> None:
        try:
            self._rows.put(self._run(config))
        except Stopped:
            return
        except CrossfedError as error:
            self._rows.put({"done": True, "step": 0, "failed": str(error)})
        # raised again in `step`, where Tune counts it against the retries
        except Exception as error:
            self._rows.put(error)

    def _run(self, config: dict[str, Any]) -> dict[str, Any]:
        run: RunConfig = config["run"]
        run_dir = run.out / config["name"]
        book = TrialRecord(run, config["number"], config["cpus"], config["gpus"])
        resume = run_dir if (run_dir / "config.yaml").is_file() else None
        if resume is not None:
            book.recall(run_dir / "history.jsonl")
            run = stored_config(run_dir)
            (run_dir / STOPPED).unlink(missing_ok=True)

        def told(row: Round) -> None:
            book.add(row)
            if config["cap"] is not None and row.step >= config["cap"] and book.domains:
                raise Stopped(f"reached {config['cap']} rounds", "FINISHED", "finished")
            self._rows.put({"done": False, "step": row.step, "facts": book.json()})
            self._go.acquire()
            if self._halt.is_set():
                pruned = (run_dir / STOPPED).is_file()
                reason = (
                    (run_dir / STOPPED).read_text(encoding="utf-8")
                    if pruned
                    else "the search was interrupted"
                )
                raise Stopped(reason, "KILLED", "pruned" if pruned else "killed")

        try:
            done = run_recorded(
                run,
                resume=resume,
                on_round=told,
                finish=self._finish,
                artifacts=self._artifacts,
                name=config["name"],
            )
        except Stopped as stopped:
            if stopped.outcome != "finished":
                raise
        else:
            book.end(done.result)
        return {"done": True, "over": True, "step": book.rounds, "facts": book.json()}


class TrialRecord:
    """What a trial has come to so far, as plain values.

    Args:
        run: the trial's run. number: the trial's. cpus, gpus: what it reserves; multiplied by its
            wall-clock time.
    """

    def __init__(
        self,
        run: RunConfig,
        number: int,
        cpus: float,
        gpus: float,
        clock: Callable[[], float] = time.time,
    ):
        self.run, self.number, self.cpus, self.gpus, self.clock = run, number, cpus, gpus, clock
        self.began, self.before = clock(), 0.0
        self.rounds = 0
        # by round: one that is run again after a roll-back counts once
        self.bytes_up: dict[int, int] = {}
        self.domains: dict[str, float] = {}
        self.epsilon: float | None = None
        self.run_id: str | None = None
        self.test: dict[str, float] = {}
        self.restarts = 0

    def recall(self, history: Path) -> None:
        """Count what an interrupted run did before."""
        if history.is_file():
            for line in history.read_text(encoding="utf-8").splitlines():
                row = json.loads(line)
                self.before += row["seconds"]
                self.bytes_up[row["step"]] = row["bytes_up"]

    def add(self, row: Round) -> None:
        """A round was run."""
        self.rounds = row.step
        self.bytes_up[row.step] = row.bytes_up
        self.domains = row.domains or self.domains
        self.epsilon = row.metrics.get(
            f"privacy/max/epsilon_{self.run.privacy.counting}", self.epsilon
        )

    def end(self, result: Mapping[str, Any]) -> None:
        """The run is over: what counts is the selected state."""
        metric = self.run.evaluation.select
        self.domains = {name: row["validation"][metric] for name, row in result["domains"].items()}
        self.restarts = result["restarts"]
        self.test = {
            name: row["test"][metric] for name, row in result["domains"].items() if "test" in row
        }

    def json(self) -> str:
        """The facts of a trial, for its books."""
        seconds = self.before + self.clock() - self.began
        told = {
            "rounds": self.rounds,
            "domains": self.domains,
            "bytes_up": sum(self.bytes_up.values()),
            "seconds": seconds,
            "cpu_seconds": self.cpus * seconds,
            "gpu_seconds": self.gpus * seconds,
        }
        optional = {
            "epsilon": self.epsilon,
            "test": self.test or None,
            "restarts": self.restarts or None,
        }
        return json.dumps(
            told | {key: value for key, value in optional.items() if value is not None}
        )
