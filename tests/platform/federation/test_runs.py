"""Runs that are there already: found, told from unfinished ones, their files read or refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from crossfed.platform.errors import CrossfedError
from crossfed.platform.federation.runs import (
    find_run,
    finished,
    load_scorer,
    privacy_account,
    stored_config,
)
from made_runs import make_run, users


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    values = {"books": {"recall_at_20": users(0, 0.3)}}
    return make_run(tmp_path / "runs" / "one", "lightgcn", 3, values, sets=("dim=4",))


def test_a_run_is_found_by_path_and_by_id(run_dir: Path) -> None:
    out = run_dir.parent
    assert find_run(str(run_dir), Path("nowhere")) == run_dir
    assert find_run("one", out) == run_dir
    (out / "empty").mkdir()
    with pytest.raises(CrossfedError, match="There is no run 'empty', neither as a path nor in"):
        find_run("empty", out)


def test_finished_is_what_has_test_metrics_of_all_domains(run_dir: Path) -> None:
    assert finished(run_dir)
    result = json.loads((run_dir / "result.json").read_text())
    del result["domains"]["books"]["test"]
    (run_dir / "result.json").write_text(json.dumps(result))
    assert not finished(run_dir)
    (run_dir / "result.json").unlink()
    assert not finished(run_dir)


def test_the_configuration_is_the_runs_own_and_its_data_may_have_moved(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = stored_config(run_dir)
    assert (config.method, config.seed, config.config["dim"]) == ("lightgcn", 3, 4)
    monkeypatch.chdir(tmp_path)
    moved = stored_config(run_dir, Path("moved"))
    assert moved.data == tmp_path / "moved" and moved.hash() == config.hash()


def test_the_model_of_a_domain_scores_and_one_that_is_not_there_is_named(run_dir: Path) -> None:
    with pytest.raises(CrossfedError, match="no model of domain 'books'; it has: none yet"):
        load_scorer(run_dir, "books")
    (run_dir / "model").mkdir()
    table = {"users": torch.tensor([[1.0, 0.0], [0.0, 2.0]]), "items": torch.eye(2)}
    save_file(table, run_dir / "model" / "books.safetensors")
    assert load_scorer(run_dir, "books")(np.array([1, 0])).tolist() == [[0.0, 2.0], [1.0, 0.0]]
    with pytest.raises(CrossfedError, match="no model of domain 'toys'; it has: books"):
        load_scorer(run_dir, "toys")


def test_a_damaged_record_of_releases_is_told_with_its_folder(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "p", "p2p_iagr", 0, {"books": {"recall_at_20": users(0, 0.3)}})
    assert privacy_account(run_dir)["domains"] == {}
    (run_dir / "ledger.jsonl").write_text('{"sender": "books"}\n')
    with pytest.raises(
        CrossfedError, match=r"A line of ledger\.jsonl .* is not what the run wrote"
    ):
        privacy_account(run_dir)
