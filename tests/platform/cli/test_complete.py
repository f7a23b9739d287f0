"""What the shell completes: methods, presets and runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from crossfed.platform.registry import method_file, method_names
from made_runs import make_run, users


@pytest.fixture
def out(tmp_path: Path) -> Path:
    for name, method, dim in (("l", "lightgcn", 8), ("f", "fedcrf", 8), ("f16", "fedcrf", 16)):
        values = {
            domain: {
                "recall_at_20": users(dim, 0.3 + len(method) / 100),
                "ndcg_at_20": users(dim + 5, 0.2),
            }
            for domain in ("books", "games")
        }
        make_run(tmp_path / "runs" / name, method, 0, values, sets=(f"dim={dim}",))
    return tmp_path / "runs"


def completed(line: str, folder: Path) -> list[str]:
    """What bash is offered for the last word of a line."""
    env = os.environ | {
        "_CROSSFED_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(line.count(" ")),
    }
    done = subprocess.run(
        [sys.executable, "-c", "import sys; sys.argv = ['crossfed']; from "
                               "crossfed.platform.cli.main import main; main()"],
        cwd=folder, env=env, capture_output=True, text=True,
    )  # fmt: skip
    assert not done.stderr
    return done.stdout.split()


def test_the_shell_completes_methods_presets_and_runs(out: Path) -> None:
    (out.parent / "mine.yaml").touch()
    assert completed("crossfed run ", out.parent) == [*method_names(), "mine.yaml"]
    assert completed("crossfed tune start fed", out.parent) == [
        m for m in method_names() if m.startswith("fed")
    ]
    assert completed("crossfed run fedcrf --preset ", out.parent) == list(
        method_file("fedcrf")["presets"]
    )
    assert sorted(completed("crossfed compare ", out.parent)) == ["f", "f16", "l"]
    assert sorted(completed("crossfed figures f", out.parent)) == ["f", "f16"]
    assert sorted(completed(f"crossfed report {out}/f", Path("/"))) == [f"{out}/f", f"{out}/f16"]
    assert completed("crossfed run --resume ", Path("/")) == []
