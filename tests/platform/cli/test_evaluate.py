"""The command that measures a model again: its options reach the measuring, and an interrupt says
how to go on.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from crossfed.platform.cli.main import app
from crossfed.platform.config.settings import build
from crossfed.platform.federation.final import test_once as final_test
from crossfed.platform.federation.run import run_federation


@pytest.fixture(scope="module")
def run_dir(shops: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    values = {"data": shops, "out": tmp_path_factory.mktemp("runs"), "backend": "inprocess"}
    sets = ["epochs=1", "tracking.enabled=false", "tracking.artifacts=false"]
    return run_federation(build("lightgcn", sets=sets, values=values), finish=final_test).run_dir


def test_other_cut_offs_are_measured_in_a_run_of_their_own(run_dir: Path, tmp_path: Path) -> None:
    before = (run_dir / "result.json").read_bytes()
    done = CliRunner().invoke(
        app,
        ["evaluate", str(run_dir), "--set", "evaluation.ks=[3,20]", "--out", str(tmp_path),
         "--progress", "quiet"],
        catch_exceptions=False,
    )  # fmt: skip
    assert done.exit_code == 0
    path = Path(done.output.strip().splitlines()[-1])
    assert path.name == "result.json" and path.parent.parent == tmp_path
    again, first = (
        json.loads(text)["domains"]["books"]["test"] for text in (path.read_text(), before)
    )
    assert "recall_at_3" in again and "recall_at_10" not in again
    assert again["recall_at_20"] == first["recall_at_20"], "the same model"
    assert (run_dir / "result.json").read_bytes() == before


@pytest.mark.parametrize(
    ("begun", "words"),
    [(False, "Nothing was left behind."), (True, "crossfed run --resume new measures again.")],
)
def test_an_interrupt_says_what_it_left(
    begun: bool, words: str, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, started: Any, **__: Any) -> None:
        if begun:
            started(Path("new"))
        raise KeyboardInterrupt

    monkeypatch.setattr("crossfed.platform.federation.reevaluate.evaluate", interrupted)
    done = CliRunner().invoke(app, ["evaluate", str(run_dir)])
    assert done.exit_code == 130 and f"Interrupted. {words}" in done.output
