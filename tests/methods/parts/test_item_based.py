"""Similarities against slow versions of themselves, and the model that adds them up."""

import math

import numpy as np
import pytest
import scipy.sparse as sp
import torch

from crossfed.methods.parts.item_based import (
    LISTED,
    ItemBased,
    blocks,
    cosine,
    keep_largest,
    listed,
    text_cosine,
    user_items,
)
from crossfed.platform.method import Context, Interactions, generators


def shop(n_users: int = 40, n_items: int = 25, each: int = 6, seed: int = 0) -> Interactions:
    rng = np.random.default_rng(seed)
    # of unequal popularity, and the last item is nobody's
    likes = np.arange(n_items - 1, 0, -1) ** 1.5
    items = [
        rng.choice(n_items - 1, each, replace=False, p=likes / likes.sum()) for _ in range(n_users)
    ]
    return Interactions.build(
        n_users, n_items, np.repeat(np.arange(n_users), each), np.concatenate(items)
    )


def context(data: Interactions) -> Context:
    rng, torch_rng = generators(0, "init", 0, "shop")
    return Context("shop", "init", 0, (), rng, torch_rng, torch.device("cpu"), data)


def slow_cosine(data: Interactions, shrinkage: float) -> np.ndarray:
    """From sets of users, pair by pair."""
    owners = [set(data.users[data.items == i].tolist()) for i in range(data.n_items)]
    found = np.zeros((data.n_items, data.n_items))
    for i, a in enumerate(owners):
        for j, b in enumerate(owners):
            if i != j and a & b:
                found[i, j] = len(a & b) / (math.sqrt(len(a)) * math.sqrt(len(b)) + shrinkage)
    return found


def test_a_pair_that_occurs_twice_counts_once():
    data = Interactions.build(2, 3, np.array([0, 0, 0, 1]), np.array([2, 2, 1, 0]))
    assert user_items(data).toarray().tolist() == [[0, 1, 1], [1, 0, 0]]


@pytest.mark.parametrize("shrinkage", [0.0, 10.0])
@pytest.mark.parametrize("limit", [1, 60, 1 << 20])
def test_cosine_is_that_of_sets_of_users_whatever_the_block(shrinkage, limit):
    data = shop()
    found = cosine(user_items(data), shrinkage, None, limit)
    np.testing.assert_allclose(found.toarray(), slow_cosine(data, shrinkage), rtol=1e-6)
    assert found.dtype == np.float32 and not found.diagonal().any()


def test_the_largest_of_each_row_stay_and_of_equal_ones_the_lower_columns():
    """Row 0 has a tie at the cut of two: columns 1 and 4 hold .5, and 1 stays. Row 1 has one entry,
    row 2 none."""
    dense = np.array(
        [[0.1, 0.5, 0, 0.9, 0.5], [0, 0, 0.3, 0, 0], [0, 0, 0, 0, 0], [4, 3, 2, 1, 0.5]], np.float32
    )
    found = keep_largest(sp.csr_matrix(dense), 2).toarray()
    expected = np.zeros_like(dense)
    expected[0, [1, 3]], expected[1, 2], expected[3, [0, 1]] = (0.5, 0.9), 0.3, (4, 3)
    assert (found == expected).all()
    assert (keep_largest(sp.csr_matrix(dense), None).toarray() == dense).all()
    with pytest.raises(ValueError, match="none below 0"):
        keep_largest(sp.csr_matrix(-dense), 2)


def test_neighbours_of_a_block_are_those_of_the_whole():
    r = user_items(shop())
    whole = cosine(r, 10.0, None).toarray()
    found = cosine(r, 10.0, 4, limit=50).toarray()
    for row, kept in zip(whole, found, strict=True):
        best = np.argsort(-row, kind="stable")[:4]
        best = best[row[best] > 0]
        assert set(np.flatnonzero(kept)) == set(best)
        assert (kept[best] == row[best]).all()


def test_blocks_cover_every_row_once_within_the_limit():
    cost = np.array([5, 1, 9, 30, 2, 2, 2, 8])
    found = blocks(cost, 10)
    assert [row for block in found for row in range(block.start, block.stop)] == list(range(8))
    assert all(cost[block].sum() <= 10 or block.stop - block.start == 1 for block in found)
    assert blocks(cost[:0], 10) == []


def test_text_neighbours_are_the_nearest_by_cosine_without_the_item_itself():
    rng = np.random.default_rng(1)
    text = rng.normal(size=(12, 4)).astype(np.float32)
    text[5] = 0  # an item without text has no neighbours
    unit = text / np.maximum(np.linalg.norm(text, axis=1, keepdims=True), 1e-12)
    cosines = unit @ unit.T
    np.fill_diagonal(cosines, -2)
    expected = np.zeros((12, 12))
    for i in range(12):
        best = np.argsort(-cosines[i])[:3]
        expected[i, best] = np.maximum(cosines[i, best], 0)
    np.testing.assert_allclose(text_cosine(text, 3).toarray(), expected, rtol=1e-5, atol=1e-7)


def model(data: Interactions, observed: bool, dense: bool = False) -> ItemBased:
    def fit():
        found = cosine(user_items(data), 10.0, 5)
        return found.toarray() if dense else found

    return ItemBased(fit, context(data), observed)


@pytest.mark.parametrize("dense", [False, True])
def test_a_score_is_the_sum_over_the_history(dense):
    data = shop()
    state = model(data, observed=False, dense=dense)
    users = np.array([7, 0, 39])
    assert not state.score(users).any()
    state.train()
    s = cosine(user_items(data), 10.0, 5).toarray()
    for row, user in zip(state.score(users), users, strict=True):
        history = data.items[data.indptr[user] : data.indptr[user + 1]]
        np.testing.assert_allclose(row, s[history].sum(0), rtol=1e-5, atol=1e-7)


def test_it_looks_at_what_it_is_shown_only_where_it_is_to():
    data = shop()
    more = Interactions.build(
        40, 25, np.r_[data.users, 3], np.r_[data.items, 24], np.arange(len(data.users) + 1)
    )
    shown, blind = model(data, observed=True), model(data, observed=False)
    for state in (shown, blind):
        state.train()
        state.similarity = state.similarity + sp.csr_matrix(([9.0], ([24], [0])), (25, 25))
    before = blind.score(np.array([3]))
    shown.observe(more)
    blind.observe(more)
    assert torch.equal(blind.score(np.array([3])), before)
    assert float(shown.score(np.array([3]))[0, 0] - before[0, 0]) == pytest.approx(9)


def test_a_saved_state_makes_the_same_model_again():
    data = shop()
    state, fresh = model(data, False), model(data, False)
    fresh.load_state_dict(state.state_dict())
    assert fresh.similarity is None
    state.train()
    fresh.load_state_dict(state.state_dict())
    assert (fresh.similarity != state.similarity).nnz == 0
    fresh.load_state_dict({"trained": False})
    assert fresh.similarity is None


def test_the_saved_model_lists_the_best_and_holds_no_history():
    data = shop(n_users=30, n_items=LISTED + 60, each=8)
    state = model(data, observed=False)
    state.train()
    exported = state.export()
    assert {name: tuple(value.shape) for name, value in exported.items()} == {
        "items": (30, LISTED),
        "scores": (30, LISTED),
        "n_items": (1,),
    }
    users = np.array([4, 29])
    scores, live = listed(exported, users), state.score(users)
    kept = scores > -torch.inf
    assert kept.sum(1).tolist() == [LISTED, LISTED]
    assert torch.equal(scores[kept], live[kept])
    for row in range(2):  # nothing that is not listed is better
        assert float(live[row][~kept[row]].max()) <= float(live[row][kept[row]].min())
