"""Runs and studies whose process ended without a word: MLflow has them as running, and nobody works
on them.

A process that is killed (`kill -9`, a full memory, a machine that is gone) can record nothing.
Whoever looks next does: the record is closed as interrupted, and opened again when the run or study
goes on.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from pathlib import Path

from crossfed.platform.config.settings import TrackingSettings
from crossfed.platform.errors import CrossfedError
from crossfed.platform.layout import ENDING, RESULT, RUN_ID
from crossfed.platform.tracking import tracker
from crossfed.platform.tracking.tracker import resolve_uri
from crossfed.platform.uris import sqlite_path

REASON = "its process ended without a word; crossfed run --resume or crossfed tune resume goes on"


def in_use(folder: Path) -> bool:
    """Whether a process works on a run or study now: it holds the lock of its folder."""
    try:
        with (folder / ".lock").open("r") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no lock was ever taken, or this storage knows none
        return False
    return False


def _open(out: Path) -> Iterator[Path]:
    """Folders of recorded runs, studies and trials that show no end, and that nobody works on."""
    for pattern in (f"*/{RUN_ID}", f"*/*/{RUN_ID}"):
        for path in sorted(out.glob(pattern)):
            folder = path.parent
            over = (folder / RESULT).is_file() and not (folder / ENDING).exists()
            if not over and not in_use(folder):
                yield folder


def close(out: Path, uri: str | None = None, below: Path | None = None) -> list[Path]:
    """Record as interrupted what MLflow has as running and nobody works on.

    Args:
        out: folder of runs. uri: the store; by default that of these runs.
        below: only this study and its trials.

    Returns:
        The folders of what was closed; nothing where there is no store, or it does not answer.
    """
    settings = TrackingSettings(uri=uri)
    candidates = [
        folder for folder in _open(out) if below is None or below in (folder, folder.parent)
    ]
    if not candidates:
        return []
    try:
        store = resolve_uri(settings, out)
        if store.startswith("sqlite") and not (sqlite_path(store) or Path()).is_file():
            return []
        with tracker.reading(store) as client:
            experiments = [row.experiment_id for row in client.search_experiments()]
            running = client.search_runs(
                experiments, "attributes.status = 'RUNNING'", max_results=1000
            )
        ids = {run.info.run_id for run in running}
    except CrossfedError:
        return []
    left = [
        folder
        for folder in candidates
        if (folder / RUN_ID).read_text(encoding="utf-8").strip() in ids
    ]
    for folder in left:
        tracker.close(
            settings.model_copy(update={"uri": store}), folder, "KILLED", REASON, "interrupted"
        )
    return left


def sentence(folders: list[Path], out: Path) -> str:
    """What was closed, in words."""
    names = ", ".join(str(folder.relative_to(out)) for folder in folders[:5])
    more = f" and {len(folders) - 5} more" if len(folders) > 5 else ""
    return (
        f"interrupted: {names}{more}: {'its' if len(folders) == 1 else 'their'} process "
        f"ended without a word"
    )
