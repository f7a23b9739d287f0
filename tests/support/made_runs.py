"""Run directories made of given numbers, as `run_recorded` leaves them: for comparisons and
analyses, without training.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from crossfed.platform.config.settings import build

Values = Mapping[str, np.ndarray]


def make_run(
    folder: Path,
    method: str,
    seed: int,
    values: Mapping[str, Values],
    *,
    sets: tuple[str, ...] = (),
    validation: Mapping[str, float] | None = None,
    history: list[dict[str, Any]] | None = None,
    trained: Mapping[str, np.ndarray] | None = None,
    **changes: Any,
) -> Path:
    """A finished run.

    Args:
        values: domain -> metric -> test values per user [n_users].
        sets: as of `crossfed run --set`.
        validation: domain -> the selecting validation metric; the test mean by default.
        trained: domain -> training interactions per user.
        changes: entries of `result.json` to replace; None drops one.
    """
    folder.mkdir(parents=True)
    config = build(method, sets=sets, values={"seed": seed, "out": folder.parent})
    (folder / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
    (folder / "per_user").mkdir()
    domains: dict[str, Any] = {}
    for name, metrics in values.items():
        n_users = len(next(iter(metrics.values())))
        n_train = np.arange(n_users) if trained is None else trained[name]
        table = pd.DataFrame(
            {"user": np.arange(n_users), "n_train": n_train, "n_truth": 1, **metrics}
        )
        table.sample(frac=1, random_state=seed).to_parquet(
            folder / "per_user" / f"{name}.test.parquet", index=False
        )
        means = {metric: float(column.mean()) for metric, column in metrics.items()}
        select = config.evaluation.select
        selecting = {select: validation[name]} if validation else {}
        domains[name] = {
            "counts": {"users": n_users, "items": 100, "interactions": 10 * n_users},
            "selected": {
                "stage": "train",
                "round": 2,
                "value": means.get(select, 0.0),
                "rounds": 3,
            },
            "validation": means | selecting,
            "validation_users": n_users,
            "validation_candidates": "full:100",
            "test": means,
            "test_users": n_users,
        }
    result = {
        "run_id": folder.name,
        "method": method,
        "scope": str(config.resolved.scope),
        "preset": None,
        "seed": seed,
        "data": {"name": "shops", "synthetic": False},
        "data_fingerprint": "ab12" * 16,
        "protocol": config.evaluation.protocol,
        "split_seed": 42,
        "candidates": dict.fromkeys(values, "full:100"),
        "config": config.config,
        "config_hash": config.hash(),
        "domains": domains,
        "bytes": {"up": dict.fromkeys(values, 0), "down": dict.fromkeys(values, 0)},
        "privacy": {
            "note": "",
            "unit": "",
            "domains": {},
            "stopped_by_budget": {},
            "sent_as_it_is": [],
        },
        "seconds": {"total": 12.0, "encode": 1.0, "rounds": 10.0, "final": 1.0},
        "backend": "inprocess",
        "placement": {name: {"host": "here", "pid": 1, "device": "cpu"} for name in values},
        "restarts": 0,
        "versions": {"crossfed": "0.1.0", "torch": "2"},
    }
    result = {key: value for key, value in (result | changes).items() if value is not None}
    (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")
    if history is not None:
        (folder / "history.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in history), encoding="utf-8"
        )
    return folder


def users(seed: int, mean: float, n_users: int = 60, spread: float = 0.1) -> np.ndarray:
    """Per-user values around a mean."""
    return np.random.default_rng(seed).normal(mean, spread, n_users)
