#!/usr/bin/env python3
"""P2P-IAGR at the size of Amazon Book–Movie (Table 4): memory and time of an epoch at growing
sizes; prints one JSON line.

    python tests/benchmarks/bench_p2p_iagr.py [--scales 0.0625 0.25 1] [--domains books movies]
    [--set key=value …]

At scale 1 the synthetic shops have the paper's sizes: 603,000 users, 367,000 items and 8.89 M
interactions; 123,000, 50,000 and 1.69 M; 18,031 users in both. Every measurement is a process of
its own with one thread, which holds one domain exactly as an actor does (`platform.nodes.Node`): it
loads its data, splits it, perturbs its prototypes, gets those of the other domain and trains one
epoch. Peak memory is that of the process, libraries included. Time is CPU time, which a shared
machine changes least; the slope is that of a straight line through log time (or log memory above
the smallest domain's) over log interactions, for each domain.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from crossfed.methods.p2p_iagr import METHOD
from crossfed.platform.config.settings import build
from crossfed.platform.data import synthetic
from crossfed.platform.data.artifacts import default_root
from crossfed.platform.data.store import PreparedData
from crossfed.platform.federation.node import Node, Plan

LARGE = synthetic.PRESETS["large"]


def prepared(scale: float) -> Path:
    """The synthetic shops of that share of users and items, generated once and kept in the
    cache.
    """
    sizes = {
        key: tuple(max(200, round(scale * n)) for n in LARGE[key]) for key in ("users", "items")
    }
    return synthetic.ensure(default_root() / "synthetic", **{**LARGE, **sizes})


def epoch(data: Path, domain: str, sets: list[str]) -> dict[str, float]:
    """One exchange and one epoch of one domain, in this process."""
    torch.set_num_threads(1)
    bare = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    config = build(
        "p2p_iagr", preset="book-movie",
        sets=["evaluation.protocol=leave-one-out-99", "evaluation.select=ndcg_at_10", *sets],
        values={"data": data, "backend": "inprocess", "tracking.enabled": False},
    )  # fmt: skip
    domains = PreparedData.open(data).domains
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.yaml").write_text(config.to_yaml())
        node = Node(
            Plan(config, data, domains, Path(folder), Path(folder)), domain, torch.device("cpu")
        )
        n_items = node.prepare({})
        node.connect(
            {
                name: n_items if name == domain else PreparedData.open(data).sizes(name)[1]
                for name in domains
            }
        )
        assert node.data is not None
        send, rows, _ = node.run_phase(0, "each", 0, 1, {})
        (peer,) = send
        cpu, wall = time.process_time(), time.perf_counter()
        _, _, metrics = node.run_phase(0, "each", 1, 1, {peer: send[peer]})
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    peak, gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 2**20  # ru_maxrss is in KiB
    return {
        "users": node.data.n_users,
        "items": node.data.n_items,
        "interactions": len(node.data.users),
        "cpu_s": cpu,
        "wall_s": wall,
        "peak_gib": peak / gib,
        "grown_gib": (peak - bare) / gib,
        "bytes_sent": sum(row.bytes for row in rows),
        "loss_bpr": metrics["loss_bpr"],
        "loss_scl": metrics["loss_scl"],
    }


def slope(rows: list[dict[str, float]], key: str) -> float:
    """The exponent b of value ≈ a · interactions^b, by least squares on logarithms."""
    return float(
        np.polyfit(*(np.log([row[name] for row in rows]) for name in ("interactions", key)), 1)[0]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scales", type=float, nargs="+", default=[0.0625, 0.25, 1.0])
    parser.add_argument("--domains", nargs="+", default=list(LARGE["domains"]))
    parser.add_argument(
        "--set", dest="sets", nargs="*", default=[], help="changes to the preset book-movie"
    )
    parser.add_argument("--one", nargs=2, metavar=("DATA", "DOMAIN"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(epoch(Path(args.one[0]), args.one[1], args.sets)))
        return
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in args.domains}
    for scale in args.scales:
        data = prepared(scale)
        for name in args.domains:
            command = [sys.executable, __file__, "--one", str(data), name, "--set", *args.sets]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            measured[name].append(json.loads(done.stdout.splitlines()[-1]))
            print(f"{name} × {scale:g}: {measured[name][-1]}", file=sys.stderr, flush=True)
    config = build("p2p_iagr", preset="book-movie", sets=args.sets).config
    result = {
        "benchmark": METHOD.name,
        "data": "synthetic",
        "config": {
            key: config[key]
            for key in ("dim", "K", "layers", "batch_size", "updates", "view", "pool", "top_k")
        },
        "domains": measured,
        "slope": {
            name: {key: round(slope(rows, key), 3) for key in ("cpu_s", "grown_gib")}
            for name, rows in measured.items()
            if len(rows) > 1
        },
        "torch": torch.__version__,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
