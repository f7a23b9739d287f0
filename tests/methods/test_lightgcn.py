"""LightGCN's equations against a slow node-by-node version, one training step against plain
autograd, and its state.
"""

import importlib.resources
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from crossfed.methods import lightgcn
from crossfed.methods.lightgcn import METHOD, Config
from crossfed.methods.parts.sampling import bpr_epoch
from crossfed.platform import checkpoint
from crossfed.platform.method import Context, Interactions, Scope, generators

N_USERS, N_ITEMS = 12, 9


@pytest.fixture
def data() -> Interactions:
    rng = np.random.default_rng(2)
    pairs = np.unique(
        rng.integers(0, [N_USERS - 1, N_ITEMS - 1], (45, 2)), axis=0
    )  # last user and item: no interaction
    return Interactions.build(N_USERS, N_ITEMS, pairs[:, 0], pairs[:, 1])


def context(data: Interactions, stage: str, round: int, seed: int = 0) -> Context:
    rng, torch_rng = generators(seed, stage, round, "shop")
    return Context("shop", stage, round, (), rng, torch_rng, torch.device("cpu"), data)


def fresh(data: Interactions, config: Config, seed: int = 0) -> lightgcn.State:
    return METHOD.init_domain(config, context(data, "init", 0, seed))


def train(state: lightgcn.State, data: Interactions, rounds: range) -> list[Mapping[str, float]]:
    (stage,) = METHOD.stages(state.config)
    (phase,) = stage.each
    return [phase.step(state, {}, context(data, "train", r)).metrics for r in rounds]


def slow_final(data: Interactions, ego: torch.Tensor, layers: int) -> torch.Tensor:
    """Eq. (3), node by node, and Eq. (4) with α_k = 1 / (K + 1)."""
    of_user = [set(data.items[data.users == u].tolist()) for u in range(N_USERS)]
    of_item = [set(data.users[data.items == i].tolist()) for i in range(N_ITEMS)]
    levels = [ego]
    for _ in range(layers):
        last, level = levels[-1], torch.zeros_like(ego)
        for u in range(N_USERS):
            for i in of_user[u]:
                level[u] += (
                    last[N_USERS + i] / math.sqrt(len(of_user[u])) / math.sqrt(len(of_item[i]))
                )
        for i in range(N_ITEMS):
            for u in of_item[i]:
                level[N_USERS + i] += (
                    last[u] / math.sqrt(len(of_item[i])) / math.sqrt(len(of_user[u]))
                )
        levels.append(level)
    return sum(levels) / (layers + 1)


# --- Equations ---


def test_eq_7_from_eq_6(data):
    """Eq. (7) built densely from A = [[0, R], [R^T, 0]] of Eq. (6): users first, symmetric, no self
    loops.
    """
    r = torch.zeros(N_USERS, N_ITEMS)
    r[data.users, data.items] = 1
    a = torch.cat(
        [
            torch.cat([torch.zeros(N_USERS, N_USERS), r], 1),
            torch.cat([r.T, torch.zeros(N_ITEMS, N_ITEMS)], 1),
        ]
    )
    scale = a.sum(1).clamp(min=1).pow(-0.5)
    torch.testing.assert_close(
        lightgcn.adjacency(data).to_dense(), torch.diag(scale) @ a @ torch.diag(scale)
    )


@pytest.mark.parametrize("layers", [0, 1, 2, 3])
def test_eq_8_is_eq_3_combined_by_eq_4(data, layers):
    """Eq. (8) for all nodes at once equals the slow Eq. (3) and Eq. (4)."""
    ego = torch.randn(N_USERS + N_ITEMS, 4)
    actual = lightgcn.final_embeddings(lightgcn.adjacency(data), ego, layers)
    torch.testing.assert_close(actual, slow_final(data, ego, layers))


def test_eq_8_by_hand():
    """One user, one item, K = 2: Ã swaps the two rows, so E = (x + Ãx + x) / 3."""
    one = Interactions.build(1, 1, np.array([0]), np.array([0]))
    actual = lightgcn.final_embeddings(lightgcn.adjacency(one), torch.tensor([[3.0], [6.0]]), 2)
    torch.testing.assert_close(actual, torch.tensor([[(3 + 6 + 3) / 3], [(6 + 3 + 6) / 3]]))


def test_eq_5_by_hand():
    """Eq. (5): [1, 2]·[3, 4] = 11 and [0, -1]·[5, 2] = -2."""
    users, items = torch.tensor([[1.0, 2.0], [0.0, -1.0]]), torch.tensor([[3.0, 4.0], [5.0, 2.0]])
    assert lightgcn.predict(users, items).tolist() == [11, -2]


def test_eq_15_by_hand():
    """Eq. (15), λ = 0.1, b = 2, dim = 1: u = [1, 2], i = [2, 0], j = [1, 1] in E, so differences 1
    and -2.

    Rows of E^(0) with squares 1 + 4 + 9 + 16 + 25 + 36 = 91: -½ (ln σ(1) + ln σ(-2)) + 0.1 · ½ · 91
    / 2.
    """
    final_rows = torch.tensor([[[1.0], [2.0]], [[2.0], [0.0]], [[1.0], [1.0]]])
    ego_rows = torch.tensor([[[1.0], [2.0]], [[3.0], [4.0]], [[5.0], [6.0]]])
    loss, _, _ = lightgcn.objective(final_rows, ego_rows, 0.1)
    expected = 0.5 * (math.log(1 + math.exp(-1)) + math.log(1 + math.exp(2))) + 0.1 * 0.5 * 91 / 2
    assert loss.item() == pytest.approx(expected, rel=1e-6)


def test_eq_15_gradient_is_that_of_autograd():
    """Eq. (15) once more in other words, differentiated by torch."""
    final_rows = torch.randn(3, 7, 5, requires_grad=True)
    ego_rows = torch.randn(3, 7, 5, requires_grad=True)
    user, positive, negative = final_rows
    probability = torch.sigmoid(
        torch.einsum("bd,bd->b", user, positive) - torch.einsum("bd,bd->b", user, negative)
    )
    expected = -probability.log().sum() / 7 + 0.3 / 2 * ego_rows.norm() ** 2 / 7
    expected_final, expected_ego = torch.autograd.grad(expected, [final_rows, ego_rows])
    loss, to_final, to_ego = lightgcn.objective(final_rows.detach(), ego_rows.detach(), 0.3)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(to_final, expected_final)
    torch.testing.assert_close(to_ego, expected_ego)


def test_an_epoch_is_plain_adam_on_the_slow_equations(data):
    """Two epochs: the same batches through the slow version, autograd through every layer, and the
    unfused Adam.
    """
    config = Config(dim=3, layers=2, lr=0.02, batch_size=16, l2=0.05)
    state = fresh(data, config)
    ego = state.ego.detach().clone().requires_grad_()
    adam = torch.optim.Adam([ego], lr=0.02, foreach=False, fused=False)
    losses = []
    for epoch in (1, 2):
        total = 0.0
        for u, i, j in bpr_epoch(data, 16, context(data, "train", epoch).rng):
            final = slow_final(data, ego, 2)
            difference = ((final[u] * final[N_USERS + i]) - (final[u] * final[N_USERS + j])).sum(1)
            squares = (
                ego[u].square().sum()
                + ego[N_USERS + i].square().sum()
                + ego[N_USERS + j].square().sum()
            )
            loss = -torch.sigmoid(difference).log().mean() + 0.05 * 0.5 * squares / len(u)
            adam.zero_grad()
            loss.backward()
            adam.step()
            total += loss.item() * len(u)
        losses.append(total / len(data.users))
    metrics = train(state, data, range(1, 3))
    torch.testing.assert_close(state.ego, ego, rtol=1e-4, atol=1e-5)
    assert [m["loss"] for m in metrics] == pytest.approx(losses, rel=1e-5)


# --- Learning ---


def test_it_learns_two_tastes():
    """Two groups of users that buy from two halves of the shelf: unseen items of one's own half
    come to score higher.
    """
    rng = np.random.default_rng(0)
    users = np.repeat(np.arange(40), 6)
    items = np.concatenate([rng.permutation(12)[:6] + 12 * (user % 2) for user in range(40)])
    data = Interactions.build(40, 24, users, items)
    state = fresh(data, Config(dim=8, lr=0.02, batch_size=64))
    metrics = train(state, data, range(1, 16))
    scores = METHOD.score(state, np.arange(40)).numpy()
    own = (np.arange(24)[None, :] // 12) == (np.arange(40)[:, None] % 2)
    scores[users, items] = np.nan
    own_half, other_half = (
        np.nanmean(np.where(mask, scores, np.nan), axis=1) for mask in (own, ~own)
    )
    assert (own_half > other_half + 0.5).all()
    assert metrics[-1]["loss"] < 0.7 * metrics[0]["loss"]


def test_without_layers_it_is_matrix_factorisation(data):
    state = fresh(data, Config(dim=4, layers=0))
    users = np.array([3, 0])
    torch.testing.assert_close(
        METHOD.score(state, users), (state.ego[users] @ state.ego[N_USERS:].T).detach()
    )


# --- State ---


def test_score_is_eq_5_for_every_item_and_exports_the_same(data):
    state = fresh(data, Config(dim=4))
    final = slow_final(data, state.ego.detach(), 2)
    users = np.array([5, 11, 0])
    scores = METHOD.score(state, users)
    assert not scores.requires_grad
    torch.testing.assert_close(
        scores, torch.stack([lightgcn.predict(final[u], final[N_USERS:]) for u in users])
    )
    exported = METHOD.export(state)
    assert {name: tuple(value.shape) for name, value in exported.items()} == {
        "users": (12, 4),
        "items": (9, 4),
    }
    assert torch.equal(METHOD.score_exported(exported, users), scores)


def test_scores_are_propagated_once_and_anew_after_training(data, monkeypatch):
    state = fresh(data, Config(dim=4))
    calls = []
    real = lightgcn.final_embeddings
    monkeypatch.setattr(lightgcn, "final_embeddings", lambda *args: calls.append(1) or real(*args))
    before = METHOD.score(state, np.array([0]))
    METHOD.score(state, np.array([1, 2]))
    assert len(calls) == 1
    train(state, data, range(1, 2))
    calls.clear()
    after = METHOD.score(state, np.array([0]))
    assert len(calls) == 1
    assert not torch.equal(before, after)


def test_continuing_from_a_checkpoint_equals_a_straight_run_bit_for_bit(data, tmp_path: Path):
    config = Config(dim=4, batch_size=8)
    straight, first, second = fresh(data, config), fresh(data, config), fresh(data, config, seed=9)
    expected = train(straight, data, range(1, 5))
    train(first, data, range(1, 3))
    checkpoint.save(tmp_path / "shop", METHOD.state_dict(first))
    METHOD.score(second, np.array([0]))  # a cache that loading must drop
    METHOD.load_state_dict(second, checkpoint.load(tmp_path / "shop"))
    assert torch.equal(
        METHOD.score(second, np.arange(N_USERS)), METHOD.score(first, np.arange(N_USERS))
    )
    assert train(second, data, range(3, 5)) == expected[2:]
    assert torch.equal(second.ego, straight.ego)
    for key, value in straight.adam.state[straight.ego].items():
        assert torch.equal(second.adam.state[second.ego][key], value), key


def test_a_saved_state_does_not_move_with_training(data):
    state = fresh(data, Config(dim=4))
    train(state, data, range(1, 2))
    saved = METHOD.state_dict(state)
    scores = METHOD.score(state, np.arange(N_USERS))
    train(state, data, range(2, 4))
    METHOD.load_state_dict(state, saved)
    train(state, data, range(2, 3))
    METHOD.load_state_dict(state, saved)
    assert torch.equal(METHOD.score(state, np.arange(N_USERS)), scores)
    assert saved["adam"]["step"] == 1  # all pairs fit one batch: one step per epoch


def test_a_state_saved_before_training_loads(data):
    saved = METHOD.state_dict(fresh(data, Config(dim=4)))
    other = fresh(data, Config(dim=4), seed=1)
    METHOD.load_state_dict(other, saved)
    straight = fresh(data, Config(dim=4))
    assert train(other, data, range(1, 3)) == train(straight, data, range(1, 3))
    assert torch.equal(other.ego, straight.ego)


def test_initial_embeddings(data):
    """Xavier uniform per table: within √(6 / (rows + dim)); normal: standard deviation 0.1. The
    seed decides.
    """
    big = Interactions.build(500, 300, data.users, data.items)
    xavier = fresh(big, Config(dim=16)).ego
    for table, bound in ((xavier[:500], (6 / 516) ** 0.5), (xavier[500:], (6 / 316) ** 0.5)):
        assert 0.98 * bound < table.abs().max() <= bound
    normal = fresh(big, Config(dim=16, init="normal")).ego
    assert normal.std().item() == pytest.approx(0.1, rel=0.05)
    assert torch.equal(xavier, fresh(big, Config(dim=16)).ego)
    assert not torch.equal(xavier, fresh(big, Config(dim=16), seed=1).ego)


# --- Declaration ---


def test_it_is_local_and_sends_nothing():
    (stage,) = METHOD.stages(Config(epochs=7, patience=3))
    assert METHOD.scope == Scope.LOCAL
    assert METHOD.fields == ()
    assert METHOD.init_server is None
    assert stage.local
    assert (stage.rounds, stage.patience, stage.keep_best) == (7, 3, True)


def test_the_shipped_file_states_the_defaults_and_valid_presets():
    text = (
        importlib.resources.files("crossfed.methods.configs").joinpath("lightgcn.yaml").read_text()
    )
    shipped = yaml.safe_load(text)
    assert Config.model_validate(shipped["config"]) == Config()
    for preset in shipped["presets"].values():
        Config.model_validate({**shipped["config"], **preset})
    for name, space in shipped["search"].items():
        for value in space.get("values", [space.get("low"), space.get("high")]):
            Config.model_validate({**shipped["config"], name: value})
