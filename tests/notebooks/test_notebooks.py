"""The notebooks run from their first cell to their last."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize("name", ["read_a_run.py", "write_a_method.py"])
def test_a_notebook_runs(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(HERE / name)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "CROSSFED_CACHE": str(tmp_path / "cache")},
    )
    assert done.returncode == 0, done.stderr


def test_every_notebook_is_run() -> None:
    notebooks = {path.name for path in HERE.glob("*.py") if "marimo.App" in path.read_text()}
    assert notebooks - {Path(__file__).name} == {"read_a_run.py", "write_a_method.py"}
