"""What an earlier version left is read, compared, served and resumed to its bits.

The archive was made by the version at 31b67f0: LightGCN on the shops of these tests, a run that
finished (without its checkpoints) and the same run stopped in its second round.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import crossfed
from crossfed.platform.config.settings import build
from crossfed.platform.federation.final import test_once as final_test
from crossfed.platform.federation.runs import load_scorer, stored_config
from crossfed.platform.report.recording import run_recorded

ARCHIVE = Path(__file__).with_name("versions") / "lightgcn-31b67f0.tar.xz"
SETS = ("dim=8", "epochs=3", "batch_size=64", "text.encoder=hashing:32", "privacy.noise_seed=0")


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def stored(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "result.json").read_text(encoding="utf-8")))


def as_then(new: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
    """A new result's domains with the entries that the earlier version wrote, and no others."""
    return {
        name: {
            key: {metric: new[name][key][metric] for metric in value}
            if isinstance(value, dict)
            else new[name][key]
            for key, value in domain.items()
        }
        for name, domain in old.items()
    }


def test_the_same_configuration_gives_the_same_hash_and_numbers(
    earlier: Path, shops: Path, tmp_path: Path
) -> None:
    config = build(
        "lightgcn",
        sets=SETS,
        values={
            "data": shops,
            "out": tmp_path / "new",
            "backend": "inprocess",
            "tracking.enabled": False,
            "tracking.artifacts": False,
        },
    )
    old = stored(earlier / "finished")
    new = run_recorded(config, finish=final_test).result
    assert new["config_hash"] == old["config_hash"]
    assert as_then(new["domains"], old["domains"]) == old["domains"]
    assert (new["bytes"], new["candidates"]) == (old["bytes"], old["candidates"])


def test_an_interrupted_run_is_resumed_to_the_bits_of_the_finished_one(
    earlier: Path, shops: Path
) -> None:
    broken = earlier / "interrupted"
    assert len((broken / "history.jsonl").read_text().splitlines()) < 3
    config = stored_config(broken).model_copy(update={"data": shops})
    resumed = run_recorded(config, resume=broken, finish=final_test)
    old = stored(earlier / "finished")
    assert resumed.run_dir == broken
    assert resumed.result["config_hash"] == old["config_hash"]
    assert as_then(resumed.result["domains"], old["domains"]) == old["domains"]


def test_a_finished_run_is_loaded_compared_and_served(earlier: Path) -> None:
    folder = earlier / "finished"
    run = crossfed.load(folder)
    assert run.finished and run.result["method"] == "lightgcn"
    assert set(run.metrics["domain"]) == {"books", "films", "games"}
    table = str(crossfed.compare([folder]))
    assert f"{stored(folder)['domains']['books']['test']['recall_at_20']:.4f}" in table
    scores = load_scorer(folder, "games")(np.array([0, 29]))
    assert scores.shape == (2, 35) and bool(scores.isfinite().all())
