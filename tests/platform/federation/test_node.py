"""What a node masks before it ranks, with scores that would put what was seen on top."""

from __future__ import annotations

import resource
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from crossfed.platform.config.settings import build
from crossfed.platform.federation.final import test_once as final_test
from crossfed.platform.federation.node import InProcess, Plan
from crossfed.platform.method import Interactions
from placed_nodes import NAMES, mrr, rank_by_part


def test_validation_masks_training_items_and_no_others(placed: tuple[Plan, InProcess]) -> None:
    """Training items score highest and are masked; the test item scores next and is not: the truth
    stands second.
    """
    plan, nodes = placed
    rank_by_part(plan, nodes, train=3, validation=1, test=2)
    measured = nodes.each("evaluate", dict.fromkeys(NAMES, ()))
    assert [mrr(measured, name) for name in NAMES] == [0.5, 0.5, 0.5]


def test_a_method_may_look_at_what_is_masked_and_at_nothing_later(
    placed: tuple[Plan, InProcess],
) -> None:
    """Validation shows the training interactions; the test shows those and the validation ones, in
    time order.
    """
    plan, nodes = placed
    shown: dict[str, list[Interactions]] = {name: [] for name in NAMES}
    for name in NAMES:
        node = nodes.nodes[name]
        node.method = replace(
            node.method, observe=lambda state, known, name=name: shown[name].append(known)
        )
    nodes.each("evaluate", dict.fromkeys(NAMES, ()))
    final_test(plan, nodes)
    for name in NAMES:
        node, (at_validation, at_test) = nodes.nodes[name], shown[name]
        train, validation, test = (node.load(part) for part in ("train", "validation", "test"))
        assert at_validation is node.data and np.array_equal(at_validation.items, train.items)
        for user in range(train.n_users):
            mine = slice(*at_test.indptr[user : user + 2])
            held = [
                {*part.items[slice(*part.indptr[user : user + 2])].tolist()}
                for part in (train, validation, test)
            ]
            assert {*at_test.items[mine].tolist()} == held[0] | held[1]
            assert not held[2] & {*at_test.items[mine].tolist()}
            assert (np.diff(at_test.times[mine]) >= 0).all()


def test_a_share_of_the_training_interactions(
    placed: tuple[Plan, InProcess], shops: Path, tmp_path: Path
) -> None:
    """The method has and sees the share alone; all training items stay masked; the split and the
    truth stay what they are.
    """
    whole = placed[1].nodes
    values = {"data": shops, "out": tmp_path, "backend": "inprocess", "tracking.enabled": False}
    plan = Plan(
        build("toys:AVERAGE", sets=["evaluation.train_share=0.25", "seed=5"], values=values),
        shops, NAMES, tmp_path, tmp_path / "cache",
    )  # fmt: skip
    nodes = InProcess()
    nodes.start(plan, {})
    shown: dict[str, list[Interactions]] = {name: [] for name in NAMES}
    for name in NAMES:
        node = nodes.nodes[name]
        observe = lambda state, known, name=name: shown[name].append(known)  # noqa: E731
        node.method = replace(node.method, observe=observe)
        data, full = node.data, whole[name].data
        assert data is not None and full is not None and node._context("train", 1).own is data
        assert len(data.users) == round(0.25 * len(full.users)) and np.array_equal(
            node.seen.items, full.items
        )
        pairs = {
            (user, item, time)
            for user, item, time in zip(data.users, data.items, data.times, strict=True)
        }
        assert pairs < {
            (user, item, time)
            for user, item, time in zip(full.users, full.items, full.times, strict=True)
        }
        assert (np.diff(data.indptr) == 0).any(), (
            "some users have nothing left, which methods must bear"
        )
    rank_by_part(plan, nodes, train=3, validation=1, test=2)
    measured = nodes.each("evaluate", dict.fromkeys(NAMES, ()))
    assert [mrr(measured, name) for name in NAMES] == [0.5, 0.5, 0.5], (
        "left out of training, still masked"
    )
    rank_by_part(plan, nodes, train=3, validation=2, test=1)
    measured = final_test(plan, nodes)
    assert [mrr(measured, name) for name in NAMES] == [1, 1, 1]
    for name in NAMES:
        node, (at_validation, at_test) = nodes.nodes[name], shown[name]
        assert at_validation is node.data
        assert len(at_test.users) == len(node.data.users) + len(node.load("validation").users)
        table = pd.read_parquet(tmp_path / "per_user" / f"{name}.test.parquet")
        assert table["n_train"].sum() == len(node.data.users)
    nodes.stop()


def test_the_most_memory_is_told_after_it_is_given_back(placed: tuple[Plan, InProcess]) -> None:
    _, nodes = placed
    before = nodes.each("memory", {"books": ()})["books"]["process"]
    held = (
        int(next(line for line in Path("/proc/self/statm").read_text().splitlines()).split()[1])
        * resource.getpagesize()
    )
    block = np.ones(before - held + 64_000_000, dtype=np.int8)
    del block
    after = nodes.each("memory", {"books": ()})["books"]
    assert 60_000_000 < after["process"] - before < 80_000_000 and after["gpu"] is None
