"""What a random order of the candidates reaches: the line that a sampled protocol's numbers have to
be read against.

For one true item among n candidates its place is uniform on 1 … n, so that with m = min(k, n)

    HR@k = Recall@k = m / n        Precision@k = m / (n k)
    NDCG@k = Σ_{r≤m} 1 / log₂(r + 1) / n        MRR@k = MAP@k = Σ_{r≤m} 1 / r / n

and MRR without a cut-off is that of k = n.
"""

from __future__ import annotations

import math

from crossfed.platform.evaluation.metrics import WHOLE, metric_name, parse_metric


def chance(metric: str, candidates: int) -> float | None:
    """The expected value of a metric for one true item in a random order; None where there is no
    such value (coverage).

    Args:
        metric: in any spelling. candidates: n, the true item included.

    Raises:
        CrossfedError: not a metric.
        ValueError: no candidate.
    """
    if candidates < 1:
        raise ValueError(f"there must be a candidate, got {candidates}")
    name, k = ("mrr", candidates) if metric_name(metric) == WHOLE else parse_metric(metric)
    reached = min(k, candidates)
    places = range(1, reached + 1)
    if name in ("hit_rate", "recall"):
        return reached / candidates
    if name == "precision":
        return reached / (candidates * k)
    if name == "ndcg":
        return sum(1 / math.log2(place + 1) for place in places) / candidates
    if name in ("mrr", "map"):
        return sum(1 / place for place in places) / candidates
    return None
