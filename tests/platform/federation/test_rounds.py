"""The loop over stages and rounds, on toy methods whose answer is known: in process, on Ray,
interrupted and resumed.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from crossfed.platform.config.settings import RunConfig, build
from crossfed.platform.data.store import PreparedData
from crossfed.platform.errors import CrossfedError, LeakError
from crossfed.platform.federation.final import test_once as final_test
from crossfed.platform.federation.rounds import Round
from crossfed.platform.federation.runs import load_scorer, stored_config
from crossfed.platform.report.recording import run_recorded


def config(
    method: str, shops: Path, out: Path, *sets: str, backend: str = "inprocess", seed: int = 0
) -> RunConfig:
    values = {
        "data": shops,
        "out": out,
        "backend": backend,
        "seed": seed,
        "tracking.enabled": False,
        "tracking.artifacts": False,
    }
    return build(f"toys:{method}", sets=sets, values=values)


def comparable(result: dict[str, Any]) -> dict[str, Any]:
    """What must not depend on back end, interruption or time."""
    return {
        key: result[key]
        for key in ("domains", "bytes", "candidates", "config_hash", "data_fingerprint")
    }


def history(run_dir: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run_dir / "history.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


def train_means(shops: Path) -> dict[str, float]:
    """Each domain's start vector, computed from the prepared data without any node."""
    from crossfed.platform.data.splits import assign

    data, means = PreparedData.open(shops), {}
    for name in data.domains:
        users, items, times = data.interactions(name)
        labels = assign(users, items, times, data.sizes(name)[0], "ratio-80-10-10", 42)
        means[name] = float(np.mean(items[labels == 0]))
    return means


def test_averaging_reaches_the_mean(shops: Path, tmp_path: Path) -> None:
    # x ← x + ½(mean - x) keeps the mean and halves the distance: after 4 rounds 1/16 of it is left
    done = run_recorded(config("AVERAGE", shops, tmp_path, "rounds=4"))
    start = train_means(shops)
    mean = np.mean(list(start.values()))
    last = history(done.run_dir)[-1]["metrics"]
    for name, value in start.items():
        assert last[f"train/{name}/x"] == pytest.approx(mean + (value - mean) / 16, rel=1e-5)


def test_gossip_reads_in_a_round_what_was_sent_in_the_round_before(
    shops: Path, tmp_path: Path
) -> None:
    # round 1 finds an empty inbox; in round 2 all three average the same three vectors and agree
    done = run_recorded(config("GOSSIP", shops, tmp_path, "rounds=2"))
    start, rows = train_means(shops), history(done.run_dir)
    for name, value in start.items():
        assert rows[0]["metrics"][f"train/{name}/x"] == pytest.approx(value, rel=1e-6)
        assert rows[1]["metrics"][f"train/{name}/x"] == pytest.approx(
            np.mean(list(start.values())), rel=1e-6
        )


def test_bytes_are_counted_by_domain_and_key(shops: Path, tmp_path: Path) -> None:
    done = run_recorded(config("AVERAGE", shops, tmp_path, "rounds=4", "dim=5"))
    expected = dict.fromkeys(("books", "films", "games"), 4 * 5 * 4)  # rounds × dim × float32
    assert done.result["bytes"] == {"up": expected, "down": expected}
    ledger = pd.read_parquet(done.run_dir / "ledger.parquet")
    assert len(ledger) == 4 * 3 * 2
    assert set(ledger["key"]) == {"x"} and set(ledger["bytes"]) == {20}


def test_peer_bytes_count_at_both_ends(shops: Path, tmp_path: Path) -> None:
    done = run_recorded(config("GOSSIP", shops, tmp_path, "rounds=2"))
    expected = dict.fromkeys(("books", "films", "games"), 2 * 2 * 12)  # rounds × peers × 3 float32
    assert done.result["bytes"] == {"up": expected, "down": expected}


@pytest.mark.parametrize(
    "method", [pytest.param("AVERAGE", marks=pytest.mark.slow), "TWO_STAGES", "GOSSIP"]
)
def test_in_process_equals_ray(method: str, shops: Path, tmp_path: Path, ray_cluster: None) -> None:
    runs = [
        run_recorded(config(method, shops, tmp_path / backend, backend=backend), finish=final_test)
        for backend in ("inprocess", "ray")
    ]
    assert comparable(runs[0].result) == comparable(runs[1].result)
    assert history(runs[0].run_dir) == history(runs[1].run_dir)


class Stop(Exception):
    """Raised after a chosen round, in place of a crash."""


@pytest.mark.parametrize("method", ["AVERAGE", "TWO_STAGES", "GOSSIP"])
@pytest.mark.parametrize("after", [1, 4, 5])
def test_resumed_equals_uninterrupted(method: str, after: int, shops: Path, tmp_path: Path) -> None:
    sets = ("rounds=4", "checkpoint_every=2", "patience=3" if method != "GOSSIP" else "step=0.5")
    straight = run_recorded(config(method, shops, tmp_path / "straight", *sets), finish=final_test)
    if (
        straight.result["domains"]["books"]["selected"]["rounds"] + 4 * (method == "TWO_STAGES")
        < after
    ):
        pytest.skip("the run ends before that round")

    def stop(row: Round) -> None:
        if row.step == after:
            raise Stop

    broken: list[Path] = []
    with pytest.raises(Stop):
        run_recorded(
            config(method, shops, tmp_path / "broken", *sets), on_round=stop, started=broken.append
        )
    resumed = run_recorded(stored_config(broken[0]), resume=broken[0], finish=final_test)
    assert comparable(resumed.result) == comparable(straight.result)
    assert history(resumed.run_dir) == history(straight.run_dir)
    pd.testing.assert_frame_equal(
        pd.read_parquet(resumed.run_dir / "ledger.parquet"),
        pd.read_parquet(straight.run_dir / "ledger.parquet"),
    )


def test_a_killed_actor_brings_the_run_back_to_the_last_round(
    shops: Path, tmp_path: Path, ray_cluster: None
) -> None:
    never, died = tmp_path / "never", tmp_path / "died"
    never.touch()
    calm = run_recorded(
        config("DIES_ONCE", shops, tmp_path / "calm", f"marker={never}"), finish=final_test
    )
    hit = run_recorded(
        config("DIES_ONCE", shops, tmp_path / "hit", f"marker={died}", backend="ray"),
        finish=final_test,
    )
    assert died.exists() and hit.result["restarts"] == 1
    assert {**comparable(hit.result), "config_hash": ""} == {
        **comparable(calm.result),
        "config_hash": "",
    }


def test_seed_changes_and_repeats_numbers(shops: Path, tmp_path: Path) -> None:
    one, again, other = (
        run_recorded(config("AVERAGE", shops, tmp_path, seed=seed)) for seed in (1, 1, 2)
    )
    assert history(one.run_dir) == history(again.run_dir)
    assert (
        history(one.run_dir)[0]["metrics"]["train/books/noise"]
        != history(other.run_dir)[0]["metrics"]["train/books/noise"]
    )


def test_a_local_stage_keeps_each_domain_at_its_own_best(shops: Path, tmp_path: Path) -> None:
    done = run_recorded(config("TWO_STAGES", shops, tmp_path, "patience=2"))
    rows = [row for row in history(done.run_dir) if row["stage"] == "drift"]
    for name, domain in done.result["domains"].items():
        curve = [
            row["metrics"][f"val/{name}/recall_at_20"]
            for row in rows
            if f"val/{name}/recall_at_20" in row["metrics"]
        ]
        best = int(np.argmax(curve))
        assert domain["selected"]["round"] == best + 1
        assert domain["validation"]["recall_at_20"] == curve[best]
        # two evaluations without a better one, or the stage's end
        assert len(curve) in (best + 1 + 2, 12)


def test_close_runs_everywhere_on_the_best_state(shops: Path, tmp_path: Path) -> None:
    done = run_recorded(config("CLOSES", shops, tmp_path))
    rows = history(done.run_dir)
    assert len({row["stage"] for row in rows}) == 2
    for name in done.result["domains"]:
        drifted = [
            row["metrics"]
            for row in rows
            if row["stage"] == "drift" and f"val/{name}/recall_at_20" in row["metrics"]
        ]
        best = int(np.argmax([metrics[f"val/{name}/recall_at_20"] for metrics in drifted]))
        assert len(drifted) < 12  # every domain stopped early
        assert rows[-1]["metrics"][f"train/{name}/marked"] == drifted[best][f"train/{name}/x"]


def test_a_stage_with_edges_keeps_the_best_mean(shops: Path, tmp_path: Path) -> None:
    done = run_recorded(config("AVERAGE", shops, tmp_path, "rounds=6"))
    rows = history(done.run_dir)
    means = [row["metrics"]["val/mean/recall_at_20"] for row in rows]
    best = int(np.argmax(means))
    assert {domain["selected"]["round"] for domain in done.result["domains"].values()} == {best + 1}
    assert (
        np.mean(
            [domain["validation"]["recall_at_20"] for domain in done.result["domains"].values()]
        )
        == means[best]
    )
    assert [row["best"] for row in rows] == list(np.maximum.accumulate(means))


def test_a_saved_model_scores_like_the_live_one(shops: Path, tmp_path: Path) -> None:
    done = run_recorded(config("AVERAGE", shops, tmp_path))
    x = history(done.run_dir)[done.result["domains"]["films"]["selected"]["round"] - 1]["metrics"][
        "train/films/x"
    ]
    scores = load_scorer(done.run_dir, "films")(np.array([3, 7]))
    expected = np.sin(np.arange(25)[None, :] * (1 + x) + np.array([3, 7])[:, None])
    np.testing.assert_allclose(scores.numpy(), expected, atol=1e-4)
    with pytest.raises(CrossfedError, match="no model of domain 'shoes'"):
        load_scorer(done.run_dir, "shoes")


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("LEAK_USERS", r"books → server: payload key 'user_ids' is not declared"),
        ("LEAK_SHAPE", r"books → server: payload key 'x' has shape \(40, 3\), declared"),
        ("LEAK_OBJECT", r"payload key 'x' has dtype object"),
        ("LEAK_NAN", r"payload key 'x' holds NaN or Inf"),
        ("LEAK_TENSOR", r"payload key 'x' is a Tensor"),
        ("LEAK_PEER", r"books tried to send to films \(peer\) in stage 'leak', outside its edges"),
        ("LEAK_NOWHERE", r"books tried to send to 'evil.example'"),
        (
            "LEAK_LOCAL",
            r"books tried to send to server \(up\) in stage 'local', outside its "
            r"edges \(none",
        ),
        ("LEAK_RANGE", r"server → books: payload key 'labels' holds values outside 0 … 1"),
        (
            "LEAK_GROWS",
            r"books → server: payload key 'shared' has shape \(40,\), with an axis as long as "
            r"the domain has users",
        ),
        (
            "LEAK_VARIES",
            r"films → server: payload key 'shared' has shape \(51,\), but books "
            r"sent \(41,\)",
        ),
    ],
)
def test_a_planted_leak_is_refused(method: str, words: str, shops: Path, tmp_path: Path) -> None:
    with pytest.raises(LeakError, match=words):
        run_recorded(config(method, shops, tmp_path))
    ledgers = list(tmp_path.glob("*/ledger.jsonl"))
    assert not any(path.read_text() for path in ledgers)  # nothing was delivered


def test_a_planted_leak_is_refused_on_ray(shops: Path, tmp_path: Path, ray_cluster: None) -> None:
    with pytest.raises(LeakError, match="books → server: payload key 'user_ids' is not declared"):
        run_recorded(config("LEAK_USERS", shops, tmp_path, backend="ray"))


@pytest.mark.parametrize("backend", ["inprocess", "ray"])
def test_received_arrays_are_read_only(
    backend: str, shops: Path, tmp_path: Path, ray_cluster: None
) -> None:
    with pytest.raises(CrossfedError, match=r"_write_inbox raised ValueError: .*read-only.* line"):
        run_recorded(config("WRITES_INBOX", shops, tmp_path, backend=backend))


def test_a_full_disk_leaves_the_last_round(
    shops: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fills up in round 3: one sentence; and the run continues from round 2 to the same
    end.
    """
    import safetensors.torch

    straight = run_recorded(config("AVERAGE", shops, tmp_path / "straight"))
    original, count = safetensors.torch.save_file, 0

    def full(tensors: Any, path: Any) -> None:
        nonlocal count
        count += "inbox" not in str(path) and "best" not in str(path)
        if count > 2 * 4:
            raise OSError(28, "No space left on device")
        original(tensors, path)

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    broken: list[Path] = []
    with pytest.raises(CrossfedError, match=r"cannot be written .*No space left"):
        run_recorded(config("AVERAGE", shops, tmp_path / "broken"), started=broken.append)
    monkeypatch.setattr(safetensors.torch, "save_file", original)
    resumed = run_recorded(stored_config(broken[0]), resume=broken[0])
    assert comparable(resumed.result) == comparable(straight.result)


@pytest.mark.parametrize(
    "name", ["placement.json", "result.json", "model/films.safetensors", "ledger.parquet"]
)
def test_what_cannot_be_written_is_named(name: str, shops: Path, tmp_path: Path) -> None:
    """A folder stands where the file should go: the run tells it in one sentence, and goes on once
    the way is free.
    """
    blocked: list[Path] = []

    def block(run_dir: Path) -> None:
        blocked.append(run_dir / name)
        blocked[0].mkdir(parents=True)
        (blocked[0] / "in the way").touch()

    with pytest.raises(CrossfedError, match=r"cannot be written .*the last committed round stays"):
        run_recorded(config("AVERAGE", shops, tmp_path), started=block)
    shutil.rmtree(blocked[0])
    run_dir = tmp_path / blocked[0].relative_to(tmp_path).parts[0]
    run_recorded(stored_config(run_dir), resume=run_dir)
    assert blocked[0].is_file()


def test_a_resumed_run_refuses_other_data(shops: Path, tmp_path: Path) -> None:
    copy = tmp_path / "shops"
    shutil.copytree(shops, copy)
    done = run_recorded(config("AVERAGE", copy, tmp_path / "runs"))
    told = json.loads((done.run_dir / "data.json").read_text())
    (done.run_dir / "data.json").write_text(json.dumps(told | {"fingerprint": "0" * 64}))
    with pytest.raises(CrossfedError, match="was started on data 000000000000"):
        run_recorded(stored_config(done.run_dir), resume=done.run_dir)


@pytest.mark.parametrize(("edit", "key"), [("seed: 7", "seed"), ("step: 0.25", "config_hash")])
def test_a_resumed_run_refuses_an_edited_configuration(
    edit: str, key: str, shops: Path, tmp_path: Path
) -> None:
    done = run_recorded(config("AVERAGE", shops, tmp_path))
    file = done.run_dir / "config.yaml"
    before = file.read_text()
    file.write_text(
        before.replace(
            {"seed": "\nseed: 0", "config_hash": "step: 0.5"}[key], "\n" * (key == "seed") + edit
        )
    )
    assert file.read_text() != before
    with pytest.raises(
        CrossfedError,
        match=f"was started with {key} .* but its config.yaml now gives .*; undo the edit",
    ):
        run_recorded(stored_config(done.run_dir), resume=done.run_dir)


@pytest.mark.parametrize("name", ["data.json"])
def test_a_resumed_run_names_a_damaged_file(name: str, shops: Path, tmp_path: Path) -> None:
    done = run_recorded(config("AVERAGE", shops, tmp_path))
    (done.run_dir / name).write_text("{")
    with pytest.raises(CrossfedError, match=f"{name} is missing or damaged"):
        run_recorded(stored_config(done.run_dir), resume=done.run_dir)


def test_a_domain_is_named_when_its_candidates_are_too_few(shops: Path, tmp_path: Path) -> None:
    with pytest.raises(
        CrossfedError,
        match=r"Domain books, validation: user row .* asks for "
        r"99 sampled candidates",
    ):
        run_recorded(config("AVERAGE", shops, tmp_path, "evaluation.protocol=leave-one-out-99"))


@pytest.mark.parametrize("name", ["books.best", "progress"])
def test_domains_whose_files_would_collide_are_refused(name: str, tmp_path: Path) -> None:
    from crossfed.platform.data.store import Writer

    with Writer(tmp_path / "data", {"kind": "test"}) as writer:
        for domain in ("books", name):
            writer.add_domain(domain, [0], [0], [0], ["u"], ["i"], [""])
    with pytest.raises(CrossfedError, match=rf"A domain of this run cannot be called '{name}'"):
        run_recorded(config("AVERAGE", tmp_path / "data", tmp_path / "runs"))
    with pytest.raises(CrossfedError, match="needs at least two domains"):
        run_recorded(config("AVERAGE", tmp_path / "data", tmp_path / "runs", "domains=[books]"))


def test_a_method_without_a_stage_is_refused(shops: Path, tmp_path: Path) -> None:
    with pytest.raises(CrossfedError, match="no_stage has no stage: it would train nothing"):
        run_recorded(config("NO_STAGE", shops, tmp_path))


def test_data_edited_after_they_were_prepared_are_refused(shops: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(shops, tmp_path / "shops")
    file = copy / "books" / "items.parquet"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(CrossfedError, match=r"books/items\.parquet differs from what was prepared"):
        run_recorded(config("AVERAGE", copy, tmp_path / "runs"))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("backend", "sets", "words"),
    [
        ("inprocess", ["resources.gpus_per_domain=1"], "asks for a GPU, but torch sees none here"),
        ("ray", ["resources.cpus_per_domain=999"], "needs [0-9.]+ CPUs"),
    ],
)
def test_resources_are_refused_before_text_is_encoded(
    backend: str,
    sets: list[str],
    words: str,
    shops: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ray_cluster: None,
) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    monkeypatch.setenv("CROSSFED_CACHE", str(tmp_path / "cache"))
    sets = [*sets, "text.encoder=hashing:32", "tracking.enabled=false"]
    values = {"data": shops, "out": tmp_path / "runs", "backend": backend}
    with pytest.raises(CrossfedError, match=words):
        run_recorded(build("fedcrf", sets=sets, values=values))
    assert not (tmp_path / "cache" / "text").exists()


def test_two_processes_do_not_share_a_run(shops: Path, tmp_path: Path) -> None:
    import fcntl

    done = run_recorded(config("AVERAGE", shops, tmp_path))
    with (done.run_dir / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(CrossfedError, match="another process"):
            run_recorded(stored_config(done.run_dir), resume=done.run_dir)


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_a_read_only_out_is_one_sentence(shops: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(
        CrossfedError, match="cannot be made: Permission denied; choose another --out"
    ):
        run_recorded(config("AVERAGE", shops, tmp_path))
