"""What the shell completes: methods, presets and runs. Nothing heavy is imported; see
`crossfed --install-completion`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import typer

from crossfed.platform.registry import method_file, method_names


def method(incomplete: str) -> list[str]:
    """Methods that ship, and run files in the working directory."""
    files = (str(path) for ending in ("yaml", "yml") for path in Path().glob(f"*.{ending}"))
    return _begun([*method_names(), *files], incomplete)


def preset(incomplete: str) -> list[str]:
    """Presets of the method that the command line names; of all methods where it names none yet."""
    # a line that ends in an option without its value is not parsed, so the words must do (bash; zsh
    # and fish)
    line = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS", "")
    known = method_names()
    found: list[str] = []
    for name in [word for word in line.split() if word in known][:1] or known:
        found += dict[str, Any](method_file(name).get("presets") or {})
    return _begun(dict.fromkeys(found), incomplete)


def run(ctx: typer.Context, incomplete: str) -> list[str]:
    """Ids of the runs and studies in the folder of runs, newest first; of a path, the folders on
    it.
    """
    head, slash, _ = incomplete.rpartition("/")
    folder = Path(head + slash) if slash else Path(ctx.params.get("out") or "runs")
    found: list[Path] = []
    with contextlib.suppress(OSError):  # a folder that is not there completes to nothing
        found = [path for path in folder.iterdir() if path.is_dir() and (slash or _holds_run(path))]
        found.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    return _begun((head + slash + path.name for path in found), incomplete)


def _holds_run(path: Path) -> bool:
    return any((path / file).is_file() for file in ("config.yaml", "study.yaml"))


def _begun(words: Iterable[str], incomplete: str) -> list[str]:
    return [word for word in words if word.startswith(incomplete)]
