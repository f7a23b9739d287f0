"""Two studies of two trials at once each on one cluster, at the same time, and a machine that is
taken away under both.

    python tests/faults/two_studies.py               four machines, one of them to spare
    python tests/faults/two_studies.py --replaced    three machines, all of them full; another one takes the lost one's place

The trials are held in their third round (`toy_faults.HELD`) until all four have got there and the
machine is gone.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
# the tests' own modules, when this file is run as a script
sys.path.insert(0, str(HERE.parents[1] / "support"))
# Ray's machines inherit this environment: their workers must find the toy methods
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(HERE.parents[1] / "support"), os.environ.get("PYTHONPATH")])
)

from crossfed.platform.checkpoint import read_json  # noqa: E402
from crossfed.platform.config.settings import RunConfig  # noqa: E402
from crossfed.platform.federation.final import test_once  # noqa: E402
from crossfed.platform.federation.runs import stored_config  # noqa: E402
from crossfed.platform.report.recording import run_recorded  # noqa: E402
from faults.matrix import DOMAINS, Machines, make_shops, numbers, say  # noqa: E402

STUDIES = ("east", "west")
TRIALS, ROUNDS, CPUS = 4, 6, 4
PATIENCE = 900
"""Seconds that four trials may take to be in their third round, on a computer that does other
things as well.
"""


class Rack(Machines):
    """Machines with room for four actors each: three hold the two studies' four trials of three
    actors.
    """

    def add(self) -> None:
        self.cluster.add_node(num_cpus=CPUS, wait=False)

    def lose(self, ray_node: str, replaced: bool) -> None:
        """Take away the machine of this id."""
        (gone,) = (node for node in self.cluster.worker_nodes if node.node_id == ray_node)
        self.cluster.remove_node(gone, allow_graceful=False)
        if replaced:
            self.add()


def command(name: str, data: Path, out: Path, address: str, marker: Path) -> list[str]:
    """One study's command line."""
    sets = (
        f"rounds={ROUNDS}",
        f"marker={marker}",
        "resources.cpus_per_domain=1",
        "resources.cpus_server=1",
        "resources.placement=SPREAD",
        "resources.start_timeout=600",
    )
    words = [
        "tune",
        "toy_faults:HELD",
        "--data",
        str(data),
        "--domains",
        ",".join(DOMAINS[:2]),
        "--out",
        str(out),
        "--study",
        name,
        "--trials",
        str(TRIALS),
        "--concurrent",
        "2",
        "--pruner",
        "none",
        "--seeds",
        "1",
        "--backend",
        "ray",
        "--search",
        "step={low: 0.1, high: 1.0}",
        "--address",
        address,
    ]
    return [
        sys.executable,
        "-m",
        "crossfed.platform.cli.main",
        *words,
        *(part for text in sets for part in ("--set", text)),
    ]


def held(folder: Path) -> list[Path]:
    """The run directories of a study's trials that have two rounds behind them and are not
    finished.
    """
    return [
        path.parent
        for path in sorted(folder.glob("trial-*/history.jsonl"))
        if len(path.read_text().splitlines()) == 2 and not (path.parent / "result.json").exists()
    ]


def living() -> list[dict[str, Any]]:
    """The actors of the cluster that are not dead."""
    from ray._private import state

    return [row for row in state.actors().values() if row["State"] != "DEAD"]


def victim(runs: Iterable[Path]) -> tuple[str, list[str], int]:
    """The machine with the most trials' own processes: its id, whose nodes are on it, and how many
    such processes.
    """
    trials = Counter(
        row["Address"]["NodeID"] for row in living() if "Trainable" in row["ActorClassName"]
    )
    nodes: dict[str, list[str]] = {}
    for run in runs:
        for name, row in read_json(run / "placement.json").items():
            nodes.setdefault(row["ray_node"], []).append(f"{run.parent.name}/{run.name}/{name}")
    chosen = max(
        nodes, key=lambda node: (len({text.split("/")[0] for text in nodes[node]}), trials[node])
    )
    return chosen, nodes[chosen], trials[chosen]


def problems(folder: Path, alone: Path) -> Iterator[str]:
    """What is wrong with a study that is over, in words."""
    import optuna

    loaded = optuna.load_study(study_name=folder.name, storage=f"sqlite:///{folder / 'optuna.db'}")
    found = [(trial.number, trial.state.name) for trial in loaded.trials]
    if found != [(number, "COMPLETE") for number in range(TRIALS)]:
        yield (
            f"its trials are {found}, {[trial.user_attrs.get('reason') for trial in loaded.trials]}"
        )
        return
    runs = sorted(path.parent for path in folder.glob("*/config.yaml"))
    names = [f"trial-{number:04d}" for number in range(TRIALS)]
    if [run.name for run in runs] != ["final-seed-0", *names]:
        yield f"its runs are {[run.name for run in runs]}"
    for run in runs:
        result, config = read_json(run / "result.json"), stored_config(run)
        calm = run_recorded(
            _calm(config, alone / folder.name), finish=test_once, name=run.name
        ).result
        if run.name.startswith("trial"):  # the test split is not read in trials
            for row in calm["domains"].values():
                row.pop("test"), row.pop("test_users")
            value = loaded.trials[int(run.name[-4:])].value
            wanted = (
                sum(row["validation"][config.evaluation.select] for row in calm["domains"].values())
                / 2
            )
            if value != wanted:
                yield f"{run.name} has the value {value}, an undisturbed one {wanted}"
        if numbers(result) != numbers(calm):
            yield f"{run.name} has other numbers than an undisturbed run"
        if len((run / "history.jsonl").read_text().splitlines()) != ROUNDS:
            yield f"{run.name} has not {ROUNDS} rounds"


def _calm(config: RunConfig, out: Path) -> RunConfig:
    """The same run in one process, untracked."""
    given = {
        "backend": "inprocess",
        "out": out,
        "tracking": config.tracking.model_copy(update={"enabled": False}),
        "resources": type(config.resources)(),
    }
    return config.model_copy(update=given)


def recorded(out: Path) -> Iterator[str]:
    """What is wrong with the store that both studies record in, in words."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{out / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("crossfed")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    names = Counter(
        (run.data.tags["study"], run.info.run_name.split()[0], run.info.status) for run in runs
    )
    each = ["final-seed-0", *(f"trial-{number:04d}" for number in range(TRIALS))]
    wanted = Counter((study, name, "FINISHED") for study in STUDIES for name in [study, *each])
    if names != wanted:
        yield f"MLflow holds {dict(names - wanted)} too many and lacks {dict(wanted - names)}"
    for run in runs:
        if run.data.tags["role"] != "study":
            for key in run.data.metrics:
                steps = [metric.step for metric in client.get_metric_history(run.info.run_id, key)]
                if not key.rpartition("/")[2].startswith("test_") and steps != list(
                    range(1, ROUNDS + 1)
                ):
                    yield f"MLflow holds {key} of {run.info.run_name} at steps {steps}"


def left_over(seconds: float = 60) -> list[str]:
    """What the studies have left on the cluster, once they had some seconds to end."""
    import ray

    until = time.monotonic() + seconds
    while True:
        groups = [
            row["state"]
            for row in ray.util.placement_group_table().values()
            if row["state"] != "REMOVED"
        ]
        found = [f"actor {row['ActorClassName']} {row['State']}" for row in living()]
        found += [f"placement group {name}" for name in groups]
        free, total = ray.available_resources().get("CPU"), ray.cluster_resources().get("CPU")
        found += [f"{free} of {total} CPUs are free"] * (free != total)
        if not found or time.monotonic() > until:
            return found
        time.sleep(1)


def two_studies(folder: Path, replaced: bool) -> list[str]:
    """Run both and remove a machine under them; what is wrong, in words."""
    shops, out, marker = make_shops(folder / "shops"), folder / "out", folder / "go"
    out.mkdir()
    began, rack, running = time.monotonic(), Rack(), dict[str, subprocess.Popen[bytes]]()
    try:
        if not replaced:
            rack.add()
        for name in STUDIES:
            with (folder / f"{name}.log").open("wb") as log:
                words = command(name, shops, out, rack.address, marker)
                running[name] = subprocess.Popen(words, stdout=log, stderr=log, cwd=folder)
        while sum(len(held(out / name)) for name in STUDIES) < 2 * len(STUDIES):
            ended = [name for name, process in running.items() if process.poll() is not None]
            if ended or time.monotonic() > began + PATIENCE:
                return [
                    f"the trials did not get to their third round: "
                    f"{(folder / f'{n}.log').read_text()}"
                    for n in running
                ]
            time.sleep(0.5)
        ray_node, nodes, trials = victim(run for name in STUDIES for run in held(out / name))
        say(
            f"{time.monotonic() - began:.0f} s: the machine goes that has {', '.join(nodes)} "
            f"and {trials} trials' own processes"
        )
        rack.lose(ray_node, replaced)
        time.sleep(5)
        marker.touch()
        for process in running.values():
            process.wait(max(1.0, began + 2 * PATIENCE - time.monotonic()))
        say(f"{time.monotonic() - began:.0f} s: both ended")
        wrong = [
            f"{name} ended with {process.returncode}"
            for name, process in running.items()
            if process.returncode
        ]
        wrong += [
            f"{name}: {text}" for name in STUDIES for text in problems(out / name, folder / "alone")
        ]
        wrong += [*recorded(out), *left_over()]
        restarts = {
            str(path.parent.relative_to(out)): read_json(path)["restarts"]
            for path in out.glob("*/*/result.json")
        }
        say(
            f"runs that went back to their last commit by themselves: "
            f"{[run for run, n in restarts.items() if n] or 'none'}"
        )
        wrong += [
            f"{run} counted {n} losses of one machine" for run, n in restarts.items() if n > 1
        ]
        for name in STUDIES:
            say(f"--- {name}\n{(folder / f'{name}.log').read_text()}")
        return wrong
    except subprocess.TimeoutExpired as error:
        logs = "\n".join((folder / f"{name}.log").read_text() for name in STUDIES)
        return [f"a study did not end within {2 * PATIENCE} s: {error.cmd[8]}\n{logs}"]
    finally:
        for process in running.values():
            process.kill()
        rack.close()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--replaced", action="store_true", help="a full cluster, and a new machine for the lost one"
    )
    parser.add_argument("--out", type=Path, help="a JSON file for what is wrong")
    parser.add_argument(
        "--keep", type=Path, help="a new folder for everything, instead of a temporary one"
    )
    told = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="studies-") as temporary:
        folder = told.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        wrong = two_studies(folder, told.replaced)
    if told.out:
        told.out.write_text(json.dumps(wrong), encoding="utf-8")
    say(
        "\n".join(wrong)
        or "both studies finished with the numbers of undisturbed runs; "
        "nothing is left on the cluster"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
