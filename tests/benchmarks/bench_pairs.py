#!/usr/bin/env python3
"""NGCF, XSimGCL or NeuMF beside RecBole 1.2.1 on ml-100k; prints one JSON line.

    python tests/benchmarks/bench_pairs.py {ngcf,xsimgcl,neumf} [--epochs 3] [--threads N] [--venv
    DIR] [--inter FILE]

Both sides have the sizes that RecBole gives the method by default (`SIZES`), all 100,000
interactions, 80/10/10 per user, batch 1024, Adam 0.005, full ranking of every user, the same number
of threads. RecBole 1.2.1 has no XSimGCL: its LightGCN stands in, whose epoch is the lower bound of
an XSimGCL built on it (noise and contrast come on top).

On a shared machine only ratios taken in the same minute mean anything, so ours runs both before and
after RecBole and the median of both halves counts; the seconds of processor time of ours are given,
too. RecBole is timed by `recbole_speed.py`, looked for in `checks/` beside the shared data folder,
which makes its virtual environment on the first run.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pandas as pd
import torch

from crossfed.platform.data.splits import TEST, TRAIN, VALIDATION, assign
from crossfed.platform.evaluation.ranking import rank
from crossfed.platform.method import Context, Interactions, Method, generators

SHARED = Path(
    os.environ.get("CROSSFED_SHARED_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"),
)
SIZES: dict[str, dict[str, Any]] = {
    "ngcf": {"layers": 3, "message_dropout": 0.1, "node_dropout": 0.0, "l2": 1e-5},
    "xsimgcl": {"layers": 2},
    "neumf": {"factors": 64, "mlp_dim": 64, "widths": (128, 64), "dropout": 0.1, "negatives": 1},
}
PEERS = {"ngcf": "NGCF", "xsimgcl": "LightGCN", "neumf": "NeuMF"}


def seconds(run: Callable[[], object]) -> tuple[float, float]:
    """Seconds of one call: on the clock, and of processor time."""
    start, used = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - start, time.process_time() - used


class Ours:
    """A method on one domain, stepped by hand."""

    def __init__(self, name: str, inter: Path) -> None:
        frame = pd.read_csv(inter, sep="\t")
        users = pd.factorize(frame["user_id:token"])[0].astype(np.int64)
        items = pd.factorize(frame["item_id:token"])[0].astype(np.int64)
        n_users, n_items = int(users.max()) + 1, int(items.max()) + 1
        split = assign(
            users,
            items,
            np.zeros(len(users), np.int64),
            n_users,
            "ratio-80-10-10",
            seed=42,
        )

        def part(chosen: np.ndarray) -> Interactions:
            return Interactions.build(n_users, n_items, users[chosen], items[chosen])

        self.train, self.validation = part(split == TRAIN), part(split == VALIDATION)
        self.test = part(split == TEST)
        self.seen = part(split != TEST)
        self.method: Method = importlib.import_module(f"crossfed.methods.{name}").METHOD
        self.config = self.method.Config(lr=0.005, batch_size=1024, **SIZES[name])
        self.state = self.method.init_domain(self.config, self.context("init", 0))
        self.round = 0

    def context(self, stage: str, round: int) -> Context:
        rng, torch_rng = generators(42, stage, round, "ml-100k")
        torch.manual_seed(round)
        return Context("ml-100k", stage, round, (), rng, torch_rng, torch.device("cpu"), self.train)

    def epoch(self) -> None:
        self.round += 1
        (stage,) = self.method.stages(self.config)
        stage.each[0].step(self.state, {}, self.context("train", self.round))

    def evaluate(self, masked: Interactions, truth: Interactions) -> dict[str, float]:
        everybody = np.arange(self.train.n_users)
        held_out = truth.indptr, truth.items
        score = lambda users: self.method.score(self.state, users)  # noqa: E731
        return rank(
            score,
            everybody,
            masked.indptr,
            masked.items,
            *held_out,
            self.train.n_items,
            (10, 20),
        ).macro

    def measure(self, epochs: int) -> list[tuple[float, float, float]]:
        """Of each epoch: seconds, processor seconds, and seconds of the validation after it."""
        validate = lambda: self.evaluate(self.train, self.validation)  # noqa: E731
        return [(*seconds(self.epoch), seconds(validate)[0]) for _ in range(epochs)]


def recbole(model: str, script: Path, venv: Path, epochs: int, threads: int) -> dict[str, Any]:
    """What RecBole took, with the same number of threads."""
    done = subprocess.run(
        [sys.executable, script, model, "--epochs", str(epochs), "--venv", venv],
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("method", choices=SIZES)
    parser.add_argument(
        "--epochs",
        type=int,
        default=3,
        help="epochs of each side; ours runs them twice",
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--venv", type=Path, default=Path(tempfile.gettempdir()) / "recbole-venv")
    parser.add_argument("--inter", type=Path, default=SHARED / "movielens_100k" / "ml-100k.inter")
    parser.add_argument(
        "--script",
        type=Path,
        default=SHARED.parent / "checks" / "recbole_speed.py",
    )
    args = parser.parse_args()
    for needed in (args.inter, args.script):
        if not needed.is_file():
            sys.exit(f"{needed} is missing; this comparison needs the shared data and its checks.")
    torch.set_num_threads(args.threads)
    ours = Ours(args.method, args.inter)
    ours.measure(1)  # warm-up
    before = ours.measure(args.epochs)
    peer = recbole(PEERS[args.method], args.script, args.venv, args.epochs, args.threads)
    both = [*before, *ours.measure(args.epochs)]
    epoch, processor, evaluation = ([row[k] for row in both] for k in range(3))
    result = {
        "benchmark": args.method,
        "data": "ml-100k",
        "peer": f"{peer['peer']} {peer['model']}",
        "threads": {"ours": torch.get_num_threads(), "peer": peer["threads"]},
        "epoch_s": {
            "ours": median(epoch),
            "peer": peer["epoch_s"],
            "ratio": peer["epoch_s"] / median(epoch),
        },
        "evaluation_s": {
            "ours": median(evaluation),
            "peer": peer["evaluation_s"],
            "ratio": peer["evaluation_s"] / median(evaluation),
        },
        "epochs_s": {"ours": epoch, "ours_processor": processor, "peer": peer["epochs_s"]},
        "test": {
            "ours": ours.evaluate(ours.seen, ours.test),
            "ours_epochs": ours.round,
            "peer": peer["test"],
        },
        "torch": torch.__version__,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
