#!/usr/bin/env python3
"""LightGCN beside RecBole 1.2.1 on ml-100k, and its propagation beside torch-geometric's; prints
one JSON line.

    python tests/benchmarks/bench_lightgcn.py [--epochs 3] [--threads N] [--venv DIR] [--inter
    ml-100k.inter]

Both sides: all 100,000 interactions, 80/10/10 per user, d = 64, 2 layers, batch 1024, Adam 0.005,
full ranking of every user, the same number of threads. On a shared machine only ratios taken in the
same minute mean anything, so ours runs both before and after RecBole and the median of both halves
counts. RecBole is timed by `recbole_speed.py`, looked for in `checks/` beside the shared data
folder, which makes its virtual environment on the first run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import pandas as pd
import torch
from torch_geometric import EdgeIndex
from torch_geometric.nn import LGConv

from crossfed.methods.lightgcn import METHOD, Config, State
from crossfed.methods.parts.graph import bipartite_adjacency, propagate
from crossfed.platform.data.splits import TEST, TRAIN, VALIDATION, assign
from crossfed.platform.evaluation.ranking import rank
from crossfed.platform.method import Context, Interactions, generators

SHARED = Path(
    os.environ.get("CROSSFED_SHARED_DATA", Path(__file__).resolve().parents[3] / "shared" / "data")
)
CPU = torch.device("cpu")


def seconds(run: Callable[[], object]) -> float:
    """Wall-clock seconds of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


class Ours:
    """LightGCN on one domain, stepped by hand."""

    def __init__(self, inter: Path) -> None:
        frame = pd.read_csv(inter, sep="\t")
        users = pd.factorize(frame["user_id:token"])[0].astype(np.int64)
        items = pd.factorize(frame["item_id:token"])[0].astype(np.int64)
        n_users, n_items = int(users.max()) + 1, int(items.max()) + 1
        split = assign(
            users, items, np.zeros(len(users), np.int64), n_users, "ratio-80-10-10", seed=42
        )
        self.train, self.validation, self.test = (
            Interactions.build(n_users, n_items, users[split == part], items[split == part])
            for part in (TRAIN, VALIDATION, TEST)
        )
        both = split != TEST
        self.seen = Interactions.build(n_users, n_items, users[both], items[both])
        self.state: State = METHOD.init_domain(
            Config(layers=2, lr=0.005, batch_size=1024), self.context("init", 0)
        )
        self.round = 0

    def context(self, stage: str, round: int) -> Context:
        rng, torch_rng = generators(42, stage, round, "ml-100k")
        return Context("ml-100k", stage, round, (), rng, torch_rng, CPU, self.train)

    def epoch(self) -> None:
        self.round += 1
        (stage,) = METHOD.stages(self.state.config)
        stage.each[0].step(self.state, {}, self.context("train", self.round))

    def evaluate(self, masked: Interactions, truth: Interactions) -> dict[str, float]:
        self.state.final = None  # propagation is part of an evaluation
        everybody = np.arange(self.train.n_users)
        held_out = truth.indptr, truth.items
        score = lambda users: METHOD.score(self.state, users)  # noqa: E731
        return rank(
            score, everybody, masked.indptr, masked.items, *held_out, self.train.n_items, (10, 20)
        ).macro

    def measure(self, epochs: int) -> tuple[list[float], list[float]]:
        """Seconds of each epoch, and of the validation after it."""
        timed = [
            (seconds(self.epoch), seconds(lambda: self.evaluate(self.train, self.validation)))
            for _ in range(epochs)
        ]
        return [a for a, _ in timed], [b for _, b in timed]


def propagation(repeats: int) -> dict[str, float]:
    """Milliseconds of two layers forward and backward at d = 64 on a graph of Amazon Beauty's size,
    fastest of some.
    """
    rng = np.random.default_rng(0)
    n_users, n_items, m, layers = 22_363, 12_101, 154_000, 2
    items = (n_items * rng.power(0.4, m)).astype(np.int64)
    adj = bipartite_adjacency(n_users, n_items, rng.integers(0, n_users, m), items)
    coo, n = adj.to_sparse_coo().coalesce(), n_users + n_items
    by_row = EdgeIndex(
        coo.indices(), sparse_size=(n, n), is_undirected=True, sort_order="row"
    ).fill_cache_()
    weight, conv = adj.values(), LGConv(normalize=False)
    x, grad = torch.randn(n, 64, requires_grad=True), torch.randn(n, 64)

    def mean_of(product: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        level = total = x
        for _ in range(layers):
            level = product(level)
            total = total + level
        return total / (layers + 1)

    candidates: dict[str, Callable[[], torch.Tensor]] = {
        "propagate_csr": lambda: propagate(adj, x, layers),
        "edge_index_matmul": lambda: mean_of(lambda y: by_row.matmul(y, weight)),
        "lgconv_csr": lambda: mean_of(lambda y: conv(y, adj)),
        "lgconv_edge_index": lambda: mean_of(lambda y: conv(y, by_row, weight)),
    }
    reference = candidates["propagate_csr"]()
    result = {}
    for name, forward in candidates.items():
        torch.testing.assert_close(forward(), reference)
        result[name] = round(
            1e3 * min(seconds(lambda f=forward: f().backward(grad)) for _ in range(repeats)), 2
        )
    return result


def recbole(script: Path, venv: Path, epochs: int, threads: int) -> dict[str, object]:
    """What RecBole took, with the same number of threads."""
    done = subprocess.run(
        [sys.executable, script, "LightGCN", "--epochs", str(epochs), "--venv", venv],
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--epochs", type=int, default=3, help="epochs of each side; ours runs them twice"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--venv", type=Path, default=Path(tempfile.gettempdir()) / "recbole-venv")
    parser.add_argument("--inter", type=Path, default=SHARED / "movielens_100k" / "ml-100k.inter")
    parser.add_argument(
        "--script", type=Path, default=SHARED.parent / "checks" / "recbole_speed.py"
    )
    args = parser.parse_args()
    for needed in (args.inter, args.script):
        if not needed.is_file():
            sys.exit(f"{needed} is missing; this comparison needs the shared data and its checks.")
    torch.set_num_threads(args.threads)
    ours = Ours(args.inter)
    ours.measure(1)  # warm-up
    before = ours.measure(args.epochs)
    peer = recbole(args.script, args.venv, args.epochs, args.threads)
    after = ours.measure(args.epochs)
    epochs, evaluations = (a + b for a, b in zip(before, after, strict=True))
    result = {
        "benchmark": "lightgcn",
        "data": "ml-100k",
        "threads": {"ours": torch.get_num_threads(), "peer": peer["threads"]},
        "epoch_s": {
            "ours": median(epochs),
            "peer": peer["epoch_s"],
            "ratio": peer["epoch_s"] / median(epochs),
        },
        "evaluation_s": {
            "ours": median(evaluations),
            "peer": peer["evaluation_s"],
            "ratio": peer["evaluation_s"] / median(evaluations),
        },
        "epochs_s": {"ours": epochs, "peer": peer["epochs_s"]},
        "evaluations_s": {"ours": evaluations, "peer": peer["evaluations_s"]},
        "test": {
            "ours": ours.evaluate(ours.seen, ours.test),
            "ours_epochs": ours.round,
            "peer": peer["test"],
        },
        "propagation_ms": propagation(10),
        "torch": torch.__version__,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
