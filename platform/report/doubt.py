"""What in a comparison is to be doubted: results that chance explains, hits that are all first,
samples without full ranking.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

from crossfed.platform.checkpoint import read_json
from crossfed.platform.errors import CrossfedError
from crossfed.platform.evaluation.chance import chance
from crossfed.platform.evaluation.protocols import PROTOCOLS
from crossfed.platform.layout import RESULT
from crossfed.platform.report.effects import per_user
from crossfed.platform.report.finished import Finished, Split
from crossfed.platform.report.tables import pretty

STEEP = 0.8
"""NDCG@k above this share of HR@k: nearly every hit would be at the first places."""


def n_candidates(result: Mapping[str, Any]) -> int | None:
    """How many items a true item is ranked among under a run's protocol; None where all are
    ranked.
    """
    protocol = PROTOCOLS.get(result["protocol"])
    return None if protocol is None or protocol.negatives is None else protocol.negatives + 1


def chance_line(result: Mapping[str, Any], metrics: Sequence[str]) -> list[float | None] | None:
    """What chance reaches in each metric; None under a protocol that ranks all items."""
    n = n_candidates(result)
    return None if n is None else [chance(metric, n) for metric in metrics]


def doubts(
    groups: Mapping[str, Sequence[Finished]], columns: Sequence[tuple[str, str]], split: Split
) -> list[str]:
    """Sentences, one for each thing to be doubted.

    Args:
        groups: runs by row. columns: (domain, metric).
    """
    found = []
    for label, members in groups.items():
        for domain, metric in columns:
            found += _by_chance(label, members, domain, metric, split)
        for domain in dict.fromkeys(domain for domain, _ in columns):
            found += _steep(label, members, domain, split)
    if n_candidates(next(iter(groups.values()))[0].result) is not None:
        lone = [
            label
            for label, members in groups.items()
            if not all(_ranked_in_full(run) for run in members)
        ]
        if lone:
            found.append(
                f"{', '.join(lone)}: ranked among sampled items only, with no full ranking of "
                f"the same model beside it; "
                "crossfed evaluate RUN --protocol leave-one-out makes one."
            )
    return found


def _by_chance(
    label: str, members: Sequence[Finished], domain: str, metric: str, split: Split
) -> list[str]:
    """A row whose interval over users (Student's, 95 %, values averaged over seeds) does not lie
    above chance.
    """
    n = n_candidates(members[0].result)
    line = None if n is None else chance(metric, n)
    if line is None or split != "test":
        return []
    try:
        users = per_user(members, domain)
    except CrossfedError:  # runs of which only the result is there
        return []
    if metric not in users:
        return []
    values = users[metric].to_numpy()
    mean = float(values.mean())
    half = (
        float(stats.sem(values) * stats.t.ppf(0.975, len(values) - 1))
        if len(values) > 1
        else math.inf
    )
    if mean - half > line:
        return []
    how = "within its interval of chance" if mean + half >= line else "below chance"
    return [f"{label}, {domain}: {pretty(metric)} {mean:.4f} ± {half:.4f} is {how} ({line:.4f})."]


def _steep(label: str, members: Sequence[Finished], domain: str, split: Split) -> list[str]:
    """A row whose NDCG@k is more than `STEEP` of its HR@k for some k > 1; the smallest such k is
    told.
    """
    rows = [run.result["domains"][domain].get(split, {}) for run in members]
    for k in sorted(
        int(name.removeprefix("ndcg_at_")) for name in rows[0] if name.startswith("ndcg_at_")
    ):
        if k == 1:
            continue
        both = [(row.get(f"ndcg_at_{k}"), row.get(f"hit_rate_at_{k}")) for row in rows]
        if any(a is None or not b for a, b in both):
            continue
        ratio = float(np.mean([a / b for a, b in both]))
        if ratio > STEEP:
            return [
                f"{label}, {domain}: NDCG@{k} is {ratio:.2f} of HR@{k}: nearly every hit would "
                f"be at the first place."
            ]
    return []


def _ranked_in_full(run: Finished) -> bool:
    """Whether the same model was ranked among all items, by a run that lies beside this one, or by
    the run it came from.
    """
    mine = {run.result["run_id"], (run.result.get("evaluated") or {}).get("run")} - {None}
    for file in run.path.parent.glob(f"*/{RESULT}"):
        try:
            other = read_json(file)
        except CrossfedError:
            continue
        theirs = {other.get("run_id"), (other.get("evaluated") or {}).get("run")} - {None}
        if mine & theirs and other.get("protocol") in PROTOCOLS and n_candidates(other) is None:
            return True
    return False
