"""P2P-IAGR: domains without a server exchange perturbed intent prototypes and rebuild their graphs
by them.

Paper
    "Privacy-Preserving Peer-to-Peer Cross-Domain Collaborative Filtering via Intent-Adaptive Graph
    Reconstruction"; the stored text names neither authors nor an identifier. Equations by the
    paper's own numbers:

    =====  =====================================  =========================================
    no.    section, what                          here
    =====  =====================================  =========================================
    1, 2   3.2.1 propagation, sum over layers     `encode`
    3-5    3.2.2 intents                          `intent_shares`, `intents`, `refine`
    6      3.2.2 BPR                              `ranking_loss`
    7      3.3.1 clipping and noise               `perturb` (on `parts.perturbation`)
    8      3.3.1 composition over rounds          `releases`, summed by the platform's accountant
    9, 10  3.3.2, 3.3.3 alignment, fused prior    `alignment`, `fuse`
    11-13  3.4.1 prior-aware vectors, Ω           `prior_aware`, `affinity`, `connection_logits`
    14,15  3.4.1 Π and its sample Â               `interpolated_log_odds`, `sample_edges`
    16,17  3.4.2 dual-view contrast               `dual_view`
    18     3.5 joint loss                         `joint_loss`
    =====  =====================================  =========================================

Notation
    =============  ====================================  =======================
    symbol         name                                  shape
    =============  ====================================  =======================
    M, N, n        users, items, both                    –
    e_0            ID embeddings, users first            [n, dim]
    z_l, g_l, e_l  structure, intent, both, at layer l   [n, dim]
    e              e_0 + … + e_L, what ranks             [n, dim]
    S^u, S^v       user and item prototypes              [K, dim] each
    S̃              what came from the peers, averaged    [K, dim] each
    C^u, C^v       fused priors S + S̃                    [K, dim] each
    p, q           shares of C^u, C^v                    [·, K]
    Ω, Π, Â        edge weights: inferred, mixed, drawn  [m], one per candidate pair
    b              training pairs in a batch             –
    =============  ====================================  =======================

What crosses
    domain → domain: `user_prototypes` and `item_prototypes`, perturbed, [K, dim] each, every round:
    2·K·dim·4 bytes per direction and domain, whatever the numbers of users and items. All peers get
    the same noisy arrays: one release. There is no server. (The paper's 0.047 MB at K = 16, dim =
    128 equal three such arrays both ways; it speaks of distributions that its algorithm does not
    send.) Metrics that a run tracks (losses, signal-to-noise ratios) are not part of the
    accounting.

Departures
    - Ω, Π and Â exist for candidate pairs only: observed edges, and `top_k` items by Ω of every
      user in the batch, found in blocks. With more than `pool` items a random draw of `pool` of
      them competes.
    - `updates` bounds the propagations over the whole graph in an epoch, which are also the
      optimiser's steps: e is computed once per group of batches, their gradients are summed and go
      back through it once. One per batch is the rule; the preset `book-movie` bounds them, since
      8,700 propagations over 8.9 M interactions are not an epoch on any machine.
    - `view="graph"` feeds the encoder all observed edges and the added ones of the batch's users;
      `view="batch"` only the edges of the batch's users, at most `fanout` random ones each, so that
      its cost does not grow with the domain.
    - With more than two domains S̃ is the mean of what arrived.
    - Beside the paper's release stands `release="contributions"` (see `contribution_sums`), and
      beside the exchange a control, `peer="noise"`: domains send noise of the same size and nothing
      else.

Not stated in the paper
    - One user can move every prototype, and 2K of them leave in a round: the whole message costs
      2K·ε₀, where the paper counts ε₀. `releases` declares both; the clipped vector is arbitrary
      within its ball, so what is hidden is the domain's whole data, not only one interaction.
    - All domains and seeds start from the same prototypes, so that an index means the same from the
      start. Embeddings and prototypes start Xavier-uniform.
    - Eq. (3) writes z_{l-1}, Eq. (4) z_l: z_l is meant in both. Eq. (2)'s sum is what Eq. (6) ranks
      with.
    - Sums stay sums, as printed: over the pairs of a batch in Eq. (6), prototypes in Eq. (9), nodes
      in Eq. (16). Adam's weight decay of 0.001 (section 4.4) acts on the gradient of these sums.
    - Eq. (9) is taken over user and over item prototypes and added.
    - τ stands for three temperatures: of Eq. (9), of Ω and of the sampling. Only the first is given
      (0.1); the other two have their own keys and the same value.
    - Â is the relaxed sample of Eq. (15), normalised by its own degrees, and encoded with the same
      prototypes and layers.
    - Eq. (16) runs over the different users and positive items of a batch.
    - Learning rate, local epochs per round, `top_k` and early stopping.
    - Without intents (`ablation="intent"`) the encoder is LightGCN's sum, and K free vectors take
      the prototypes' place everywhere else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from pydantic import Field as Setting
from pydantic import model_validator
from torch import Tensor, nn

from crossfed.methods.parts.graph import (
    bipartite_adjacency,
    bipartite_pattern,
    edge_products,
    normalised_weights,
    spmm,
    weighted_product,
)
from crossfed.methods.parts.losses import bpr, finite, info_nce
from crossfed.methods.parts.perturbation import add_laplace, clip_l1, laplace_scale, signal_to_noise
from crossfed.methods.parts.sampling import Batch, bpr_epoch
from crossfed.platform.method import (
    Context,
    Direction,
    Field,
    Method,
    MethodConfig,
    Out,
    Payload,
    Phase,
    Release,
    Stage,
    generators,
)

BLOCK_ELEMENTS = 1 << 24  # connection logits held at once while the top k are found: 64 MiB
SATURATED = math.log(99)  # a logit beyond which Ω is above 0.99 or below 0.01


class Config(MethodConfig):
    """Section 4.4 where not said otherwise. ◇: not in the paper, chosen here."""

    dim: int = Setting(64, ge=1, description="D, size of all vectors")
    layers: int = Setting(3, ge=0, description="L, propagation layers")
    K: int = Setting(16, ge=1, description="intents, i.e. prototypes of users and of items")
    batch_size: int = Setting(1024, ge=2, description="training pairs per batch")
    lr: float = Setting(0.001, gt=0, description="Adam's learning rate ◇")
    weight_decay: float = Setting(1e-3, ge=0, description="Adam's weight decay")
    rounds: int = Setting(30, ge=0, description="T, rounds of exchange at most (section 5.3)")
    local_epochs: int = Setting(1, ge=1, description="E, epochs between two exchanges ◇")
    patience: int | None = Setting(
        None, ge=1, description="evaluations without a better one before stopping ◇"
    )
    updates: int | None = Setting(
        None,
        ge=1,
        description="optimiser steps per epoch at most, each one propagation; none "
        "is one per batch ◇",
    )

    C: float = Setting(
        1.0, gt=0, description="L1 norm to which a prototype is clipped (section 5.3)"
    )
    epsilon0: float = Setting(
        2.0, gt=0, description="ε₀, budget of one perturbed prototype in one round"
    )
    release: Literal["prototypes", "contributions"] = Setting(
        "prototypes",
        description="prototypes: the paper's; contributions: clipped sums over "
        "users, same total ε ◇",
    )
    peer: Literal["exchange", "noise"] = Setting(
        "exchange", description="noise: a control that sends noise alone ◇"
    )

    beta: float = Setting(0.1, ge=0, description="β, weight of L_CCL")
    gamma: float = Setting(0.1, ge=0, description="γ, weight of L_SCL")
    tau: float = Setting(0.1, gt=0, description="τ of Eq. (9)")
    tau_omega: float = Setting(0.1, gt=0, description="τ of Eq. (13) ◇")
    tau_edge: float = Setting(0.1, gt=0, description="τ of Eq. (15) ◇")
    tau_scl: float = Setting(0.15, gt=0, description="τ_scl of Eq. (16)")
    lambda_: float = Setting(
        0.5, ge=0, lt=1, description="λ of Eq. (14), the observed edges' share"
    )
    top_k: int = Setting(10, ge=0, description="items by Ω that are added per user ◇")
    pool: int = Setting(8192, ge=1, description="items that compete for the top k at most ◇")
    view: Literal["graph", "batch"] = Setting(
        "graph", description="which observed edges Â holds beside the added ◇"
    )
    fanout: int | None = Setting(
        None, ge=1, description="with view=batch, observed edges of a user in Â at most ◇"
    )
    ablation: Literal["none", "intent", "ccl", "scl"] = Setting(
        "none", description="the variants of section 5.2"
    )

    @model_validator(mode="after")
    def _fanout_belongs_to_the_batch_view(self) -> Self:
        if self.fanout is not None and self.view != "batch":
            raise ValueError("fanout bounds the edges of a batch's users and needs view=batch")
        return self


# --- Equations ---


def encode(
    product: Callable[[Tensor], Tensor], ego: Tensor, user_s: Tensor, item_s: Tensor, n_users: int, layers: int,  # noqa: E501
    with_intents: bool = True,
) -> Tensor:  # fmt: skip
    """Eq. (1), Eq. (2): z_l = D^-½AD^-½ e_{l-1}, e_l by `refine`, and their sum over the layers 0 …
    L.

    Args:
        product: x [n, dim] -> the normalised adjacency times x.
        ego: e_0, users first, [n, dim]. user_s, item_s: S^u, S^v, [K, dim].
        with_intents: False leaves LightGCN, summed over its layers: e_l = z_l.

    Returns:
        [n, dim].
    """
    level = total = ego
    for _ in range(layers):
        level = product(level)
        if with_intents:
            level = torch.cat([refine(level[:n_users], user_s), refine(level[n_users:], item_s)])
        total = total + level
    return total


def intent_shares(z: Tensor, prototypes: Tensor) -> Tensor:
    """Eq. (3): P(s_k | z) = softmax over k of zᵀs_k. [n, dim], [K, dim] -> [n, K]."""
    return torch.softmax(z @ prototypes.T, dim=1)


def intents(z: Tensor, prototypes: Tensor) -> Tensor:
    """Eq. (4): g = Σ_k s_k P(s_k | z). [n, dim], [K, dim] -> [n, dim]."""
    return intent_shares(z, prototypes) @ prototypes


def refine(z: Tensor, prototypes: Tensor) -> Tensor:
    """Eq. (5): e = z + g. [n, dim], [K, dim] -> [n, dim]."""
    return z + intents(z, prototypes)


def ranking_loss(user: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
    """Eq. (6): −Σ ln σ(ŷ_ij − ŷ_ij′) with ŷ the inner product. three [b, dim] -> scalar."""
    return len(user) * bpr((user * positive).sum(1), (user * negative).sum(1))


def perturb(
    clipped: npt.NDArray[np.floating[Any]], bound: float, epsilon: float, rng: np.random.Generator
) -> npt.NDArray[np.float32]:
    """Eq. (7): s̃ = s̄ + Laplace(0, 2C/ε)^D, independent noise on every coordinate. [K, dim] -> [K,
    dim].

    Args:
        clipped: what changes by at most 2C in L1 norm when a unit changes; for the paper's release
            each row by itself.
        bound: C. rng: `Context.noise_rng`.
    """
    return add_laplace(clipped, laplace_scale(2 * bound, epsilon), rng)


def alignment(own: Tensor, received: Tensor, tau: float) -> Tensor:
    """Eq. (9): −Σ_k log softmax_j(cos(s_k, s̃_j)/τ) at j = k. two [K, dim] -> scalar."""
    return len(own) * info_nce(own, received, tau)


def distance(own: Tensor, received: Tensor) -> Tensor:
    """What stands in for Eq. (9) without CCL (section 5.2): Σ_k ‖s_k − s̃_k‖². two [K, dim] ->
    scalar.
    """
    return (own - received).square().sum()


def fuse(own: Tensor, received: Tensor) -> Tensor:
    """Eq. (10): c_k = s_k + s̃_k. two [K, dim] -> [K, dim]."""
    return own + received


def affinity(e: Tensor, prior: Tensor) -> Tensor:
    """Eq. (12): p^k = softmax over k of eᵀc_k. [n, dim], [K, dim] -> [n, K]."""
    return torch.softmax(e @ prior.T, dim=1)


def prior_aware(shares: Tensor, prior: Tensor) -> Tensor:
    """Eq. (11): ẽ = Σ_k p^k c_k. [n, K], [K, dim] -> [n, dim]."""
    return shares @ prior


def connection_logits(users: Tensor, items: Tensor, tau: float) -> Tensor:
    """Eq. (13) before its sigmoid: ẽ_uᵀẽ_v/τ, so that Ω = σ of it. [a, dim], [c, dim] -> [a, c]."""
    return users @ items.T / tau


def interpolated_log_odds(logits: Tensor, observed: Tensor, lambda_: float) -> Tensor:
    """Eq. (14): log Π − log(1 − Π) of Π = λA + (1 − λ)Ω, from the logits of Ω: finite where Ω
    itself rounds to 0 or 1.

    With A = 1 it is log(λ + (1 − λ)Ω) − log((1 − λ)(1 − Ω)); with A = 0 the same of 1 − Ω, negated.

    Args:
        logits: [m]. observed: A, bool [m]. lambda_: in [0, 1).
    """
    sign = torch.where(observed, 1.0, -1.0)
    chance = math.log1p(-lambda_) + F.logsigmoid(sign * logits)
    share = logits.new_tensor(math.log(lambda_) if lambda_ else -math.inf)
    return sign * (
        torch.logaddexp(share, chance) - math.log1p(-lambda_) - F.logsigmoid(-sign * logits)
    )


def sample_edges(log_odds: Tensor, noise: Tensor, tau: float) -> Tensor:
    """Eq. (15): Â = σ((log Π − log(1 − Π) + g₁ − g₂)/τ). three [m] -> [m].

    Args:
        noise: g₁ − g₂ of two Gumbel variables, which is logistic.
    """
    return torch.sigmoid((log_odds + noise) / tau)


def dual_view(anchor: Tensor, view: Tensor, tau: float) -> Tensor:
    """Eq. (16): −Σ_u log softmax_u′(cos(e_u, ê_u′)/τ) at u′ = u; Eq. (17) adds users' and items'.
    two [a, dim] -> scalar.
    """
    return len(anchor) * info_nce(anchor, view, tau)


def joint_loss(rec: Tensor, ccl: Tensor, scl: Tensor, beta: float, gamma: float) -> Tensor:
    """Eq. (18): L = L_BPR + βL_CCL + γL_SCL."""
    return rec + beta * ccl + gamma * scl


def contribution_sums(
    shares: Tensor, vectors: Tensor, weights: Tensor, bound: float
) -> npt.NDArray[np.float64]:
    """Σ over users of ½(P_u − 1/K) ⊗ v_u, v_u clipped to L1 norm C: the users' vectors, sorted by
    intent. [K, dim].

    A user's term is a [K, dim] matrix whose L1 norm is at most C, since Σ_k |P_uk − 1/K| < 2;
    replacing it by another user's moves the sums by at most 2C, all K · dim entries together. The
    encoder that made the vectors is held fixed.

    Args:
        shares: [m, K]. vectors: [m, dim]. weights: [m], with sum 1 for each user; a row counts that
            often.
        bound: C.
    """
    clipped = clip_l1(vectors.cpu().numpy(), bound)
    centred = (shares.cpu().double().numpy() - 1 / shares.shape[1]) / 2
    sums: npt.NDArray[np.float64] = (centred * weights.cpu().double().numpy()[:, None]).T @ clipped
    return sums


# --- State ---


class Domain(nn.Module):
    """All that a domain owns. Parameters are its state, with the optimizer; the graph is rebuilt
    from the data.
    """

    def __init__(self, config: Config, ctx: Context) -> None:
        super().__init__()
        self.config, self.device = config, ctx.device
        self.data = data = ctx.own
        tables = [torch.empty(size, config.dim) for size in (data.n_users, data.n_items)]
        self.ego = nn.Parameter(
            torch.cat([nn.init.xavier_uniform_(t, generator=ctx.torch_rng) for t in tables])
        )
        # the same at every domain and for every seed
        shared = generators(0, "p2p_iagr", "prototypes")[1]
        start = [
            nn.init.xavier_uniform_(torch.empty(config.K, config.dim), generator=shared)
            for _ in range(2)
        ]
        self.user_s, self.item_s = (nn.Parameter(table) for table in start)
        self.to(ctx.device)
        self.adjacency = bipartite_adjacency(
            data.n_users, data.n_items, data.users, data.items, ctx.device
        )
        pairs = np.unique(data.users * data.n_items + data.items)  # the observed edges, by user
        self.users, self.items = (
            torch.from_numpy(x).to(ctx.device) for x in np.divmod(pairs, data.n_items)
        )
        self.pointer = F.pad(torch.bincount(self.users, minlength=data.n_users).cumsum(0), (1, 0))
        self.optimizer = self.new_optimizer()
        self.final: Tensor | None = None

    def new_optimizer(self) -> torch.optim.Adam:
        """Adam on all parameters, with the paper's weight decay."""
        config = self.config
        return torch.optim.Adam(
            self.parameters(), lr=config.lr, weight_decay=config.weight_decay, fused=True
        )

    def prototypes(self) -> dict[str, Tensor]:
        """S^u and S^v by side, [K, dim] each."""
        return {"user": self.user_s, "item": self.item_s}

    def encoded(self, product: Callable[[Tensor], Tensor], ego: Tensor, n_users: int) -> Tensor:
        """`encode` with this domain's prototypes."""
        config = self.config
        return encode(
            product,
            ego,
            self.user_s,
            self.item_s,
            n_users,
            config.layers,
            config.ablation != "intent",
        )

    def vectors(self) -> Tensor:
        """e of all nodes over the observed graph, with gradient. [n, dim]."""
        return self.encoded(lambda x: spmm(self.adjacency, x), self.ego, self.data.n_users)

    @torch.no_grad()
    def ranking(self) -> tuple[Tensor, Tensor]:
        """The vectors that rank: users [n_users, dim] and items [n_items, dim]; kept until training
        goes on.
        """
        if self.final is None:
            self.final = self.vectors()
        return self.final[: self.data.n_users], self.final[self.data.n_users :]


@dataclass(frozen=True, slots=True)
class Candidates:
    """The pairs that may be edges of Â, among nodes that have numbers of their own here.

    Attributes:
        nodes: rows of `ego`, users first, int64 [a + c]. n_users: a.
        users, items: the pairs, as places among the a users and the c items, int64 [m]. observed:
            A, bool [m].
        batch: user, positive and negative of the batch's pairs, as places in `nodes`, int64 [3, b].
    """

    nodes: Tensor
    n_users: int
    users: Tensor
    items: Tensor
    observed: Tensor
    batch: Tensor


@dataclass(frozen=True, slots=True)
class Pool:
    """The items that compete for a user's top k.

    Attributes:
        items: int64 [c], ascending. place: int64 [n_items], where an item stands in `items`, -1 for
            the others.
        vectors: ẽ_v [c, dim]. user_prior: C^u [K, dim].
    """

    items: Tensor
    place: Tensor
    vectors: Tensor
    user_prior: Tensor


@torch.no_grad()
def top_items(
    users: Tensor, items: Tensor, seen: tuple[Tensor, Tensor], k: int, tau: float
) -> tuple[Tensor, Tensor]:
    """The k items of largest Ω of every user among those without an observed edge, found in blocks
    of users.

    Args:
        users: ẽ_u [a, dim]. items: ẽ_v [c, dim].
        seen: the observed pairs as places among users and items, int64 [s] twice, sorted by user.

    Returns:
        The added pairs as places among users and items, int64 twice; fewer than a · k where a user
        has seen nearly all.
    """
    owners, columns = seen
    step, keep = max(1, BLOCK_ELEMENTS // max(len(items), 1)), min(k, len(items))
    found = [(owners[:0], columns[:0])]
    for start in range(0, len(users), step):
        logits = connection_logits(users[start : start + step], items, tau)
        low, high = torch.searchsorted(
            owners, torch.tensor([start, start + step], device=owners.device)
        ).tolist()
        logits[owners[low:high] - start, columns[low:high]] = -math.inf
        best, place = logits.topk(keep, dim=1)
        row, column = best.isfinite().nonzero(as_tuple=True)
        found.append((row + start, place[row, column]))
    return torch.cat([user for user, _ in found]), torch.cat([item for _, item in found])


@torch.no_grad()
def draw_pool(
    state: Domain, final: Tensor, received: Mapping[str, Tensor], rng: torch.Generator
) -> Pool:
    """All items, or `Config.pool` random ones, with their prior-aware vectors."""
    n_users, n_items = state.data.n_users, state.data.n_items
    items = torch.arange(n_items, device=state.device)
    if n_items > state.config.pool:
        items = (
            torch.randperm(n_items, generator=rng)[: state.config.pool]
            .sort()
            .values.to(state.device)
        )
    place = items.new_full((n_items,), -1)
    place[items] = torch.arange(len(items), device=state.device)
    user_prior, item_prior = (
        shared_prior(own, received.get(side)) for side, own in state.prototypes().items()
    )
    vectors = prior_aware(affinity(final[items + n_users], item_prior), item_prior)
    return Pool(items, place, vectors, user_prior)


@torch.no_grad()
def candidates(
    state: Domain, batch: Batch, final: Tensor, pool: Pool | None, rng: torch.Generator
) -> Candidates:
    """The batch's part of the graph: observed edges (of all users, or of the batch's) and the added
    ones; no pool, no edges.
    """
    config, n_users = state.config, state.data.n_users
    user, positive, negative = (column.to(state.device) for column in batch)
    users, owner = torch.unique(user, return_inverse=True)
    none = users[:0]
    added_users = added_items = seen_users = seen_items = none
    if pool is not None:
        start, count = state.pointer[users], state.pointer[users + 1] - state.pointer[users]
        seen_users = torch.arange(len(users), device=state.device).repeat_interleave(count)
        offset = (start - count.cumsum(0) + count).repeat_interleave(count)
        seen_items = state.items[torch.arange(len(offset), device=state.device) + offset]
        place = pool.place[seen_items]
        seen = seen_users[place >= 0], place[place >= 0]
        vectors = prior_aware(affinity(final[users], pool.user_prior), pool.user_prior)
        added_users, found = top_items(vectors, pool.vectors, seen, config.top_k, config.tau_omega)
        added_items = pool.items[found]
        if config.fanout is not None:  # the first of every user's history in a random order
            order = torch.argsort(
                seen_users
                + torch.rand(len(seen_users), generator=rng, dtype=torch.float64).to(state.device)
            )
            rank = (
                torch.arange(len(order), device=state.device)
                - (count.cumsum(0) - count)[seen_users]
            )
            kept = order[rank < config.fanout]
            seen_users, seen_items = seen_users[kept], seen_items[kept]
    if config.view == "graph":
        edge_users, edge_items = (
            torch.cat([state.users, users[added_users]]),
            torch.cat([state.items, added_items]),
        )
        nodes, places = (
            torch.arange(len(final), device=state.device),
            torch.stack([user, positive, negative]),
        )
        places[1:] += n_users
        observed = torch.arange(len(edge_users), device=state.device) < len(state.users)
        return Candidates(nodes, n_users, edge_users, edge_items, observed, places)
    items, where = torch.unique(
        torch.cat([positive, negative, seen_items, added_items]), return_inverse=True
    )
    b = len(user)
    return Candidates(
        nodes=torch.cat([users, items + n_users]),
        n_users=len(users),
        users=torch.cat([seen_users, added_users]),
        items=where[2 * b :],
        observed=torch.arange(len(where) - 2 * b, device=state.device) < len(seen_users),
        batch=torch.stack([owner, where[:b] + len(users), where[b : 2 * b] + len(users)]),
    )


def structural_contrast(
    state: Domain,
    pairs: Candidates,
    final: Tensor,
    ego: Tensor,
    received: Mapping[str, Tensor],
    rng: torch.Generator,
) -> tuple[Tensor, dict[str, Tensor]]:
    """L_SCL of a batch: equations 11 to 17 in a row.

    Args:
        final, ego: e and e_0 of the candidates' nodes, [a + c, dim].

    Returns:
        The loss, and of Â: mean weight of observed and of added edges, share of Ω that is 0 or 1 to
            within 1 %.
    """
    config, a = state.config, pairs.n_users
    aware = []
    for (side, own), e in zip(state.prototypes().items(), (final[:a], final[a:]), strict=True):
        prior = shared_prior(own, received.get(side))
        aware.append(prior_aware(affinity(e, prior), prior))
    pattern = bipartite_pattern(a, len(final) - a, pairs.users, pairs.items)
    logits = edge_products(pattern, torch.cat(aware)) / config.tau_omega
    uniform = (
        torch.rand(len(logits), generator=rng)
        .clamp(min=torch.finfo(torch.float32).tiny)
        .to(state.device)
    )
    log_odds = interpolated_log_odds(logits, pairs.observed, config.lambda_)
    edges = sample_edges(log_odds, torch.logit(uniform), config.tau_edge)
    values = normalised_weights(pattern, edges)
    view = state.encoded(lambda x: weighted_product(pattern, values, x), ego, a)
    users, items = torch.unique(pairs.batch[0]), torch.unique(pairs.batch[1])
    loss = dual_view(final[users], view[users], config.tau_scl) + dual_view(
        final[items], view[items], config.tau_scl
    )
    with torch.no_grad():
        observed, weights = pairs.observed, edges.detach()
        told = {
            "loss_scl": loss.detach() / (len(users) + len(items)),
            "edges_observed": weights[observed].mean() if observed.any() else loss.new_zeros(()),
            "edges_added": weights[~observed].mean() if not observed.all() else loss.new_zeros(()),
            "omega_saturated": (logits.abs() > SATURATED).float().mean()
            if len(logits)
            else loss.new_zeros(()),
        }
    return loss, told


def batch_loss(
    state: Domain,
    pairs: Candidates,
    final: Tensor,
    ego: Tensor,
    received: Mapping[str, Tensor],
    rng: torch.Generator,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Eq. (18) of one batch, and its parts per pair, per prototype and per node."""
    config = state.config
    rec = ranking_loss(*final[pairs.batch])
    ccl = rec.new_zeros(())
    for side, own in state.prototypes().items():
        if side not in received:  # a domain alone agrees with nobody
            continue
        l2 = config.ablation == "ccl"
        ccl = ccl + (
            distance(own, received[side]) if l2 else alignment(own, received[side], config.tau)
        )
    told = {
        "loss_bpr": rec.detach() / pairs.batch.shape[1],
        "loss_ccl": ccl.detach() / (2 * config.K),
    }
    scl = rec.new_zeros(())
    if config.ablation != "scl":
        scl, more = structural_contrast(state, pairs, final, ego, received, rng)
        told |= more
    return joint_loss(rec, ccl, scl, config.beta, config.gamma), told


# --- Steps ---


@torch.no_grad()
def signals(state: Domain) -> tuple[dict[str, npt.NDArray[np.float64]], float]:
    """What is to be perturbed, [K, dim] by side, and the ε that each release of it gets."""
    config = state.config
    if config.release == "prototypes":
        clean = {
            side: clip_l1(own.cpu().numpy(), config.C) for side, own in state.prototypes().items()
        }
        return clean, config.epsilon0
    users, items = state.ranking()
    degree = torch.diff(state.pointer).clamp(min=1).float()
    weight = torch.zeros(len(items), device=state.device).index_add_(
        0, state.items, degree.reciprocal()[state.users]
    )
    return {
        "user": contribution_sums(
            intent_shares(users, state.user_s), users, torch.ones(len(users)), config.C
        ),
        "item": contribution_sums(intent_shares(items, state.item_s), items, weight, config.C),
    }, config.K * config.epsilon0


def exchange(state: Domain, inbox: Mapping[str, Payload], ctx: Context) -> Out:
    """Perturb once and send the same noisy arrays to every peer."""
    config = state.config
    clean, epsilon = signals(state)
    message, metrics = {}, {}
    for side, signal in clean.items():
        if config.peer == "noise":
            signal = np.zeros_like(signal)
        message[f"{side}_prototypes"] = perturb(signal, config.C, epsilon, ctx.noise_rng)
        metrics[f"signal_to_noise_{side}"] = signal_to_noise(
            signal, laplace_scale(2 * config.C, epsilon)
        )
    return Out(dict.fromkeys(ctx.peers, message), metrics)


def shared_prior(own: Tensor, received: Tensor | None) -> Tensor:
    """`fuse`, and s_k itself for a domain that has no peers. [K, dim] -> [K, dim]."""
    return own if received is None else fuse(own, received)


def receive(state: Domain, inbox: Mapping[str, Payload], ctx: Context) -> dict[str, Tensor]:
    """S̃ by side, the mean over the peers; sums of contributions come without a scale and take that
    of the own prototypes.

    Empty for a domain that has no peers.
    """
    received: dict[str, Tensor] = {}
    if not ctx.peers:
        return received
    for side, own in state.prototypes().items():
        arrived = np.mean(
            [inbox[name][f"{side}_prototypes"] for name in sorted(inbox)], axis=0, dtype=np.float32
        )
        received[side] = torch.from_numpy(arrived).to(state.device)
        if state.config.release == "contributions":
            received[side] *= own.detach().norm() / received[side].norm()
    return received


def train(state: Domain, inbox: Mapping[str, Payload], ctx: Context) -> Out:
    """Local epochs on the joint loss, with what the peers have sent."""
    config = state.config
    received = receive(state, inbox, ctx)
    metrics = _told_of_prototypes(state, received)
    steps = max(1, -(-len(state.data.users) // config.batch_size))
    size = 1 if config.updates is None else -(-steps // config.updates)
    parts: list[dict[str, Tensor]] = []
    for _ in range(config.local_epochs):
        batches: Iterator[Batch] = bpr_epoch(state.data, config.batch_size, ctx.rng)
        while group := list(islice(batches, size)):
            parts += update(state, group, received, ctx.torch_rng)
    for name in parts[0] if parts else ():
        metrics[name] = float(torch.stack([part[name] for part in parts]).mean())
    return Out(metrics=finite(metrics, ctx))


def update(
    state: Domain, group: list[Batch], received: Mapping[str, Tensor], rng: torch.Generator
) -> list[dict[str, Tensor]]:
    """One optimiser step on the sum of the batches' losses, with one propagation over the whole
    graph, forth and back.
    """
    state.final = None
    state.optimizer.zero_grad()
    encoded = state.vectors()
    final, ego = encoded.detach(), state.ego.detach()
    to_final, to_ego = torch.zeros_like(final), torch.zeros_like(ego)
    pool = None if state.config.ablation == "scl" else draw_pool(state, final, received, rng)
    parts = []
    for batch in group:
        pairs = candidates(state, batch, final, pool, rng)
        rows, ego_rows = (table[pairs.nodes].requires_grad_() for table in (final, ego))
        loss, told = batch_loss(state, pairs, rows, ego_rows, received, rng)
        loss.backward()  # type: ignore[no-untyped-call]
        for total, leaf in ((to_final, rows), (to_ego, ego_rows)):
            if leaf.grad is not None:
                total.index_add_(0, pairs.nodes, leaf.grad)
        parts.append(told)
    encoded.backward(to_final)  # type: ignore[no-untyped-call]
    state.ego.grad = to_ego if state.ego.grad is None else state.ego.grad.add_(to_ego)
    state.optimizer.step()
    return parts


@torch.no_grad()
def _told_of_prototypes(state: Domain, received: Mapping[str, Tensor]) -> dict[str, float]:
    """Of both sides: the largest |cosine| of two own prototypes, and the mean cosine of own and
    received by index.
    """
    told = {}
    for side, own in state.prototypes().items():
        unit = F.normalize(own, dim=1)
        told[f"prototype_cosine_{side}"] = float((unit @ unit.T).fill_diagonal_(0.0).abs().max())
        if side in received:
            told[f"received_cosine_{side}"] = float(F.cosine_similarity(own, received[side]).mean())
    return told


def score(state: Domain, users: npt.NDArray[np.int64]) -> Tensor:
    """ŷ of Eq. (6) for some users and all items. int64 [b] -> float32 [b, n_items]."""
    user_vectors, items = state.ranking()
    return user_vectors[torch.from_numpy(users).to(state.device)] @ items.T


def export(state: Domain) -> dict[str, Tensor]:
    """The vectors that rank, and the domain's own prototypes (Figure 6)."""
    users, items = state.ranking()
    own = {f"{side}_prototypes": table.detach() for side, table in state.prototypes().items()}
    return {"users": users, "items": items, **own}


def state_dict(state: Domain) -> dict[str, Any]:
    """Parameters and optimizer: all else is rebuilt from these and the data."""
    return {"model": dict(state.state_dict()), "optimizer": state.optimizer.state_dict()}


def load_state_dict(state: Domain, saved: Mapping[str, Any]) -> None:
    """Continue from `state_dict`'s result, bit for bit."""
    state.load_state_dict(dict(saved["model"]))
    state.optimizer = state.new_optimizer()
    state.optimizer.load_state_dict(dict(saved["optimizer"]))
    state.final = None


def stages(config: Config) -> tuple[Stage, ...]:
    """One federated stage without a server: exchange, then train, in every round."""
    return (
        Stage(
            "train",
            rounds=config.rounds,
            each=(Phase(exchange), Phase(train)),
            edges=frozenset({Direction.PEER}),
            patience=config.patience,
        ),
    )


def releases(config: Config) -> tuple[Release, ...]:
    """What leaves in a round, as the accountant counts it; nothing about the domain where it is
    noise alone.
    """
    if config.peer == "noise":
        return ()
    sums = config.release == "contributions"
    epsilon = config.K * config.epsilon0 if sums else config.epsilon0
    return (
        Release(
            stage="train",
            keys=("user_prototypes", "item_prototypes"),
            mechanism="laplace",
            unit="one user's term in the sums, the encoder being held fixed"
            if sums
            else "a domain's whole data",
            sensitivity=2 * config.C,
            scale=laplace_scale(2 * config.C, epsilon),
            per_round_epsilon=config.epsilon0,
            count=2 if sums else 2 * config.K,
        ),
    )


METHOD = Method(
    name="p2p_iagr",
    title="P2P-IAGR: perturbed intent prototypes between peers, and graphs rebuilt by them",
    paper="P2P-IAGR",
    Config=Config,
    stages=stages,
    init_domain=Domain,
    score=score,
    state_dict=state_dict,
    load_state_dict=load_state_dict,
    export=export,
    fields=(
        Field(
            "user_prototypes",
            Direction.PEER,
            ("K", "dim"),
            "user intent prototypes, clipped and perturbed",
        ),
        Field(
            "item_prototypes",
            Direction.PEER,
            ("K", "dim"),
            "item intent prototypes, clipped and perturbed",
        ),
    ),
    releases=releases,
)
