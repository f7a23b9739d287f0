"""A disk that fills up, for real: a small file system of its own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from crossfed.platform.checkpoint import Checkpoints
from crossfed.platform.config.settings import RunConfig, build
from crossfed.platform.errors import CrossfedError
from crossfed.platform.federation.runs import stored_config
from crossfed.platform.report.recording import run_recorded

NODES = ("server", "books", "films", "games")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 400 KiB: room for the run's directory and a few commits of its 100 KB of
    state.
    """
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(disk)]
    if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def config(shops: Path, out: Path) -> RunConfig:
    values = {"data": shops, "out": out, "backend": "inprocess"}
    sets = ["rounds=6", "dim=3000", "tracking.enabled=false", "tracking.artifacts=false"]
    return build("toys:AVERAGE", sets=sets, values=values)


def numbers(result: dict[str, Any]) -> dict[str, Any]:
    return {key: result[key] for key in ("domains", "bytes")}


def test_a_full_disk_stops_the_run_in_one_sentence_and_loses_no_commit(
    shops: Path, tmp_path: Path, small_disk: Path
) -> None:
    straight = run_recorded(config(shops, tmp_path / "straight"))
    started: list[Path] = []
    with pytest.raises(
        CrossfedError,
        match=r"cannot be (written|committed|made).*(No space|os "
        r"error 28)",
    ):
        run_recorded(config(shops, small_disk), started=started.append)
    run_dir = started[0]
    kept = Checkpoints(run_dir, NODES)
    found = kept.latest()
    assert found is not None and found[1]["step"] >= 1, "a committed round is left, and it is sound"
    assert all(kept.check(commit) for commit in kept.committed())

    with pytest.raises(CrossfedError, match="cannot be"):
        # still full: the same sentence, and still nothing is lost
        run_recorded(stored_config(run_dir), resume=run_dir)
    assert kept.latest() is not None
    subprocess.run(["mount", "-o", "remount,size=16m", str(small_disk)], check=True)
    assert numbers(run_recorded(stored_config(run_dir), resume=run_dir).result) == numbers(
        straight.result
    )
