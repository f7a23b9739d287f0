"""NGCF's equations against node-by-node and dense versions, its reduction to LightGCN, both
dropouts, and its state.
"""

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from crossfed.methods import ngcf
from crossfed.methods.ngcf import METHOD, Config
from crossfed.methods.parts.graph import propagate
from crossfed.methods.parts.sampling import bpr_epoch
from crossfed.platform import checkpoint
from crossfed.platform.config.settings import build
from crossfed.platform.method import Context, Interactions, Scope, generators

N_USERS, N_ITEMS = 12, 9
NODES = N_USERS + N_ITEMS
STILL = {"message_dropout": 0.0, "node_dropout": 0.0}


@pytest.fixture
def data() -> Interactions:
    """The last user and the last item have no interaction."""
    rng = np.random.default_rng(2)
    pairs = np.unique(rng.integers(0, [N_USERS - 1, N_ITEMS - 1], (45, 2)), axis=0)
    return Interactions.build(N_USERS, N_ITEMS, pairs[:, 0], pairs[:, 1])


def context(data: Interactions, stage: str, round: int, seed: int = 0) -> Context:
    rng, torch_rng = generators(seed, stage, round, "shop")
    torch.manual_seed(1000 * seed + round)
    return Context("shop", stage, round, (), rng, torch_rng, torch.device("cpu"), data)


def fresh(data: Interactions, config: Config, seed: int = 0) -> ngcf.State:
    return METHOD.init_domain(config, context(data, "init", 0, seed))


def train(state: ngcf.State, data: Interactions, rounds: range) -> list[Mapping[str, float]]:
    (stage,) = METHOD.stages(state.config)
    (phase,) = stage.each
    return [phase.step(state, {}, context(data, "train", r)).metrics for r in rounds]


def dense_laplacian(data: Interactions) -> torch.Tensor:
    """Eq. (8) from A = [[0, R], [R^T, 0]]."""
    a = torch.zeros(NODES, NODES)
    a[data.users, N_USERS + data.items] = 1
    a = a + a.T
    scale = a.sum(1).clamp(min=1).rsqrt()
    return scale[:, None] * a * scale[None, :]


def weights_of(layers: int, dim: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(dim, dim), torch.randn(dim, dim)) for _ in range(layers)]


def slow_layer(
    data: Interactions,
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    slope: float,
) -> torch.Tensor:
    """Eq. (3) to (6), message by message."""
    degree = torch.bincount(
        torch.from_numpy(np.concatenate([data.users, N_USERS + data.items])),
        minlength=NODES,
    )
    received = x @ w1  # what each node sends itself
    for u, i in zip(data.users.tolist(), (N_USERS + data.items).tolist(), strict=True):
        p = 1 / math.sqrt(int(degree[u]) * int(degree[i]))
        received[u] = received[u] + p * (x[i] @ w1 + (x[i] * x[u]) @ w2)
        received[i] = received[i] + p * (x[u] @ w1 + (x[u] * x[i]) @ w2)
    return torch.where(received > 0, received, slope * received)


def slow_final(
    data: Interactions,
    ego: torch.Tensor,
    weights: ngcf.Weights,
    config: Config,
) -> torch.Tensor:
    levels, x = [ego], ego
    for w1, w2 in weights:
        x = slow_layer(data, x, w1, w2, config.slope)
        length = x.norm(dim=1, keepdim=True).clamp(min=1e-12) if config.normalise else 1
        levels.append(x / length)
    return torch.cat(levels, 1)


# --- Equations ---


def test_eq_8(data):
    """Eq. (8): symmetric, users first, no self loops, an empty row for a node without edges."""
    torch.testing.assert_close(ngcf.laplacian(data).to_dense(), dense_laplacian(data))


@pytest.mark.parametrize("slope", [0.0, 0.2, 1.0])
def test_eq_7_is_eq_3_to_6_message_by_message(data, slope):
    """Eq. (7) for all nodes at once against sums of single messages, Eq. (3), (4), (5) and (6)."""
    x, ((w1, w2),) = torch.randn(NODES, 4), weights_of(1, 4)
    actual = ngcf.layer(dense_laplacian(data) @ x, x, w1, w2, slope)
    torch.testing.assert_close(actual, slow_layer(data, x, w1, w2, slope))


def test_eq_7_by_hand():
    """Eq. (7) with dim = 1: one user x = 2, one item y = -3, 𝓛 swaps them, W1 = 5, W2 = 7.

    (𝓛 + I)E W1 = (-3 + 2)·5 = -5 for both, the bi-interaction -6·7 = -42 for both: -47, times the
    slope.
    """
    x, side = torch.tensor([[2.0], [-3.0]]), torch.tensor([[-3.0], [2.0]])
    w1, w2 = torch.tensor([[5.0]]), torch.tensor([[7.0]])
    torch.testing.assert_close(ngcf.layer(side, x, w1, w2, 0.1), torch.tensor([[-4.7], [-4.7]]))
    torch.testing.assert_close(ngcf.layer(side, x, -w1, -w2, 0.1), torch.tensor([[47.0], [47.0]]))


def test_eq_9_by_hand():
    """Eq. (9): [1, 2] ‖ [3, 4]; normalised, the second becomes [0.6, 0.8] and the learned one
    stays.
    """
    levels = [torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]])]
    assert ngcf.concatenated(levels, False).tolist() == [[1, 2, 3, 4]]
    torch.testing.assert_close(ngcf.concatenated(levels, True), torch.tensor([[1, 2, 0.6, 0.8]]))


def test_eq_10_by_hand():
    """Eq. (10): [1, 2]·[3, 4] = 11 and [0, -1]·[5, 2] = -2."""
    users, items = torch.tensor([[1.0, 2.0], [0.0, -1.0]]), torch.tensor([[3.0, 4.0], [5.0, 2.0]])
    assert ngcf.predict(users, items).tolist() == [11, -2]


def test_eq_11_by_hand():
    """Eq. (11), λ = 0.1, b = 2, width 1: u = [1, 2], i = [2, 0], j = [1, 1] in E*, so differences 1
    and -2.

    Squares: of the rows of E^(0) 1 + 4 + 9 + 16 + 25 + 36 = 91, of W1 and W2 49 + 64 = 113.
    """
    final_rows = torch.tensor([[[1.0], [2.0]], [[2.0], [0.0]], [[1.0], [1.0]]])
    ego_rows = torch.tensor([[[1.0], [2.0]], [[3.0], [4.0]], [[5.0], [6.0]]])
    weights = [(torch.tensor([[7.0]]), torch.tensor([[8.0]]))]
    loss = ngcf.objective(final_rows, ego_rows, weights, 0.1)
    ranking = 0.5 * (math.log(1 + math.exp(-1)) + math.log(1 + math.exp(2)))
    assert loss.item() == pytest.approx(ranking + 0.1 * 0.5 * (91 + 113) / 2, rel=1e-6)


@pytest.mark.parametrize("layers", [0, 1, 3])
@pytest.mark.parametrize("normalise", [True, False])
def test_all_layers_of_eq_7_concatenated_by_eq_9(data, layers, normalise):
    config = Config(dim=4, layers=layers, normalise=normalise, **STILL)
    ego, weights = torch.randn(NODES, 4), weights_of(layers, 4)
    actual = ngcf.final_embeddings(ngcf.laplacian(data), ego, weights, config)
    torch.testing.assert_close(actual, slow_final(data, ego, weights, config), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layers", [0, 1, 2, 3])
def test_a_batch_needs_the_last_layer_at_its_nodes_only(data, layers):
    """Training's layers at some nodes are those of all nodes, and so are the gradients to E^(0) and
    the weights.
    """
    config = Config(dim=4, layers=layers, normalise=False, **STILL)
    ego = torch.randn(NODES, 4, requires_grad=True)
    weights = [(a.requires_grad_(), b.requires_grad_()) for a, b in weights_of(layers, 4)]
    rows, leaves = torch.tensor([0, 3, 11, 14, 20]), [ego, *(w for pair in weights for w in pair)]
    actual = torch.cat(ngcf.levels_at(rows, ngcf.laplacian(data), ego, weights, config), 1)
    expected = slow_final(data, ego, weights, config)[rows]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    direction = torch.randn_like(actual)
    actual_gradients = torch.autograd.grad(actual, leaves, direction)
    expected_gradients = torch.autograd.grad(expected, leaves, direction)
    for mine, other in zip(actual_gradients, expected_gradients, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-3)


# --- Reductions ---


def test_without_weights_and_activation_it_is_lightgcn_with_self_loops(data):
    """W2 = 0, W1 = I, slope 1, the layers summed: Σ (𝓛 + I)^l E, which is LightGCN on 𝓛 + I up to
    its mean's 1 / (L + 1).
    """
    config = Config(dim=4, layers=3, slope=1.0, normalise=False, **STILL)
    ego, weights = torch.randn(NODES, 4), [(torch.eye(4), torch.zeros(4, 4))] * 3
    concatenation = ngcf.final_embeddings(ngcf.laplacian(data), ego, weights, config)
    with_loops = (dense_laplacian(data) + torch.eye(NODES)).to_sparse_csr()
    summed = concatenation.view(NODES, 4, 4).sum(1)
    torch.testing.assert_close(summed / 4, propagate(with_loops, ego, 3))
    rows = torch.arange(NODES)
    trained = ngcf.concatenated(
        ngcf.levels_at(rows, ngcf.laplacian(data), ego, weights, config),
        False,
    )
    torch.testing.assert_close(trained, concatenation)


def test_without_layers_it_is_matrix_factorisation(data):
    state = fresh(data, Config(dim=4, layers=0))
    users = np.array([3, 0])
    torch.testing.assert_close(
        METHOD.score(state, users),
        (state.ego[users] @ state.ego[N_USERS:].T).detach(),
    )


# --- Dropout ---


def test_a_dropped_node_sends_nothing_and_others_make_up_for_it():
    """Whole rows fall out, at the rate; what is left is divided by 1 - p, so that the expected sum
    stays.
    """
    torch.manual_seed(0)
    sent = ngcf.sending(torch.ones(20_000, 3), 0.25)
    assert sent.unique().tolist() == pytest.approx([0, 4 / 3])
    assert torch.equal(sent, sent[:, :1].expand(-1, 3))
    assert sent.mean().item() == pytest.approx(1, abs=0.02)


def test_node_dropout_leaves_a_nodes_message_to_itself(data, monkeypatch):
    """With every node dropped, only I of 𝓛 + I is left, in whole layers and in the last: E W1, then
    E W1 W1.
    """
    monkeypatch.setattr(ngcf, "sending", lambda x, rate: torch.zeros_like(x))
    config = Config(dim=4, layers=2, slope=1.0, message_dropout=0.0)
    ego, weights, rows = torch.randn(NODES, 4), weights_of(2, 4), torch.tensor([1, 15])
    _, first, second = ngcf.levels_at(rows, ngcf.laplacian(data), ego, weights, config)
    torch.testing.assert_close(first, (ego @ weights[0][0])[rows])
    torch.testing.assert_close(
        second,
        (ego @ weights[0][0] @ weights[1][0])[rows],
        rtol=1e-4,
        atol=1e-4,
    )


@pytest.mark.parametrize("layers", [1, 2])
def test_message_dropout_is_on_every_layers_output_while_training_only(data, layers):
    config = Config(dim=64, layers=layers, message_dropout=0.5, node_dropout=0.0)
    state, rows = fresh(data, config), torch.arange(NODES - 1)
    torch.manual_seed(0)
    ego, *outputs = ngcf.levels_at(rows, state.adj, state.ego, state.weights, config)
    assert (ego != 0).all()
    connected = torch.cat([torch.arange(N_USERS - 1), torch.arange(N_USERS, NODES - 1)])
    for output in outputs:
        assert (output[connected] == 0).float().mean().item() == pytest.approx(0.5, abs=0.05)
    scores = METHOD.score(state, np.arange(N_USERS))
    state.final = None
    assert torch.equal(METHOD.score(state, np.arange(N_USERS)), scores)
    assert (ngcf.embeddings(state)[connected] != 0).all()


def test_each_dropout_changes_training(data):
    losses = {
        rates: train(
            fresh(data, Config(dim=4, message_dropout=rates[0], node_dropout=rates[1])),
            data,
            range(1, 3),
        )
        for rates in [(0.0, 0.0), (0.3, 0.0), (0.0, 0.3)]
    }
    assert len({tuple(m["loss"] for m in metrics) for metrics in losses.values()}) == 3


# --- Learning ---


def test_an_epoch_is_plain_adam_on_the_slow_equations(data):
    """Two epochs: the same batches through single messages, autograd through all of it, and the
    unfused Adam.
    """
    config = Config(dim=3, layers=2, lr=0.02, batch_size=16, l2=0.05, **STILL)
    state = fresh(data, config)
    ego = state.ego.detach().clone().requires_grad_()
    weights = [tuple(w.detach().clone().requires_grad_() for w in pair) for pair in state.weights]
    leaves = [ego, *(w for pair in weights for w in pair)]
    adam = torch.optim.Adam(leaves, lr=0.02, foreach=False, fused=False)
    losses = []
    for epoch in (1, 2):
        total = 0.0
        for u, i, j in bpr_epoch(data, 16, context(data, "train", epoch).rng):
            final = slow_final(data, ego, weights, config)
            difference = (final[u] * (final[N_USERS + i] - final[N_USERS + j])).sum(1)
            squares = sum(ego[rows].square().sum() for rows in (u, N_USERS + i, N_USERS + j))
            squares = squares + sum(w.square().sum() for w in leaves[1:])
            loss = -torch.sigmoid(difference).log().mean() + 0.05 * 0.5 * squares / len(u)
            adam.zero_grad()
            loss.backward()
            adam.step()
            total += loss.item() * len(u)
        losses.append(total / len(data.users))
    metrics = train(state, data, range(1, 3))
    assert [m["loss"] for m in metrics] == pytest.approx(losses, rel=1e-4)
    torch.testing.assert_close(state.ego, ego, rtol=1e-3, atol=1e-4)
    for mine, other in zip(state.weights, weights, strict=True):
        torch.testing.assert_close(mine[0], other[0], rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(mine[1], other[1], rtol=1e-3, atol=1e-4)


def test_it_learns_two_tastes():
    """Two groups of users that buy from two halves of the shelf: unseen items of one's own half
    come to score higher.
    """
    rng = np.random.default_rng(0)
    users = np.repeat(np.arange(40), 6)
    items = np.concatenate([rng.permutation(12)[:6] + 12 * (user % 2) for user in range(40)])
    data = Interactions.build(40, 24, users, items)
    state = fresh(data, Config(dim=8, layers=2, lr=0.02, batch_size=64))
    metrics = train(state, data, range(1, 16))
    scores = METHOD.score(state, np.arange(40)).numpy().copy()
    own = (np.arange(24)[None, :] // 12) == (np.arange(40)[:, None] % 2)
    scores[users, items] = np.nan
    own_half = np.nanmean(np.where(own, scores, np.nan), axis=1)
    other_half = np.nanmean(np.where(own, np.nan, scores), axis=1)
    assert (own_half > other_half + 0.5).all()
    assert metrics[-1]["loss"] < 0.7 * metrics[0]["loss"]


# --- State ---


def test_score_is_eq_10_for_every_item_and_exports_the_same(data):
    state = fresh(data, Config(dim=4, layers=2))
    final = slow_final(
        data,
        state.ego.detach(),
        [tuple(w.detach() for w in pair) for pair in state.weights],
        state.config,
    )
    users = np.array([5, 11, 0])
    scores = METHOD.score(state, users)
    assert not scores.requires_grad
    expected = torch.stack([ngcf.predict(final[u], final[N_USERS:]) for u in users])
    torch.testing.assert_close(scores, expected)
    exported = METHOD.export(state)
    assert {name: tuple(value.shape) for name, value in exported.items()} == {
        "users": (12, 12),
        "items": (9, 12),
    }
    assert torch.equal(METHOD.score_exported(exported, users), scores)


def test_scores_are_made_anew_after_training(data):
    state = fresh(data, Config(dim=4))
    before = METHOD.score(state, np.array([0]))
    kept = state.final
    METHOD.score(state, np.array([1, 2]))
    assert state.final is kept
    train(state, data, range(1, 2))
    assert not torch.equal(before, METHOD.score(state, np.array([0])))


def test_continuing_from_a_checkpoint_equals_a_straight_run_bit_for_bit(data, tmp_path: Path):
    config = Config(dim=4, layers=2, batch_size=8)
    straight, first, second = fresh(data, config), fresh(data, config), fresh(data, config, seed=9)
    expected = train(straight, data, range(1, 5))
    train(first, data, range(1, 3))
    checkpoint.save(tmp_path / "shop", METHOD.state_dict(first))
    METHOD.score(second, np.array([0]))  # a cache that loading must drop
    METHOD.load_state_dict(second, checkpoint.load(tmp_path / "shop"))
    assert torch.equal(
        METHOD.score(second, np.arange(N_USERS)),
        METHOD.score(first, np.arange(N_USERS)),
    )
    assert train(second, data, range(3, 5)) == expected[2:]
    for mine, other in zip(second.parameters(), straight.parameters(), strict=True):
        assert torch.equal(mine, other)
        for key, value in straight.adam.state[other].items():
            assert torch.equal(second.adam.state[mine][key], value), key


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
    assert [moments["step"] for moments in saved["adam"]] == [1] * 7


def test_a_state_saved_before_training_loads(data):
    saved = METHOD.state_dict(fresh(data, Config(dim=4)))
    other, straight = fresh(data, Config(dim=4), seed=1), fresh(data, Config(dim=4))
    METHOD.load_state_dict(other, saved)
    assert train(other, data, range(1, 3)) == train(straight, data, range(1, 3))
    assert torch.equal(other.ego, straight.ego)


def test_initial_values(data):
    """Xavier uniform: within √(6 / (rows + columns)) for each table and each weight. The seed
    decides.
    """
    big = Interactions.build(500, 300, data.users, data.items)
    state = fresh(big, Config(dim=16))
    tables = [
        (state.ego[:500], 516),
        (state.ego[500:], 316),
        *((w, 32) for pair in state.weights for w in pair),
    ]
    for table, fan in tables:
        assert 0.9 * (6 / fan) ** 0.5 < table.abs().max() <= (6 / fan) ** 0.5
    assert len({w.sum().item() for w in state.parameters()}) == 7
    assert torch.equal(state.ego, fresh(big, Config(dim=16)).ego)
    assert not torch.equal(state.ego, fresh(big, Config(dim=16), seed=1).ego)


# --- Declaration ---


def test_it_is_local_and_sends_nothing():
    (stage,) = METHOD.stages(Config(epochs=7, patience=3))
    assert METHOD.scope == Scope.LOCAL
    assert (METHOD.fields, METHOD.init_server, stage.local) == ((), None, True)
    assert (stage.rounds, stage.patience, stage.keep_best) == (7, 3, True)


def test_the_preset_of_fedcrf_is_its_protocol():
    config = build("ngcf", preset="fedcrf").config
    assert (config["dim"], config["layers"], config["lr"], config["batch_size"]) == (
        64,
        2,
        0.005,
        1024,
    )
