"""How long ranking takes: run `pytest tests/benchmarks/bench_ranking.py` (needs the `bench` extra).

Scoring is part of it, as a product of random vectors of width 64, which is what LightGCN's scoring
costs. Sizes are those of MovieLens-100k (RecBole 1.2.1 takes 0.11 s there on a quiet 2-core
machine, scoring included) and of Amazon Beauty, both with 80 % of the interactions seen, 10 %
masked as validation and 10 % ranked; and a catalogue as large as Amazon Books.
"""

import numpy as np
import pytest
import torch

from crossfed.platform.evaluation.candidates import draw
from crossfed.platform.evaluation.ranking import rank

pytest.importorskip("pytest_benchmark", reason="benchmarks need the bench extra")

SIZES = {
    "ml-100k": (943, 1_682, 100_000),
    "beauty": (22_363, 12_101, 198_502),
    "books-catalogue": (2_000, 370_000, 30_000),
}


def make(name: str, popularity: bool = False):
    """Scorer and CSR index arrays of a random domain of that size, one in ten interactions held
    out.
    """
    n_users, n_items, n_interactions = SIZES[name]
    rng = np.random.default_rng(0)
    pairs = np.unique(
        rng.integers(0, n_users, n_interactions) * n_items
        + rng.integers(0, n_items, n_interactions)
    )
    held_out = rng.random(len(pairs)) < 0.1

    def csr(chosen):
        counts = np.bincount(chosen // n_items, minlength=n_users)
        return np.concatenate([[0], counts.cumsum()]), chosen % n_items

    if popularity:
        counts = torch.from_numpy(np.bincount(pairs % n_items, minlength=n_items)).float()
        score = lambda users: counts.expand(len(users), n_items)  # noqa: E731
    else:
        user_vectors, item_vectors = torch.randn(n_users, 64), torch.randn(n_items, 64)
        score = lambda users: user_vectors[torch.from_numpy(users)] @ item_vectors.T  # noqa: E731
    return score, csr(pairs), csr(pairs[~held_out]), csr(pairs[held_out]), n_users, n_items


@pytest.mark.parametrize("name", SIZES)
def bench_full(benchmark, name):
    score, _, seen, truth, n_users, n_items = make(name)
    users = np.arange(n_users)
    benchmark.pedantic(
        lambda: rank(score, users, *seen, *truth, n_items, [10, 20]), rounds=5, warmup_rounds=1
    )


def bench_full_with_ties(benchmark):
    """Popularity gives many items the same score, so the stated tie rule must be worked out for
    every user.
    """
    score, _, seen, truth, n_users, n_items = make("ml-100k", popularity=True)
    users = np.arange(n_users)
    benchmark.pedantic(
        lambda: rank(score, users, *seen, *truth, n_items, [10, 20]), rounds=5, warmup_rounds=1
    )


@pytest.mark.parametrize(("name", "n"), [("ml-100k", 99), ("beauty", 99), ("beauty", 999)])
def bench_sampled(benchmark, name, n):
    score, known, seen, truth, n_users, n_items = make(name)
    candidates = draw(np.arange(n_users), *known, n_items, n, seed=0)
    benchmark.pedantic(
        lambda: rank(score, candidates.users, *seen, *truth, n_items, [10, 20], candidates),
        rounds=3,
        warmup_rounds=1,
    )


@pytest.mark.parametrize(("name", "n"), [("beauty", 99), ("beauty", 999)])
def bench_draw(benchmark, name, n):
    _, known, _, _, n_users, n_items = make(name)
    benchmark.pedantic(lambda: draw(np.arange(n_users), *known, n_items, n, seed=0), rounds=3)
