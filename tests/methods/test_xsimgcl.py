"""XSimGCL's equations by hand and against dense versions, its reduction to LightGCN, the noise, and
its state.
"""

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError

from crossfed.methods import xsimgcl
from crossfed.methods.parts.graph import bipartite_adjacency, propagate
from crossfed.methods.parts.sampling import bpr_epoch
from crossfed.methods.xsimgcl import METHOD, Config
from crossfed.platform import checkpoint
from crossfed.platform.config.settings import build
from crossfed.platform.method import Context, Interactions, Scope, generators

N_USERS, N_ITEMS = 12, 9
NODES = N_USERS + N_ITEMS


@pytest.fixture
def data() -> Interactions:
    """The last user and the last item have no interaction."""
    rng = np.random.default_rng(2)
    pairs = np.unique(rng.integers(0, [N_USERS - 1, N_ITEMS - 1], (45, 2)), axis=0)
    return Interactions.build(N_USERS, N_ITEMS, pairs[:, 0], pairs[:, 1])


@pytest.fixture
def adj(data: Interactions) -> torch.Tensor:
    return bipartite_adjacency(N_USERS, N_ITEMS, data.users, data.items)


def context(data: Interactions, stage: str, round: int, seed: int = 0) -> Context:
    rng, torch_rng = generators(seed, stage, round, "shop")
    torch.manual_seed(1000 * seed + round)
    return Context("shop", stage, round, (), rng, torch_rng, torch.device("cpu"), data)


def fresh(data: Interactions, config: Config, seed: int = 0) -> xsimgcl.State:
    return METHOD.init_domain(config, context(data, "init", 0, seed))


def train(state: xsimgcl.State, data: Interactions, rounds: range) -> list[Mapping[str, float]]:
    (stage,) = METHOD.stages(state.config)
    (phase,) = stage.each
    return [phase.step(state, {}, context(data, "train", r)).metrics for r in rounds]


def slow_encoded(
    adj: torch.Tensor,
    ego: torch.Tensor,
    rows: torch.Tensor,
    config: Config,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """E, E^(l*) and E^(0) at some nodes from dense products, the noise added as a constant.

    Draws the noise in the same order: of all nodes for every layer but the last, of `rows` for the
        last.
    """
    x, levels, dense = ego, [], adj.to_dense()
    for number in range(1, config.layers + 1):
        x = dense @ x
        x = x if number < config.layers else x[rows]
        x = x + (xsimgcl.perturbed(x.detach(), config.noise) - x.detach())
        levels.append(x if number == config.layers else x[rows])
        if number == config.layers:
            break
    return sum(levels) / config.layers, levels[config.contrast_layer - 1], ego[rows]


# --- Equations ---


def test_eq_3_noise_has_norm_ε_and_the_sign_of_the_vector():
    """Eq. (3): ‖x' - x‖ = ε in every row, no entry moves against its sign, and a zero vector gets
    none.
    """
    x = torch.randn(500, 16)
    x[7] = 0
    moved = xsimgcl.perturbed(x, 0.3) - x
    others = torch.arange(500) != 7
    torch.testing.assert_close(
        moved[others].norm(dim=1),
        torch.full((499,), 0.3),
        rtol=1e-4,
        atol=1e-5,
    )
    assert (moved * x >= 0).all()
    assert (moved[7] == 0).all()
    assert xsimgcl.perturbed(x, 0.0) is x


def test_eq_3_noise_is_uniform_before_its_norm_is_set():
    """U is uniform on (0, 1) up to a factor: 40,000 entries of mean ½ and variance 1/12, and rows
    that differ.
    """
    torch.manual_seed(0)
    u = xsimgcl.uniform(400, 100, torch.device("cpu")) / 2**16
    assert u.min() > 0 and u.max() < 1
    assert u.mean().item() == pytest.approx(0.5, abs=0.01)
    assert u.var().item() == pytest.approx(1 / 12, abs=0.002)
    assert np.histogram(u.numpy(), 10, (0, 1))[0] == pytest.approx(4000, abs=300)
    assert abs(np.corrcoef(u[:, 0], u[:, 1])[0, 1]) < 0.2
    assert xsimgcl.uniform(3, 5, torch.device("cpu")).shape == (3, 5)


def test_eq_4_by_hand():
    """One user, one item, L = 2: Ã swaps the two rows, so E = (Ãx + ÃÃx) / 2, without x itself."""
    adj = bipartite_adjacency(1, 1, np.array([0]), np.array([0]))
    actual = xsimgcl.final_embeddings(adj, torch.tensor([[3.0], [6.0]]), 2)
    torch.testing.assert_close(actual, torch.tensor([[(6 + 3) / 2], [(3 + 6) / 2]]))


def test_eq_4_perturbs_every_layer_and_feeds_it_on(adj):
    """Each layer is Ã times the perturbed one before, plus noise of norm ε of its own."""
    ego = torch.randn(NODES, 4)
    first, second, third = xsimgcl.propagated(adj, ego, 3, 0.5)
    connected = adj.to_dense().sum(1) > 0
    for before, after in ((ego, first), (first, second), (second, third)):
        length = (after - adj.to_dense() @ before).norm(dim=1)
        torch.testing.assert_close(length, 0.5 * connected.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("layers", "contrasted"), [(1, 1), (2, 1), (2, 2), (3, 1), (3, 2), (3, 3)])
@pytest.mark.parametrize("noise", [0.0, 0.4])
def test_eq_4_at_a_batchs_nodes_with_gradients(adj, layers, contrasted, noise):
    """Eq. (4) for the batch alone, and its written-out gradient, against dense products and
    autograd.
    """
    config = Config(dim=5, layers=layers, contrast_layer=contrasted, noise=noise)
    rows = torch.tensor([0, 3, 4, 11, 13, 20])
    ego = torch.randn(NODES, 5, requires_grad=True)
    torch.manual_seed(3)
    actual = xsimgcl.encode(ego, adj, rows, config)
    torch.manual_seed(3)
    expected = slow_encoded(adj, ego, rows, config)
    for mine, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, other)
    directions = [torch.randn(6, 5) for _ in range(3)]
    for chosen in ([0], [1], [2], [0, 1, 2]):
        ways = [directions[k] for k in chosen]
        of_actual, of_expected = [actual[k] for k in chosen], [expected[k] for k in chosen]
        (mine,) = torch.autograd.grad(of_actual, ego, ways, retain_graph=True)
        (other,) = torch.autograd.grad(of_expected, ego, ways, retain_graph=True)
        torch.testing.assert_close(mine, other)


def test_eq_5_by_hand():
    """Eq. (5), τ = ½: rows [2, 0] and [0, 3] against [1, 0] and [1, 1].

    Cosines 1 and 1/√2 of the first row, 0 and 1/√2 of the second; one way, from the first argument.
    """
    final, other = torch.tensor([[2.0, 0.0], [0.0, 3.0]]), torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    root = 2 * 2**-0.5
    first = -math.log(math.exp(2) / (math.exp(2) + math.exp(root)))
    second = -math.log(math.exp(root) / (math.exp(0) + math.exp(root)))
    assert xsimgcl.contrast(final, other, 0.5).item() == pytest.approx(
        (first + second) / 2,
        rel=1e-5,
    )
    assert xsimgcl.contrast(other, final, 0.5).item() != pytest.approx(
        (first + second) / 2,
        rel=1e-3,
    )


def test_eq_2_by_hand():
    """Eq. (2), dim = 1: u = [1, 2], i = [2, 0], j = [1, 1], so differences 1 and -2: -½ (ln σ(1) +
    ln σ(-2)).
    """
    u, i, j = torch.tensor([[[1.0], [2.0]], [[2.0], [0.0]], [[1.0], [1.0]]])
    expected = 0.5 * (math.log(1 + math.exp(-1)) + math.log(1 + math.exp(2)))
    assert xsimgcl.recommendation(u, i, j).item() == pytest.approx(expected, rel=1e-6)


def test_eq_1_counts_every_node_once_in_the_contrast_and_every_pair_in_the_rest():
    """Eq. (1): two users, items 2 … 4, pairs (0, 2, 4), (1, 3, 4), (0, 3, 2): Eq. (5) over users
    {0, 1}, items {2, 3}.
    """
    config = Config(dim=3, weight=0.7, l2=0.1, temperature=0.4)
    final, other, ego = torch.randn(3, 5, 3)
    place = torch.tensor([[0, 1, 0], [2, 3, 3], [4, 4, 2]])
    loss, ranking, apart = xsimgcl.objective((final, other, ego), place, 2, config)
    u, i, j = place
    difference = (final[u] * (final[i] - final[j])).sum(1)
    expected_ranking = -torch.sigmoid(difference).log().mean()
    expected_apart = torch.zeros(())
    for kind in ([0, 1], [2, 3]):
        p = torch.softmax(F.normalize(final[kind]) @ F.normalize(other[kind]).T / 0.4, 1)
        expected_apart = expected_apart - p.diagonal().log().mean()
    squares = ego[u].square().sum() + ego[i].square().sum() + ego[j].square().sum()
    torch.testing.assert_close(ranking, expected_ranking)
    torch.testing.assert_close(apart, expected_apart)
    torch.testing.assert_close(
        loss,
        expected_ranking + 0.7 * expected_apart + 0.1 * 0.5 * squares / 3,
    )


# --- Reductions ---


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_without_contrast_and_noise_it_is_lightgcn_without_its_ego_layer(data, adj, layers):
    """λ = ε = 0. LightGCN's mean has L + 1 layers: ((L + 1) · it - E^(0)) / L; and two epochs of
    plain training on that.
    """
    config = Config(dim=3, layers=layers, weight=0, noise=0, lr=0.02, batch_size=16, l2=0.05)
    state = fresh(data, config)
    ego = state.ego.detach().clone().requires_grad_()

    def without_ego() -> torch.Tensor:
        return ((layers + 1) * propagate(adj, ego, layers) - ego) / layers

    final = without_ego().detach()
    torch.testing.assert_close(
        METHOD.score(state, np.arange(N_USERS)),
        final[:N_USERS] @ final[N_USERS:].T,
    )
    adam, losses = torch.optim.Adam([ego], lr=0.02, foreach=False, fused=False), []
    for epoch in (1, 2):
        total = 0.0
        for u, i, j in bpr_epoch(data, 16, context(data, "train", epoch).rng):
            final = without_ego()
            difference = (final[u] * (final[N_USERS + i] - final[N_USERS + j])).sum(1)
            squares = sum(ego[rows].square().sum() for rows in (u, N_USERS + i, N_USERS + j))
            loss = -torch.sigmoid(difference).log().mean() + 0.05 * 0.5 * squares / len(u)
            adam.zero_grad()
            loss.backward()
            adam.step()
            total += loss.item() * len(u)
        losses.append(total / len(data.users))
    metrics = train(state, data, range(1, 3))
    assert [m["loss"] for m in metrics] == pytest.approx(losses, rel=1e-4)
    assert [m["contrast"] for m in metrics] == [0, 0]
    torch.testing.assert_close(state.ego, ego, rtol=1e-3, atol=1e-4)


# --- Learning ---


def test_an_epoch_is_plain_adam_on_the_slow_equations(data, adj):
    """Two epochs with noise and contrast: the same batches through dense products, autograd, and
    the unfused Adam.
    """
    config = Config(
        dim=3,
        layers=2,
        contrast_layer=1,
        lr=0.02,
        batch_size=16,
        l2=0.05,
        noise=0.3,
        weight=0.5,
    )
    state = fresh(data, config)
    ego = state.ego.detach().clone().requires_grad_()
    adam, losses = torch.optim.Adam([ego], lr=0.02, foreach=False, fused=False), []
    for epoch in (1, 2):
        total = 0.0
        for u, i, j in bpr_epoch(data, 16, context(data, "train", epoch).rng):
            rows, place = torch.unique(
                torch.cat([u, N_USERS + i, N_USERS + j]),
                return_inverse=True,
            )
            final, other, start = slow_encoded(adj, ego, rows, config)
            a, b, c = place.view(3, -1)
            difference = (final[a] * (final[b] - final[c])).sum(1)
            squares = start[place].square().sum()
            loss = -torch.sigmoid(difference).log().mean() + 0.05 * 0.5 * squares / len(u)
            for kind in (a.unique(), b.unique()):
                p = torch.log_softmax(
                    F.normalize(final[kind]) @ F.normalize(other[kind]).T / 0.15,
                    1,
                )
                loss = loss - 0.5 * p.diagonal().mean()
            adam.zero_grad()
            loss.backward()
            adam.step()
            total += loss.item() * len(u)
        losses.append(total / len(data.users))
    metrics = train(state, data, range(1, 3))
    assert [m["loss"] for m in metrics] == pytest.approx(losses, rel=1e-4)
    torch.testing.assert_close(state.ego, ego, rtol=1e-3, atol=1e-4)


def test_it_learns_two_tastes():
    """Two groups of users that buy from two halves of the shelf: unseen items of one's own half
    come to score higher.
    """
    rng = np.random.default_rng(0)
    users = np.repeat(np.arange(40), 6)
    items = np.concatenate([rng.permutation(12)[:6] + 12 * (user % 2) for user in range(40)])
    data = Interactions.build(40, 24, users, items)
    state = fresh(data, Config(dim=8, lr=0.02, batch_size=64, weight=0.02))
    metrics = train(state, data, range(1, 16))
    scores = METHOD.score(state, np.arange(40)).numpy().copy()
    own = (np.arange(24)[None, :] // 12) == (np.arange(40)[:, None] % 2)
    scores[users, items] = np.nan
    own_half = np.nanmean(np.where(own, scores, np.nan), axis=1)
    other_half = np.nanmean(np.where(own, np.nan, scores), axis=1)
    assert (own_half > other_half + 0.5).all()
    assert metrics[-1]["loss"] < 0.7 * metrics[0]["loss"]


def test_contrast_spreads_vectors_out(data):
    """What the paper is about: with it the distinct vectors of E are less alike than without."""
    alike = []
    for weight in (0.0, 1.0):
        state = fresh(data, Config(dim=8, lr=0.02, weight=weight))
        train(state, data, range(1, 30))
        unit = F.normalize(xsimgcl.embeddings(state)[: N_USERS - 1])
        alike.append((unit @ unit.T).mean().item())
    assert alike[1] < alike[0] - 0.1


# --- State ---


def test_scores_are_without_noise_and_export_gives_the_same(data, adj):
    state = fresh(data, Config(dim=4))
    dense = adj.to_dense()
    final = (dense @ state.ego + dense @ dense @ state.ego).detach() / 2
    users = np.array([5, 11, 0])
    scores = METHOD.score(state, users)
    assert not scores.requires_grad
    torch.testing.assert_close(scores, final[users] @ final[N_USERS:].T)
    exported = METHOD.export(state)
    assert {name: tuple(value.shape) for name, value in exported.items()} == {
        "users": (12, 4),
        "items": (9, 4),
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
    config = Config(dim=4, batch_size=8)
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
    other, straight = fresh(data, Config(dim=4), seed=1), fresh(data, Config(dim=4))
    METHOD.load_state_dict(other, saved)
    assert train(other, data, range(1, 3)) == train(straight, data, range(1, 3))
    assert torch.equal(other.ego, straight.ego)


def test_initial_embeddings(data):
    """Xavier uniform per table: within √(6 / (rows + dim)). The seed decides."""
    big = Interactions.build(500, 300, data.users, data.items)
    ego = fresh(big, Config(dim=16)).ego
    for table, bound in ((ego[:500], (6 / 516) ** 0.5), (ego[500:], (6 / 316) ** 0.5)):
        assert 0.98 * bound < table.abs().max() <= bound
    assert torch.equal(ego, fresh(big, Config(dim=16)).ego)
    assert not torch.equal(ego, fresh(big, Config(dim=16), seed=1).ego)


# --- Declaration ---


def test_it_is_local_and_sends_nothing():
    (stage,) = METHOD.stages(Config(epochs=7, patience=3))
    assert METHOD.scope == Scope.LOCAL
    assert (METHOD.fields, METHOD.init_server, stage.local) == ((), None, True)
    assert (stage.rounds, stage.patience, stage.keep_best) == (7, 3, True)


def test_the_contrasted_layer_must_exist():
    with pytest.raises(ValidationError, match=r"contrast_layer \(3\) must be one of the 2 layers"):
        Config(layers=2, contrast_layer=3)


def test_the_preset_of_fedcrf_is_its_protocol():
    config = build("xsimgcl", preset="fedcrf").config
    assert (config["dim"], config["layers"], config["lr"], config["batch_size"]) == (
        64,
        2,
        0.005,
        1024,
    )
