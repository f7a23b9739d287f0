"""The analyses of one run that every run draws for itself, where they have something to show.

Apart from `figures`, which needs nothing but a history: these read a finished run's directory.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from matplotlib.figure import Figure

from crossfed.platform.method import SERVER
from crossfed.platform.report.analyses import Analysis, cohorts
from crossfed.platform.report.finished import Finished, load_runs
from crossfed.platform.report.rounds import history, upload, weights


def run_analyses(run_dir: Path) -> dict[str, Figure]:
    """Figures of a finished run by file name: users by activity, quality against bytes, aggregation
    weights.

    The metric shown is the one that selected.

    Args:
        run_dir: holds `result.json`, `config.yaml`, `history.jsonl` and, where the test split was
            read, `per_user/`.
    """
    [run] = load_runs([run_dir])
    select = run.settings["evaluation.select"]
    wanted: dict[str, Callable[[], Analysis]] = {}
    if all("test" in row for row in run.result["domains"].values()):
        wanted["cohorts"] = lambda: cohorts([run], select)
    if any(run.result["bytes"]["up"].values()) and _evaluated(run) > 1:
        wanted["upload"] = lambda: upload([run], select)
    if any(
        key.startswith(f"train/{SERVER}/weight_") for row in history(run) for key in row["metrics"]
    ):
        wanted["weights"] = lambda: weights(run)
    return {name: draw().figure for name, draw in wanted.items()}


def _evaluated(run: Finished) -> int:
    """How many rounds were evaluated."""
    return sum(any(key.startswith("val/") for key in row["metrics"]) for row in history(run))
