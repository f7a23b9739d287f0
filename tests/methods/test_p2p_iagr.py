"""P2P-IAGR's equations against slow or dense versions and by hand, its steps against plain
autograd, and what crosses.
"""

import dataclasses
import importlib.resources
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from scipy import stats

from crossfed.methods import p2p_iagr
from crossfed.methods.p2p_iagr import METHOD, Config, Domain
from crossfed.methods.parts.perturbation import clip_l1
from crossfed.platform.config.settings import build
from crossfed.platform.method import Context, Direction, Interactions, generators, noise_generator
from crossfed.platform.report.recording import run_recorded

N_USERS, N_ITEMS = 12, 9
SMALL = {"dim": 5, "K": 3, "batch_size": 16, "top_k": 2, "layers": 2}


@pytest.fixture
def data() -> Interactions:
    rng = np.random.default_rng(2)
    # the last of each has nothing
    pairs = np.unique(rng.integers(0, [N_USERS - 1, N_ITEMS - 1], (45, 2)), axis=0)
    return Interactions.build(N_USERS, N_ITEMS, pairs[:, 0], pairs[:, 1])


def context(
    data: Interactions,
    round: int = 0,
    seed: int = 0,
    node: str = "a",
    peers: tuple[str, ...] = ("b",),
) -> Context:
    stage = "train" if round else "init"
    rng, torch_rng = generators(seed, stage, round, node)
    noise = noise_generator(seed, stage, round, node)
    return Context(
        node, stage, round, peers, rng, torch_rng, torch.device("cpu"), data, noise_rng=noise
    )


def fresh(data: Interactions, seed: int = 0, node: str = "a", **values: Any) -> Domain:
    return Domain(Config(**{**SMALL, **values}), context(data, seed=seed, node=node))


def message(K: int = 3, dim: int = 5, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        f"{side}_prototypes": rng.normal(size=(K, dim)).astype(np.float32)
        for side in ("user", "item")
    }


def received(state: Domain, **inbox: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return p2p_iagr.receive(
        state, inbox or {"b": message(state.config.K, state.config.dim)}, context(state.data, 1)
    )


def train(
    state: Domain, data: Interactions, rounds: range, seed: int = 0
) -> list[Mapping[str, float]]:
    (stage,) = METHOD.stages(state.config)
    _, step = (phase.step for phase in stage.each)
    inbox = {"b": message(state.config.K, state.config.dim)}
    return [step(state, inbox, context(data, r, seed)).metrics for r in rounds]


def dense_graph(n_users: int, n_items: int, users: torch.Tensor, items: torch.Tensor, weights: torch.Tensor,  # noqa: E501
                floor: float = 0.0) -> torch.Tensor:  # fmt: skip
    """D^-½AD^-½ as a dense matrix."""
    n = n_users + n_items
    half = torch.zeros(n, n, dtype=weights.dtype).index_put((users, items + n_users), weights)
    full = half + half.T
    degree = full.sum(1) + floor
    root = torch.where(degree > 0, degree.clamp(min=1e-30).rsqrt(), 0.0)
    return root[:, None] * full * root[None, :]


# --- Equations 1 to 6: encoder and ranking ---


@pytest.mark.parametrize("layers", [0, 1, 3])
def test_eq_1_and_eq_2_node_by_node(data, layers):
    """Eq. (1), neighbour by neighbour, then Eq. (3), Eq. (4), Eq. (5) for each node alone, and the
    sum of Eq. (2).
    """
    state = fresh(data, layers=layers)
    ego, n = state.ego.detach(), N_USERS + N_ITEMS
    of_user = [set(data.items[data.users == u].tolist()) for u in range(N_USERS)]
    of_item = [set(data.users[data.items == i].tolist()) for i in range(N_ITEMS)]
    neighbours = [[N_USERS + i for i in items] for items in of_user] + [
        list(users) for users in of_item
    ]
    level, total = ego, ego.clone()
    for _ in range(layers):
        following = torch.zeros_like(ego)
        for node in range(n):
            z = torch.zeros(5)
            for other in neighbours[node]:
                z += level[other] / math.sqrt(len(neighbours[node]) * len(neighbours[other]))
            prototypes = (state.user_s if node < N_USERS else state.item_s).detach()
            weights = [math.exp(float(z @ s)) for s in prototypes]
            g = sum(
                weight / sum(weights) * s for weight, s in zip(weights, prototypes, strict=True)
            )
            following[node] = z + g
        level = following
        total += level
    torch.testing.assert_close(state.vectors().detach(), total)


def test_eq_3_and_eq_4_by_hand():
    """z = [ln 3, 0], s = [1, 0], [0, 1]: exp 3 and 1, so P = (¾, ¼) by Eq. (3), g = [¾, ¼] by Eq.
    (4); Eq. (5) adds z.
    """
    z, s = torch.tensor([[math.log(3), 0.0]]), torch.eye(2)
    torch.testing.assert_close(p2p_iagr.intent_shares(z, s), torch.tensor([[0.75, 0.25]]))
    # exp 9 and 1
    torch.testing.assert_close(p2p_iagr.intents(z, 2 * torch.eye(2)), torch.tensor([[1.8, 0.2]]))
    torch.testing.assert_close(p2p_iagr.refine(z, s), torch.tensor([[math.log(3) + 0.75, 0.25]]))


def test_eq_6_by_hand():
    """Eq. (6), a sum: differences 2·(3 − 1) = 4 and −1·(0 − 2) = 2, so ln(1 + e⁻⁴) + ln(1 +
    e⁻²).
    """
    user, positive, negative = (
        torch.tensor([[2.0], [-1.0]]),
        torch.tensor([[3.0], [0.0]]),
        torch.tensor([[1.0], [2.0]]),
    )
    expected = math.log(1 + math.exp(-4)) + math.log(1 + math.exp(-2))
    assert p2p_iagr.ranking_loss(user, positive, negative).item() == pytest.approx(expected)


# --- Equations 7 and 8: what leaves, and what it costs ---


def test_eq_7_what_is_sent_is_the_clipped_prototype_plus_laplace_noise(data):
    """Eq. (7) on the messages themselves: no clipped norm above C, residuals distributed as
    Laplace(0, 2C/ε₀).
    """
    state = fresh(data, K=64, dim=64, C=0.5, epsilon0=4.0)
    with torch.no_grad():
        state.user_s[0] *= 100  # far outside
        state.user_s[1] *= 1e-3  # inside: it stays
    clean, epsilon = p2p_iagr.signals(state)
    assert epsilon == 4.0
    for side, own in state.prototypes().items():
        norms = [math.fsum(abs(x) for x in row) for row in clean[side].tolist()]
        assert max(norms) <= 0.5
        assert (
            F.cosine_similarity(torch.from_numpy(clean[side]), own.detach().double()).min()
            > 1 - 1e-9
        )
    assert np.array_equal(clean["user"][1], state.user_s.detach().double().numpy()[1])
    out = p2p_iagr.exchange(state, {}, context(data, 1))
    noise = np.concatenate(
        [out.send["b"][f"{side}_prototypes"] - clean[side] for side in ("user", "item")]
    ).ravel()
    assert stats.kstest(noise, stats.laplace(scale=2 * 0.5 / 4.0).cdf).pvalue > 0.01
    assert noise.var() == pytest.approx(2 * 0.25**2, rel=0.1)
    other = p2p_iagr.exchange(state, {}, context(data, 2)).send["b"]["user_prototypes"]
    assert not np.array_equal(other, out.send["b"]["user_prototypes"])


def test_eq_7_draws_from_the_noise_generator_alone(data):
    """With seeded run generators and fresh noise, two messages differ: what is drawn cannot be
    drawn again.
    """
    ctx = dataclasses.replace(context(data, 1), noise_rng=noise_generator())
    again = dataclasses.replace(context(data, 1), noise_rng=noise_generator())
    one, two = (
        p2p_iagr.exchange(fresh(data), {}, c).send["b"]["user_prototypes"] for c in (ctx, again)
    )
    assert not np.array_equal(one, two)
    before = context(data, 1).rng.random()
    ctx = context(data, 1)
    p2p_iagr.exchange(fresh(data), {}, ctx)
    assert ctx.rng.random() == before


def test_eq_8_and_the_whole_release():
    """Eq. (8): T·ε₀ = 30 · 2 as the paper counts; 2K vectors leave in a round, so 2 · 16 · 30 · 2
    in truth.
    """
    (release,) = METHOD.releases(Config())
    assert 30 * release.per_round_epsilon == 60
    assert release.count == 32 and release.epsilon == 2.0
    assert 30 * release.count * release.epsilon == 1920
    assert (release.sensitivity, release.scale, release.norm) == (2.0, 1.0, "L1")
    assert set(release.keys) == {field.key for field in METHOD.fields}
    (sums,) = METHOD.releases(Config(release="contributions"))
    assert sums.count * sums.epsilon == release.count * release.epsilon  # the same in all
    assert METHOD.releases(Config(peer="noise")) == ()


# --- Equations 9 to 15: alignment, prior, reconstruction ---


def test_eq_9_by_hand():
    """Eq. (9), K = 2, τ = ½: own [1, 0], [0, 2]; received [3, 0], [1, 1]: cosines 1, 1/√2 and 0,
    1/√2.

    −ln(e²/(e² + e^√2)) − ln(e^√2/(e⁰ + e^√2)).
    """
    own, other = torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([[3.0, 0.0], [1.0, 1.0]])
    root = math.sqrt(2)
    expected = math.log1p(math.exp(root - 2)) + math.log1p(math.exp(-root))
    assert p2p_iagr.alignment(own, other, 0.5).item() == pytest.approx(expected)
    assert p2p_iagr.alignment(own, own, 0.1) < p2p_iagr.alignment(own, own.flip(0), 0.1)


def test_without_ccl_it_is_the_squared_distance():
    """(1 − 3)² + 0 + (0 − 1)² + (2 − 1)² = 6."""
    own, other = torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([[3.0, 0.0], [1.0, 1.0]])
    assert p2p_iagr.distance(own, other).item() == 6


def test_eq_10_to_eq_13_by_hand():
    """Eq. (10): C = [1, 0] + [1, 0] and [0, 1] + [0, 1], twice the unit matrix. e_u = [ln 2, 0],
    e_v = [0, ln 3].

    Eq. (12): exponents 2 ln 2 and 0, so p = (4, 1)/5; q = (1, 9)/10. Eq. (11): ẽ_u = [8, 2]/5, ẽ_v
    = [2, 18]/10. Eq. (13), τ = ½: (1.6 · 0.2 + 0.4 · 1.8) / ½ = 2.08.
    """
    prior = p2p_iagr.fuse(torch.eye(2), torch.eye(2))
    assert torch.equal(prior, 2 * torch.eye(2))
    p = p2p_iagr.affinity(torch.tensor([[math.log(2), 0.0]]), prior)
    q = p2p_iagr.affinity(torch.tensor([[0.0, math.log(3)]]), prior)
    torch.testing.assert_close(p, torch.tensor([[0.8, 0.2]]))
    torch.testing.assert_close(q, torch.tensor([[0.1, 0.9]]))
    u, v = p2p_iagr.prior_aware(p, prior), p2p_iagr.prior_aware(q, prior)
    torch.testing.assert_close(u, torch.tensor([[1.6, 0.4]]))
    torch.testing.assert_close(v, torch.tensor([[0.2, 1.8]]))
    torch.testing.assert_close(p2p_iagr.connection_logits(u, v, 0.5), torch.tensor([[2.08]]))


@pytest.mark.parametrize("lambda_", [0.0, 0.3, 0.5, 0.9])
def test_eq_14_is_the_log_odds_of_the_mixture(lambda_):
    """Eq. (14) written down as it is printed, in float64, for observed and other pairs."""
    x = torch.linspace(-6, 6, 13, dtype=torch.float64).repeat(2)
    observed = torch.arange(26) < 13
    pi = lambda_ * observed.double() + (1 - lambda_) * torch.sigmoid(x)
    actual = p2p_iagr.interpolated_log_odds(x, observed, lambda_)
    torch.testing.assert_close(actual, torch.log(pi) - torch.log(1 - pi))


def test_eq_14_is_finite_where_omega_is_zero_or_one():
    """At logits of ±200 Ω is 0 or 1 in float32: Π of an observed edge is λ or 1, of another 0 or 1
    − λ.
    """
    x = torch.tensor([200.0, -200.0, 200.0, -200.0], requires_grad=True)
    odds = p2p_iagr.interpolated_log_odds(x, torch.tensor([True, True, False, False]), 0.3)
    (grad,) = torch.autograd.grad(odds.sum(), [x])
    assert odds.isfinite().all() and grad.isfinite().all()
    expected = torch.tensor(
        [200 - math.log(0.7), math.log(3 / 7), math.log(7 / 3), math.log(0.7) - 200]
    )
    torch.testing.assert_close(odds.detach(), expected)


@pytest.mark.parametrize("tau", [0.1, 1.0])
def test_eq_15_an_edge_is_on_with_probability_pi(tau):
    """Eq. (15): σ((logit Π + g₁ − g₂)/τ) > ½ exactly when g₁ − g₂ > −logit Π, which has probability
    Π, for every τ.
    """
    rng = np.random.default_rng(0)
    pi = torch.tensor([0.1, 0.5, 0.83])[:, None].expand(3, 40_000)
    gumbel = torch.from_numpy(rng.gumbel(size=(2, 3, 40_000)).astype(np.float32))
    edges = p2p_iagr.sample_edges(torch.logit(pi), gumbel[0] - gumbel[1], tau)
    torch.testing.assert_close((edges > 0.5).float().mean(1), pi[:, 0], atol=0.01, rtol=0)
    assert edges.min() >= 0 and edges.max() <= 1


def test_eq_15_by_hand():
    """Π = 0.8, no noise, τ = 2: log odds ln 4, so σ(ln 2) = 2/3. Smaller τ is nearer to 0 or 1."""
    odds, none = torch.tensor([math.log(4)]), torch.zeros(1)
    assert p2p_iagr.sample_edges(odds, none, 2.0).item() == pytest.approx(2 / 3)
    assert p2p_iagr.sample_edges(odds, none, 0.1) > 0.999


def test_the_drawn_noise_is_that_of_two_gumbels(data, monkeypatch):
    """g₁ − g₂ is drawn at once, as a logistic variable: Kolmogorov–Smirnov on what reaches Eq.
    (15).
    """
    state = fresh(data, layers=0)
    caught: list[torch.Tensor] = []
    real = p2p_iagr.sample_edges
    monkeypatch.setattr(
        p2p_iagr,
        "sample_edges",
        lambda odds, noise, tau: caught.append(noise) or real(odds, noise, tau),
    )
    train(state, data, range(1, 80))
    drawn = torch.cat(caught).numpy()
    rng = np.random.default_rng(1)
    assert len(drawn) > 2_000
    assert stats.ks_2samp(drawn, rng.gumbel(size=20_000) - rng.gumbel(size=20_000)).pvalue > 0.01


# --- Candidates ---


def test_top_items_are_the_largest_omega_among_the_unseen(monkeypatch):
    """Against a full sort, in one block and in blocks of two users; a user who has seen all but one
    gets one.
    """
    rng = np.random.default_rng(4)
    users, items = (
        torch.from_numpy(rng.normal(size=(7, 3))).float(),
        torch.from_numpy(rng.normal(size=(6, 3))).float(),
    )
    seen = np.unique(
        np.concatenate([rng.integers(0, [7, 6], (12, 2)), [[3, i] for i in range(5)]]), axis=0
    )
    pairs = tuple(torch.from_numpy(column.copy()) for column in seen.T)
    expected = set()
    for u in range(7):
        free = [i for i in range(6) if [u, i] not in seen.tolist()]
        best = sorted(free, key=lambda i: -float(torch.sigmoid(users[u] @ items[i] / 0.7)))[:2]
        expected |= {(u, i) for i in best}
    for block in (1 << 24, 12):
        monkeypatch.setattr(p2p_iagr, "BLOCK_ELEMENTS", block)
        found = p2p_iagr.top_items(users, items, pairs, 2, 0.7)
        assert set(zip(*(x.tolist() for x in found), strict=True)) == expected
        assert len(found[0]) == len(expected)


def one_batch(state: Domain, rows: slice = slice(None)) -> tuple[torch.Tensor, ...]:
    rng = np.random.default_rng(9)
    users, items = state.data.users[rows], state.data.items[rows]
    return tuple(torch.from_numpy(x) for x in (users, items, rng.integers(0, N_ITEMS, len(users))))


@pytest.mark.parametrize("view", ["graph", "batch"])
def test_candidates_are_the_observed_edges_and_the_users_top_items(data, view):
    """Every added pair is a batch user's and unobserved, `top_k` each; observed ones are all, or
    the batch users' own.
    """
    state = fresh(data, view=view)
    final, batch = state.vectors().detach(), one_batch(state, slice(0, 6))
    pool = p2p_iagr.draw_pool(state, final, received(state), torch.Generator())
    found = p2p_iagr.candidates(state, batch, final, pool, torch.Generator())
    users = found.nodes[found.users]
    items = found.nodes[found.items + found.n_users] - N_USERS
    pairs = list(zip(users.tolist(), items.tolist(), strict=True))
    history = set(zip(data.users.tolist(), data.items.tolist(), strict=True))
    mine = set(batch[0].tolist())
    observed = {
        pair
        for pair, is_observed in zip(pairs, found.observed.tolist(), strict=True)
        if is_observed
    }
    added = set(pairs) - observed
    assert len(set(pairs)) == len(pairs)
    assert observed == {pair for pair in history if view == "graph" or pair[0] in mine}
    assert not added & history and {u for u, _ in added} == mine
    prior = {side: own + received(state)[side] for side, own in state.prototypes().items()}
    omega = p2p_iagr.connection_logits(
        p2p_iagr.prior_aware(p2p_iagr.affinity(final[:N_USERS], prior["user"]), prior["user"]),
        p2p_iagr.prior_aware(p2p_iagr.affinity(final[N_USERS:], prior["item"]), prior["item"]), 0.1,
    )  # fmt: skip
    for u in mine:
        free = [i for i in range(N_ITEMS) if (u, i) not in history]
        best = sorted(free, key=lambda i: -omega[u, i].item())[:2]
        assert {i for owner, i in added if owner == u} == set(best)
    assert torch.equal(
        found.nodes[found.batch], torch.stack([batch[0], batch[1] + N_USERS, batch[2] + N_USERS])
    )


def test_a_smaller_pool_bounds_what_competes(data):
    state = fresh(data, pool=4, top_k=9, view="batch")
    final = state.vectors().detach()
    pool = p2p_iagr.draw_pool(state, final, received(state), torch.Generator().manual_seed(1))
    other = p2p_iagr.draw_pool(state, final, received(state), torch.Generator().manual_seed(2))
    assert (
        len(pool.items) == 4
        and len(pool.items.unique()) == 4
        and not torch.equal(pool.items, other.items)
    )
    found = p2p_iagr.candidates(state, one_batch(state), final, pool, torch.Generator())
    added = found.nodes[found.items[~found.observed] + found.n_users] - N_USERS
    assert set(added.tolist()) <= set(pool.items.tolist())
    history = set(zip(data.users.tolist(), data.items.tolist(), strict=True))
    free = sum((u, i) not in history for u in np.unique(data.users) for i in pool.items.tolist())
    assert len(added) == free


def test_a_fanout_keeps_random_parts_of_the_histories(data):
    """min(fanout, history) observed edges per user, every one of them in turn, and none of the seen
    among the added.
    """
    state = fresh(data, view="batch", fanout=2, top_k=9)
    final, batch = state.vectors().detach(), one_batch(state)
    pool = p2p_iagr.draw_pool(state, final, received(state), torch.Generator())
    history = set(zip(data.users.tolist(), data.items.tolist(), strict=True))
    rng, met = torch.Generator().manual_seed(0), set()
    for _ in range(60):
        found = p2p_iagr.candidates(state, batch, final, pool, rng)
        users, items = found.nodes[found.users], found.nodes[found.items + found.n_users] - N_USERS
        pairs = set(
            zip(users[found.observed].tolist(), items[found.observed].tolist(), strict=True)
        )
        assert pairs <= history and len(pairs) == int(found.observed.sum())
        counts = np.bincount([u for u, _ in pairs], minlength=N_USERS)
        assert counts.tolist() == np.minimum(np.diff(data.indptr), 2).tolist()
        added = set(
            zip(users[~found.observed].tolist(), items[~found.observed].tolist(), strict=True)
        )
        assert (
            len(added) == len(np.unique(data.users)) * N_ITEMS - len(history)
            and not added & history
        )
        met |= pairs
    assert met == history
    with pytest.raises(ValueError, match="view=batch"):
        Config(fanout=2)


# --- Equations 16 to 18, and the steps against plain autograd ---


def test_eq_16_and_eq_17_by_hand():
    """Eq. (16), τ = 1: anchors [1, 0], [0, 1]; views [2, 0], [−1, 0]: cosines 1, −1 and 0, 0: ln(1
    + e⁻²) + ln 2.

    Eq. (17) is the sum over users and items, which `structural_contrast` is tested for below.
    """
    anchors, views = torch.eye(2), torch.tensor([[2.0, 0.0], [-1.0, 0.0]])
    expected = math.log1p(math.exp(-2)) + math.log(2)
    assert p2p_iagr.dual_view(anchors, views, 1.0).item() == pytest.approx(expected)


def test_eq_18_by_hand():
    """Eq. (18): 1 + 0.5 · 2 + 0.25 · 8 = 4."""
    one, two, eight = (torch.tensor(value) for value in (1.0, 2.0, 8.0))
    assert p2p_iagr.joint_loss(one, two, eight, 0.5, 0.25).item() == 4


def slow_loss(state: Domain, batch: tuple[torch.Tensor, ...], pairs: Any, s: Mapping[str, torch.Tensor],  # noqa: E501
              ego: torch.Tensor, own: Mapping[str, torch.Tensor], noise: torch.Tensor) -> torch.Tensor:  # fmt: skip  # noqa: E501
    """The whole of equations 1 to 18 on dense matrices, for the given candidate pairs (global
    numbers) and noise.
    """
    config = state.config
    users, items, observed = pairs

    def encode(adj: torch.Tensor) -> torch.Tensor:
        level = total = ego
        for _ in range(config.layers):
            z = adj @ level
            parts = []
            for part, prototypes in ((z[:N_USERS], own["user"]), (z[N_USERS:], own["item"])):
                weights = (part @ prototypes.T).exp()
                parts.append(part + (weights / weights.sum(1, keepdim=True)) @ prototypes)
            level = torch.cat(parts) if config.ablation != "intent" else z
            total = total + level
        return total

    def contrast(a: torch.Tensor, b: torch.Tensor, tau: float) -> torch.Tensor:
        total = torch.zeros(())
        for i in range(len(a)):
            cosines = (
                torch.stack([F.cosine_similarity(a[i], b[j], dim=0) for j in range(len(b))]) / tau
            )
            total = total - torch.log(cosines[i].exp() / cosines.exp().sum())
        return total

    ones = torch.ones(len(state.users))
    e = encode(dense_graph(N_USERS, N_ITEMS, state.users, state.items, ones))
    u, i, j = batch
    rec = -torch.log(torch.sigmoid((e[u] * (e[N_USERS + i] - e[N_USERS + j])).sum(1))).sum()
    ccl = torch.zeros(())
    for side in ("user", "item"):
        gap = (own[side] - s[side]).square().sum()
        ccl = ccl + (gap if config.ablation == "ccl" else contrast(own[side], s[side], config.tau))
    c = {side: own[side] + s[side] for side in own}
    p, q = torch.softmax(e[:N_USERS] @ c["user"].T, 1), torch.softmax(e[N_USERS:] @ c["item"].T, 1)
    omega = torch.sigmoid((p @ c["user"]) @ (q @ c["item"]).T / config.tau_omega)[users, items]
    pi = config.lambda_ * observed + (1 - config.lambda_) * omega
    hat = torch.sigmoid((torch.log(pi) - torch.log(1 - pi) + noise) / config.tau_edge)
    view = encode(dense_graph(N_USERS, N_ITEMS, users, items, hat, floor=1e-3))
    scl = torch.zeros(())
    for nodes in (u.unique(), i.unique() + N_USERS):
        scl = scl + contrast(e[nodes], view[nodes], config.tau_scl)
    return rec + config.beta * ccl + config.gamma * scl


@pytest.mark.parametrize("ablation", ["none", "intent", "ccl"])
def test_a_step_is_adam_on_the_slow_equations(data, ablation):
    """Two steps, the second with two batches summed: gradients through both views, Ω, degrees,
    prior and prototypes.
    """
    values = {"tau_omega": 3.0, "tau_edge": 0.7, "lr": 0.02, "beta": 0.3, "gamma": 0.4}
    state = fresh(data, ablation=ablation, **values)
    with torch.no_grad():
        state.ego *= 2
    s = {side: 0.5 * table for side, table in received(state).items()}
    names = {"user": state.user_s, "item": state.item_s}
    slow = {side: table.detach().clone().requires_grad_() for side, table in names.items()}
    ego = state.ego.detach().clone().requires_grad_()
    # weight decay is part of what is tested: the paper's, on everything
    adam = torch.optim.Adam(
        [ego, *slow.values()], lr=0.02, weight_decay=1e-3, foreach=False, fused=False
    )
    for step, cuts in enumerate([[slice(0, 14)], [slice(3, 20), slice(20, None)]]):
        batches = [one_batch(state, cut) for cut in cuts]
        rng, twin = (torch.Generator().manual_seed(step) for _ in range(2))
        final = state.vectors().detach()
        pool = p2p_iagr.draw_pool(state, final, s, twin)
        losses = []
        for batch in batches:
            found = p2p_iagr.candidates(state, batch, final, pool, twin)
            noise = torch.logit(torch.rand(len(found.users), generator=twin))
            losses.append(
                slow_loss(
                    state, batch, (found.users, found.items, found.observed), s, ego, slow, noise
                )
            )
        adam.zero_grad()
        torch.stack(losses).sum().backward()
        told = p2p_iagr.update(state, batches, s, rng)
        for part, loss, (users, positives, _) in zip(told, losses, batches, strict=True):
            # what is told are means: per pair, per prototype of both sides, per contrasted node
            nodes = len(users.unique()) + len(positives.unique())
            whole = (
                len(users) * part["loss_bpr"]
                + 0.3 * 2 * 3 * part["loss_ccl"]
                + 0.4 * nodes * part["loss_scl"]
            )
            assert whole.item() == pytest.approx(loss.item(), rel=1e-4)
        for mine, its in ((state.ego, ego), *((names[side], slow[side]) for side in names)):
            scale = its.grad.abs().max()
            torch.testing.assert_close(mine.grad / scale, its.grad / scale, rtol=1e-3, atol=2e-4)
        adam.step()
        assert len(told) == len(batches)
    torch.testing.assert_close(state.ego, ego, rtol=1e-2, atol=1e-3)


def test_what_is_told_of_the_edges(data, monkeypatch):
    """Mean weight of observed and of added edges, and how many Ω lie within 1 % of 0 or 1."""
    caught: dict[str, torch.Tensor] = {}
    odds, edges = p2p_iagr.interpolated_log_odds, p2p_iagr.sample_edges

    def keep_odds(logits, observed, lambda_):
        caught.update(omega=torch.sigmoid(logits.detach()), observed=observed)
        return odds(logits, observed, lambda_)

    def keep_edges(*given):
        caught["edges"] = edges(*given)
        return caught["edges"]

    monkeypatch.setattr(p2p_iagr, "interpolated_log_odds", keep_odds)
    monkeypatch.setattr(p2p_iagr, "sample_edges", keep_edges)
    state = fresh(data)
    (told,) = p2p_iagr.update(
        state, [one_batch(state)], received(state), torch.Generator().manual_seed(0)
    )
    observed, weights, omega = caught["observed"], caught["edges"].detach(), caught["omega"]
    assert 0 < observed.sum() < len(observed)
    assert told["edges_observed"].item() == pytest.approx(weights[observed].mean().item())
    assert told["edges_added"].item() == pytest.approx(weights[~observed].mean().item())
    saturated = ((omega < 0.01) | (omega > 0.99)).float().mean().item()
    assert told["omega_saturated"].item() == pytest.approx(saturated)


def test_both_views_of_a_batch_of_everybody_are_the_same(data):
    """With every user in the batch, its users' edges are all edges: the loss, its gradients, and
    what is told.
    """
    results = []
    for view in ("graph", "batch"):
        state = fresh(data, view=view)
        told = p2p_iagr.update(
            state, [one_batch(state)], received(state), torch.Generator().manual_seed(0)
        )
        # the added pairs come in the same order, so that the noise falls on the same edges
        results.append((told, state.ego.grad, state.user_s.grad, state.item_s.grad))
    (told, *grads), (other, *others) = results
    assert {k: float(v) for k, v in told[0].items()} == pytest.approx(
        {k: float(v) for k, v in other[0].items()}, rel=1e-4
    )
    for a, b in zip(grads, others, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


def test_gradients_reach_omega(data):
    """With the contrast alone, the edges' weights carry a gradient to the prototypes: cut at Ω it
    is another one.
    """
    gradients = []
    for cut in (False, True):
        state = fresh(data, tau_omega=3.0, tau_edge=0.7, ablation="intent", beta=0.0, gamma=1.0)
        if cut:  # without intents, prototypes act on the contrast through Ω only
            state.config = state.config.model_copy(update={"lambda_": 0.999999})
        p2p_iagr.update(
            state, [one_batch(state)], received(state), torch.Generator().manual_seed(0)
        )
        gradients.append(state.user_s.grad.abs().max().item())
    assert gradients[0] > 1e-3 > 1e-4 > gradients[1]


def test_updates_bound_the_propagations(data, monkeypatch):
    """5 batches: 5 propagations, or 2 with `updates` = 2 (groups of 3 and 2), or 1; every batch is
    trained on each time.
    """
    m = len(data.users)
    calls = []
    real = Domain.vectors
    monkeypatch.setattr(Domain, "vectors", lambda self: calls.append(1) or real(self))
    for updates, expected in ((None, 5), (2, 2), (1, 1), (9, 5)):
        state = fresh(data, batch_size=-(-m // 5), updates=updates)
        calls.clear()
        (metrics,) = train(state, data, range(1, 2))
        assert len(calls) == expected
        assert state.optimizer.state[state.ego]["step"] == expected
        assert 0.2 < metrics["loss_bpr"] < 0.9


def test_local_epochs_between_two_exchanges(data):
    twice, once = fresh(data, local_epochs=2), fresh(data)
    train(twice, data, range(1, 2))
    train(once, data, range(1, 2))
    assert twice.optimizer.state[twice.ego]["step"] == 2 * once.optimizer.state[once.ego]["step"]


# --- Exchange ---


def test_all_peers_get_the_same_arrays_of_a_fixed_size(data):
    """2·K·dim·4 bytes per peer, one perturbation for all of them, nothing for anybody else."""
    out = p2p_iagr.exchange(fresh(data, K=4, dim=6), {}, context(data, 1, peers=("b", "c")))
    assert set(out.send) == {"b", "c"}
    for key, value in out.send["b"].items():
        assert value is out.send["c"][key]
    assert sum(value.nbytes for value in out.send["b"].values()) == 2 * 4 * 6 * 4


def test_what_arrived_is_averaged(data):
    state = fresh(data)
    one, two = message(seed=1), message(seed=2)
    got = received(state, b=one, c=two)
    for side in ("user", "item"):
        key = f"{side}_prototypes"
        torch.testing.assert_close(got[side], torch.from_numpy((one[key] + two[key]) / 2))


def test_all_domains_and_seeds_start_from_the_same_prototypes(data):
    a, b = fresh(data, node="a"), fresh(data, seed=5, node="b")
    assert torch.equal(a.user_s, b.user_s) and torch.equal(a.item_s, b.item_s)
    assert not torch.equal(a.user_s, a.item_s)
    assert not torch.equal(a.ego, b.ego)


def test_the_control_sends_noise_that_knows_nothing(data):
    """`peer="noise"`: the same message whatever the prototypes, of the same distribution;
    signal-to-noise 0.
    """
    state = fresh(data, K=64, dim=64, peer="noise")
    one = p2p_iagr.exchange(state, {}, context(data, 1))
    with torch.no_grad():
        state.user_s.mul_(-7)
    two = p2p_iagr.exchange(state, {}, context(data, 1))
    assert np.array_equal(one.send["b"]["user_prototypes"], two.send["b"]["user_prototypes"])
    assert (
        stats.kstest(one.send["b"]["user_prototypes"].ravel(), stats.laplace(scale=1.0).cdf).pvalue
        > 0.01
    )
    assert one.metrics["signal_to_noise_user"] == 0


def test_contribution_sums_against_a_loop_and_their_sensitivity():
    """Σ_u ½(P_u − 1/K) ⊗ clip(v_u), user by user; replacing a user never moves the whole matrix by
    more than 2C.
    """
    rng = np.random.default_rng(3)
    shares = torch.softmax(torch.from_numpy(rng.normal(size=(9, 4)) * 5), 1)
    vectors = torch.from_numpy(rng.normal(size=(9, 6)))
    clipped = clip_l1(vectors.numpy(), 0.7)
    expected = sum(np.outer((shares[u].numpy() - 0.25) / 2, clipped[u]) for u in range(9))
    ones = torch.ones(9, dtype=torch.float64)
    actual = p2p_iagr.contribution_sums(shares, vectors, ones, 0.7)
    np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-9)
    corner, opposite = (
        torch.eye(4, dtype=torch.float64)[:1],
        torch.full((1, 6), 50.0, dtype=torch.float64),
    )
    for u in range(9):
        for share, vector in ((corner, opposite), (corner, -opposite)):
            other_shares, other_vectors = shares.clone(), vectors.clone()
            other_shares[u], other_vectors[u] = share[0], vector[0]
            moved = p2p_iagr.contribution_sums(other_shares, other_vectors, ones, 0.7) - actual
            assert np.abs(moved).sum() <= 2 * 0.7


def test_released_contributions_hold_each_user_to_c(data):
    """Items count by their users' means: taking one user out of the sums moves each of them by at
    most C.
    """
    state = fresh(data, release="contributions", C=0.3)
    clean, epsilon = p2p_iagr.signals(state)
    assert epsilon == 3 * 2.0
    users, items = state.ranking()
    expected = np.zeros((3, 5))
    for u in np.unique(data.users):
        mine = data.items[data.users == u]
        shares = p2p_iagr.intent_shares(items[mine], state.item_s.detach()).double().numpy()
        term = np.mean(
            [
                np.outer((p - 1 / 3) / 2, v)
                for p, v in zip(shares, clip_l1(items[mine].numpy(), 0.3), strict=True)
            ],
            0,
        )
        assert np.abs(term).sum() <= 0.3
        expected += term
    np.testing.assert_allclose(clean["item"], expected, rtol=1e-4, atol=1e-7)
    shares = p2p_iagr.intent_shares(users, state.user_s.detach()).double().numpy()
    expected = (shares - 1 / 3).T @ clip_l1(users.numpy(), 0.3) / 2
    np.testing.assert_allclose(clean["user"], expected, rtol=1e-4, atol=1e-7)


def test_an_item_weighs_what_its_users_give_it():
    """User 0 has item 2 alone, user 1 items 0 and 2, user 2 nothing: weights ½, 0, 1 + ½ and 0."""
    few = Interactions.build(3, 4, np.array([0, 1, 1]), np.array([2, 0, 2]))
    state = fresh(few, release="contributions")
    clean, epsilon = p2p_iagr.signals(state)
    _, items = state.ranking()
    with torch.no_grad():
        shares = p2p_iagr.intent_shares(items, state.item_s)
    weights = torch.tensor([0.5, 0.0, 1.5, 0.0])
    np.testing.assert_allclose(
        clean["item"], p2p_iagr.contribution_sums(shares, items, weights, 1.0)
    )
    assert epsilon == 3 * state.config.epsilon0


def test_the_told_signal_to_noise_is_that_of_the_noise_added(data):
    """With C = ½ and ε₀ = 3 the scale is 1/3: Σ s² over 2 · (1/3)² a coordinate."""
    state = fresh(data, C=0.5, epsilon0=3.0)
    told = p2p_iagr.exchange(state, {}, context(data, 1)).metrics
    for side, signal in p2p_iagr.signals(state)[0].items():
        expected = np.square(signal).sum() / (2 / 9 * signal.size)
        assert told[f"signal_to_noise_{side}"] == pytest.approx(expected)


def test_received_contributions_take_the_scale_of_the_own_prototypes(data):
    state = fresh(data, release="contributions")
    raw = message()
    got = received(state, b=raw)
    for side, own in state.prototypes().items():
        assert got[side].norm().item() == pytest.approx(own.norm().item(), rel=1e-5)
        assert (
            F.cosine_similarity(got[side], torch.from_numpy(raw[f"{side}_prototypes"])).min()
            > 0.999
        )


def test_contributions_carry_more_signal_at_the_same_budget():
    """Many users in a few tastes: after training, the sums stand above their noise, the prototypes
    far below theirs.
    """
    data = tastes(400)
    ratios = {}
    for release in ("prototypes", "contributions"):
        state = fresh(data, dim=8, K=4, release=release, ablation="scl", lr=0.02, batch_size=128)
        train(state, data, range(1, 6))
        ratios[release] = p2p_iagr.exchange(state, {}, context(data, 9)).metrics[
            "signal_to_noise_user"
        ]
    assert ratios["prototypes"] < 0.1 < 1 < ratios["contributions"]


# --- Learning ---


def tastes(n_users: int) -> Interactions:
    """Two groups of users that buy from two halves of a shelf of 24."""
    rng = np.random.default_rng(0)
    users = np.repeat(np.arange(n_users), 6)
    items = np.concatenate([rng.permutation(12)[:6] + 12 * (user % 2) for user in range(n_users)])
    return Interactions.build(n_users, 24, users, items)


@pytest.mark.parametrize("ablation", ["none", "intent", "ccl", "scl"])
def test_it_learns_two_tastes(ablation):
    """Unseen items of one's own half come to score higher, in every variant."""
    data = tastes(40)
    state = fresh(data, dim=8, lr=0.02, batch_size=64, ablation=ablation)
    metrics = train(state, data, range(1, 16))
    scores = METHOD.score(state, np.arange(40)).numpy()
    own = (np.arange(24)[None, :] // 12) == (np.arange(40)[:, None] % 2)
    scores[data.users, data.items] = np.nan
    own_half, other_half = (
        np.nanmean(np.where(mask, scores, np.nan), axis=1) for mask in (own, ~own)
    )
    assert (own_half > other_half + 0.5).all()
    assert metrics[-1]["loss_bpr"] < 0.7 * metrics[0]["loss_bpr"]
    assert ("loss_scl" in metrics[0]) == (ablation != "scl")


def test_without_intents_the_encoder_is_lightgcns_sum(data):
    """Eq. (1) and Eq. (2) with g = 0: (L + 1) times the mean over layers."""
    state = fresh(data, ablation="intent")
    adj = dense_graph(N_USERS, N_ITEMS, state.users, state.items, torch.ones(len(state.users)))
    torch.testing.assert_close(state.vectors(), state.ego + adj @ state.ego + adj @ adj @ state.ego)


def test_the_metrics_by_hand(data):
    """Own prototypes [1, 0], [1, 1], [0, −1] and received [2, 0], [1, −1], [0, 1]: largest |cos|
    1/√2; mean (1 + 0 − 1)/3.
    """
    state = fresh(data, dim=2)
    with torch.no_grad():
        state.user_s.copy_(torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, -1.0]]))
    other = torch.tensor([[2.0, 0.0], [1.0, -1.0], [0.0, 1.0]])
    told = p2p_iagr._told_of_prototypes(state, {"user": other, "item": other})
    assert told["prototype_cosine_user"] == pytest.approx(0.5**0.5)
    assert told["received_cosine_user"] == pytest.approx(0.0, abs=1e-6)


# --- State and data ---


def test_continuing_from_a_state_is_bit_for_bit(data):
    straight, first, second = fresh(data), fresh(data), fresh(data, seed=9)
    expected = train(straight, data, range(1, 5))
    train(first, data, range(1, 3))
    METHOD.score(second, np.array([0]))  # a cache that loading must drop
    METHOD.load_state_dict(second, METHOD.state_dict(first))
    assert torch.equal(
        METHOD.score(second, np.arange(N_USERS)), METHOD.score(first, np.arange(N_USERS))
    )
    assert train(second, data, range(3, 5)) == expected[2:]
    for a, b in zip(second.parameters(), straight.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_export_ranks_and_shows_the_prototypes(data):
    state = fresh(data)
    train(state, data, range(1, 3))
    exported = METHOD.export(state)
    assert {name: tuple(value.shape) for name, value in exported.items()} == {
        "users": (12, 5), "items": (9, 5), "user_prototypes": (3, 5), "item_prototypes": (3, 5),
    }  # fmt: skip
    users = np.array([5, 11, 0])
    e = state.vectors().detach()
    torch.testing.assert_close(METHOD.score(state, users), e[users] @ e[N_USERS:].T)
    assert torch.equal(METHOD.score_exported(exported, users), METHOD.score(state, users))


# --- Whole runs ---


@pytest.mark.parametrize("count", [2, 3])
def test_bytes_of_a_round_do_not_depend_on_the_data(tmp_path: Path, count: int):
    """2·K·dim·4 per direction and domain (and peer), at two sizes of the data, from the ledger of
    whole runs.
    """
    for size in (60, 240):
        values = {
            "data": None,
            "out": tmp_path,
            "backend": "inprocess",
            "tracking.enabled": False,
            "tracking.artifacts": False,
            "synthetic.users": size,
            "synthetic.items": size,
            "synthetic.domains": count,
        }
        done = run_recorded(
            build("p2p_iagr", sets=["K=5", "dim=6", "rounds=2", "top_k=3"], values=values)
        )
        rows = [
            json.loads(line) for line in (done.run_dir / "history.jsonl").read_text().splitlines()
        ]
        expected = count * (count - 1) * 2 * 5 * 6 * 4
        assert [(row["bytes_up"], row["bytes_down"]) for row in rows] == [(expected, expected)] * 2
        each = dict.fromkeys(done.result["domains"], 2 * (count - 1) * 2 * 5 * 6 * 4)
        assert done.result["bytes"] == {"up": each, "down": each}


def test_it_has_no_server_and_sends_to_peers_only():
    (stage,) = METHOD.stages(Config(rounds=7, patience=3))
    assert METHOD.init_server is None
    assert stage.edges == {Direction.PEER}
    assert all(phase.at == "domains" for phase in stage.each)
    assert (stage.rounds, stage.patience, stage.keep_best) == (7, 3, True)
    assert {field.shape for field in METHOD.fields} == {("K", "dim")}


def test_the_papers_payload():
    """K = 16, dim = 128 (section 5.6): 16,384 bytes each way; 0.047 MiB would be three arrays each
    way, not two.
    """
    assert 2 * 16 * 128 * 4 == 16_384
    assert pytest.approx(0.047, abs=5e-4) == 2 * 3 * 16 * 128 * 4 / 2**20


def test_the_shipped_file_states_the_papers_values():
    shipped = yaml.safe_load(
        importlib.resources.files("crossfed.methods.configs").joinpath("p2p_iagr.yaml").read_text()
    )
    assert Config.model_validate(shipped["config"]) == Config()
    assert {"food-kitchen", "game-movie", "elec-cell", "book-movie"} == set(shipped["presets"])
    for preset in shipped["presets"].values():
        Config.model_validate({**shipped["config"], **preset})
    assert shipped["search"]["K"]["values"] == [8, 16, 32, 64, 128]
    assert shipped["search"]["epsilon0"]["values"] == [0.1, 0.5, 1.0, 2.0, 5.0]
