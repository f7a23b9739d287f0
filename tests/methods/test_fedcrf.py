"""FedCRF's equations against slow or dense versions, its steps against the equations, its state and
its refusals.

The numbers are the ones that the module's docstring gives the paper's displays.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError

from crossfed.methods import fedcrf
from crossfed.methods.fedcrf import METHOD, Config, Domain, Server
from crossfed.methods.parts.losses import info_nce
from crossfed.methods.parts.sampling import bpr_epoch
from crossfed.platform.errors import CrossfedError
from crossfed.platform.method import SERVER, Context, Interactions, Out, generators

SIZES = {"north": (14, 18), "south": (11, 15)}
WIDTH = 12
SMALL: dict[str, Any] = {
    "dim": 5,
    "K": 4,
    "batch_size": 16,
    "neighbours": 3,
    "fgsat_neighbours": 3,
    "rounds": 2,
}


def tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def small(**values: Any) -> Config:
    return Config(**(SMALL | values))


def data(name: str) -> Interactions:
    n_users, n_items = SIZES[name]
    rng = np.random.default_rng(len(name) + n_items)
    # last item: unseen
    pairs = [(u, i) for u in range(n_users) for i in rng.choice(n_items - 1, 4, replace=False)]
    users, items = np.array(pairs).T
    return Interactions.build(n_users, n_items, users, items)


def text(name: str) -> np.ndarray:
    return (
        np.random.default_rng(SIZES[name])
        .normal(0.3, 1, (SIZES[name][1], WIDTH))
        .astype(np.float32)
    )


def context(node: str, stage: str, round: int, phase: int = 0, seed: int = 0) -> Context:
    rng, torch_rng = generators(seed, stage, round, node, phase)
    peers = tuple(name for name in SIZES if name != node)
    if node == SERVER:
        return Context(node, stage, round, peers, rng, torch_rng, torch.device("cpu"))
    artifacts = {"text": text(node)}
    return Context(
        node, stage, round, peers, rng, torch_rng, torch.device("cpu"), data(node), artifacts
    )


class Run:
    """The method's stages in memory, phase by phase, with the messages delivered along them."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.states: dict[str, Any] = {
            name: METHOD.init_domain(config, context(name, "init", 0)) for name in SIZES
        }
        assert METHOD.init_server is not None
        self.states[SERVER] = METHOD.init_server(config, context(SERVER, "init", 0))
        self.outs: list[dict[str, Out]] = []

    def phases(self, stage: str, round: int, phases: tuple) -> None:
        for number, phase in enumerate(phases):
            inbox: dict[str, dict] = {name: {} for name in self.states}
            for sender, out in (self.outs[-1] if self.outs else {}).items():
                for receiver, payload in out.send.items():
                    inbox[receiver][sender] = payload
            nodes = [SERVER] if phase.at == "server" else list(SIZES)
            self.outs.append(
                {
                    n: phase.step(self.states[n], inbox[n], context(n, stage, round, number))
                    for n in nodes
                }
            )

    def stage(self, name: str, rounds: range | None = None) -> Run:
        for stage in METHOD.stages(self.config):
            if stage.name == name and stage.rounds:
                if rounds is None or rounds.start == 1:
                    self.phases(name, 0, stage.open)
                for round in rounds or range(1, stage.rounds + 1):
                    self.phases(name, round, stage.each)
                if rounds is None:
                    self.phases(name, stage.rounds, stage.close)
        return self


def dense_item_graph(t: torch.Tensor, n: int) -> torch.Tensor:
    """Eq. (16) and Eq. (17) written out: cosines, the top n of each row, both directions, D^-½ S
    D^-½.
    """
    m = len(t)
    s = torch.zeros(m, m)
    cosine = torch.stack([torch.stack([a @ b / (a.norm() * b.norm()) for b in t]) for a in t])
    for i in range(m):
        for j in cosine[i].masked_fill(torch.arange(m) == i, -2).topk(n).indices.tolist():
            s[i, j] = s[j, i] = max(cosine[i, j].item(), 0)
    degree = s.sum(1)
    return torch.tensor(
        [
            [
                (s[i, j] / (degree[i] * degree[j]).sqrt()).item() if s[i, j] else 0.0
                for j in range(m)
            ]
            for i in range(m)
        ]
    )


def scores(state: Domain) -> torch.Tensor:
    return METHOD.score(state, np.arange(state.data.n_users))


# ---------------------------------------------------------------- equations of sections 3.3 and 3.4


def test_projection() -> None:
    """Eq. (2): row by row, Σ_j x_ij w_jk."""
    x, w = tensor(4, 3), tensor(3, 2, seed=1)
    slow = [[sum(x[i, j] * w[j, k] for j in range(3)) for k in range(2)] for i in range(4)]
    torch.testing.assert_close(fedcrf.project(x, w), torch.tensor(slow))


def test_normalisation_by_hand() -> None:
    """Eq. (3): (5 − 1) / √4 = 2 and (2 − 4) / √(1/4) = −4, but for ε."""
    out = fedcrf.normalise(
        torch.tensor([[5.0, 2.0]]), torch.tensor([1.0, 4.0]), torch.tensor([4.0, 0.25])
    )
    torch.testing.assert_close(out, torch.tensor([[2.0, -4.0]]), rtol=1e-4, atol=0)


def test_normalisation_keeps_a_constant_coordinate_finite() -> None:
    """Eq. (3): σ² = 0 is what ε is for."""
    assert fedcrf.normalise(torch.ones(2, 1), torch.ones(1), torch.zeros(1)).tolist() == [
        [0.0],
        [0.0],
    ]


def test_own_statistics_standardise() -> None:
    """Eq. (3) with Eq. (4) at ρ = 0: every coordinate gets mean 0 and variance 1."""
    t = 3 * tensor(500, 4) + 2
    mean, variance = fedcrf.running_statistics(t, torch.zeros(4), torch.ones(4), 0.0)
    out = fedcrf.normalise(t, mean, variance)
    torch.testing.assert_close(out.mean(0), torch.zeros(4), atol=1e-5, rtol=0)
    torch.testing.assert_close(out.var(0, correction=0), torch.ones(4), atol=1e-4, rtol=0)


def test_denormalisation_is_the_inverse() -> None:
    """Eq. (3), backwards."""
    t, mean, variance = tensor(6, 3), tensor(3, seed=1), tensor(3, seed=2).square()
    torch.testing.assert_close(
        fedcrf.denormalise(fedcrf.normalise(t, mean, variance), mean, variance), t
    )


def test_running_statistics_by_hand() -> None:
    """Eq. (4): t = 2, 6 has t̄ = 4 and s² = 4; with ρ = ¾: μ = ¾·8 + ¼·4 = 7 and σ² = ¾·12 + ¼·4 =
    10.
    """
    t = torch.tensor([[2.0], [6.0]])
    mean, variance = fedcrf.running_statistics(t, torch.tensor([8.0]), torch.tensor([12.0]), 0.75)
    assert (mean.item(), variance.item()) == (7.0, 10.0)


def test_initial_centres_are_items() -> None:
    """Eq. (5): with as many clusters as items every item is a centre; with fewer, another seed
    gives other centres.
    """
    x = tensor(9, 3).numpy()
    every = fedcrf.global_clusters(x, 9, None, 1.0, seed=0)
    np.testing.assert_allclose(np.sort(every.cluster_centers_, 0), np.sort(x, 0), rtol=1e-6)
    one, two = (fedcrf.global_clusters(x, 3, None, 1.0, seed=s).cluster_centers_ for s in (0, 1))
    assert not np.array_equal(one, two)


def test_a_given_start_is_used() -> None:
    """Eq. (5) from the second round on: two far groups, and centres that swap the numbers of the
    clusters.
    """
    x = np.array([[0.0], [1.0], [50.0], [51.0]], np.float32)
    for start, labels in (([[0.0], [50.0]], [0, 0, 1, 1]), ([[50.0], [0.0]], [1, 1, 0, 0])):
        fitted = fedcrf.global_clusters(x, 2, np.array(start, np.float32), 1.0, seed=0)
        assert fitted.labels_.tolist() == labels


def test_labels_are_the_nearest_centres() -> None:
    """Eq. (6): arg min over k of ‖t̃_i − c_k‖, item by item."""
    x = tensor(40, 3).numpy()
    fitted = fedcrf.global_clusters(x, 5, None, 1.0, seed=0)
    for row, label in zip(x, fitted.labels_, strict=True):
        assert label == np.argmin(
            [np.sum((row - centre) ** 2) for centre in fitted.cluster_centers_]
        )


def test_centres_are_distance_weighted_means() -> None:
    """Eq. (7): at the fixed point c_k = Σ w_i t̃_i / Σ w_i with w_i = 1 / (‖t̃_i − c_k‖ + ε), and
    not the plain mean.
    """
    x, eps = tensor(60, 2).numpy(), 0.5
    fitted = fedcrf.global_clusters(x, 3, None, eps, seed=0)
    differs = 0.0
    for k, centre in enumerate(fitted.cluster_centers_):
        members = x[fitted.labels_ == k]
        weights = [1 / (np.linalg.norm(m - centre) + eps) for m in members]
        expected = sum(w * m for w, m in zip(weights, members, strict=True)) / sum(weights)
        np.testing.assert_allclose(centre, expected, atol=2e-3)
        differs = max(differs, float(np.abs(centre - members.mean(0)).max()))
    assert differs > 0.01


# ---------------------------------------------------------------- equations of section 3.5


def test_secondary_centres_are_the_regularised_least_squares() -> None:
    """Eq. (8): the dense solve of (YᵀY + ηI) C̃ = YᵀT, with an empty cluster among them."""
    t, labels, k, eta = tensor(9, 4), torch.tensor([0, 2, 2, 0, 4, 2, 0, 4, 2]), 5, 0.7
    y = F.one_hot(labels, k).float()
    dense = torch.linalg.solve(y.T @ y + eta * torch.eye(k), y.T @ t)
    torch.testing.assert_close(fedcrf.secondary_centres(t, labels, k, eta), dense)
    assert dense[1].abs().max() == 0


def test_without_regularisation_secondary_centres_are_means() -> None:
    """Eq. (8) with η → 0: the mean of the cluster's items."""
    t, labels = tensor(6, 3), torch.tensor([0, 1, 0, 1, 1, 0])
    out = fedcrf.secondary_centres(t, labels, 2, 1e-9)
    torch.testing.assert_close(out, torch.stack([t[labels == 0].mean(0), t[labels == 1].mean(0)]))


def test_activation_by_hand() -> None:
    """Eq. (9): (1, 2)·[[1, 3], [−2, 1]] = (−3, 5), and ReLU."""
    out = fedcrf.activated_centres(
        torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 3.0], [-2.0, 1.0]])
    )
    assert out.tolist() == [[0.0, 5.0]]


def test_the_semantic_graph_against_a_dense_one() -> None:
    """A of Eq. (10): W_ij = max over both directions of the kept cosines ≥ 0; Y as weight-1 edges
    to own centres.
    """
    t, c, labels, n = tensor(7, 3), tensor(3, 3, seed=1), torch.tensor([0, 2, 2, 0, 2, 0, 0]), 2
    dense = torch.zeros(10, 10)
    for block, shift in ((t, 0), (c, 7)):
        unit = F.normalize(block, dim=1)
        cosine = (unit @ unit.T).fill_diagonal_(-2)
        for i in range(len(block)):
            for j in cosine[i].topk(min(n, len(block) - 1)).indices.tolist():
                dense[i + shift, j + shift] = dense[j + shift, i + shift] = max(
                    cosine[i, j].item(), 0
                )
    for i, label in enumerate(labels.tolist()):
        dense[i, 7 + label] = dense[7 + label, i] = 1
    edges, weights = fedcrf.semantic_edges(t, c, labels, n)
    built = torch.zeros(10, 10)
    built[edges[0], edges[1]] = weights
    torch.testing.assert_close(built, dense)
    assert len({tuple(edge) for edge in edges.T.tolist()}) == edges.shape[1]


def test_propagation_against_dense_matrices() -> None:
    """Eq. (10): ReLU(D^-½ (A + I) D^-½ Z W₂)."""
    z, w2 = tensor(5, 3), tensor(3, 3, seed=1)
    a = torch.zeros(5, 5)
    for i, j, weight in ((0, 1, 0.5), (1, 2, 1.0), (0, 4, 0.25)):
        a[i, j] = a[j, i] = weight
    edges = a.nonzero().T
    with_loops = a + torch.eye(5)
    scale = with_loops.sum(1).rsqrt()
    dense = F.relu(scale[:, None] * with_loops * scale[None, :] @ z @ w2)
    torch.testing.assert_close(
        fedcrf.semantic_propagation(z, edges, a[edges[0], edges[1]], w2), dense
    )


def test_attention_against_a_slow_softmax() -> None:
    """Eq. (11): q_if = exp(wᵀx_if + b_f) / Σ_f exp(wᵀx_if + b_f); every item's weights sum to
    one.
    """
    features, w, b = tensor(4, 3, 5), tensor(5, seed=1), tensor(3, seed=2)
    q = fedcrf.attention(features, w, b)
    for i in range(4):
        raw = [np.exp(float(features[i, f] @ w + b[f])) for f in range(3)]
        np.testing.assert_allclose(q[i].numpy(), np.array(raw) / sum(raw), rtol=1e-5)
    torch.testing.assert_close(q.sum(1), torch.ones(4))


def test_a_bias_that_all_sources_share_cancels() -> None:
    """Eq. (11): softmax(s + b) = softmax(s), which is why each source has its own bias."""
    features, w = tensor(4, 3, 5), tensor(5, seed=1)
    torch.testing.assert_close(
        fedcrf.attention(features, w, torch.zeros(3)),
        fedcrf.attention(features, w, torch.full((3,), 2.0)),
    )


def test_fusion_by_hand() -> None:
    """Eq. (12): ½·(2, 0) + ¼·(0, 4) + ¼·(4, 4) = (2, 2)."""
    features = torch.tensor([[[2.0, 0.0], [0.0, 4.0], [4.0, 4.0]]])
    assert fedcrf.fuse(features, torch.tensor([[0.5, 0.25, 0.25]])).tolist() == [[2.0, 2.0]]


def test_distillation_against_a_slow_divergence() -> None:
    """Eq. (13): mean over pairs of Σ_{y∈{0,1}} p(y) ln(p(y) / q(y)), p = σ(x_uᵀt″) and q =
    σ(x_uᵀt), in this order.
    """
    u, t2, t = tensor(6, 3), tensor(6, 3, seed=1), tensor(6, 3, seed=2)
    total = 0.0
    for i in range(6):
        p, q = (1 / (1 + np.exp(-float(u[i] @ v[i]))) for v in (t2, t))
        total += p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))
    assert fedcrf.distillation(u, t2, t).item() == pytest.approx(total / 6, rel=1e-5)
    assert fedcrf.distillation(u, t, t).item() == pytest.approx(0, abs=1e-7)


def test_alignment_by_hand() -> None:
    """Eq. (14): (‖(3, 4)‖² + ‖(1, 0)‖²) / 2 = 13."""
    assert (
        fedcrf.alignment(
            torch.tensor([[3.0, 4.0], [1.0, 2.0]]), torch.tensor([[0.0, 0.0], [0.0, 2.0]])
        ).item()
        == 13
    )


def test_pretrain_loss_by_hand() -> None:
    """Eq. (15): 1 + 2·10 + 3·100 = 321."""
    one, ten, hundred = (torch.tensor(v) for v in (1.0, 10.0, 100.0))
    assert fedcrf.pretrain_loss(one, ten, hundred, 2.0, 3.0).item() == 321


# ---------------------------------------------------------------- equations of section 3.6


def test_item_graph_against_dense_matrices() -> None:
    """Eq. (16) and Eq. (17), with positive cosines beyond the top N, so that N counts."""
    for t in (tensor(9, 4), tensor(9, 4) + 1.5):
        for n in (1, 3):
            torch.testing.assert_close(fedcrf.item_graph(t, n).to_dense(), dense_item_graph(t, n))


def test_convolution_is_a_product() -> None:
    """Eq. (18): H = S̃H₀, in full and for some rows."""
    graph, h0 = fedcrf.item_graph(tensor(9, 4), 3), tensor(9, 2, seed=1)
    torch.testing.assert_close(fedcrf.convolve(graph, h0), graph.to_dense() @ h0)
    rows = torch.tensor([4, 0, 8])
    torch.testing.assert_close(fedcrf.convolve(graph, h0, rows), (graph.to_dense() @ h0)[rows])


@pytest.mark.parametrize("keep_positive", [False, True])
def test_contrast_against_a_slow_sum(keep_positive: bool) -> None:
    """Eq. (19) and Eq. (20): both directions, j ≠ i in the denominators as printed, or all j."""
    local, pre, tau = tensor(5, 3), tensor(5, 3, seed=1), 0.3

    def sim(a: torch.Tensor, b: torch.Tensor) -> float:
        return float(a @ b) / (float(a.norm()) * float(b.norm()))

    total = 0.0
    for a, b in ((local, pre), (pre, local)):
        for i in range(5):
            below = sum(np.exp(sim(a[i], b[j]) / tau) for j in range(5) if keep_positive or j != i)
            total -= np.log(np.exp(sim(a[i], b[i]) / tau) / below)
    assert fedcrf.contrast(local, pre, tau, keep_positive).item() == pytest.approx(
        total / 5, rel=1e-5
    )


@pytest.mark.parametrize("keep_positive", [False, True])
def test_contrast_is_two_calls_of_info_nce(keep_positive: bool) -> None:
    """Eq. (20), gradients included."""
    grads = []
    for both in (
        lambda a, b: fedcrf.contrast(a, b, 0.5, keep_positive),
        lambda a, b: info_nce(a, b, 0.5, keep_positive) + info_nce(b, a, 0.5, keep_positive),
    ):
        local, pre = tensor(6, 3).requires_grad_(), tensor(6, 3, seed=1).requires_grad_()
        value = both(local, pre)
        grads.append([value.detach(), *torch.autograd.grad(value, [local, pre])])
    for one, two in zip(*grads, strict=True):
        torch.testing.assert_close(one, two)


def test_item_vectors_by_hand() -> None:
    """Eq. (21): (1, 1) + (3, 4)/5 + (0, −2)/2 + (7, 0)/7 = (2.6, 0.8)."""
    ids, text, local, pre = (
        torch.tensor([v]) for v in ([1.0, 1.0], [3.0, 4.0], [0.0, -2.0], [7.0, 0.0])
    )
    torch.testing.assert_close(
        fedcrf.item_vectors(ids, text, local, pre), torch.tensor([[2.6, 0.8]])
    )


def test_prediction_is_the_inner_product() -> None:
    """Eq. (22): ŷ_ui = Σ_k x_uk x_ik."""
    users, items = tensor(3, 4), tensor(5, 4, seed=1)
    slow = [[sum(users[u, k] * items[i, k] for k in range(4)) for i in range(5)] for u in range(3)]
    torch.testing.assert_close(fedcrf.predict(users, items), torch.tensor(slow))


def test_finetune_loss_by_hand() -> None:
    """Eq. (23): 1 + 2·10 + 3·100 = 321."""
    one, ten, hundred = (torch.tensor(v) for v in (1.0, 10.0, 100.0))
    assert fedcrf.finetune_loss(one, ten, hundred, 2.0, 3.0).item() == 321


# ---------------------------------------------------------------- modules and steps


def test_the_projection_starts_orthonormal_and_comparable() -> None:
    start = {
        name: fedcrf.initial_projection(torch.from_numpy(text(name)), 5, "aligned")
        for name in SIZES
    }
    shared = [
        fedcrf.initial_projection(torch.from_numpy(text(name)), 5, "random") for name in SIZES
    ]
    assert torch.equal(*shared)
    for weight in start.values():
        torch.testing.assert_close(weight.T @ weight, torch.eye(5), atol=1e-5, rtol=0)
        assert (weight * shared[0]).sum() > 2, "columns should point the way of the shared basis"


def test_a_projection_cannot_widen() -> None:
    with pytest.raises(CrossfedError, match="dim = 13 is larger than the text embeddings' 12"):
        METHOD.init_domain(small(dim=13), context("north", "init", 0))


@pytest.mark.parametrize("how", ["aligned", "random"])
def test_a_projection_may_be_as_wide_as_the_text(how: str) -> None:
    weight = fedcrf.initial_projection(torch.from_numpy(text("north")), WIDTH, how)
    torch.testing.assert_close(weight @ weight.T, torch.eye(WIDTH), atol=1e-5, rtol=0)


def test_ids_start_as_xavier_says() -> None:
    """Uniform within √(6 / (n + dim)), users and items apart."""
    ids = fedcrf.IdEncoder(200, 50, 10, torch.Generator().manual_seed(0))
    for rows in (ids.table[:200], ids.table[200:]):
        bound = (6 / (len(rows) + 10)) ** 0.5
        assert 0.9 * bound < rows.abs().max().item() <= bound


def test_upload_sends_normalised_items() -> None:
    """Eq. (3) with the first round's own statistics, then with running ones of Eq. (4)."""
    state = METHOD.init_domain(small(momentum=0.9), context("north", "init", 0))
    first = fedcrf.upload(state, {}, context("north", "pretrain", 1)).send[SERVER]["item_vectors"]
    assert first.shape == (18, 5) and first.dtype == np.float32
    np.testing.assert_allclose(first.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(first.std(0), 1, atol=1e-3)
    t = state.text @ state.phi.detach()
    before, spread = t.mean(0), t.var(0, correction=0)
    torch.testing.assert_close(state.mean, before)
    torch.testing.assert_close(state.variance, spread)
    with torch.no_grad():
        state.phi *= 2
    second = fedcrf.upload(state, {}, context("north", "pretrain", 2)).send[SERVER]["item_vectors"]
    torch.testing.assert_close(state.mean, 0.9 * before + 0.1 * 2 * before)
    torch.testing.assert_close(state.variance, 0.9 * spread + 0.1 * 4 * spread)
    np.testing.assert_allclose(
        second, fedcrf.normalise(2 * t, state.mean, state.variance).numpy(), rtol=1e-5
    )


def test_the_server_clusters_the_union_and_answers_each_domain() -> None:
    """Labels come back in the items' order, and are the nearest of the centres that came with them,
    Eq. (6).
    """
    config = small()
    server = METHOD.init_server(config, context(SERVER, "init", 0))
    up = {
        name: {"item_vectors": tensor(SIZES[name][1], 5, seed=i).numpy()}
        for i, name in enumerate(SIZES)
    }
    out = fedcrf.cluster(server, dict(reversed(up.items())), context(SERVER, "pretrain", 1))
    assert set(out.send) == set(SIZES)
    for name, answer in out.send.items():
        assert answer["centres"].shape == (4, 5) and answer["centres"].dtype == np.float32
        distance = np.linalg.norm(
            up[name]["item_vectors"][:, None] - answer["centres"][None], axis=2
        )
        np.testing.assert_array_equal(answer["labels"], distance.argmin(1))
    again = fedcrf.cluster(server, up, context(SERVER, "pretrain", 2))
    assert again.metrics["kmeans_iterations"] <= 2, (
        "the second round starts from the first round's centres"
    )


def test_three_domains_get_their_own_labels() -> None:
    """Far groups, one for each domain, so that a label given to the wrong domain would be that of
    another group.
    """
    sizes = {"north": 5, "south": 4, "west": 6}
    up = {
        n: {"item_vectors": (tensor(k, 5) / 10 + 20 * i).numpy()}
        for i, (n, k) in enumerate(sizes.items())
    }
    ctx = dataclasses.replace(context(SERVER, "pretrain", 1), peers=tuple(sizes))
    server = METHOD.init_server(small(K=3), ctx)
    server.centres = np.stack([up[n]["item_vectors"][0] for n in sizes])
    out = fedcrf.cluster(server, up, ctx)
    assert {n: out.send[n]["labels"].tolist() for n in sizes} == {
        n: [number] * k for number, (n, k) in enumerate(sizes.items())
    }
    union = np.concatenate([up[n]["item_vectors"] for n in sizes])
    labels = np.repeat(np.arange(3), list(sizes.values()))
    squares = float(np.square(union - out.send["north"]["centres"][labels]).sum())
    assert out.metrics["kmeans_inertia"] == pytest.approx(squares / 15, rel=1e-3)


def test_the_server_starts_from_the_centres_it_sent_last() -> None:
    """Two far groups that drift by 0.01 a round take their centres along; what was sent is what the
    server keeps.
    """
    server = METHOD.init_server(small(K=2), context(SERVER, "init", 0))
    drifting = {
        name: (tensor(SIZES[name][1], 5, seed=i) + 20 * i).numpy() for i, name in enumerate(SIZES)
    }
    sent = []
    for round in (1, 2, 3):
        up = {
            name: {"item_vectors": (x + 0.01 * round).astype(np.float32)}
            for name, x in drifting.items()
        }
        sent.append(
            fedcrf.cluster(server, up, context(SERVER, "pretrain", round)).send["north"]["centres"]
        )
        np.testing.assert_array_equal(server.centres, sent[-1])
    for before, after in pairwise(sent):
        np.testing.assert_allclose(after - before, 0.01, atol=0.003)


def test_random_starts_are_the_rounds_own() -> None:
    """Without centres to start from, a round draws its start by its place in the run."""
    up = {
        name: {"item_vectors": tensor(SIZES[name][1], 5, seed=i).numpy()}
        for i, name in enumerate(SIZES)
    }

    def first(round: int) -> np.ndarray:
        server = METHOD.init_server(small(K=8), context(SERVER, "init", 0))
        return fedcrf.cluster(server, up, context(SERVER, "pretrain", round)).send["north"][
            "centres"
        ]

    np.testing.assert_array_equal(first(1), first(1))
    assert not np.allclose(first(1), first(2))


def test_more_clusters_than_items_is_refused() -> None:
    run = Run(small(K=34))
    with pytest.raises(CrossfedError, match=r"K = 34 clusters .* 33 items in total"):
        run.stage("pretrain")


def test_at_least_one_cluster() -> None:
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        Config(K=0)


def test_one_cluster_and_one_neighbour_work() -> None:
    run = (
        Run(small(K=1, neighbours=1, fgsat_neighbours=1))
        .stage("pretrain")
        .stage("finetune", range(1, 2))
    )
    assert torch.isfinite(scores(run.states["north"])).all()


def twin(state: Domain) -> Domain:
    """Another object in the same state."""
    other: Domain = METHOD.init_domain(state.config, context("north", "init", 0))
    METHOD.load_state_dict(other, copy.deepcopy(METHOD.state_dict(state)))
    return other


def in_pretrain(**values: Any) -> Domain:
    """A domain in the middle of the first stage, with FGSAT's parameters moved away from their
    start.
    """
    state: Domain = Run(small(**values)).stage("pretrain", range(1, 3)).states["north"]
    with torch.no_grad():
        for i, p in enumerate(state.fgsat.parameters()):
            p += 0.3 * tensor(*p.shape, seed=i)
    return state


def test_both_graphs_are_built_anew_unless_the_local_one_alone_is_wanted() -> None:
    state = in_pretrain()
    state.build_graphs(local_only=True)  # the first time there is nothing to keep
    assert state.graphs is not None
    before = state.graphs[1].to_dense()
    state.t_local.copy_(tensor(18, 5, seed=3))
    state.t_pre.copy_(tensor(18, 5, seed=4))
    local, pre = (fedcrf.item_graph(t, 3).to_dense() for t in (state.t_local, state.t_pre))
    for local_only, expected in ((True, before), (False, pre)):
        state.build_graphs(local_only=local_only)
        torch.testing.assert_close(state.graphs[0].to_dense(), local)
        torch.testing.assert_close(state.graphs[1].to_dense(), expected)
    assert not torch.equal(before, pre)


def test_adapted_is_equations_8_to_12_in_a_row() -> None:
    state = in_pretrain(eta=0.5)
    t, labels, f = tensor(6, 5), state.labels[:6], state.fgsat
    centres = state.centres * torch.sqrt(state.variance + fedcrf.EPS) + state.mean
    c1 = fedcrf.activated_centres(fedcrf.secondary_centres(t, labels, 4, 0.5), f.w1)
    z = fedcrf.semantic_propagation(
        torch.cat([t, c1]), *fedcrf.semantic_edges(t, c1, labels, 3), f.w2
    )
    t1 = t + z[:6]
    features = torch.stack([t1, centres[labels], c1[labels]], 1)
    t2 = fedcrf.fuse(features, fedcrf.attention(features, f.w, f.b))
    moved, fused = state.adapted(t, labels)
    torch.testing.assert_close(moved, t1)
    torch.testing.assert_close(fused, t2)


def test_without_the_residual_only_the_propagated_part_is_left() -> None:
    state, plain = in_pretrain(), in_pretrain(residual=False)
    plain.load_state_dict(state.state_dict())
    t, labels = tensor(6, 5), state.labels[:6]
    torch.testing.assert_close(state.adapted(t, labels)[0] - t, plain.adapted(t, labels)[0])


def test_without_fgsat_the_global_centre_is_used_directly() -> None:
    """Table 3, −FGSAT: t″ lies between t and the domain's own version of the global centre."""
    state = in_pretrain(ablation="fgsat")
    t, labels = tensor(6, 5), state.labels[:6]
    moved, fused = state.adapted(t, labels)
    assert torch.equal(moved, t)
    centre = fedcrf.denormalise(state.centres, state.mean, state.variance)[labels]
    share = ((fused - t) * (centre - t)).sum(1) / (centre - t).square().sum(1)
    torch.testing.assert_close(fused, t + share[:, None] * (centre - t))
    assert (share > 0).all() and (share < 1).all()


def test_the_item_itself_outweighs_its_centres_at_the_start() -> None:
    state = METHOD.init_domain(small(own_bias=3.0), context("north", "init", 0))
    q = fedcrf.attention(tensor(4, 3, 5), state.fgsat.w, state.fgsat.b)
    torch.testing.assert_close(
        q, torch.tensor([[np.e**3, 1, 1]]).float().expand(4, 3) / (np.e**3 + 2)
    )


def test_the_first_batch_of_pretraining_against_the_equations() -> None:
    """L_rec, L_KD, L_FA and L2 of the only batch, before any step; L_rec scores with x^id +
    t″/‖t″‖.
    """
    config = small(batch_size=1000, rounds=1)
    run = Run(config)
    upload, cluster, adapt = METHOD.stages(config)[0].each
    run.phases("pretrain", 1, (upload, cluster))
    state: Domain = run.states["north"]
    answer = run.outs[-1][SERVER].send["north"]
    fresh = twin(state)
    ctx = context("north", "pretrain", 1, 2)
    metrics = adapt.step(state, {SERVER: answer}, ctx).metrics

    fresh.centres, fresh.labels = torch.tensor(answer["centres"]), torch.tensor(answer["labels"])
    ((user, pos, neg),) = bpr_epoch(data("north"), 1000, context("north", "pretrain", 1, 2).rng)
    used = torch.unique(torch.cat([pos, neg]))
    t = fresh.text @ fresh.phi
    t1, t2 = torch.zeros_like(t), torch.zeros_like(t)
    t1[used], t2[used] = fresh.adapted(t[used], fresh.labels[used])
    dense, e = fresh.adjacency.to_dense(), fresh.ids.table
    both = (e + dense @ e + dense @ dense @ e) / 3
    u, x = both[:14][user], both[14:] + t2 / t2.norm(dim=1, keepdim=True).clamp(min=1e-12)
    rec = -torch.log(torch.sigmoid((u * x[pos]).sum(1) - (u * x[neg]).sum(1))).mean()
    ego = torch.cat([e[:14][user], e[14:][pos], e[14:][neg]])
    expected = {
        "loss_rec": rec,
        "loss_kd": fedcrf.distillation(u, t2[pos], t[pos]),
        "loss_fa": (t1[pos] - t2[pos]).norm(dim=1).square().mean(),
        "loss_l2": ego.square().sum() / 2 / len(user),
    }
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value.item(), rel=1e-4, abs=1e-7), name
    loss = rec + 0.2 * expected["loss_kd"] + 0.1 * expected["loss_fa"] + 1e-4 * expected["loss_l2"]
    assert_one_adam_step(fresh, state, loss)


def test_the_first_batch_of_finetuning_against_the_equations() -> None:
    """L_rec, L_con, L_kd and L2 of the only batch, before any step, and the step itself, Eq.
    (23).
    """
    config = small(batch_size=1000, rounds=1, alpha=0.3, beta=0.4, lr_decay=1.0)
    run = Run(config).stage("pretrain")
    run.phases("finetune", 0, METHOD.stages(config)[1].open)
    state: Domain = run.states["north"]
    fresh = twin(state)
    metrics = fedcrf.finetune(state, {}, context("north", "finetune", 1)).metrics

    ((user, pos, neg),) = bpr_epoch(data("north"), 1000, context("north", "finetune", 1).rng)
    t = fresh.text @ fresh.phi_local
    s_local = fedcrf.item_graph(t, 3).to_dense()
    s_pre = fedcrf.item_graph(fresh.t_pre, 3).to_dense()
    dense, e = fresh.adjacency.to_dense(), fresh.ids.table
    both = (e + dense @ e + dense @ dense @ e) / 3
    u, ids = both[:14][user], both[14:]
    h_local, h_pre = s_local @ ids, s_pre @ ids
    x = ids + sum(v / v.norm(dim=1, keepdim=True).clamp(min=1e-12) for v in (t, h_local, h_pre))
    bought = torch.unique(pos)
    rec = -torch.log(torch.sigmoid((u * x[pos]).sum(1) - (u * x[neg]).sum(1))).mean()
    ego = torch.cat([e[:14][user], e[14:][pos], e[14:][neg]])
    expected = {
        "loss_rec": rec,
        "loss_con": fedcrf.contrast(h_local[bought], h_pre[bought], 0.5, keep_positive=False),
        "loss_kd": fedcrf.distillation(u, h_pre[pos], h_local[pos]),
        "loss_l2": ego.square().sum() / 2 / len(user),
    }
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value.item(), rel=1e-4, abs=1e-7), name
    loss = rec + 0.3 * expected["loss_con"] + 0.4 * expected["loss_kd"] + 1e-4 * expected["loss_l2"]
    assert_one_adam_step(fresh, state, loss)


def assert_one_adam_step(fresh: Domain, trained: Domain, loss: torch.Tensor) -> None:
    """Adam's first step moves every parameter by its rate × g / (|g| + 1e-8): the IDs at lr, the
    text path at lr_text.
    """
    named = dict(fresh.named_parameters())
    grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    moved = 0
    for (name, before), grad in zip(named.items(), grads, strict=True):
        after = dict(trained.named_parameters())[name]
        rate = fresh.config.lr if name.startswith("ids") else fresh.config.lr_text
        if grad is None:
            assert torch.equal(before, after), name
            continue
        clear = grad.abs() > 1e-5  # below that, rounding decides the quotient
        expected = before - rate * grad / (grad.abs() + 1e-8)
        torch.testing.assert_close(
            after[clear], expected[clear], rtol=0, atol=rate * 0.02, msg=name
        )
        moved += int(clear.sum())
    assert moved > 50


FEW = Interactions.build(5, 18, np.array([0, 0, 1, 2, 3, 4, 4]), np.array([5, 9, 9, 13, 17, 5, 3]))
"""A domain of which one batch, the only one of an epoch, needs neither all users' nor all items'
rows.
"""

STEPS: dict[str, Any] = {
    "dim": 5,
    "K": 4,
    "layers": 3,
    "batch_size": 1000,
    "lr": 0.02,
    "lr_text": 0.003,
    "lr_decay": 0.5,
    "warm_start": False,
    "l2": 0.3,
    "fgsat_neighbours": 2,
    "neighbours": 4,
    "eta": 0.5,
    "lambda_kd": 0.7,
    "lambda_fa": 0.4,
    "alpha": 0.3,
    "beta": 0.6,
    "tau": 0.4,
}


def few(stage: str, round: int, phase: int = 0) -> Context:
    return dataclasses.replace(context("north", stage, round, phase), data=FEW)


def domain_of_few() -> Domain:
    """Large vectors, so that no part of the loss is in its linear range, and FGSAT away from its
    start.
    """
    state: Domain = METHOD.init_domain(Config(**STEPS), few("init", 0))
    with torch.no_grad():
        state.ids.table *= 3
        state.phi *= 2
        state.phi_local += 0.2 * tensor(*state.phi.shape, seed=9)
        for i, p in enumerate(state.fgsat.parameters()):
            p += 0.3 * tensor(*p.shape, seed=i)
    fedcrf.upload(state, {}, few("pretrain", 1))
    return state


def few_vectors(e: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x_u and x^id of FEW: the mean of E, ÂE, Â²E and Â³E with a dense Â."""
    a = torch.zeros(23, 23)
    for u, i in zip(FEW.users.tolist(), FEW.items.tolist(), strict=True):
        a[u, 5 + i] = a[5 + i, u] = 1
    scale = a.sum(1).clamp(min=1).rsqrt()
    a = scale[:, None] * a * scale[None, :]
    both = (e + a @ e + a @ a @ e + a @ a @ a @ e) / 4
    return both[:5], both[5:]


def divergence(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Mean KL of two Bernoulli variables."""
    return (p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()).mean()


def unit(v: torch.Tensor) -> torch.Tensor:
    return v / v.norm(dim=1, keepdim=True)


def ranking_loss(
    e: torch.Tensor, x: torch.Tensor, user: torch.Tensor, pos: torch.Tensor, neg: torch.Tensor
) -> Any:
    """BPR, and LightGCN's L2 term with its weight."""
    u = few_vectors(e)[0][user]
    ego = torch.cat([e[:5][user], e[5:][pos], e[5:][neg]])
    return -torch.sigmoid(
        (u * (x[pos] - x[neg])).sum(1)
    ).log().mean() + 0.3 * ego.square().sum() / 2 / len(user)


def assert_trained_as_by_plain_autograd(
    state: Domain,
    stage: str,
    step: Callable[[Context], Out],
    loss: Callable[..., torch.Tensor],
    rates: list[list[float]],
) -> None:
    """Two epochs of one batch each: the gradients, and the parameters after torch's Adam as it
    comes.

    Args:
        loss: (the parameters by name, user, pos, neg) -> scalar.
        rates: for each epoch the learning rates of the IDs and of the rest.
    """
    trained = dict(state.named_parameters())
    mine = {name: p.detach().clone().requires_grad_() for name, p in trained.items()}
    text = [p for name, p in mine.items() if name != "ids.table"]
    adam = torch.optim.Adam([{"params": [mine["ids.table"]]}, {"params": text}])
    for round, pair in enumerate(rates, 1):
        step(few(stage, round))
        ((user, pos, neg),) = bpr_epoch(FEW, 1000, few(stage, round).rng)
        assert set(torch.cat([pos, neg]).tolist()) != set(range(18)), (
            "some items stay out of the batch"
        )
        adam.zero_grad()
        loss(mine, user, pos, neg).backward()
        for group, rate in zip(adam.param_groups, pair, strict=True):
            group["lr"] = rate
        adam.step()
        for name, p in trained.items():
            torch.testing.assert_close(
                p.grad, mine[name].grad, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
            )
            torch.testing.assert_close(
                p, mine[name], rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
            )


def test_pretraining_steps_against_plain_autograd() -> None:
    """Eq. (8) to Eq. (15) of the batch's own items, each with its own label, on dense matrices."""
    state = domain_of_few()
    labels, centres = torch.arange(18) * 7 % 4, tensor(4, 5, seed=5)
    answer = {SERVER: {"centres": centres.numpy(), "labels": labels.numpy()}}
    own_centres = centres * torch.sqrt(state.variance + 1e-5) + state.mean

    def loss(
        p: dict[str, torch.Tensor], user: torch.Tensor, pos: torch.Tensor, neg: torch.Tensor
    ) -> torch.Tensor:
        used = torch.unique(torch.cat([pos, neg]))
        t, y = state.text[used] @ p["phi"], F.one_hot(labels[used], 4).float()
        c1 = F.relu(torch.linalg.solve(y.T @ y + 0.5 * torch.eye(4), y.T @ t) @ p["fgsat.w1"])
        edges, weights = fedcrf.semantic_edges(t, c1, labels[used], 2)
        a = torch.eye(len(t) + 4)
        a[edges[0], edges[1]] = weights.detach()
        scale = a.sum(1).rsqrt()
        z = F.relu(scale[:, None] * a * scale[None, :] @ torch.cat([t, c1]) @ p["fgsat.w2"])
        t1 = t + z[: len(t)]
        features = torch.stack([t1, y @ own_centres, y @ c1], 1)
        share = (features @ p["fgsat.w"] + p["fgsat.b"]).exp()
        t2 = (features * (share / share.sum(1, keepdim=True))[:, :, None]).sum(1)
        place = {item: row for row, item in enumerate(used.tolist())}
        bought = torch.tensor([place[item] for item in pos.tolist()])
        users, ids = few_vectors(p["ids.table"])
        x = ids.index_add(0, used, unit(t2))
        teacher, student = (torch.sigmoid((users[user] * v[bought]).sum(1)) for v in (t2, t))
        align = (t1 - t2)[bought].square().sum(1).mean()
        return (
            ranking_loss(p["ids.table"], x, user, pos, neg)
            + 0.7 * divergence(teacher, student)
            + 0.4 * align
        )

    assert_trained_as_by_plain_autograd(
        state, "pretrain", lambda ctx: fedcrf.adapt(state, answer, ctx), loss, [[0.02, 0.003]] * 2
    )


def test_finetuning_steps_against_plain_autograd() -> None:
    """Eq. (16) to Eq. (23) on dense item graphs; the local one is that of the epoch's start, the
    other stays.
    """
    state = domain_of_few()
    state.t_pre.copy_(tensor(18, 5, seed=6) + 0.5)
    fedcrf.begin_finetune(state, {}, few("finetune", 0))
    with torch.no_grad():
        state.ids.table *= 4
    s_pre = dense_item_graph(state.t_pre, 4)

    def loss(
        p: dict[str, torch.Tensor], user: torch.Tensor, pos: torch.Tensor, neg: torch.Tensor
    ) -> torch.Tensor:
        users, ids = few_vectors(p["ids.table"])
        t = state.text @ p["phi_local"]
        h_local, h_pre = dense_item_graph(t.detach(), 4) @ ids, s_pre @ ids
        bought = sorted(set(pos.tolist()))
        similar = torch.exp(unit(h_local[bought]) @ unit(h_pre[bought]).T / 0.4)
        others = similar * (1 - torch.eye(len(bought)))
        con = -(
            (similar.diag() / others.sum(1)).log() + (similar.diag() / others.sum(0)).log()
        ).mean()
        teacher, student = (torch.sigmoid((users[user] * h[pos]).sum(1)) for h in (h_pre, h_local))
        x = ids.index_add(0, (used := torch.unique(torch.cat([pos, neg]))), unit(t[used]))
        for h in (h_local, h_pre):
            x = x.index_add(0, used, h[used] / h[used].norm(dim=1, keepdim=True).clamp(min=1e-12))
        return (
            ranking_loss(p["ids.table"], x, user, pos, neg)
            + 0.3 * con
            + 0.6 * divergence(teacher, student)
        )

    rates = [[0.02, 0.003], [0.01, 0.0015]]
    assert_trained_as_by_plain_autograd(
        state, "finetune", lambda ctx: fedcrf.finetune(state, {}, ctx), loss, rates
    )


def test_the_prior_is_frozen_at_the_end_of_pretraining() -> None:
    """T^pre = t″ of all items, and finetuning does not touch it or its graph."""
    run = Run(small()).stage("pretrain")
    state: Domain = run.states["north"]
    expected = state.adapted(state.text @ state.phi, state.labels)[1]
    torch.testing.assert_close(state.t_pre, expected.detach())
    run.stage("finetune", range(1, 3))
    torch.testing.assert_close(state.t_pre, expected.detach())
    torch.testing.assert_close(
        state.graphs[1].to_dense(), fedcrf.item_graph(state.t_pre, 3).to_dense()
    )


def test_without_the_federated_stage_the_raw_text_is_the_prior() -> None:
    """Table 3, −Fed: nothing is sent, and the pre graph is that of the text."""
    config = small(ablation="fed")
    assert [stage.rounds for stage in METHOD.stages(config)] == [0, config.epochs]
    run = Run(config).stage("pretrain").stage("finetune", range(1, 2))
    assert not any(out.send for outs in run.outs for out in outs.values())
    graph = fedcrf.item_graph(torch.from_numpy(text("north")), 3).to_dense()
    torch.testing.assert_close(run.states["north"].graphs[1].to_dense(), graph)


def test_without_contrast_its_loss_is_gone() -> None:
    """Table 3, −CL: the same as α = 0."""
    runs = [
        Run(small(**change)).stage("pretrain").stage("finetune", range(1, 3))
        for change in ({"ablation": "cl"}, {"alpha": 0.0}, {})
    ]
    assert runs[0].outs[-1]["north"].metrics["loss_con"] == 0
    cl, zero, full = (scores(run.states["north"]) for run in runs)
    assert torch.equal(cl, zero)
    assert not torch.equal(cl, full)


@pytest.mark.parametrize(
    "change", [{"contrast": "infonce"}, {"beta": 0.0}, {"warm_start": False}, {"tau": 0.1}]
)
def test_every_choice_of_finetuning_matters(change: dict[str, Any]) -> None:
    one, two = (
        Run(small(**c)).stage("pretrain").stage("finetune", range(1, 3)) for c in ({}, change)
    )
    assert not torch.equal(scores(one.states["north"]), scores(two.states["north"]))


@pytest.mark.parametrize(
    "change",
    [
        {"momentum": 0.0},
        {"lambda_kd": 5.0},
        {"lambda_fa": 5.0},
        {"projection": "random"},
        {"cluster_eps": 9.0},
    ],
)
def test_every_choice_of_pretraining_matters(change: dict[str, Any]) -> None:
    one, two = (Run(small(**c)).stage("pretrain") for c in ({}, change))
    assert not torch.equal(one.states["north"].t_pre, two.states["north"].t_pre)


def test_a_warm_start_keeps_the_ids_and_a_cold_one_does_not() -> None:
    for warm in (True, False):
        run = Run(small(warm_start=warm)).stage("pretrain")
        before = run.states["north"].ids.table.detach().clone()
        run.phases("finetune", 0, METHOD.stages(run.config)[1].open)
        assert torch.equal(run.states["north"].ids.table, before) == warm


def test_the_local_graph_follows_the_local_projection() -> None:
    """Refreshed at the start of epochs 1, 4, 7 … with `refresh_every` = 3."""
    run = Run(small(refresh_every=3, lr_text=0.5)).stage("pretrain")
    seen = []
    for r in range(1, 5):
        run.stage("finetune", range(r, r + 1))
        seen.append(run.states["north"].graphs[0].to_dense())
    assert torch.equal(seen[0], seen[1]) and torch.equal(seen[1], seen[2])
    assert not torch.equal(seen[2], seen[3])


def test_a_refresh_leaves_the_pre_trained_graph_alone() -> None:
    """The prior is frozen, so its graph is the same object: rebuilding it every epoch would be work
    for nothing.
    """
    run = Run(small(refresh_every=1)).stage("pretrain").stage("finetune", range(1, 2))
    state: Domain = run.states["north"]
    local, pre = state.graphs
    run.stage("finetune", range(2, 3))
    assert state.graphs[0] is not local and state.graphs[1] is pre


@pytest.mark.parametrize(
    ("warm", "expected"), [(True, [0.000625, 0.0000625]), (False, [0.0025, 0.00025])]
)
def test_the_learning_rate_decays_per_epoch(warm: bool, expected: list[float]) -> None:
    """The third epoch after two federated rounds: 0.01 · ½⁴ with the rounds counted in, 0.01 · ½²
    with new IDs.
    """
    run = Run(small(lr=0.01, lr_text=0.001, lr_decay=0.5, warm_start=warm)).stage("pretrain")
    assert [group["lr"] for group in run.states["north"].optimizer.param_groups] == [0.01, 0.001]
    run.stage("finetune", range(1, 4))
    assert [group["lr"] for group in run.states["north"].optimizer.param_groups] == expected


def test_training_learns() -> None:
    run = Run(small(rounds=8, lr=0.05))
    run.stage("pretrain").stage("finetune", range(1, 9))
    losses = [
        outs["north"].metrics["loss_rec"]
        for outs in run.outs
        if "loss_rec" in outs.get("north", Out()).metrics
    ]
    assert losses[7] < 0.9 * losses[0]
    assert losses[15] < 0.9 * losses[8]


def test_metrics_tell_what_the_text_path_keeps() -> None:
    out = Run(small()).stage("pretrain", range(1, 2)).outs[-1]["north"].metrics
    assert 1 <= out["effective_rank"] <= 5
    assert 1 <= out["clusters_used"] <= 4
    assert 0 <= out["text_neighbours_kept"] <= 1


def test_an_item_vector_that_is_sent_says_nothing_of_other_users() -> None:
    """Before any training the upload depends on text alone."""
    state = METHOD.init_domain(small(), context("north", "init", 0))
    other = METHOD.init_domain(small(), context("north", "init", 0, seed=7))
    one, two = (
        fedcrf.upload(s, {}, context("north", "pretrain", 1)).send[SERVER] for s in (state, other)
    )
    np.testing.assert_array_equal(one["item_vectors"], two["item_vectors"])


def test_scores_are_those_of_the_final_vectors_in_both_stages() -> None:
    """Eq. (22) on x^id + t″/‖t″‖ in pretrain, on Eq. (21) in finetune; nothing stale is cached."""
    run = Run(small()).stage("pretrain")
    state: Domain = run.states["north"]
    first = scores(state).clone()
    users, ids = state.ids(state.adjacency, 2)
    fused = state.adapted(state.text @ state.phi, state.labels)[1]
    torch.testing.assert_close(first, (users @ (ids + F.normalize(fused, dim=1)).T).detach())
    run.stage("finetune", range(1, 2))
    users, ids = state.ids(state.adjacency, 2)
    hops = [graph.to_dense() @ ids for graph in state.graphs]
    items = fedcrf.item_vectors(ids, state.text @ state.phi_local, *hops)
    torch.testing.assert_close(scores(state), (users @ items.T).detach())
    second = scores(state).clone()
    run.stage("finetune", range(2, 3))
    assert not torch.allclose(scores(state), second)


def test_the_exported_vectors_score_alike() -> None:
    state = Run(small()).stage("pretrain").stage("finetune", range(1, 2)).states["south"]
    users = np.array([3, 0])
    torch.testing.assert_close(
        METHOD.score_exported(METHOD.export(state), users), METHOD.score(state, users)
    )


@pytest.mark.parametrize(
    "cut", [("pretrain", 1), ("pretrain", 2), ("finetune", 1), ("finetune", 2)]
)
def test_saved_and_continued_is_bit_for_bit_the_straight_run(cut: tuple[str, int]) -> None:
    config = small(epochs=3, refresh_every=2, rounds=3)
    straight = Run(config).stage("pretrain", range(1, 4))
    broken = Run(config)

    def close(run: Run) -> None:
        run.phases("pretrain", 3, METHOD.stages(config)[0].close)

    def reload(run: Run) -> Run:
        fresh = Run(config)
        for name, state in run.states.items():
            METHOD.load_state_dict(fresh.states[name], copy.deepcopy(METHOD.state_dict(state)))
        return fresh

    stage, after = cut
    if stage == "pretrain":
        broken = reload(broken.stage("pretrain", range(1, after + 1))).stage(
            "pretrain", range(after + 1, 4)
        )
    else:
        broken.stage("pretrain", range(1, 4))
    close(straight)
    close(broken)
    straight.stage("finetune", range(1, 4))
    if stage == "finetune":
        broken = reload(broken.stage("finetune", range(1, after + 1))).stage(
            "finetune", range(after + 1, 4)
        )
    else:
        broken.stage("finetune", range(1, 4))
    for name in SIZES:
        assert torch.equal(scores(straight.states[name]), scores(broken.states[name]))
        for key, value in straight.states[name].state_dict().items():
            assert torch.equal(value, broken.states[name].state_dict()[key]), key


def test_loading_replaces_what_was_trained_since() -> None:
    """The best round's state comes back, scores included, although training went on."""
    run = Run(small()).stage("pretrain").stage("finetune", range(1, 2))
    state: Domain = run.states["north"]
    saved, best = copy.deepcopy(METHOD.state_dict(state)), scores(state).clone()
    run.stage("finetune", range(2, 4))
    METHOD.load_state_dict(state, saved)
    assert torch.equal(scores(state), best)


def test_declared_fields_are_what_is_sent() -> None:
    run = Run(small()).stage("pretrain", range(1, 2))
    sent: dict[str, Mapping[str, Any]] = {}
    for outs in run.outs:
        for sender, out in outs.items():
            for receiver, payload in out.send.items():
                sent |= {
                    key: (receiver if sender == SERVER else sender, value)
                    for key, value in payload.items()
                }
    sizes = {"K": 4, "dim": 5}
    assert set(sent) == {field.key for field in METHOD.fields}
    for field in METHOD.fields:
        domain, value = sent[field.key]
        assert field.shape is not None
        assert value.shape == tuple(sizes.get(axis, SIZES[domain][1]) for axis in field.shape)
        assert str(value.dtype) == field.dtype
    assert not any("n_users" in (field.shape or ()) for field in METHOD.fields)


def test_stages() -> None:
    pretrain, finetune = METHOD.stages(Config())
    assert (pretrain.name, finetune.name) == ("pretrain", "finetune")
    assert not pretrain.local and finetune.local
    assert [phase.at for phase in pretrain.each] == ["domains", "server", "domains"]


def test_stages_take_their_lengths_from_the_configuration() -> None:
    """The first stage ends with its last round, the second with its best epoch."""
    pretrain, finetune = METHOD.stages(Config(rounds=4, epochs=7, patience=3))
    assert (pretrain.rounds, pretrain.patience, pretrain.keep_best) == (4, None, False)
    assert (finetune.rounds, finetune.patience, finetune.keep_best) == (7, 3, True)


def test_a_server_continues_from_its_centres() -> None:
    run = Run(small()).stage("pretrain", range(1, 2))
    server: Server = run.states[SERVER]
    other = METHOD.init_server(run.config, context(SERVER, "init", 0))
    assert METHOD.state_dict(other) == {}
    METHOD.load_state_dict(other, METHOD.state_dict(server))
    np.testing.assert_array_equal(other.centres, server.centres)
    METHOD.load_state_dict(other, {})
    assert other.centres is None
