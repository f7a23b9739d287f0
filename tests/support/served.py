"""What a domain's model must recommend, worked out the slow way."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from crossfed.platform.federation.runs import load_scorer

DOMAINS = ("books", "films", "games")


def expected(
    run_dir: Path, domain: str, user: int, k: int, exclude: tuple[int, ...] = ()
) -> list[str]:
    """The slow way: sort all pairs (score, row number)."""
    scores = load_scorer(run_dir, domain)(np.array([user]))[0].tolist()
    ranked = sorted((-s, i) for i, s in enumerate(scores) if i not in exclude)
    return [f"{domain}-i{i}" for _, i in ranked[:k]]
