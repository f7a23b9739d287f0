"""Faults in real federated runs: what is killed, when, and whether the numbers are those of an
undisturbed run.

    python tests/faults/matrix.py                                  every federated method, every fault, every moment
    python tests/faults/matrix.py --methods p2p_iagr,fedcrf --moments last --each 1 --out
    outcomes.json
    python tests/faults/matrix.py --spread                         one domain per machine, and the placement that proves it

A fault is: the actor of one domain killed, the server's killed, the machine of one domain removed,
the driver killed and its run resumed. A moment is the first, the middle or the last round of a
stage; the fault strikes when that round has been run and evaluated, and is not committed yet. Four
Ray machines on this computer (`ray.cluster_utils`) stand for a cluster.
"""  # noqa: E501

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

HERE = Path(__file__).resolve()
# the tests' own modules, when this file is run as a script
sys.path.insert(0, str(HERE.parents[1] / "support"))

from contract.test_methods import METHODS, small  # noqa: E402
from crossfed.platform.checkpoint import write_json  # noqa: E402
from crossfed.platform.config.settings import RunConfig  # noqa: E402
from crossfed.platform.errors import CrossfedError  # noqa: E402
from crossfed.platform.federation.final import test_once  # noqa: E402
from crossfed.platform.federation.rounds import Round  # noqa: E402
from crossfed.platform.federation.runs import stored_config  # noqa: E402
from crossfed.platform.method import SERVER, Scope  # noqa: E402
from crossfed.platform.registry import find_method  # noqa: E402
from crossfed.platform.report.recording import run_recorded  # noqa: E402

DOMAINS = ("books", "films", "games")
FEDERATED = tuple(name for name in METHODS if find_method(name).scope == Scope.FEDERATED)
SETTINGS = (
    "resources.cpus_per_domain=1",
    "resources.cpus_server=1",
    "resources.placement=SPREAD",
    "resources.round_timeout=120",
    "resources.start_timeout=600",
    "tracking.artifacts=false",
)
LONG = {"rounds": 3, "epochs": 3, "cf_epochs": 3}
"""Lengths of stages, where a method has them, at which every stage has a first, a middle and a last
round.
"""
KINDS = ("kill a domain", f"kill {SERVER}", f"remove machine of {DOMAINS[0]}", "kill driver")
LIMIT = 480
"""Seconds after which a case counts as a hang, on a machine that does nothing else."""


@dataclass(frozen=True, slots=True)
class Case:
    """One fault.

    Args:
        fault: `kill NODE`, `remove machine of NODE` or `kill driver`.
        stage, moment: where it strikes, in words. step: the same as rounds since the run began.
    """

    method: str
    fault: str
    stage: str
    moment: str
    step: int

    @property
    def kind(self) -> str:
        """The fault without the domain's name."""
        return "kill a domain" if self.fault in {f"kill {name}" for name in DOMAINS} else self.fault


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of it: `same` is what is wanted, everything else says what was wrong."""

    case: Case
    outcome: str
    restarts: int
    seconds: float


def settings(method: str) -> tuple[str, ...]:
    """What all runs of a method set."""
    fields = find_method(method).Config.model_fields
    return (*SETTINGS, *(f"{key}={value}" for key, value in LONG.items() if key in fields))


def numbers(result: dict[str, Any]) -> dict[str, Any]:
    """What a fault may not change."""
    return {key: result[key] for key in ("domains", "bytes", "candidates")}


def history(run_dir: Path) -> list[dict[str, Any]]:
    """Every round, without its seconds and without the privacy account, in which a repeated release
    counts again.
    """
    rows = [json.loads(line) for line in (run_dir / "history.jsonl").read_text().splitlines()]
    for row in rows:
        row["metrics"] = {
            key: value for key, value in row["metrics"].items() if not key.startswith("privacy/")
        }
    return [row | {"seconds": 0} for row in rows]


class Machines:
    """Four Ray machines on this computer: a head, and one per domain, with invented GPUs."""

    def __init__(self) -> None:
        os.environ["RAY_AUTH_MODE"] = "disabled"
        os.environ.setdefault("RAY_raylet_start_wait_time_s", "300")  # beside other work
        import ray
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 1, "num_gpus": 0, "include_dashboard": False}
        self.cluster: Any = Cluster(initialize_head=True, head_node_args=head)
        for _ in DOMAINS:
            self.add()
        self.cluster.wait_for_nodes(timeout=120)
        ray.init(address=self.cluster.address, log_to_driver=False, logging_level="ERROR")

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def add(self) -> None:
        """One more machine, with room for two actors."""
        self.cluster.add_node(num_cpus=2, num_gpus=1, wait=False)

    def remove(self, ray_node: str) -> None:
        """Take away the machine of this id, and put a new one into its place."""
        (gone,) = (node for node in self.cluster.worker_nodes if node.node_id == ray_node)
        self.cluster.remove_node(gone, allow_graceful=False)
        self.add()

    def close(self) -> None:
        import ray

        ray.shutdown()
        self.cluster.shutdown()


def moments(rows: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str, int]]:
    """(stage, moment, step) of the first, middle and last round of every stage that was run."""
    for stage, group in itertools.groupby(rows, key=lambda row: row["stage"]):
        steps = [row["step"] for row in group]
        named = {steps[len(steps) // 2]: "middle", steps[-1]: "last", steps[0]: "first"}
        yield from ((stage, named[step], step) for step in sorted(named))


def strike(case: Case, run_dir: Callable[[], Path], machines: Machines) -> Callable[[Round], None]:
    """What brings the fault about, once, from inside the run."""
    done: list[bool] = []

    def told(row: Round) -> None:
        if row.step != case.step or done:
            return
        done.append(True)
        placement = json.loads((run_dir() / "placement.json").read_text())
        node = case.fault.split()[-1]
        if case.fault.startswith("kill"):
            os.kill(placement[node]["pid"], signal.SIGKILL)
        else:
            machines.remove(placement[node]["ray_node"])

    return told


@contextlib.contextmanager
def limit(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in what takes longer."""

    def late(_signal: int, _frame: FrameType | None) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def drive(config: Path, step: int) -> None:
    """Run a configuration and die, as by a power cut, after so many rounds. In a process of its
    own.
    """

    def told(row: Round) -> None:
        if row.step == step:
            os.kill(os.getpid(), signal.SIGKILL)

    run_recorded(stored_config(config.parent), on_round=told, finish=test_once, name="driven")


def run_case(
    case: Case,
    config: RunConfig,
    expected: tuple[Any, Any],
    machines: Machines,
    folder: Path,
    allowed: int,
) -> Outcome:
    """Run a method under a fault and compare it with the undisturbed run; after `allowed` seconds
    it is a hang.
    """
    began, restarts, started = time.monotonic(), 0, list[Path]()
    try:
        with limit(allowed):
            if case.fault == "kill driver":
                (folder / "told").mkdir(parents=True)
                joined = config.model_copy(
                    update={
                        "resources": config.resources.model_copy(
                            update={"address": machines.address}
                        )
                    }
                )
                (folder / "told" / "config.yaml").write_text(joined.to_yaml(), encoding="utf-8")
                command = [
                    sys.executable,
                    str(HERE),
                    "--drive",
                    str(folder / "told" / "config.yaml"),
                    str(case.step),
                ]
                code = subprocess.run(
                    command, check=False, stderr=subprocess.DEVNULL, timeout=allowed
                ).returncode
                if code != -signal.SIGKILL:
                    return Outcome(
                        case, f"the driver ended with {code}", 0, time.monotonic() - began
                    )
                run_dir = config.out / "driven"
                done = run_recorded(stored_config(run_dir), resume=run_dir, finish=test_once)
            else:
                told = strike(case, lambda: started[0], machines)
                done = run_recorded(config, on_round=told, finish=test_once, started=started.append)
                restarts = done.result["restarts"]
                if restarts != 1:
                    return Outcome(
                        case,
                        f"{restarts} restarts where one was due",
                        restarts,
                        time.monotonic() - began,
                    )
        same = (numbers(done.result), history(done.run_dir)) == expected
        outcome = "same" if same else "other numbers"
    # Ray makes a SystemError of what a signal raises
    except (TimeoutError, SystemError, subprocess.TimeoutExpired):
        outcome = f"no end within {allowed} s"
    except CrossfedError as error:
        outcome = f"refused: {error}"
    return Outcome(case, outcome, restarts, time.monotonic() - began)


def cases(
    method: str, rows: Sequence[dict[str, Any]], nodes: Sequence[str], wanted: Sequence[str]
) -> list[Case]:
    """Every fault at every wanted moment."""
    faults = [f"kill {node}" for node in nodes] + [f"remove machine of {DOMAINS[0]}", "kill driver"]
    places = [place for place in moments(rows) if place[1] in wanted]
    return [Case(method, fault, *place) for fault in faults for place in places]


def matrix(
    methods: Sequence[str],
    wanted: Sequence[str],
    each: int | None,
    shops: Path,
    folder: Path,
    tell: Callable[[str], None],
    allowed: int = LIMIT,
) -> list[Outcome]:
    """Run the matrix.

    Args:
        methods, wanted: which methods, and which moments.
        each: of every kind of fault (an actor, the server, a machine, the driver) so many per
            method; None is all.
        shops: prepared data with the domains of `DOMAINS`. folder: for the runs. tell: told every
            outcome as it is there.
    """
    machines, found = Machines(), list[Outcome]()
    try:
        for method in methods:
            calm = run_recorded(
                small(method, shops, folder / method / "calm", *settings(method)), finish=test_once
            )
            rows = history(calm.run_dir)
            server = [SERVER] if find_method(method).init_server else []
            chosen = cases(method, rows, [*server, *DOMAINS], wanted)
            if each is not None:
                chosen = [
                    case for kind in KINDS for case in [c for c in chosen if c.kind == kind][:each]
                ]
            for number, case in enumerate(chosen):
                place = folder / method / f"{number:03d}"
                config = small(method, shops, place / "runs", *settings(method), backend="ray")
                outcome = run_case(
                    case, config, (numbers(calm.result), rows), machines, place, allowed
                )
                found.append(outcome)
                tell(line(outcome))
    finally:
        machines.close()
    return found


def say(text: str) -> None:
    """A line for the terminal, at once."""
    print(text, flush=True)


def line(row: Outcome) -> str:
    case = row.case
    return (
        f"| {case.method} | {case.fault} | {case.stage} | {case.moment} ({case.step}) | "
        f"{row.outcome} | {row.restarts} | "
        f"{row.seconds:.0f} |"
    )


HEAD = (
    "| method | fault | stage | round | outcome | restarts | seconds "
    "|\n|---|---|---|---|---|---:|---:|"
)


def spread(methods: Sequence[str], shops: Path, folder: Path, tell: Callable[[str], None]) -> bool:
    """Run methods with one domain per machine and GPU; whether the placement says so and the
    numbers are the same.
    """
    machines, sound = Machines(), True
    try:
        for method in methods:
            calm = run_recorded(
                small(method, shops, folder / method / "calm", *settings(method)), finish=test_once
            )
            sets = (
                *settings(method),
                "resources.placement=STRICT_SPREAD",
                "resources.gpus_per_domain=1",
                "resources.device=cpu",
            )
            done = run_recorded(
                small(method, shops, folder / method / "spread", *sets, backend="ray"),
                finish=test_once,
            )
            placed = done.result["placement"]
            tell(f"{method}")
            for name, row in placed.items():
                tell(
                    f"  {name:<7} machine {row['ray_node'][:12]}  pid {row['pid']}  GPU "
                    f"{', '.join(row['gpu_ids']) or '–'}"
                )
            apart = len({row["ray_node"] for row in placed.values()}) == len(placed) >= len(DOMAINS)
            gpus = all(len(placed[name]["gpu_ids"]) == 1 for name in DOMAINS)
            same = numbers(done.result) == numbers(calm.result)
            tell(
                f"  one machine each: {apart}   one GPU each: {gpus}   numbers of a run in "
                f"one process: {same}"
            )
            sound &= apart and gpus and same
    finally:
        machines.close()
    return sound


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--methods", default=",".join(FEDERATED))
    parser.add_argument("--moments", default="first,middle,last")
    parser.add_argument("--each", type=int, help="so many cases of every kind of fault per method")
    parser.add_argument(
        "--data", type=Path, help="prepared data with the domains books, films and games"
    )
    parser.add_argument("--out", type=Path, help="a JSON file for the outcomes")
    parser.add_argument(
        "--limit", type=int, default=LIMIT, help="seconds after which a case counts as a hang"
    )
    parser.add_argument("--spread", action="store_true")
    parser.add_argument("--drive", nargs=2, help=argparse.SUPPRESS)
    told = parser.parse_args()
    if told.drive:
        drive(Path(told.drive[0]), int(told.drive[1]))
        return 0
    methods = told.methods.split(",")
    with tempfile.TemporaryDirectory(prefix="faults-") as temporary:
        folder = Path(temporary)
        shops = told.data or make_shops(folder / "shops")
        if told.spread:
            return 0 if spread(methods, shops, folder, say) else 1
        say(HEAD)
        found = matrix(methods, told.moments.split(","), told.each, shops, folder, say, told.limit)
    if told.out:
        write_json(told.out, [asdict(row) for row in found])
    print(f"\n{sum(row.outcome == 'same' for row in found)} of {len(found)} the same")
    return 0 if found and all(row.outcome == "same" for row in found) else 1


def make_shops(path: Path) -> Path:
    """The tests' three small shops."""
    from conftest import write_shops

    return write_shops(path)


if __name__ == "__main__":
    sys.exit(main())
