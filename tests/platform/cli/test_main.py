"""The command line as a user meets it: results, resumption after SIGKILL, and one sentence with
exit code 2 for a mistake.
"""

from __future__ import annotations

import gzip
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from crossfed.platform.cli import main

SMALL = [
    "--set",
    "dim=8",
    "--set",
    "batch_size=64",
    "--set",
    "text.encoder=hashing:32",
    "--progress",
    "plain",
]
FEDCRF = ["fedcrf", *SMALL, "--set", "K=4", "--set", "rounds=2", "--set", "epochs=3"]


def crossfed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *args: str
) -> tuple[int, str, str]:
    """Exit code, output and errors of `crossfed …`, run through its entry point."""
    monkeypatch.setattr(sys, "argv", ["crossfed", *args])
    with pytest.raises(SystemExit) as caught:
        main.main()
    out, err = capsys.readouterr()
    return int(caught.value.code or 0), out, err


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    return lambda *args: crossfed(monkeypatch, capsys, *[str(arg) for arg in args])


def test_version(call) -> None:
    code, out, _ = call("--version")
    assert code == 0 and re.fullmatch(r"crossfed \d+\.\d+\.\d+\n", out)


def test_methods_tells_what_crosses(call) -> None:
    code, out, _ = call("methods")
    assert code == 0
    assert "item_vectors: float32 [n_items, dim]" in out and "sends nothing" in out
    code, out, _ = call("methods", "fedcrf")
    assert code == 0 and "lambda_kd" in out and "searched: " in out


def test_a_run_writes_everything_it_promises(call, shops: Path, tmp_path: Path) -> None:
    code, out, err = call(
        "run", *FEDCRF, "--data", shops, "--out", tmp_path, "--backend", "inprocess", "--seed", 3
    )
    assert code == 0, err
    assert "pretrain 2/2" in out and "finetune" in out and "full:30" in out
    result_file = Path(out.strip().splitlines()[-1])
    result = json.loads(result_file.read_text())
    assert (result["method"], result["seed"], result["protocol"]) == ("fedcrf", 3, "ratio-80-10-10")
    for domain in result["domains"].values():
        for split in ("validation", "test"):
            assert 0 <= domain[split]["ndcg_at_20"] <= domain[split]["recall_at_20"] <= 1
    assert result["bytes"]["up"]["books"] == 2 * 30 * 8 * 4  # rounds × items × dim × float32
    # rounds × (K × dim × float32 + items × int64)
    assert result["bytes"]["down"]["books"] == 2 * (4 * 8 * 4 + 30 * 8)
    run_dir = result_file.parent
    for name in (
        "config.yaml",
        "data.json",
        "placement.json",
        "ledger.parquet",
        "history.jsonl",
        "mlflow_run_id",
    ):
        assert (run_dir / name).is_file(), name
    assert {path.name for path in (run_dir / "per_user").iterdir()} == {
        f"{d}.test.parquet" for d in result["domains"]
    }
    assert {path.name for path in (run_dir / "model").glob("*.safetensors")} == {
        f"{d}.safetensors" for d in result["domains"]
    }
    assert list((run_dir / "figures").glob("*.png"))


def test_per_user_files_hold_rows_not_ids(call, shops: Path, tmp_path: Path) -> None:
    import pandas as pd

    code, out, err = call(
        "run",
        "lightgcn",
        *SMALL,
        "--set",
        "epochs=2",
        "--data",
        shops,
        "--out",
        tmp_path,
        "--backend",
        "inprocess",
        "--set",
        "resources.gpu_memory_fraction=0.5",
    )
    assert code == 0
    assert "In one process resources.gpu_memory_fraction does nothing." in out + err
    run_dir = Path(out.strip().splitlines()[-1]).parent
    table = pd.read_parquet(run_dir / "per_user" / "films.test.parquet")
    assert table["user"].dtype.kind == "i" and table["user"].between(0, 49).all()
    result = json.loads((run_dir / "result.json").read_text())
    assert table["recall_at_20"].mean() == pytest.approx(
        result["domains"]["films"]["test"]["recall_at_20"], abs=1e-12
    )


def test_what_a_run_logs_in_mlflow(call, shops: Path, tmp_path: Path) -> None:
    from mlflow import MlflowClient

    code, out, _ = call(
        "run", *FEDCRF, "--data", shops, "--out", tmp_path, "--backend", "inprocess"
    )
    assert code == 0
    run_dir = Path(out.strip().splitlines()[-1]).parent
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    run = client.get_run((run_dir / "mlflow_run_id").read_text().strip())
    assert run.info.status == "FINISHED"
    result = json.loads((run_dir / "result.json").read_text())
    assert run.data.params["K"] == "4" and run.data.params["config_hash"] == result["config_hash"]
    assert run.data.params.keys() >= {"method", "data", "seed", "protocol", "select"}
    assert run.info.run_name == f"{run_dir.name} {shops.name}"
    for name, domain in result["domains"].items():
        assert run.data.metrics[f"domain/{name}/test_ndcg_at_20"] == domain["test"]["ndcg_at_20"]
        curve = client.get_metric_history(run.info.run_id, f"domain/{name}/val_recall_at_20")
        history = [
            json.loads(line) for line in (run_dir / "history.jsonl").read_text().splitlines()
        ]
        told = [
            row["metrics"][f"val/{name}/recall_at_20"]
            for row in history
            if f"val/{name}/recall_at_20" in row["metrics"]
        ]
        assert [point.value for point in curve] == told
    assert "train_share" not in run.data.params.keys() | run.data.tags.keys()
    mean = sum(domain["test"]["recall_at_20"] for domain in result["domains"].values()) / 3
    assert run.data.metrics["all/test_recall_at_20"] == pytest.approx(mean)
    selected = [domain["selected"]["value"] for domain in result["domains"].values()]
    assert run.data.metrics["all/best_recall_at_20"] == pytest.approx(sum(selected) / 3)
    stages = [point.value for point in client.get_metric_history(run.info.run_id, "all/stage")]
    assert stages == sorted(stages) and set(stages) == {1, 2}
    assert len(run.data.metrics) <= 60 and not [
        name for name in run.data.metrics if name.startswith("system/")
    ]
    assert set(result["memory"]) == {"server", *result["domains"]}
    for name, peak in result["memory"].items():
        assert peak["process"] > 100_000_000 and peak["gpu"] is None, name
    [dataset] = [entry.dataset for entry in run.inputs.dataset_inputs]
    assert (
        dataset.name == shops.name
        and json.loads(dataset.profile).keys() == result["domains"].keys()
    )
    top = {artifact.path for artifact in client.list_artifacts(run.info.run_id)}
    assert {
        "config.yaml",
        "result.json",
        "placement.json",
        "ledger.parquet",
        "data.json",
        "figures",
        "per_user",
    } <= top
    drawn = {
        Path(artifact.path).stem for artifact in client.list_artifacts(run.info.run_id, "figures")
    }
    assert drawn == {"validation", "losses", "diagnostics", "bytes", "upload", "cohorts"}


def test_killed_with_sigkill_and_resumed_equals_uninterrupted(
    call, shops: Path, tmp_path: Path
) -> None:
    """A real process, killed at a random moment of its rounds, in whatever it was doing."""
    args = [
        "lightgcn",
        "--set",
        "dim=64",
        "--set",
        "epochs=40",
        "--set",
        "batch_size=8",
        "--set",
        "patience=40",
    ]
    args += [
        "--data",
        str(shops),
        "--backend",
        "inprocess",
        "--set",
        "tracking.enabled=false",
        "--progress",
        "quiet",
    ]
    code, out, err = call("run", *args, "--out", tmp_path / "straight")
    assert code == 0, err
    straight = json.loads(Path(out.strip().splitlines()[-1]).read_text())
    victim = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "crossfed.platform.cli.main",
            "run",
            *args,
            "--out",
            str(tmp_path / "killed"),
        ]
    )
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not list(
        (tmp_path / "killed").glob("*/checkpoints/commit-*/progress.json")
    ):
        time.sleep(0.02)
    time.sleep(float(np.random.default_rng().uniform(0.05, 0.8)))
    victim.send_signal(signal.SIGKILL)
    victim.wait()
    (run_dir,) = (tmp_path / "killed").iterdir()
    assert not (run_dir / "result.json").exists(), "the run ended before it was killed"
    code, out, err = call("run", "--resume", run_dir, "--progress", "quiet")
    assert code == 0, err
    resumed = json.loads((run_dir / "result.json").read_text())
    assert resumed["domains"] == straight["domains"]


@pytest.mark.parametrize("backend", ["inprocess", pytest.param("ray", marks=pytest.mark.slow)])
def test_sigterm_ends_a_run_cleanly(shops: Path, tmp_path: Path, backend: str) -> None:
    """A scheduler's SIGTERM: exit code 130, one sentence with the way on, the MLflow run marked as
    killed.
    """
    from mlflow import MlflowClient

    args = [
        "lightgcn",
        "--set",
        "dim=8",
        "--set",
        "epochs=5000",
        "--set",
        "patience=5000",
        "--data",
        str(shops),
    ]
    args += ["--backend", backend]
    command = [
        sys.executable,
        "-m",
        "crossfed.platform.cli.main",
        "run",
        *args,
        "--out",
        str(tmp_path),
        "--progress",
        "quiet",
    ]
    victim = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and not list(
        tmp_path.glob("*/checkpoints/commit-*/progress.json")
    ):
        time.sleep(0.1)
    victim.send_signal(signal.SIGTERM)
    _, err = victim.communicate(timeout=60)
    assert victim.returncode == 130, err
    assert (
        err.startswith("Interrupted. What was committed stays: crossfed run --resume")
        and len(err.splitlines()) == 1
    )
    (run_dir,) = (path.parent for path in tmp_path.glob("*/config.yaml"))
    run = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db").get_run(
        (run_dir / "mlflow_run_id").read_text().strip()
    )
    assert run.info.status == "KILLED"


def test_resume_takes_no_other_settings(call, shops: Path, tmp_path: Path) -> None:
    code, _, err = call("run", "lightgcn", "--resume", "x")
    assert code == 2 and "give no method" in err
    code, _, err = call("run", "--resume", tmp_path / "none")
    assert code == 2 and "There is no run" in err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["nope"], "There is no method 'nope'"),
        ([], "Name a method"),
        (["fedcrf", "--set", "K=0"], "K = 0 is not possible"),
        (["fedcrf", "--set", "K=1000"], "1000"),
        (["fedcrf", "--data", "/nowhere"], "/nowhere does not exist"),
        (["fedcrf", "--data", "{tmp}"], "is not a prepared data directory"),
        (["fedcrf", "--data", "{old}"], "format version"),
        (["fedcrf", "--domains", "books,shoes"], "There is no domain 'shoes'"),
        (["fedcrf", "--domains", "books,books"], "must name each domain once"),
        (["fedcrf", "--domains", "books"], "needs at least two domains, but got books alone"),
        (
            ["fedcrf", "--backend", "inprocess", "--set", "resources.gpus_per_domain=1"],
            "torch sees none here",
        ),
        (["fedcrf", "--out", "{file}"], "cannot be made"),
        (["fedcrf", "--tracking-uri", "http://127.0.0.1:9", "--require-tracking"], "127.0.0.1:9"),
        (["fedcrf", "--set", "text.encoder=no-such/model"], "no-such/model"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(
    args: list[str], words: str, call, shops: Path, tmp_path: Path
) -> None:
    import shutil

    old = tmp_path / "old"
    shutil.copytree(shops, old)
    manifest = json.loads((old / "manifest.json").read_text())
    (old / "manifest.json").write_text(json.dumps(manifest | {"version": 0}))
    (tmp_path / "file").touch()
    args = [arg.format(tmp=tmp_path, old=old, file=tmp_path / "file") for arg in args]
    defaults = (
        []
        if not args
        else ["--set", "text.encoder=hashing:64"]
        if "text.encoder=no-such/model" not in args
        else []
    )
    for option, value in (
        ("--data", shops),
        ("--out", tmp_path / "runs"),
        ("--backend", "inprocess"),
    ):
        if option not in args and args:
            defaults += [option, str(value)]
    code, _, err = call("run", *args, *defaults, "--progress", "quiet")
    assert code == 2
    assert words in err and "Traceback" not in err
    assert len(err.strip().splitlines()) == 1


def test_an_unreachable_tracking_server_is_a_warning_and_a_spool(
    call, shops: Path, tmp_path: Path
) -> None:
    began = time.monotonic()
    code, out, _ = call(
        "run",
        "lightgcn",
        *SMALL,
        "--set",
        "epochs=2",
        "--data",
        shops,
        "--out",
        tmp_path,
        "--backend",
        "inprocess",
        "--tracking-uri",
        "http://127.0.0.1:9",
    )
    assert code == 0 and time.monotonic() - began < 60
    run_dir = Path(out.strip().splitlines()[-1]).parent
    assert (run_dir / "tracking-spool.jsonl").stat().st_size > 0
    code, out, _ = call("replay", run_dir, "--uri", f"sqlite:///{tmp_path}/late.db")
    assert code == 0 and "0 left" in out

    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path}/late.db")
    run = client.get_run((run_dir / "mlflow_run_id").read_text().strip())
    result = json.loads((run_dir / "result.json").read_text())
    assert (
        run.data.metrics["domain/books/test_recall_at_20"]
        == result["domains"]["books"]["test"]["recall_at_20"]
    )


@pytest.mark.parametrize("method", ["fedcrf", "lightgcn"])
def test_a_diverging_run_says_so(method: str, call, shops: Path, tmp_path: Path) -> None:
    sets = ["--set", "K=4"] if method == "fedcrf" else []
    code, _, err = call(
        "run",
        method,
        *SMALL,
        *sets,
        "--set",
        "lr=1e30",
        "--data",
        shops,
        "--out",
        tmp_path,
        "--backend",
        "inprocess",
    )
    assert code == 2 and "training has diverged in" in err and "use a smaller learning rate" in err
    assert not list(tmp_path.glob("*/result.json"))


def test_ui_needs_a_store_and_stays_on_loopback(call, tmp_path: Path) -> None:
    code, _, err = call("ui", "--out", tmp_path)
    assert code == 2 and "There is no tracking database" in err


def test_data_commands(call, tmp_path: Path) -> None:
    code, out, err = call(
        "data",
        "synth",
        "--out",
        tmp_path / "s",
        "--domains",
        2,
        "--users",
        60,
        "--items",
        40,
        "--overlap",
        0.5,
    )
    assert code == 0, err
    assert "(synthetic)" in out and "30 (" in out
    again, shown, _ = call("data", "stats", tmp_path / "s")
    assert again == 0 and shown == out
    code, _, err = call("data", "synth", "--out", tmp_path / "s")
    assert code == 2 and "not empty" in err
    code, out, _ = call("data", "specs")
    assert code == 0 and "fedcrf-kitchen-food" in out and "jmcauley" in out


def test_prepare_from_a_users_own_files(call, tmp_path: Path) -> None:
    """A gzip CSV with a column mapping; then a truncated copy of it is refused with its name."""
    rows = ["who,what,when,name"] + [
        f"u{u},i{i},{100 * u + i},thing {i}" for u in range(8) for i in range(6)
    ]
    (tmp_path / "own.csv.gz").write_bytes(gzip.compress("\n".join(rows).encode() + b"\n"))
    (tmp_path / "spec.yaml").write_text(
        "name: own\nrecipe: {text: [name]}\ndomains:\n  mine:\n    interactions:\n      path: "
        "own.csv.gz\n      layout: table\n"
        "      columns: {user: who, item: what, time: when, name: name}\n"
    )
    code, out, err = call("data", "prepare", tmp_path / "spec.yaml", "--out", tmp_path / "data")
    assert code == 0, err
    assert "mine" in out and "48" in out
    whole = (tmp_path / "own.csv.gz").read_bytes()
    (tmp_path / "own.csv.gz").write_bytes(whole[: len(whole) // 2])
    code, _, err = call("data", "prepare", tmp_path / "spec.yaml", "--out", tmp_path / "data2")
    assert code == 2 and "own.csv.gz" in err and len(err.strip().splitlines()) == 1
    assert not (tmp_path / "data2").exists()


def test_compare(call, shops: Path, tmp_path: Path) -> None:
    import pandas as pd

    runs: list[Path] = []
    common = [
        "--data",
        shops,
        "--out",
        tmp_path,
        "--backend",
        "inprocess",
        "--set",
        "tracking.enabled=false",
    ]
    for args in (
        ["lightgcn", "--seed", 1],
        ["lightgcn", "--seed", 2],
        ["fedcrf", "--seed", 1, "--set", "K=4", "--set", "rounds=1"],
    ):
        code, out, err = call("run", *args, *SMALL, "--set", "epochs=2", *common)
        assert code == 0, err
        runs.append(Path(out.strip().splitlines()[-1]).parent)
    code, out, err = call("compare", *runs)
    assert code == 0, err
    results = [json.loads((run / "result.json").read_text()) for run in runs]
    mean = np.mean([result["domains"]["books"]["test"]["recall_at_20"] for result in results[:2]])
    assert f"{mean:.4f}" in out and "protocol ratio-80-10-10" in out and "| lightgcn | 2 |" in out
    tables = [
        pd.read_parquet(run / "per_user" / "games.test.parquet")["recall_at_20"] for run in runs
    ]
    difference = float((tables[2] - (tables[0] + tables[1]) / 2).mean())
    assert f"| fedcrf | lightgcn | games | Recall@20 | {difference:+.4f} |" in out
    args = [
        "--split",
        "validation",
        "--metric",
        "mrr@10",
        "--out-file",
        tmp_path / "t" / "table.csv",
    ]
    code, out, _ = call("compare", runs[0], runs[2], *args)
    assert code == 0 and out.strip() == str(tmp_path / "t" / "table.csv")
    from_disk = (tmp_path / "t" / "table.csv").read_text()
    assert from_disk.startswith("method,private,domain,split,metric,mean")
    code, _, err = call("compare", runs[0], runs[2], "--against", "nobody")
    assert code == 2 and "There is no row 'nobody'" in err
    (runs[1] / "result.json").unlink()
    code, _, err = call("compare", *runs)
    assert code == 2 and "has not finished" in err and runs[1].name in err


def test_the_audit_attacks_what_was_uploaded_and_survives_a_resume(
    call, shops: Path, tmp_path: Path
) -> None:
    common = [
        "--data",
        shops,
        "--out",
        tmp_path,
        "--backend",
        "inprocess",
        "--set",
        "evaluation.audit=true",
    ]
    code, out, err = call("run", *FEDCRF, *common)
    assert code == 0, err
    result = json.loads(Path(out.strip().splitlines()[-1]).read_text())
    audit = result["domains"]["books"]["audit"]
    assert set(audit) == {
        f"item_vectors{what}/f1_at_{k}"
        for what in ("", "_random", "_popularity")
        for k in (1, 3, 5)
    }
    assert all(0 < value < 1 for value in audit.values())
    run_dir = Path(out.strip().splitlines()[-1]).parent
    (run_dir / "result.json").unlink()
    # every round is committed: only the end is done again
    code, out, err = call("run", "--resume", run_dir)
    assert code == 0, err
    assert json.loads((run_dir / "result.json").read_text())["domains"] == result["domains"]


@pytest.mark.parametrize("code", [0, 2, 130])
def test_the_program_ends_with_its_code_and_what_is_due_at_its_end(code: int) -> None:
    script = (
        "import atexit, sys\nfrom crossfed.platform.cli import main as "
        "cli\natexit.register(print, 'due')\n"
        f"cli.main = lambda: sys.exit({code})\ncli.entry()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (code, "due\n"), done.stderr
