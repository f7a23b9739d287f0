"""SASRec's training epoch beside RecBole 1.2.1's on ml-100k, and the validation NDCG@10 that each
reaches.

    python tests/benchmarks/bench_sasrec.py [--epochs 3] [--ours-epochs 60] [--threads 1] [--preset
    recbole] [KEY=VALUE …]

Prints one JSON line. Both sides have d = 64, two blocks, two heads, length 50, the last item of
every user as test and the one before it as validation, all 1,682 items ranked. An epoch is the same
97 thousand targets on both sides: RecBole makes one row of up to 50 items per target, ours trains
every position of consecutive windows. RecBole does not mask the history when it ranks sequences, so
the compared NDCG@10 of ours does not either; the masked one is given beside it.

A machine that others use slows both sides, and only times taken in the same minutes mean anything,
so epochs of ours are timed both before and after RecBole and the median of both halves counts.
RecBole is timed by `recbole_speed.py`, looked for in `checks/` beside the shared data folder, which
makes its virtual environment on the first run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pandas as pd
import torch
import yaml

from crossfed.methods.parts.next_item import n_targets
from crossfed.methods.sasrec import METHOD, Config
from crossfed.platform.data.splits import TEST, TRAIN, VALIDATION, assign
from crossfed.platform.evaluation.ranking import rank
from crossfed.platform.method import Context, Interactions, Method, generators
from crossfed.platform.registry import method_file

SHARED = Path(
    os.environ.get("CROSSFED_SHARED_DATA", Path(__file__).resolve().parents[3] / "shared" / "data")
)
CPU = torch.device("cpu")


class Ours:
    """A method with one local stage on one domain, stepped by hand."""

    def __init__(self, inter: Path, config: Any, method: Method = METHOD) -> None:
        self.method = method
        frame = pd.read_csv(inter, sep="\t").sort_values("timestamp:float", kind="stable")
        users = pd.factorize(frame["user_id:token"])[0].astype(np.int64)
        items = pd.factorize(frame["item_id:token"])[0].astype(np.int64)
        times = frame["timestamp:float"].to_numpy(np.int64)
        n_users, n_items = int(users.max()) + 1, int(items.max()) + 1
        split = assign(users, items, times, n_users, "leave-one-out")

        def part(chosen: np.ndarray) -> Interactions:
            return Interactions.build(n_users, n_items, users[chosen], items[chosen], times[chosen])

        self.train, self.validation, self.test = (
            part(split == label) for label in (TRAIN, VALIDATION, TEST)
        )
        self.seen, self.nothing = part(split != TEST), part(split < 0)
        self.state: Any = method.init_domain(config, self.context("init", 0))
        self.round = 0
        self.reached: list[dict[str, float]] = []
        self.best: dict[str, float] = {}

    def context(self, stage: str, round: int) -> Context:
        rng, torch_rng = generators(42, stage, round, "ml-100k")
        torch.manual_seed(round)
        return Context("ml-100k", stage, round, (), rng, torch_rng, CPU, self.train)

    def rank(
        self, known: Interactions, masked: Interactions, truth: Interactions
    ) -> dict[str, float]:
        assert self.method.observe is not None
        self.method.observe(self.state, known)
        everybody = np.arange(self.train.n_users)
        score = lambda users: self.method.score(self.state, users)  # noqa: E731
        held_out = truth.indptr, truth.items
        return rank(
            score, everybody, masked.indptr, masked.items, *held_out, self.train.n_items, (10, 20)
        ).macro

    def epochs(self, count: int) -> list[float]:
        """Train and validate; the seconds of each epoch without its validation."""
        (stage,) = self.method.stages(self.state.config)
        seconds = []
        for _ in range(count):
            self.round += 1
            start = time.perf_counter()
            stage.each[0].step(self.state, {}, self.context("train", self.round))
            seconds.append(time.perf_counter() - start)
            plain = self.rank(self.train, self.nothing, self.validation)["ndcg_at_10"]
            masked = self.rank(self.train, self.train, self.validation)["ndcg_at_10"]
            self.reached.append({"epoch": self.round, "ndcg_at_10": plain, "masked": masked})
            if plain >= max(row["ndcg_at_10"] for row in self.reached):
                test = self.rank(self.seen, self.nothing, self.test)
                masked_test = self.rank(self.seen, self.seen, self.test)
                self.best = {
                    "epoch": self.round,
                    "ndcg_at_10": plain,
                    "validation_masked": masked,
                } | {
                    "test_ndcg_at_10": test["ndcg_at_10"],
                    "test_masked": masked_test["ndcg_at_10"],
                }
        return seconds


def recbole(
    script: Path,
    venv: Path,
    epochs: int,
    threads: int,
    model: str = "SASRec",
) -> dict[str, Any]:
    """What RecBole took, with the same number of threads."""
    done = subprocess.run(
        [sys.executable, script, model, "--epochs", str(epochs), "--venv", venv],
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
        "sets", nargs="*", metavar="KEY=VALUE", help="settings of ours beside the preset"
    )
    parser.add_argument(
        "--epochs",
        type=int,
        default=3,
        help="epochs of RecBole; ours runs as many before and after it",
    )
    parser.add_argument(
        "--ours-epochs",
        type=int,
        default=60,
        help="further epochs of ours, for the NDCG it reaches",
    )
    parser.add_argument("--preset", default="recbole")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--without-peer", action="store_true", help="measure ours alone")
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
    shipped = method_file("sasrec")
    sets = {key: yaml.safe_load(value) for key, value in (entry.split("=") for entry in args.sets)}
    ours = Ours(
        args.inter,
        Config.model_validate({**shipped["config"], **shipped["presets"][args.preset], **sets}),
    )
    seconds = ours.epochs(args.epochs)
    peer = None if args.without_peer else recbole(args.script, args.venv, args.epochs, args.threads)
    seconds += ours.epochs(args.epochs)
    within = max(row["ndcg_at_10"] for row in ours.reached[: args.epochs])
    ours.epochs(args.ours_epochs)
    result = {
        "benchmark": "sasrec",
        "data": "ml-100k",
        "targets": n_targets(ours.train),
        "config": {"preset": args.preset} | sets,
        "threads": torch.get_num_threads(),
        "epoch_s": {"ours": median(seconds)},
        "epochs_s": {"ours": seconds},
        "validation_ndcg_at_10": {"ours_in_as_many_epochs": within, "ours_best": ours.best},
        "reached": [row["ndcg_at_10"] for row in ours.reached],
        "torch": torch.__version__,
    }
    if peer is not None:
        result["epoch_s"] |= {"peer": peer["epoch_s"], "ratio": peer["epoch_s"] / median(seconds)}
        result["epochs_s"]["peer"] = peer["epochs_s"]
        result["validation_ndcg_at_10"]["peer"] = peer["valid"]
        result["test"] = {"peer": peer["test"]}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
