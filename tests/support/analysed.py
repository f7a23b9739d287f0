"""What tests of reports share: runs of given numbers, and reading tables and figures back."""

from __future__ import annotations

import csv
import io
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from crossfed.platform.report import analyses
from crossfed.platform.report.finished import Finished
from made_runs import users

RECALL = "recall_at_20"


def texts(figure: Figure) -> str:
    return "\n".join(
        t.get_text() for t in figure.findobj(lambda o: hasattr(o, "get_text")) if t.get_text()
    )


def records(found: analyses.Analysis) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(found.grid.csv())))


def both(mean: float, seed: int = 0) -> dict[str, Any]:
    return {domain: {RECALL: users(seed + len(domain), mean)} for domain in ("books", "toys")}


MEANS = {"lightgcn": 0.30, "sasrec": 0.31, "fedcrf": 0.34, "p2p_iagr": 0.25}


METRICS = ("recall_at_20", "ndcg_at_20")


def per_user(method: str, seed: int, domain: str) -> dict[str, np.ndarray]:
    place = [*MEANS].index(method) * 100 + seed * 10 + len(domain)
    base = users(len(domain), 0.0)  # users differ more among themselves than methods do
    luck = 0.01 * seed if domain == "books" else 0.03 * (seed - 1) * (method == "fedcrf")
    recall = (base + users(place, MEANS[method] + luck, spread=0.04)).round(2)
    return {"recall_at_20": recall, "ndcg_at_20": recall / 2}


def raw(runs: list[Finished], method: str, domain: str, metric: str) -> dict[int, np.ndarray]:
    """Seed -> values by user, read from the files."""
    found = {}
    for run in runs:
        if run.result["method"] == method:
            table = pd.read_parquet(run.path / "per_user" / f"{domain}.test.parquet").sort_values(
                "user"
            )
            found[run.result["seed"]] = table[metric].to_numpy()
    return found


def csv_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))
