"""The one place where the test split is read: after training, once, for the selected state. Tuning
may not import this.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from crossfed.platform.federation.node import Measured, Node, Nodes, Plan
from crossfed.platform.method import Interactions


def _measure(node: Node) -> Measured:
    """Test metrics of one domain, and what ranking by popularity reaches in it: training and
    validation items are masked.

    Per-user values stay as rows without ids.
    """
    assert node.data is not None and node.seen is not None
    train, validation, test = node.data, node.load("validation"), node.load("test")
    known = _together(train, validation)
    seen = known if train is node.seen else _together(node.seen, validation)
    truth = (test.indptr, test.items)
    measured, ranking = node.measure("test", seen, known, truth)
    counts = torch.from_numpy(np.bincount(train.items, minlength=train.n_items).astype(np.float32))
    floor, _ = node.measure("test", seen, known, truth, lambda users: counts.expand(len(users), -1))
    folder = node.plan.run_dir / "per_user"
    folder.mkdir(exist_ok=True)
    trained = np.diff(train.indptr)[ranking.users]
    columns = {"user": ranking.users, "n_train": trained, "n_truth": ranking.n_truth}
    pq.write_table(pa.table(columns | ranking.per_user), folder / f"{node.name}.test.parquet")
    return replace(measured, popularity=floor.metrics)


def _together(one: Interactions, other: Interactions) -> Interactions:
    return Interactions.build(
        one.n_users,
        one.n_items,
        np.concatenate([one.users, other.users]),
        np.concatenate([one.items, other.items]),
        np.concatenate([one.times, other.times]),
    )


def test_once(plan: Plan, nodes: Nodes) -> dict[str, Measured]:
    """Test metrics by domain, each measured where the domain's data is."""
    measured: dict[str, Measured] = nodes.each("apply", dict.fromkeys(plan.domains, (_measure,)))
    return measured


test_once.__test__ = False  # type: ignore[attr-defined]  # pytest would collect it by its name
