"""GRU4Rec's training epoch beside RecBole 1.2.1's on ml-100k, and the NDCG@10 that both reach.

    python tests/benchmarks/bench_gru4rec.py [--epochs 2] [--threads 1] [--preset NAME] [KEY=VALUE]

Prints one JSON line. The same comparison as `bench_sasrec.py`, which says how it is made: the same
97 thousand targets an epoch, the last item of every user as test and the one before it as
validation, all 1,682 items ranked, times taken before and after RecBole's. By default ours has
RecBole's sizes in that script (d = hidden = 64, one layer, dropout 0.3, learning rate 0.005) and
trains every position of a window at once; RecBole has one row per target. With `cut=prefixes
batch_size=1024` ours makes RecBole's rows as well, so that only the implementation differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import median

import torch
import yaml
from bench_sasrec import SHARED, Ours, recbole

from crossfed.methods.gru4rec import METHOD, Config
from crossfed.methods.parts.next_item import n_targets
from crossfed.platform.registry import method_file

SIZES = {"dim": 64, "hidden": 64, "layers": 1, "dropout_embed": 0.3, "lr": 0.005, "batch_size": 128}


def main() -> None:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("sets", nargs="*", metavar="KEY=VALUE", help="settings of ours")
    parser.add_argument("--epochs", type=int, default=2, help="of RecBole; ours twice")
    parser.add_argument("--ours-epochs", type=int, default=0, help="further epochs of ours")
    parser.add_argument("--preset", help="a preset of ours in place of RecBole's sizes")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--without-peer", action="store_true", help="measure ours alone")
    parser.add_argument("--venv", type=Path, default=Path(tempfile.gettempdir()) / "recbole-venv")
    parser.add_argument("--inter", type=Path, default=SHARED / "movielens_100k" / "ml-100k.inter")
    checks = SHARED.parent / "checks"
    parser.add_argument("--script", type=Path, default=checks / "recbole_speed.py")
    args = parser.parse_args()
    for needed in (args.inter, args.script):
        if not needed.is_file():
            sys.exit(f"{needed} is missing; this comparison needs the shared data and its checks.")
    torch.set_num_threads(args.threads)
    sizes = method_file("gru4rec")["presets"][args.preset] if args.preset else SIZES
    sets = {k: yaml.safe_load(value) for k, value in (entry.split("=") for entry in args.sets)}
    ours = Ours(args.inter, Config.model_validate({**sizes, **sets}), METHOD)
    seconds = ours.epochs(args.epochs)
    peer = None
    if not args.without_peer:
        peer = recbole(args.script, args.venv, args.epochs, args.threads, "GRU4Rec")
    seconds += ours.epochs(args.epochs)
    ours.epochs(args.ours_epochs)
    result = {
        "benchmark": "gru4rec",
        "data": "ml-100k",
        "targets": n_targets(ours.train),
        "config": {"preset": args.preset, **sizes, **sets},
        "threads": torch.get_num_threads(),
        "epoch_s": {"ours": median(seconds)},
        "epochs_s": {"ours": seconds},
        "validation_ndcg_at_10": {"ours_best": ours.best},
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
