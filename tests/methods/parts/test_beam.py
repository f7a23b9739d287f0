"""Beam search and exhaustive scores against a plain loop over items, within real and random tries;
items that share a leaf.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from crossfed.methods.parts.beam import all_leaves, beam_search, item_scores, score_items
from crossfed.methods.parts.trie import Trie
from crossfed.platform.data.text import make_encoder
from crossfed.platform.evaluation.ranking import rank
from crossfed.platform.tokeniser.quantiser import ResidualKMeans

C, LEVELS, USERS = 12, 3, 5


class Tables:
    """A model whose log-probabilities depend on the user and on every code so far: one table per
    level.
    """

    def __init__(
        self, codes: int, levels: int, users: int, sharpness: float = 1.0, seed: int = 0
    ) -> None:
        g = torch.Generator().manual_seed(seed)
        shape = [users]
        self.tables = []
        for _ in range(levels):
            shape.append(codes)
            self.tables.append((sharpness * torch.randn(shape, generator=g)).log_softmax(-1))
        self.calls = 0

    def __call__(self, prefixes: torch.Tensor) -> torch.Tensor:
        self.calls += prefixes.shape[1]
        users = torch.arange(len(prefixes)).unsqueeze(1).expand(prefixes.shape[:2])
        return self.tables[prefixes.shape[2]][(users, *prefixes.unbind(2))]


def by_loop(model: Tables, sids: np.ndarray, users: int) -> np.ndarray:
    """Σ_l log p(c_l | user, c_1 … c_{l-1}) of every item, one number after the other, in
    float64.
    """
    scores = np.zeros((users, len(sids)))
    for user in range(users):
        for item, codes in enumerate(sids.tolist()):
            for level, table in enumerate(model.tables):
                scores[user, item] += float(table[(user, *codes[: level + 1])])
    return scores


@pytest.fixture
def catalogue() -> tuple[np.ndarray, Trie]:
    """90 items on fewer leaves: 10 of them copy another item's semantic ID."""
    rng = np.random.default_rng(1)
    sids = rng.integers(0, C, (80, LEVELS))
    sids = np.concatenate([sids, sids[:10]])
    return sids, Trie.build(sids, rng.integers(0, 50, 90), C)


def test_every_items_score_is_the_sum_along_its_path(catalogue: tuple[np.ndarray, Trie]) -> None:
    sids, trie = catalogue
    model = Tables(C, LEVELS, USERS)
    scores = score_items(model, trie, USERS, None)
    assert scores.shape == (USERS, 90)
    np.testing.assert_allclose(scores.numpy(), by_loop(model, sids, USERS), rtol=1e-5)
    assert model.calls == sum(trie.sizes[:-1]), "each prefix is continued once"


def test_blocks_do_not_matter(catalogue: tuple[np.ndarray, Trie]) -> None:
    _, trie = catalogue
    model = Tables(C, LEVELS, USERS)
    whole = all_leaves(model, trie, USERS)
    for block in (1, USERS * C * 7, USERS * C * 100):
        assert torch.equal(all_leaves(model, trie, USERS, block), whole)


def test_a_wide_beam_is_the_exhaustive_order(catalogue: tuple[np.ndarray, Trie]) -> None:
    _, trie = catalogue
    model = Tables(C, LEVELS, USERS)
    leaves, scores = beam_search(model, trie, USERS, trie.sizes[-1])
    best = all_leaves(model, trie, USERS).sort(dim=1, descending=True)
    assert torch.equal(scores, best.values)
    assert torch.equal(leaves, best.indices)


def test_a_narrow_beam_by_hand() -> None:
    """Codes A, B; items AA, AB, BB. p(A) = 0.6: a beam of one goes to A and finds AA (0.6 · 0.55 =
    0.33); the best item is BB, 0.4 · 0.95 = 0.38, which a beam of two finds. BA (0.4 · 0.05) is no
    item."""
    trie = Trie.build(np.array([[0, 0], [0, 1], [1, 1]]), np.zeros(3), codes=2)
    first, second = torch.tensor([0.6, 0.4]).log(), torch.tensor([[0.55, 0.45], [0.05, 0.95]]).log()

    def model(prefixes: torch.Tensor) -> torch.Tensor:
        return first.expand(1, 1, 2) if prefixes.shape[2] == 0 else second[prefixes[..., 0]]

    leaves, scores = beam_search(model, trie, 1, width=1)
    assert leaves.tolist() == [[0]]
    assert scores.exp().tolist() == [[pytest.approx(0.33)]]
    leaves, scores = beam_search(model, trie, 1, width=2)
    assert leaves.tolist() == [[2, 0]]
    assert scores.exp().tolist()[0] == pytest.approx([0.38, 0.33])
    leaves, _ = beam_search(model, trie, 1, width=9)
    assert leaves.tolist() == [[2, 0, 1]]
    narrow = score_items(model, trie, 1, width=1)
    assert narrow.exp().tolist()[0] == pytest.approx([0.33, 0.0, 0.0])


def test_where_the_beam_runs_dry_no_leaf_is_made_up() -> None:
    """Twelve items, but two beams go to a prefix with one item each: two leaves are found, and
    nothing else.
    """
    sids = np.array([[0, 0], [1, 0], *[[2, code] for code in range(10)]])
    trie = Trie.build(sids, np.zeros(12), codes=10)
    first = torch.full((10,), -9.0)
    first[:3] = torch.tensor([-1.0, -2.0, -3.0])

    def model(prefixes: torch.Tensor) -> torch.Tensor:
        return (
            first.expand(1, 1, 10)
            if prefixes.shape[2] == 0
            else torch.full((1, prefixes.shape[1], 10), -2.5)
        )

    leaves, scores = beam_search(model, trie, 1, width=2)
    assert leaves.tolist() == [[0, 1]]
    three, scores = beam_search(model, trie, 1, width=4)
    assert set(three[0].tolist()) <= set(range(12))
    sids = sids[:3]
    leaves, scores = beam_search(model, Trie.build(sids, np.zeros(3), codes=10), 1, width=2)
    assert leaves.tolist() == [[0, 1]]
    deep = Trie.build(np.array([[0, 0, 1], [0, 0, 2], [0, 0, 3], [1, 1, 1]]), np.zeros(4), codes=10)
    leaves, scores = beam_search(lambda p: torch.full((1, p.shape[1], 10), -1.0), deep, 1, width=3)
    live = scores[0] > -torch.inf
    assert set(leaves[0][live].tolist()) <= set(range(4))
    assert (leaves[0][~live] == 4).all()


def test_forbidden_codes_are_never_taken_however_likely() -> None:
    """The model puts nearly all probability on codes that no item has."""
    rng = np.random.default_rng(3)
    sids = 2 * rng.integers(0, C // 2, (40, LEVELS))
    trie = Trie.build(sids, np.zeros(40), C)
    model = Tables(C, LEVELS, USERS)
    for table in model.tables:
        table[..., 1::2] += 30
    leaves, scores = beam_search(model, trie, USERS, 10)
    assert (scores > -torch.inf).all()
    assert (leaves < trie.sizes[-1]).all()
    np.testing.assert_allclose(
        score_items(model, trie, USERS, None).numpy(), by_loop(model, sids, USERS), rtol=1e-5
    )


def test_items_that_share_a_leaf_are_told_apart_and_nothing_else_moves() -> None:
    """Leaf 0 holds items 0, 2, 3 (popularity 1, 5, 3); leaf 1 scores one float32 step less; leaf 2
    scores exactly 0.
    """
    trie = Trie.build(
        np.array([[0], [1], [0], [0], [2], [2]]), np.array([1, 0, 5, 3, 0, 1]), codes=3
    )
    lower = np.nextafter(np.float32(-3.7), np.float32(-np.inf))
    scores = item_scores(trie, torch.tensor([[np.float32(-3.7), lower, 0.0]]))[0]
    assert scores.argsort(descending=True).tolist() == [5, 4, 2, 3, 0, 1]
    assert len(set(scores.tolist())) == 6
    assert torch.equal(
        scores.float(), torch.tensor([np.float32(-3.7), lower, -3.7, -3.7, 0.0, 0.0])
    )
    assert item_scores(trie, torch.full((1, 3), -torch.inf)).tolist() == [[-np.inf] * 6]


def test_a_hit_on_the_leaf_is_no_hit_on_the_item() -> None:
    """One user, three items on the best leaf; the held-out item is the second most popular of them:
    found at 2, not at 1.
    """
    trie = Trie.build(np.array([[0], [0], [0], [1]]), np.array([9, 5, 1, 0]), codes=2)
    model = Tables(2, 1, 1)
    model.tables = [torch.tensor([[0.9, 0.1]]).log()]
    held = {
        item: rank(
            lambda users: score_items(model, trie, 1, None),
            np.array([0]),
            np.array([0, 0]),
            np.zeros(0, int),
            np.array([0, 1]),
            np.array([item]),
            4,
            (1, 2, 3),
        ).macro
        for item in range(3)
    }
    for item in range(3):
        assert [held[item][f"hit_rate_at_{k}"] for k in (1, 2, 3)] == [
            float(k > item) for k in (1, 2, 3)
        ]


def test_an_item_outside_the_beam_scores_minus_infinity(catalogue: tuple[np.ndarray, Trie]) -> None:
    _, trie = catalogue
    model = Tables(C, LEVELS, USERS)
    exact, beamed = score_items(model, trie, USERS, None), score_items(model, trie, USERS, 8)
    leaves, _ = beam_search(model, trie, USERS, 8)
    for user in range(USERS):
        inside = torch.isin(trie.leaf, leaves[user])
        assert torch.equal(beamed[user][inside], exact[user][inside])
        assert (beamed[user][~inside] == -torch.inf).all()


def test_users_do_not_see_each_other(catalogue: tuple[np.ndarray, Trie]) -> None:
    """The beams of a user are the same alone and in a batch."""
    _, trie = catalogue
    model = Tables(C, LEVELS, USERS)
    together = beam_search(model, trie, USERS, 6)
    for user in range(USERS):
        alone = Tables(C, LEVELS, USERS)
        alone.tables = [table[user : user + 1] for table in model.tables]
        assert torch.equal(beam_search(alone, trie, 1, 6)[0][0], together[0][user])


def test_a_wide_beam_agrees_with_exhaustive_scores_on_a_real_catalogue(shared_data: Path) -> None:
    """Amazon Beauty's 12,101 items under the semantic IDs of their titles; a model whose every
    level depends on all codes before.

    The beam holds 1,000 of the catalogue's leaves; the top ten items are those of the exhaustive
    scores, in their order.
    """
    titles = pd.read_csv(
        shared_data / "amazon_beauty_2014" / "Amazon_Beauty.item", sep="\t", usecols=["title:token"]
    )
    x = torch.from_numpy(make_encoder("hashing:64").encode(titles.iloc[:, 0].fillna("").tolist()))
    tokeniser = ResidualKMeans(64, 16, 3, 256)
    tokeniser.fit(x, 0)
    sids = tokeniser.codes(x).numpy()
    assert len(sids) == 12_101
    trie = Trie.build(sids, np.zeros(len(sids)), 256)
    users, dim, g = 6, 16, torch.Generator().manual_seed(0)
    user, tables = torch.randn(users, dim, generator=g), torch.randn(2, 256, dim, generator=g)
    heads = torch.randn(3, dim, 256, generator=g)

    def model(prefixes: torch.Tensor) -> torch.Tensor:
        query = user.unsqueeze(1).expand(-1, prefixes.shape[1], -1)
        for level in range(prefixes.shape[2]):
            query = query + tables[level][prefixes[:, :, level]]
        return (query @ heads[prefixes.shape[2]] / 2).log_softmax(-1)

    exact, wide = score_items(model, trie, users, None), score_items(model, trie, users, 1000)
    assert torch.equal(exact.topk(10).indices, wide.topk(10).indices)
    assert not torch.equal(
        exact.topk(10).indices, score_items(model, trie, users, 2).topk(10).indices
    )
