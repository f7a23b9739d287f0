"""The prefix trie: every table against the plain set of prefixes, a small one by hand, items that
share a leaf.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from crossfed.methods.parts.trie import Trie

SIDS = np.array([[2, 0], [0, 1], [2, 3], [0, 1], [2, 0], [0, 1]])


def test_a_small_trie_by_hand() -> None:
    """Six items on three paths: (0,1) holds items 1, 3, 5; (2,0) holds 0 and 4; (2,3) holds 2.

    Depth 1 has the nodes 0 (code 0) and 1 (code 2). The leaves are 0 = (0,1), 1 = (2,0), 2 = (2,3);
    3 is the empty leaf.
    """
    trie = Trie.build(SIDS, np.array([5, 1, 0, 9, 7, 1]), codes=4)
    assert trie.levels == 2
    assert trie.sizes == (1, 2, 3)
    assert trie.child[0].tolist() == [[0, 2, 1, 2], [2, 2, 2, 2]]
    assert trie.child[1].tolist() == [[3, 0, 3, 3], [1, 3, 3, 2], [3, 3, 3, 3]]
    assert [t.tolist() for t in trie.parent] == [[0, 0], [0, 1, 1]]
    assert [t.tolist() for t in trie.token] == [[0, 2], [1, 0, 3]]
    assert [t.tolist() for t in trie.prefixes] == [[[]], [[0], [2]]]
    assert trie.leaf.tolist() == [1, 0, 2, 0, 1, 0]
    # 3 is the most popular of (0,1); 1 and 5 are equal, so the lower number comes first
    assert trie.place.tolist() == [1, 1, 0, 0, 0, 2]


@settings(max_examples=60, deadline=None)
@given(
    sids=st.tuples(st.integers(1, 30), st.integers(1, 4)).flatmap(
        lambda shape: hnp.arrays(np.int64, shape, elements=st.integers(0, 4))
    ),
    data=st.data(),
)
def test_a_prefix_is_in_the_trie_exactly_if_an_item_has_it(
    sids: np.ndarray, data: st.DataObject
) -> None:
    popularity = data.draw(hnp.arrays(np.int64, len(sids), elements=st.integers(0, 3)))
    trie = Trie.build(sids, popularity, codes=5)
    for path in np.ndindex(*[5] * trie.levels):
        node = 0
        for depth, code in enumerate(path):
            node = int(trie.child[depth][node, code])
            held = (sids[:, : depth + 1] == path[: depth + 1]).all(axis=1)
            assert (node < trie.sizes[depth + 1]) == held.any(), (path, depth)
            if held.any() and depth + 1 < trie.levels:
                assert tuple(trie.prefixes[depth + 1][node].tolist()) == path[: depth + 1]
        if held.any():
            assert (trie.leaf.numpy() == node).tolist() == held.tolist()
            named = sorted(np.flatnonzero(held), key=lambda item: (-popularity[item], item))
            assert trie.place[named].tolist() == list(range(len(named)))
    for depth in range(trie.levels):
        order = torch.arange(trie.sizes[depth + 1])
        assert torch.equal(trie.child[depth][trie.parent[depth], trie.token[depth]].long(), order)
        assert torch.equal(trie.parent[depth], trie.parent[depth].sort().values), (
            "children of neighbours lie together"
        )


def test_the_order_in_a_leaf_rebuilds_the_same_trie() -> None:
    """What is kept of a trie is the semantic IDs and the order, no popularity."""
    trie = Trie.build(SIDS, np.array([5, 1, 0, 9, 7, 1]), codes=4)
    again = Trie.build(SIDS, -trie.place.numpy(), codes=4)
    assert torch.equal(trie.place, again.place)


def test_moving_keeps_every_table() -> None:
    trie = Trie.build(SIDS, np.zeros(6), codes=4)
    moved = trie.to(torch.device("meta"))
    tables = [*moved.child, *moved.parent, *moved.token, *moved.prefixes, moved.leaf, moved.place]
    assert {table.device.type for table in tables} == {"meta"}
    assert moved.sizes == trie.sizes


@pytest.mark.parametrize(
    ("sids", "popularity", "told"),
    [
        (np.zeros((0, 3), int), np.zeros(0), "at least one"),
        (np.zeros(3, int), np.zeros(3), "at least one"),
        (np.array([[0, 4]]), np.zeros(1), r"0 … 3, got 0 … 4"),
        (np.array([[-1, 0]]), np.zeros(1), r"got -1 … 0"),
        (np.array([[0, 0]]), np.zeros(2), r"popularity must be \[1\]"),
    ],
)
def test_what_makes_no_trie_is_told(sids: np.ndarray, popularity: np.ndarray, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Trie.build(sids, popularity, codes=4)
