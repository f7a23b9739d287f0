"""Measuring a finished run's model again: the same numbers, other candidates, other ranking, and
what is refused.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from typer.testing import CliRunner

from crossfed.platform.checkpoint import read_json, write_json
from crossfed.platform.cli.main import app
from crossfed.platform.config.settings import build
from crossfed.platform.data.store import PreparedData
from crossfed.platform.errors import CrossfedError
from crossfed.platform.evaluation import candidates
from crossfed.platform.evaluation.protocols import PROTOCOLS, Protocol
from crossfed.platform.federation.final import test_once as final_test
from crossfed.platform.federation.reevaluate import evaluate, evaluation_config
from crossfed.platform.federation.runs import find_run, load_scorer, stored_config
from crossfed.platform.method import ranking_keys
from crossfed.platform.report.finished import check_comparable, load_runs
from crossfed.platform.report.recording import Recording, run_recorded
from crossfed.platform.tracking.tracker import Tracker

FEW = Protocol(
    "leave-one-out-9", "leave-one-out", 9, "As leave-one-out, but among 9 sampled items."
)
DOMAINS = ("books", "films", "games")


@pytest.fixture(autouse=True)
def _few_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's shops have no 99 items that a user does not know."""
    monkeypatch.setitem(PROTOCOLS, FEW.id, FEW)


def trained(
    method: str, shops: Path, out: Path, *sets: str, seed: int = 0, finish: Any = final_test
) -> Path:
    config = build(
        method,
        sets=[
            "evaluation.protocol=leave-one-out",
            "tracking.enabled=false",
            "tracking.artifacts=false",
            *sets,
        ],
        values={"data": shops, "out": out, "backend": "inprocess", "seed": seed},
    )
    return run_recorded(config, finish=finish).run_dir


@pytest.fixture(scope="module")
def local(shops: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A local method, its best round not its last, over two seeds."""
    out = tmp_path_factory.mktemp("local")
    return [
        trained("lightgcn", shops, out, "dim=8", "epochs=6", "lr=0.05", seed=seed)
        for seed in (0, 1)
    ]


def result(run_dir: Path) -> dict[str, Any]:
    return dict(read_json(run_dir / "result.json"))


def again(run_dir: Path, out: Path, *sets: str, protocol: str | None = None) -> Path:
    watched = (Recording(),)
    done = evaluate(run_dir, final_test, protocol=protocol, sets=sets, out=out, callbacks=watched)
    return done.run_dir


# -- what comes of it ------------------------------------------------------------------------------


def test_the_same_protocol_gives_the_same_numbers(local: list[Path], tmp_path: Path) -> None:
    before, run_dir = result(local[0]), again(local[0], tmp_path)
    after = result(run_dir)
    assert run_dir.parent == tmp_path and run_dir.name != local[0].name
    assert after["domains"] == before["domains"] and after["bytes"] == before["bytes"]
    assert after["evaluated"]["run"] == local[0].name
    assert after["evaluated"]["protocol"] == "leave-one-out" and after["evaluated"]["ranking"] == {}
    for name in DOMAINS:
        path = f"per_user/{name}.test.parquet"
        pd.testing.assert_frame_equal(
            pd.read_parquet(local[0] / path), pd.read_parquet(run_dir / path)
        )
        assert (local[0] / f"model/{name}.safetensors").read_bytes() == (
            run_dir / f"model/{name}.safetensors"
        ).read_bytes()


def test_a_federation_with_perturbed_messages(shops: Path, tmp_path: Path) -> None:
    """What it sent and what that cost is what the training cost, and the last commit is the
    selected state.
    """
    sets = ("K=4", "dim=8", "rounds=3", "batch_size=64", "top_k=3", "privacy.noise_seed=0")
    run_dir = trained("p2p_iagr", shops, tmp_path, *sets)
    before, after = (
        result(run_dir),
        result(again(run_dir, tmp_path, "evaluation.ks=[5,20]", protocol=FEW.id)),
    )
    assert sum(before["bytes"]["up"].values()) and before["privacy"]["domains"]
    for key in ("bytes", "privacy", "seconds", "restarts", "placement", "memory", "versions"):
        assert after[key] == before[key]
    for name, row in after["domains"].items():
        assert row["selected"] == before["domains"][name]["selected"]
        assert {f"recall_at_{k}" for k in (5, 20)} <= row[
            "test"
        ].keys() and "recall_at_10" not in row["test"]


def test_sampled_candidates_are_ranked_by_the_selected_model(
    local: list[Path], shops: Path, tmp_path: Path
) -> None:
    """By hand, from the exported model and the candidates that are drawn from the data alone."""
    run_dir = again(local[0], tmp_path, protocol=FEW.id)
    after, before, store = result(run_dir), result(local[0]), PreparedData.open(shops)
    assert after["protocol"] == FEW.id and after["evaluated"]["protocol"] == "leave-one-out"
    for name in DOMAINS:
        users, items, times = store.interactions(name)
        n_users, n_items = store.sizes(name)
        order = np.lexsort((np.arange(len(users)), times, users))
        known = items[order]
        indptr = np.concatenate([[0], np.cumsum(np.bincount(users, minlength=n_users))])
        drawn = candidates.draw(np.arange(n_users), indptr, known, n_items, FEW.negatives or 0, 42)
        scores = load_scorer(local[0], name)(np.arange(n_users)).numpy()
        truth = known[indptr[1:] - 1]
        own = scores[np.arange(n_users), truth][:, None]
        rank = (scores[np.arange(n_users)[:, None], drawn.items] > own).sum(1)
        assert after["domains"][name]["test"]["recall_at_10"] == 1
        assert after["domains"][name]["test"]["mrr_at_10"] == pytest.approx(
            (1 / (rank + 1)).mean(), rel=1e-6
        )
        assert after["candidates"][name] == drawn.id != before["candidates"][name]
        assert after["domains"][name]["validation"] != before["domains"][name]["validation"]
        assert after["domains"][name]["selected"] == before["domains"][name]["selected"]


def test_what_it_took_stands_apart_from_the_training(local: list[Path], tmp_path: Path) -> None:
    before, after = result(local[0]), result(again(local[0], tmp_path))
    assert after["seconds"] == before["seconds"] and after["evaluated"]["seconds"]["total"] > 0
    assert after["evaluated"]["seconds"]["total"] != before["seconds"]["total"]
    assert after["evaluated"]["backend"] == "inprocess"


def test_a_run_of_before_memory_was_told(shops: Path, tmp_path: Path) -> None:
    run_dir = trained("lightgcn", shops, tmp_path, "dim=8", "epochs=2")
    old = {
        key: value for key, value in result(run_dir).items() if key not in ("memory", "train_share")
    }
    write_json(run_dir / "result.json", old)
    measured = again(run_dir, tmp_path / "again")
    assert result(measured)["domains"] == old["domains"] and (measured / "ledger.parquet").is_file()


def test_a_key_of_ranking_changes_alone(shops: Path, tmp_path: Path) -> None:
    """One round, so that one beam and all items select the same state, and both can be trained
    for.
    """
    sizes = (
        "levels=2",
        "codebook=4",
        "dim=8",
        "heads=2",
        "encoder_layers=1",
        "decoder_layers=1",
        "inner=8",
        "decoder_inner=8",
        "batch_size=128",
        "tokeniser.kind=residual-kmeans",
        "tokeniser.dim=8",
        "epochs=1",
        "text.encoder=hashing:32",
    )
    run_dir = trained("tiger", shops, tmp_path, *sizes, "beam=1")
    whole = again(run_dir, tmp_path, "beam=null")
    before, after = result(run_dir), result(whole)
    assert (before["config"]["beam"], after["config"]["beam"]) == (1, None)
    assert after["evaluated"]["ranking"] == {"beam": 1}
    other = result(trained("tiger", shops, tmp_path, *sizes, "beam=null"))
    for name in DOMAINS:
        for split in ("validation", "test"):
            row = after["domains"][name][split]
            assert row == other["domains"][name][split] != before["domains"][name][split]
    back = again(whole, tmp_path, "beam=1")
    assert result(back)["domains"] == before["domains"]
    assert (
        result(back)["evaluated"]["run"] == run_dir.name
        and result(back)["evaluated"]["ranking"] == {}
    )
    assert result(back)["seconds"] == before["seconds"]
    assert {key: value for key, value in after["config"].items() if key != "beam"} == {
        key: value for key, value in before["config"].items() if key != "beam"
    }
    told = read_json(whole / "trained.json")
    told["tokeniser"]["collision_rate"]["books"] += 0.01
    write_json(whole / "trained.json", told)
    (whole / "result.json").unlink()
    with pytest.raises(CrossfedError, match="other semantic IDs than those"):
        run_recorded(stored_config(whole), resume=whole, finish=final_test)
    assert ranking_keys(stored_config(run_dir).resolved.Config) == ("beam",)


def test_its_configuration_says_what_selected(local: list[Path], tmp_path: Path) -> None:
    """It is not that of a run which trains under the new protocol, and cannot be run as one."""
    run_dir = again(local[0], tmp_path, protocol=FEW.id)
    config, old = stored_config(run_dir), stored_config(local[0])
    assert config.evaluated is not None and config.evaluated.protocol == "leave-one-out"
    plain = config.model_copy(update={"evaluated": None})
    assert (
        config.hash() != plain.hash()
        and config.hash() == read_json(run_dir / "data.json")["config_hash"]
    )
    assert (
        config.hash() == evaluation_config(local[1], FEW.id).hash() and old.hash() != plain.hash()
    )
    with pytest.raises(CrossfedError, match="trains nothing: use crossfed evaluate"):
        run_recorded(build(str(run_dir / "config.yaml"), values={"out": tmp_path}))
    with pytest.raises(CrossfedError, match="unknown key 'evaluated'"):
        build("lightgcn", sets=["evaluated={run: x, protocol: leave-one-out}"])


def test_the_tracker_is_told_whose_model_it_is(
    local: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: dict[str, Any] = {}
    start = Tracker.start

    def noted(
        settings: Any, run_dir: Path, name: str, params: Any, tags: Any, *rest: Any, **more: Any
    ) -> Any:
        told.update(params=params, tags=tags)
        return start(settings, run_dir, name, params, tags, *rest, **more)

    monkeypatch.setattr(Tracker, "start", noted)
    again(local[0], tmp_path, protocol=FEW.id)
    assert told["tags"]["evaluated"] == local[0].name and told["params"]["protocol"] == FEW.id
    assert stored_config(local[0]).config.items() <= told["params"].items()


def test_seeds_make_one_row_and_what_selected_tells_rows_apart(
    local: list[Path], shops: Path, tmp_path: Path
) -> None:
    measured = [again(run_dir, tmp_path, protocol=FEW.id) for run_dir in local]
    runs = load_runs(measured)
    check_comparable(runs)
    assert [run.label for run in runs] == ["lightgcn"] * 2
    other = trained(
        "lightgcn", shops, tmp_path, "dim=8", "epochs=6", "lr=0.05", f"evaluation.protocol={FEW.id}"
    )
    runs = load_runs([*measured, other])
    check_comparable(runs)
    assert [run.label for run in runs] == ["lightgcn (evaluated.protocol=leave-one-out)"] * 2 + [
        "lightgcn"
    ]
    shown = CliRunner().invoke(app, ["compare", *map(str, measured)])
    assert shown.exit_code == 0, shown.output
    assert "leave-one-out-9 (trained and selected under leave-one-out)" in " ".join(
        shown.output.split()
    )


# -- interrupted -----------------------------------------------------------------------------------


def test_an_interrupt_is_resumed_or_repeated(
    local: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = result(again(local[0], tmp_path / "straight", protocol=FEW.id))

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    left: list[Path] = []
    with pytest.raises(KeyboardInterrupt):
        evaluate(local[0], interrupted, protocol=FEW.id, out=tmp_path, started=left.append)
    assert result(again(local[0], tmp_path, protocol=FEW.id))["domains"] == wanted["domains"]
    run_recorded(stored_config(left[0]), resume=left[0], finish=final_test)
    assert result(left[0])["domains"] == wanted["domains"]
    aside = {"seconds": 0, "placement": 0, "memory": 0}
    assert {**result(left[0])["evaluated"], **aside} == {**wanted["evaluated"], **aside}
    shutil.rmtree(left[0] / "checkpoints")
    with pytest.raises(
        CrossfedError, match=f"measures the model of {local[0].name} again, but does not hold it"
    ):
        run_recorded(stored_config(left[0]), resume=left[0], finish=final_test)


def test_what_was_brought_in_part_is_no_run(
    local: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill before the configuration is there: nothing can take the directory for a run that has
    still to train.
    """
    from crossfed.platform.federation import reevaluate as module

    monkeypatch.setattr(module.shutil, "rmtree", lambda *_, **__: None)

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "write_text", killed)
    with pytest.raises(KeyboardInterrupt):
        again(local[0], tmp_path)
    (left,) = tmp_path.iterdir()
    assert (left / "checkpoints").is_dir()
    with pytest.raises(CrossfedError, match="There is no run"):
        find_run(left.name, tmp_path)


# -- refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("protocol", "sets", "told"),
    [
        ("temporal-cut", (), r"on the split of leave-one-out, but temporal-cut splits "
                             r"otherwise .* seen some of its test"),
        ("ratio-80-10-10", (), "but ratio-80-10-10 splits otherwise"),
        (None, ("evaluation.protocol=ratio-80-10-10-time",), "but ratio-80-10-10-time splits "
                                                             "otherwise"),
        ("leave-one-out-1", (), "unknown protocol 'leave-one-out-1'"),
        (None, ("evaluation.split_seed=7",), "evaluation.split_seed cannot change .* "
                                             "evaluation.protocol, evaluation.ks, "),
        (None, ("evaluation.select=ndcg_at_10",), "evaluation.select cannot change"),
        (None, ("dim=16",), r"dim cannot change .*; what can: evaluation.protocol, "
                            r"evaluation.ks, evaluation.metrics\."),
        (None, ("evaluation.ks=[5,10]",), r"leaves out 20: recall_at_20 selected"),
        (None, ("evaluation.metrics=[ndcg]",), r"leaves out recall: recall_at_20 selected"),
        (None, ("evaluation.ks=ten",), "evaluation.ks"),
    ],
)  # fmt: skip
def test_what_cannot_be_measured_again(
    local: list[Path], tmp_path: Path, protocol: str | None, sets: tuple[str, ...], told: str
) -> None:
    with pytest.raises(CrossfedError, match=told):
        again(local[0], tmp_path, *sets, protocol=protocol)
    assert not list(tmp_path.iterdir())


def test_runs_that_cannot_be_measured_again(local: list[Path], shops: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    trial = trained("lightgcn", shops, tmp_path, "dim=8", "epochs=1", finish=None)
    with pytest.raises(CrossfedError, match="a trial of a search"):
        again(trial, out)

    here = tmp_path / "copy"
    shutil.copytree(local[0], here)
    (here / "result.json").unlink()
    with pytest.raises(
        CrossfedError, match=f"has not finished, .* crossfed run --resume {here} goes on"
    ):
        again(here, out)

    shutil.rmtree(here)
    shutil.copytree(local[0], here)
    for commit in sorted((here / "checkpoints").iterdir())[-1:]:
        (commit / "books.safetensors").write_bytes(b"damaged")
    with pytest.raises(
        CrossfedError,
        match=r"does not hold its selected state any more "
        r"\(.*books.*--resume",
    ):
        again(here, out)
    run_recorded(stored_config(here), resume=here, finish=final_test)
    assert result(again(here, out))["domains"] == result(local[0])["domains"]

    shutil.rmtree(out)
    write_json(here / "data.json", read_json(here / "data.json") | {"fingerprint": "0" * 64})
    with pytest.raises(CrossfedError, match="was started on data 000000000000"):
        again(here, out)
    edited = yaml.safe_load((local[0] / "config.yaml").read_text())
    (here / "config.yaml").write_text(yaml.safe_dump({**edited, "text": {"encoder": "hashing"}}))
    with pytest.raises(CrossfedError, match="undo the edit"):
        again(here, out)
    assert not out.exists()


def test_the_command(local: list[Path], tmp_path: Path) -> None:
    given = ["evaluate", str(local[0]), "--protocol", FEW.id, "--set", "evaluation.ks=[1,20]"]
    done = CliRunner().invoke(
        app, [*given, "--out", str(tmp_path), "--backend", "inprocess", "--progress", "plain"]
    )
    assert done.exit_code == 0, done.output
    path = next(line for line in done.output.splitlines() if line.endswith("result.json"))
    assert Path(path).parent.parent == tmp_path and result(Path(path).parent)["protocol"] == FEW.id
    assert "measuring what validation recall_at_20 under leave-one-out selected in" in done.output
