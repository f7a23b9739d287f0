"""Whole searches on a real Ray, a real Optuna storage and a real MLflow store."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from crossfed.platform.checkpoint import read_json
from crossfed.platform.config.settings import RunConfig, build
from crossfed.platform.errors import CrossfedError
from crossfed.platform.federation.final import test_once as final_test
from crossfed.platform.report.recording import run_recorded
from crossfed.tuning.placement import slots
from crossfed.tuning.search import go_on, start, tune_all
from crossfed.tuning.study import Search, Study

pytestmark = pytest.mark.timeout(600)
NODES = ("server", "books", "films", "games")


def base(
    out: Path,
    shops: Path,
    method: str,
    *sets: str,
    backend: str = "inprocess",
    tracking: bool = False,
) -> RunConfig:
    values = {"data": shops, "out": out, "backend": backend, "tracking.enabled": tracking}
    return build(method, sets=["rounds=3", *sets], values=values)


def machine(cpus: float, gpus: float = 0) -> dict[str, Any]:
    return {"Alive": True, "Resources": {"CPU": cpus, "GPU": gpus}}


def test_a_study_is_not_kept_at_a_uri(shops: Path, tmp_path: Path) -> None:
    search = Search(name="away", trials=1, seeds=1)
    with pytest.raises(CrossfedError, match="A study is kept in a folder, not at a URI"):
        start(search, base(tmp_path, shops, "toys:FRAGILE", "mirror=s3://bucket/prefix"))
    assert not (tmp_path / "away").exists()


def test_a_study_survives_what_its_trials_do(
    shops: Path, tmp_path: Path, ray_cluster: None
) -> None:
    """NaN, an exception, a process that dies: each is one failed trial with its reason, in Optuna
    and in MLflow.
    """
    from mlflow import MlflowClient

    search = Search(
        name="faults", trials=4, sampler="grid", pruner="none", seeds=2, concurrent=2, retries=0,
        changes={"fault": ["none", "nan", "raise", "die"]},
    )  # fmt: skip
    found = start(search, base(tmp_path, shops, "toys:FRAGILE", tracking=True), finish=final_test)
    trials = {trial.params["fault"]: trial for trial in found.study.optuna.trials}
    assert {fault: trial.state for fault, trial in trials.items()} == {
        "none": TrialState.COMPLETE,
        "nan": TrialState.FAIL,
        "raise": TrialState.FAIL,
        "die": TrialState.FAIL,
    }
    assert "NaN" in trials["nan"].user_attrs["reason"]
    assert "_fail raised RuntimeError: the toy breaks" in trials["raise"].user_attrs["reason"]
    assert "died" in trials["die"].user_attrs["reason"]
    assert found.summary["outcomes"] == {"finished": 1, "failed": 3}
    assert found.summary["winner"] == {
        "trial": 0,
        "config": {"fault": "none"},
        "values": trials["none"].values,
    }

    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("crossfed")
    assert experiment is not None
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    parent = next(runs.pop(name) for name in list(runs) if name.startswith("faults "))
    assert parent.info.status == "FINISHED"
    assert {run.data.tags["mlflow.parentRunId"] for run in runs.values()} == {parent.info.run_id}
    assert {run.data.tags["role"] for name, run in runs.items() if name.startswith("final")} == {
        "final"
    }
    outcome = {
        run.data.params["fault"]: (run.info.status, run.data.tags["outcome"])
        for name, run in runs.items()
        if name.startswith("trial")
    }
    assert outcome == {
        "none": ("FINISHED", "finished"),
        "nan": ("FAILED", "failed"),
        "raise": ("FAILED", "failed"),
        "die": ("FAILED", "failed"),
    }
    what = {"method", "data", "seed", "protocol", "select"}
    assert all(
        run.data.params.keys() == {"fault"} | what for run in runs.values()
    )  # only what was searched, and of what
    assert all(f" faults {run.data.tags['method']} " in name for name, run in runs.items())
    assert {"optimisation_history.png", "slice_fault.png"} <= {
        Path(file.path).name for file in client.list_artifacts(parent.info.run_id, "figures")
    }
    # the test split was read in the final runs, once each, and never in a trial
    for seed in (0, 1):
        assert (
            "test"
            in read_json(found.study.folder / f"final-seed-{seed}/result.json")["domains"]["books"]
        )
    assert (
        "test" not in read_json(found.study.folder / "trial-0000/result.json")["domains"]["books"]
    )


@pytest.mark.slow
def test_a_trial_whose_process_dies_once_is_run_again(
    shops: Path, tmp_path: Path, ray_cluster: None
) -> None:
    search = Search(name="s", trials=1, seeds=0, retries=1, changes={"step": [0.5]})
    found = start(search, base(tmp_path, shops, "toys:DIES_ONCE", f"marker={tmp_path / 'died'}"))
    assert (tmp_path / "died").exists()
    assert found.summary["outcomes"] == {"finished": 1}
    alone = run_recorded(base(tmp_path, shops, "toys:AVERAGE"))
    again = read_json(found.study.folder / "trial-0000/result.json")
    assert again["domains"] == alone.result["domains"]  # it went on from its last committed round


def test_a_study_is_tuned_without_the_test_split(
    shops: Path, tmp_path: Path, ray_cluster: None
) -> None:
    config = base(tmp_path, shops, "toys:TRAPPED")
    given = {"trials": 3, "changes": {"step": {"low": 0.1, "high": 1.0}}, "concurrent": 2}
    found = start(Search(name="blind", seeds=0, **given), config, finish=final_test)
    assert found.summary["outcomes"].get("finished", 0) >= 1 and found.summary["finals"] == {}
    # the trap works
    with pytest.raises(CrossfedError, match="RuntimeError: the test split was read"):
        start(Search(name="seeing", seeds=1, retries=0, **given), config, finish=final_test)


def test_trials_are_runs_unchanged_and_share_their_processes(
    shops: Path, tmp_path: Path, ray_cluster: None
) -> None:
    config = base(tmp_path, shops, "toys:AVERAGE", backend="ray")
    search = Search(
        name="s", trials=2, seeds=0, pruner="none", changes={"step": [0.5, 0.9]}, sampler="grid"
    )
    found = start(search, config)
    alone = run_recorded(base(tmp_path, shops, "toys:AVERAGE", "step=0.9"))
    trials = [
        read_json(found.study.folder / f"trial-{number:04d}/result.json") for number in (0, 1)
    ]
    assert [trial["config"]["step"] for trial in trials] == [0.5, 0.9]
    for key in ("domains", "bytes", "candidates"):
        assert trials[1][key] == alone.result[key]
    pids = [{name: row["pid"] for name, row in trial["placement"].items()} for trial in trials]
    assert pids[0] == pids[1] and len(set(pids[0].values())) == 4
    facts = found.study.optuna.trials[1].user_attrs
    assert facts["rounds"] == 3 and facts["bytes_up"] == sum(alone.result["bytes"]["up"].values())


@pytest.mark.slow
def test_more_trials_replace_the_winners_final_runs_only_where_they_win(
    shops: Path, tmp_path: Path, ray_cluster: None
) -> None:
    config = base(tmp_path, shops, "toys:AVERAGE")
    search = Search(
        name="s", trials=2, seeds=1, pruner="none", changes={"step": {"low": 0.1, "high": 1.0}}
    )
    first = start(search, config, finish=final_test)
    study = Study.open(first.study.folder)
    study.extend(2)
    second = go_on(study, finish=final_test)
    assert sum(second.summary["outcomes"].values()) == 4
    assert second.summary["winner"]["values"][0] >= first.summary["winner"]["values"][0]
    moved = list(study.folder.glob("final-seed-0-of-trial-*"))
    assert len(moved) == (first.summary["winner"]["trial"] != second.summary["winner"]["trial"])


@pytest.mark.slow
def test_tuning_several_methods_alike(shops: Path, tmp_path: Path, ray_cluster: None) -> None:
    from crossfed.platform.console import make_progress

    asked = {
        name: (
            Search(name=f"all-{name}", trials=2, seeds=2, changes={"step": [0.5, 0.9]}),
            base(tmp_path, shops, f"toys:{name}"),
        )
        for name in ("AVERAGE", "TWO_STAGES")
    }
    table = tune_all(asked, tmp_path / "all", finish=final_test, view=make_progress("quiet"))
    text = (tmp_path / "all/budget.md").read_text()
    assert "average" in text and "two_stages" in text and "±" in text
    assert table.csv() == (tmp_path / "all/budget.csv").read_text()


def test_objectives_must_exist(shops: Path, tmp_path: Path) -> None:
    config, changes = base(tmp_path, shops, "toys:AVERAGE"), {"step": [0.5, 0.9]}
    with pytest.raises(
        CrossfedError, match="names no domain of this run; it has books, films, games"
    ):
        start(Search(name="a", objectives=("domain:toys",), changes=changes), config)
    with pytest.raises(CrossfedError, match="epsilon needs a method that perturbs what it sends"):
        start(
            Search(name="b", objectives=("mean", "epsilon"), pruner="none", changes=changes), config
        )
    assert not (tmp_path / "a").exists()


# -- placement -------------------------------------------------------------------------------------


def gpu_base(tmp_path: Path, shops: Path, *sets: str) -> RunConfig:
    return base(
        tmp_path, shops, "toys:AVERAGE", "resources.gpus_per_domain=0.5", *sets, backend="ray"
    )


def test_a_cluster_is_divided_among_trials(shops: Path, tmp_path: Path) -> None:
    plain = base(tmp_path, shops, "toys:AVERAGE", backend="ray")
    two_cores = slots(plain, NODES, None, [machine(2)])
    assert (two_cores.at_once, two_cores.bundles) == (1, ({}, *[{"CPU": 0.5}] * 4))
    both = slots(plain, NODES, 2, [machine(2)])
    assert (both.at_once, both.cpus, both.bundles[1]) == (2, 1.0, {"CPU": 0.25})
    assert slots(plain, NODES, None, [machine(16)] * 2).at_once == 8
    assert slots(plain, NODES, None, [machine(64, 8)]).at_once == 2  # eight GPUs, one per domain
    assert slots(base(tmp_path, shops, "toys:AVERAGE"), NODES, None, [machine(2)]).at_once == 2


def test_gpu_fractions_decide_how_many_trials_run(shops: Path, tmp_path: Path) -> None:
    half = gpu_base(tmp_path, shops)
    # 1.5 of 2 GPUs; another trial needs 1.5 more
    assert slots(half, NODES, None, [machine(16, 2)]).at_once == 1
    assert slots(half, NODES, None, [machine(16, 3)]).at_once == 2
    explicit = gpu_base(tmp_path, shops, "resources.cpus_per_domain=1", "resources.cpus_server=1")
    slots(explicit, NODES, None, [machine(4, 2)])
    with pytest.raises(
        CrossfedError,
        match=r"needs 5 CPUs \(server 1, books 1, films 1, games "
        r"1, toys 1\) .* 1 short",
    ):
        slots(explicit, (*NODES, "toys"), None, [machine(4, 2)])
    with pytest.raises(CrossfedError, match=r"needs 2.5 GPUs .* has 2: 0.5 short"):
        slots(half, (*NODES, "toys", "music"), None, [machine(16, 2)])
    with pytest.raises(
        CrossfedError,
        match=r"share of 0.6 fits 1 times on one GPU .* the "
        r"cluster has 2",
    ):
        slots(
            gpu_base(tmp_path, shops, "resources.gpus_per_domain=0.6"),
            NODES,
            None,
            [machine(16, 2)],
        )


INVENTED = """
import json, sys, time
import ray
from pathlib import Path
from crossfed.platform.config.settings import build
from crossfed.platform.errors import CrossfedError
from crossfed.tuning.search import start
from crossfed.tuning.study import Search

shops, out = sys.argv[1:]
ray.init(address="local", num_cpus=4, num_gpus=2, include_dashboard=False, log_to_driver=False)
sets = ["rounds=4", "resources.cpus_per_domain=1", "resources.cpus_server=1", "resources.gpus_per_domain=0.5"]
values = {"data": shops, "out": out, "tracking.enabled": False, "backend": "ray", "resources.device": "cpu"}
config = build("toys:AVERAGE", sets=sets, values=values)
start(Search(name="gpus", trials=3, seeds=0, pruner="none", changes={"step": {"low": 0.1, "high": 1.0}}), config)
began = time.monotonic()
try:
    start(Search(name="more", trials=1, seeds=0, changes={"step": [0.5]}),
          config.model_copy(update={"resources": config.resources.model_copy(update={"cpus_server": 2.0})}))
except CrossfedError as error:
    print("refused:", error, time.monotonic() - began)
"""  # noqa: E501


@pytest.mark.slow
def test_invented_gpus_run_one_trial_at_a_time(shops: Path, tmp_path: Path) -> None:
    script = tmp_path / "invented.py"
    script.write_text(INVENTED)
    done = subprocess.run(
        [sys.executable, str(script), str(shops), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=400,
        env={**os.environ, "RAY_AUTH_MODE": "disabled"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "needs 5 CPUs" in done.stdout and "has 4: 1 short" in done.stdout
    assert float(done.stdout.split()[-1]) < 10
    ends, begins = [], []
    for number in range(3):
        folder = tmp_path / f"gpus/trial-{number:04d}"
        rows = read_json(folder / "placement.json")
        assert all(
            len(rows[name]["gpu_ids"]) == 1 and rows[name]["gpus"] == 0.5 for name in NODES[1:]
        )
        assert rows["server"]["gpu_ids"] == []
        begins.append((folder / "config.yaml").stat().st_mtime)
        ends.append((folder / "result.json").stat().st_mtime)
    assert all(begin >= end for begin, end in zip(sorted(begins)[1:], sorted(ends), strict=False))


@pytest.mark.slow
def test_a_time_budget_ends_the_search_but_not_the_study(
    shops: Path, tmp_path: Path, ray_cluster: None
) -> None:
    search = Search(
        name="s",
        trials=500,
        seeds=1,
        pruner="none",
        concurrent=2,
        time_budget=40,
        changes={"step": {"low": 0.1, "high": 1.0}},
    )
    found = start(search, base(tmp_path, shops, "toys:AVERAGE", "rounds=40"), finish=final_test)
    outcomes = found.summary["outcomes"]
    assert (
        outcomes["finished"] >= 1 and 1 <= outcomes["killed"] <= 2 and sum(outcomes.values()) < 500
    )
    assert not [trial for trial in found.study.optuna.trials if trial.state == TrialState.RUNNING]
    assert found.summary["finals"]


# -- interruptions ---------------------------------------------------------------------------------


def command(*words: str) -> list[str]:
    return [str(Path(sys.executable).with_name("crossfed")), "tune", *words]


def states(folder: Path) -> dict[int, str]:
    storage = f"sqlite:///{folder / 'optuna.db'}"
    return {
        trial.number: trial.state.name
        for trial in optuna.load_study(study_name=folder.name, storage=storage).trials
    }


def started(
    folder: Path, arguments: list[str], *, finished: int, log: Path
) -> subprocess.Popen[str]:
    """A study, once so many of its trials have finished and another is in the middle."""
    with log.open("w") as file:
        process = subprocess.Popen(
            arguments, stdout=file, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()
        results = list(folder.glob("trial-*/result.json"))  # cheaper to watch than the storage
        running = [
            path
            for path in folder.glob("trial-*/history.jsonl")
            if not (path.parent / "result.json").exists()
        ]
        if (
            len(results) >= finished
            and running
            and list(states(folder).values()).count("COMPLETE") >= finished
        ):
            return process
        time.sleep(0.1)
    raise AssertionError(log.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_study_that_was_ended_goes_on(shops: Path, tmp_path: Path, how: signal.Signals) -> None:
    from mlflow import MlflowClient

    arguments = command(
        "toys:AVERAGE",
        "--data",
        str(shops),
        "--trials",
        "5",
        "--study",
        "s",
        "--out",
        str(tmp_path),
        "--pruner",
        "none",
        "--search",
        "step={low: 0.1, high: 1.0}",
        "--set",
        "rounds=30",
        "--concurrent",
        "2",
        "--backend",
        "inprocess",
    )
    folder = tmp_path / "s"
    process = started(folder, arguments, finished=1, log=tmp_path / "log")
    process.send_signal(how)
    code = process.wait(timeout=120)
    assert code == (-9 if how == signal.SIGKILL else 130)
    assert "RUNNING" in states(folder).values()
    done = [
        folder / f"trial-{index:04d}/result.json"
        for index, state in states(folder).items()
        if state == "COMPLETE"
    ]
    before = {path: path.read_bytes() for path in done}

    resumed = subprocess.run(
        command("resume", "s", "--out", str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert resumed.returncode == 0, resumed.stderr
    assert states(folder) == dict.fromkeys(range(5), "COMPLETE")
    assert "goes on from its last committed round" in resumed.stdout
    # not run again
    assert before and all(path.read_bytes() == content for path, content in before.items())
    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("crossfed")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    assert sorted(run.info.run_name for run in runs) == sorted(
        ["s", "final-seed-0", *(f"trial-{n:04d}" for n in range(5))]
    )
    assert {run.info.status for run in runs} == {"FINISHED"}

    extended = subprocess.run(
        command("extend", "s", "--trials", "2", "--out", str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert extended.returncode == 0, extended.stderr
    assert states(folder) == dict.fromkeys(range(7), "COMPLETE")
    assert json.loads((folder / "study.json").read_text())["outcomes"] == {"finished": 7}
