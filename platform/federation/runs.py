"""Runs that are there already: found by name, fetched, their configuration, privacy account and
models read.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file

from crossfed.platform.checkpoint import Checkpoints, read_json
from crossfed.platform.config.settings import RunConfig, build
from crossfed.platform.errors import CrossfedError
from crossfed.platform.federation import mirror, privacy
from crossfed.platform.federation.node import Plan
from crossfed.platform.layout import CONFIG, DATA, LEDGER, RESULT


def find_run(name: str, out: Path) -> Path:
    """The directory of a run given by path or by id below `out`.

    Raises:
        CrossfedError: there is none.
    """
    for path in (Path(name), out / name):
        if (path / CONFIG).is_file():
            return path
    raise CrossfedError(f"There is no run {name!r}, neither as a path nor in {out}.")


def finished(run_dir: Path) -> bool:
    """Whether a run has test metrics of all its domains."""
    if not (run_dir / RESULT).is_file():
        return False
    return all("test" in row for row in read_json(run_dir / RESULT)["domains"].values())


def fetch_run(uri: str, out: Path) -> Path:
    """Bring a run that was mirrored to a URI into `out`, as of its last complete commit.

    Raises:
        CrossfedError: there is none, or the name is taken in `out`.
    """

    def names(run_dir: Path) -> tuple[str, ...]:
        domains = tuple(read_json(run_dir / DATA)["domains"])
        return Plan(stored_config(run_dir), run_dir, domains, run_dir, run_dir).nodes

    return mirror.fetch(uri, out, names)


def stored_config(run_dir: Path, data: Path | None = None) -> RunConfig:
    """The effective configuration of a run; a run that was moved goes on where it is now.

    Args:
        data: where its data are now, if not where they were.
    """
    return build(str(run_dir / CONFIG), values={"data": data and data.absolute()})


def privacy_account(run_dir: Path) -> dict[str, Any]:
    """The "privacy" block of a run, also of one that is unfinished or still going on, from its own
    record.

    Raises:
        CrossfedError: a file of the run is damaged.
    """
    config, last = stored_config(run_dir), Checkpoints(run_dir, ()).peek()
    releases = config.resolved.releases(config.method_config())
    accountant = privacy.Accountant(
        config.privacy, releases, privacy.read_lines(run_dir / privacy.RECORD)
    )
    ledger = privacy.read_lines(run_dir / LEDGER)
    try:
        return accountant.report(ledger, last.get("budget_stops", {}) if last else {})
    except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
        raise CrossfedError(
            f"A line of {LEDGER} or {privacy.RECORD} in {run_dir} is not what the run wrote "
            f"({type(error).__name__}: {error}); "
            "restore them from a copy."
        ) from error


def load_scorer(run_dir: Path, domain: str) -> Callable[[npt.NDArray[np.int64]], torch.Tensor]:
    """The finished model of one domain: users (row numbers, int64 [b]) -> scores [b, n_items], seen
    items not masked.

    Raises:
        CrossfedError: the run has not finished or has no such domain.
    """
    path = run_dir / "model" / f"{domain}.safetensors"
    if not path.is_file():
        known = (
            ", ".join(sorted(file.stem for file in path.parent.glob("*.safetensors"))) or "none yet"
        )
        raise CrossfedError(f"{run_dir} holds no model of domain {domain!r}; it has: {known}.")
    method, exported = stored_config(run_dir).resolved, load_file(path)
    return lambda users: method.score_exported(exported, users)
