"""FedCRF: federated cross-domain recommendation with semantic-driven deep knowledge fusion.

Paper
    Guo et al., arXiv 2604.17681 v2. Domains share neither users nor items; item text is the bridge.
    In stage "pretrain" the server clusters the item vectors of all domains and every domain adapts
    the centres to its own items (FGSAT); stage "finetune" is local: two item graphs, from the
    pre-trained and from local text vectors, enrich the item IDs.

    The text version of the paper has lost its equation numbers. They are counted here in the order
    in which section 3 displays them, the three steps of K-means included:

    =====  =====================================  ======================================
    no.    section, what                          here
    =====  =====================================  ======================================
    1      3.3 text encoder                       the platform's artifact "text"
    2      3.3 projection φ_emb                   `project`
    3, 4   3.4.1 domain-aware normalisation       `normalise`, `running_statistics`
    5-7    3.4.2 weighted K-means                 `parts.kmeans`, called by `global_clusters`
    8, 9   3.5 secondary centres                  `secondary_centres`, `activated_centres`
    10     3.5 propagation on the semantic graph  `semantic_propagation`
    11,12  3.5 attention                          `attention`, `fuse`
    13-15  3.5 L_KD, L_FA, L_total                `distillation`, `alignment`, `pretrain_loss`
    16,17  3.6 item graphs                        `item_graph` (on `parts.text_graph`)
    18     3.6 graph convolution                  `convolve`
    19,20  3.6 sim, L_con                         `contrast`
    21,22  3.6 item vector, score                 `item_vectors`, `predict`
    23     3.6 L                                  `finetune_loss`
    =====  =====================================  ======================================

Notation
    ==========  =====================================  ====================
    symbol      name                                   shape
    ==========  =====================================  ====================
    x^t         text embedding                         [n_items, width]
    t           projected text                         [n_items, dim]
    t̃           t after domain-aware normalisation     [n_items, dim]
    μ, σ²       running mean and variance              [dim]
    c_k         global centres                         [K, dim]
    Y           one-hot labels from the server         [b, K], kept as [b]
    C̃, C′       secondary centres, activated           [K, dim]
    Z, L        [T; C′] and its normalised graph       [b + K, dim], edges
    t′, t″      text after propagation, after fusion   [b, dim]
    x_u, x^id   user and item vectors of LightGCN      [n_users | n_items, dim]
    S̃           normalised top-N item graph            CSR [n_items, n_items]
    h           x^id after one hop on S̃                [n_items, dim]
    ==========  =====================================  ====================

What crosses
    up:   `item_vectors` [n_items, dim], the normalised item vectors t̃, every round of "pretrain"; nothing about users.
    down: `centres` [K, dim] and the domain's own `labels` [n_items].

Departures
    - The sums over a batch in L_KD and L_con are means, so that the weights do not depend on the
      batch size.
    - t′ = t + ReLU(LZW₂): without the residual the vectors lose most of what the text knew
      (`residual`).
    - Fewer federated rounds than the paper's 20 and a smaller learning rate on the text path, both
      chosen on validation (`rounds`, `lr_text`).
    - The three scores of Eq. (11) share w, but each source has its own bias: a shared one cancels
      in the softmax. That of t′ starts at `own_bias`. Equal shares would make every item of a
      cluster a near copy of its centre.
    - The item graphs of Eq. (17) keep non-negative cosines to other items only, and an edge that
      either end keeps.
    - The default text encoder is the packaged 384-d MiniLM, not a 1024-d one
      (`text.encoder=bge-large` of the run).

Not stated in the paper
    - φ_emb is linear and starts near an isometry: the directions of largest variance of the
      domain's own text, rotated as close as possible to one random basis that all domains and all
      seeds share (`projection`). The rotation keeps the coordinates of different domains comparable
      and evens out their variances, so that Eq. (3) hardly bends the geometry.
    - μ and σ² start at the first round's statistics and are updated once per round, with a small ρ
      (`momentum`): while the projection trains, lagging statistics give each domain an offset, and
      the clusters would part by domain.
    - K-means: a member's weight is 1 / (distance + `cluster_eps`); every round starts from the last
      round's centres; an emptied cluster is re-seeded at the farthest item.
    - The centres arrive in normalised coordinates; FGSAT maps them back to the domain's own scale
      to mix them with t.
    - Semantic graph: an item is linked to its own secondary centre with weight 1; item-item and
      centre-centre pairs keep their top `fgsat_neighbours` cosines, non-negative; self loops.
    - A batch of items in FGSAT is the different positives and sampled negatives of a batch of
      pairs; T^pre and scores come from the whole catalogue as one batch. T^pre is t″, not φ(x).
    - L_KD and L_FA run over the positives of a batch, as often as they occur. Gradients reach both
      sides of L_KD and L_kd and the users; none passes through the edge weights of Eq. (10).
    - L_rec is BPR on x_u and x^id + t″/‖t″‖ in "pretrain" and on Eq. (21) in "finetune", with
      LightGCN's L2 term.
    - f(x_u, ·) = σ(x_uᵀ·), so KL is that of two Bernoulli variables; L_kd of Eq. (23) compares
      h^pre with h^local.
    - "finetune" goes on from the IDs of "pretrain" (`warm_start`), with a fresh optimizer. The
      decay of its learning rates (`lr_decay`) counts the federated rounds in, so that it starts
      below the rate that trained the IDs. Against `ablation="fed"` this also means more epochs on
      the IDs: `warm_start=false` separates the two.
    - T^local comes from a second projection. Its graph is refreshed every `refresh_every` epochs,
      without gradient.
    - L_con runs over the different positive items of a batch. As printed, its denominator leaves
      the positive pair out; `contrast="infonce"` keeps it.
    - Without the federated stage (`ablation="fed"`) the pre-trained graph is that of the raw text.
    - Without FGSAT (`ablation="fgsat"`) the attention mixes t with the global centre alone.
"""  # noqa: E501

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from pydantic import Field as Setting
from torch import Tensor, nn

from crossfed.methods.parts.graph import bipartite_adjacency, propagate, spmm
from crossfed.methods.parts.losses import bernoulli_kl, bpr, finite, l2_ego
from crossfed.methods.parts.sampling import bpr_epoch
from crossfed.methods.parts.text_graph import (
    aligned_projection,
    cosine_edges,
    cosine_graph,
    effective_rank,
    neighbour_overlap,
    row_product,
    top_cosine,
)
from crossfed.platform.errors import CrossfedError
from crossfed.platform.method import (
    SERVER,
    Context,
    Direction,
    Field,
    Method,
    MethodConfig,
    Out,
    Payload,
    Phase,
    Stage,
    generators,
    in_stage,
)

if TYPE_CHECKING:
    from crossfed.methods.parts.kmeans import WeightedKMeans

EPS = 1e-5  # ε of Eq. (3)
Pretrain = functools.partial(Setting, json_schema_extra=in_stage("pretrain"))  # only that stage
Finetune = functools.partial(Setting, json_schema_extra=in_stage("finetune"))  # reads the setting


class Config(MethodConfig):
    """Section 4.5 where not said otherwise; its values for Kitchen-Food are the defaults. ◇: not in
    the paper, chosen here.
    """

    dim: int = Setting(64, ge=1, description="d_t, size of all vectors")
    layers: int = Setting(2, ge=0, description="LightGCN layers")
    batch_size: int = Setting(1024, ge=2, description="training pairs per batch")
    lr: float = Setting(0.005, gt=0, description="learning rate of the ID embeddings")
    lr_text: float = Setting(0.0003, gt=0, description="learning rate of projections and FGSAT ◇")
    lr_decay: float = Finetune(
        0.9, gt=0, le=1, description="factor per epoch, applied in the finetune stage ◇"
    )
    l2: float = Setting(1e-4, ge=0, description="weight of LightGCN's L2 term ◇")
    projection: Literal["aligned", "random"] = Setting("aligned", description="how φ starts ◇")

    rounds: int = Pretrain(8, ge=0, description="federated rounds; the paper has 20 ◇")
    K: int = Pretrain(50, ge=1, description="global clusters")
    momentum: float = Pretrain(0.1, ge=0, lt=1, description="ρ of Eq. (4) ◇")
    cluster_eps: float = Pretrain(
        1.0, gt=0, description="ε of the K-means weights, in units of t̃ ◇"
    )
    eta: float = Pretrain(1.0, gt=0, description="η of Eq. (8) ◇")
    residual: bool = Pretrain(True, description="t′ = t + ReLU(LZW₂) ◇")
    own_bias: float = Pretrain(
        3.0, description="where the score's bias of t′ starts; the centres' start at 0 ◇"
    )
    fgsat_neighbours: int = Pretrain(10, ge=1, description="N of the semantic graph ◇")
    lambda_kd: float = Pretrain(0.2, ge=0, description="weight of L_KD in Eq. (15)")
    lambda_fa: float = Pretrain(0.1, ge=0, description="weight of L_FA in Eq. (15)")

    epochs: int = Finetune(60, ge=0, description="epochs of the finetune stage at most ◇")
    patience: int = Finetune(5, ge=1, description="epochs without a better validation score ◇")
    neighbours: int = Finetune(10, ge=1, description="N of the item graphs ◇")
    refresh_every: int = Finetune(
        1, ge=1, description="epochs between refreshes of the local graph ◇"
    )
    warm_start: bool = Finetune(True, description="whether finetune goes on from pretrain's IDs ◇")
    alpha: float = Finetune(0.2, ge=0, description="weight of L_con")
    beta: float = Finetune(0.2, ge=0, description="weight of L_kd")
    tau: float = Finetune(0.5, gt=0, description="temperature of Eq. (20)")
    contrast: Literal["printed", "infonce"] = Finetune(
        "printed", description="denominator of Eq. (20)"
    )
    ablation: Literal["none", "fed", "cl", "fgsat"] = Setting("none", description="row of Table 3")


class IdEncoder(nn.Module):
    """Embeddings E, U of section 3.3 and their LightGCN propagation; Xavier-initialised."""

    def __init__(self, n_users: int, n_items: int, dim: int, rng: torch.Generator) -> None:
        super().__init__()
        user = nn.init.xavier_uniform_(torch.empty(n_users, dim), generator=rng)
        item = nn.init.xavier_uniform_(torch.empty(n_items, dim), generator=rng)
        # one table: no copy per batch
        self.n_users, self.table = n_users, nn.Parameter(torch.cat([user, item]))

    def forward(self, adjacency: Tensor, layers: int) -> tuple[Tensor, Tensor]:
        """The propagated x_u [n_users, dim] and x^id [n_items, dim]."""
        both = propagate(adjacency, self.table, layers)
        return both[: self.n_users], both[self.n_users :]

    def l2(self, user: Tensor, pos: Tensor, neg: Tensor) -> Tensor:
        """LightGCN's L2 term on the rows of a batch."""
        return l2_ego(*self.table[torch.stack([user, pos + self.n_users, neg + self.n_users])])


class Fgsat(nn.Module):
    """W₁, W₂ and the linear score of section 3.5, with one bias per source that starts at `own` for
    the item itself.
    """

    def __init__(self, dim: int, sources: int, own: float, rng: torch.Generator) -> None:
        super().__init__()
        self.w1 = nn.Parameter(nn.init.xavier_uniform_(torch.empty(dim, dim), generator=rng))
        self.w2 = nn.Parameter(nn.init.xavier_uniform_(torch.empty(dim, dim), generator=rng))
        self.w = nn.Parameter(torch.zeros(dim))
        self.b = nn.Parameter(torch.tensor([own] + [0.0] * (sources - 1)))


def initial_projection(text: Tensor, dim: int, how: str) -> Tensor:
    """An orthonormal start for φ_emb. [n_items, width] -> [width, dim].

    "random": a random basis that is the same at every domain. "aligned": the principal directions
    of the domain's own text, rotated towards that basis.
    """
    width = text.shape[1]
    if dim > width:
        raise CrossfedError(
            f"dim = {dim} is larger than the text embeddings' {width} "
            f"dimensions: choose a smaller dim"
        )
    shared = torch.linalg.qr(
        torch.randn(width, dim, generator=generators(0, "fedcrf", "projection")[1])
    ).Q
    return aligned_projection(text, shared) if how == "aligned" else shared


def project(text: Tensor, weight: Tensor) -> Tensor:
    """Eq. (2): t_i = φ_emb(x_i). [b, width], [width, dim] -> [b, dim]."""
    return text @ weight


def normalise(t: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """Eq. (3): t̃ = (t − μ) / √(σ² + ε). [n, dim], [dim], [dim] -> [n, dim]."""
    return (t - mean) / torch.sqrt(variance + EPS)


def denormalise(t: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """The inverse of Eq. (3), to bring the server's centres back to the domain's own scale. [n,
    dim] -> [n, dim].
    """
    return t * torch.sqrt(variance + EPS) + mean


def running_statistics(
    t: Tensor, mean: Tensor, variance: Tensor, momentum: float
) -> tuple[Tensor, Tensor]:
    """Eq. (4): μ ← ρμ + (1−ρ)t̄ and σ² ← ρσ² + (1−ρ)s². [n, dim] -> two [dim]."""
    now, spread = t.mean(0), t.var(0, correction=0)
    return momentum * mean + (1 - momentum) * now, momentum * variance + (1 - momentum) * spread


def global_clusters(
    vectors: npt.NDArray[np.float32],
    k: int,
    start: npt.NDArray[np.float32] | None,
    eps: float,
    seed: int,
) -> WeightedKMeans:
    """Eq. (5), Eq. (6), Eq. (7): random or given initial centres, nearest assignment,
    distance-weighted means.

    Args:
        vectors: [n, dim], the items of all domains.
        start: [k, dim] centres to start from, or None for k random items.

    Returns:
        The fitted estimator, with `cluster_centers_` [k, dim] and `labels_` [n].
    """
    # only the server needs it, and scikit-learn takes a second to import
    from crossfed.methods.parts.kmeans import WeightedKMeans

    model = WeightedKMeans(k, eps=eps, init="random" if start is None else start, random_state=seed)
    return model.fit(vectors)


def secondary_centres(t: Tensor, labels: Tensor, k: int, eta: float) -> Tensor:
    """Eq. (8): C̃ = (YᵀY + ηI)⁻¹YᵀT. [b, dim], int64 [b] -> [k, dim].

    YᵀY is diagonal with the cluster sizes, so the solve is a division of segment sums: O(b·dim).
    """
    sums = t.new_zeros(k, t.shape[1]).index_add(0, labels, t)
    counts = torch.bincount(labels, minlength=k).to(t.dtype)
    return sums / (counts + eta)[:, None]


def activated_centres(centres: Tensor, w1: Tensor) -> Tensor:
    """Eq. (9): C′ = ReLU(C̃W₁). [k, dim], [dim, dim] -> [k, dim]."""
    return F.relu(centres @ w1)


def semantic_edges(t: Tensor, centres: Tensor, labels: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The graph A over Z = [T; C′]: top-n cosines among items and among centres, and each item with
    its own centre.

    Returns:
        int64 [2, e] with both directions of every edge, once each, and float [e] weights in 0 … 1;
        no self loops.
    """
    from torch_geometric.utils import to_undirected  # only domains need it, and it takes seconds

    # the centre of a cluster without items here is zero: its edges weigh nothing
    b, k = len(t), len(centres)
    own = torch.stack([torch.arange(b, device=t.device), labels + b])
    (items, item_weights), (among, centre_weights) = cosine_edges(t, n), cosine_edges(centres, n)
    edges = torch.cat([items, own, among + b], dim=1)
    weights = torch.cat([item_weights, t.new_ones(b), centre_weights])
    undirected: tuple[Tensor, Tensor] = to_undirected(edges, weights, num_nodes=b + k, reduce="max")
    return undirected


def semantic_propagation(z: Tensor, edges: Tensor, weights: Tensor, w2: Tensor) -> Tensor:
    """Eq. (10): Z′ = ReLU(LZW₂) with L = D^-½(A + I)D^-½. [n, dim], int64 [2, e], [e], [dim, dim]
    -> [n, dim].
    """
    from torch_geometric.nn import SimpleConv
    from torch_geometric.nn.conv.gcn_conv import gcn_norm

    edges, weights = gcn_norm(edges, weights, len(z), add_self_loops=True)
    return F.relu(SimpleConv("sum")(z, edges, weights) @ w2)


def attention(features: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Eq. (11): q_i = softmax of score(x) = wᵀx + b over an item's features. [n, f, dim], [dim],
    [f] -> [n, f].
    """
    return torch.softmax(features @ w + b, dim=1)


def fuse(features: Tensor, q: Tensor) -> Tensor:
    """Eq. (12): t″_i = Σ_f q_if · feature_if. [n, f, dim], [n, f] -> [n, dim]."""
    return torch.einsum("nf,nfd->nd", q, features)


def distillation(users: Tensor, teacher: Tensor, student: Tensor) -> Tensor:
    """Eq. (13): L_KD = KL(f(x_u, t″) ‖ f(x_u, t)), f = σ(x_uᵀ·), as a mean. three [b, dim] ->
    scalar.
    """
    return bernoulli_kl((users * teacher).sum(1), (users * student).sum(1)).mean()


def alignment(propagated: Tensor, fused: Tensor) -> Tensor:
    """Eq. (14): L_FA = mean_i ‖t′_i − t″_i‖². two [b, dim] -> scalar."""
    return (propagated - fused).square().sum(1).mean()


def pretrain_loss(
    rec: Tensor, kd: Tensor, fa: Tensor, lambda_kd: float, lambda_fa: float
) -> Tensor:
    """Eq. (15): L_total = L_rec + λ_KD L_KD + λ_FA L_FA."""
    return rec + lambda_kd * kd + lambda_fa * fa


def item_graph(t: Tensor, n: int) -> Tensor:
    """Eq. (16), Eq. (17): S̃ = D^-½SD^-½ of the top-n cosine similarities. [n_items, dim] -> CSR
    [n_items, n_items].
    """
    return cosine_graph(t, n)


def convolve(graph: Tensor, h0: Tensor, rows: Tensor | None = None) -> Tensor:
    """Eq. (18): H = S̃H₀, with H₀ = x^id; all rows, or only some. CSR [n, n], [n, dim], int64 [b]
    -> [n or b, dim].
    """
    return spmm(graph, h0) if rows is None else row_product(graph, h0, rows)


def contrast(local: Tensor, pre: Tensor, tau: float, keep_positive: bool) -> Tensor:
    """Eq. (19), Eq. (20): L_con, cosine contrast in both directions, as a mean. two [b, dim], b > 1
    -> scalar.

    Both directions read one similarity matrix, by rows and by columns; it equals two calls of
    `losses.info_nce`.
    """
    similarity = F.normalize(local, dim=1) @ F.normalize(pre, dim=1).T / tau  # [b, b]
    positive = similarity.diagonal()
    if not keep_positive:
        similarity = similarity - torch.diag(torch.full_like(positive, torch.inf))
    return (similarity.logsumexp(1) + similarity.logsumexp(0) - 2 * positive).mean()


def item_vectors(ids: Tensor, text: Tensor, local: Tensor, pre: Tensor) -> Tensor:
    """Eq. (21): x_i = x^id_i + t^local_i/‖·‖ + h^local_i/‖·‖ + h^pre_i/‖·‖. four [b, dim] -> [b,
    dim].
    """
    return ids + F.normalize(text, dim=1) + F.normalize(local, dim=1) + F.normalize(pre, dim=1)


def predict(users: Tensor, items: Tensor) -> Tensor:
    """Eq. (22): ŷ_ui = x_iᵀx_u for every user and item. [b, dim], [n, dim] -> [b, n]."""
    return users @ items.T


def finetune_loss(rec: Tensor, con: Tensor, kd: Tensor, alpha: float, beta: float) -> Tensor:
    """Eq. (23): L = L_rec + αL_con + βL_kd."""
    return rec + alpha * con + beta * kd


class Domain(nn.Module):
    """All that a domain owns. Parameters and buffers are its state, with the optimizer; graphs are
    rebuilt from them.
    """

    mean: Tensor
    variance: Tensor
    centres: Tensor
    labels: Tensor
    t_pre: Tensor
    t_local: Tensor
    uploads: Tensor
    tuning: Tensor

    def __init__(self, config: Config, ctx: Context) -> None:
        super().__init__()
        self.config, self.data, self.device = config, ctx.own, ctx.device
        self.text = torch.from_numpy(np.array(ctx.artifacts["text"], np.float32))
        start = initial_projection(self.text, config.dim, config.projection)
        self.phi, self.phi_local = nn.Parameter(start.clone()), nn.Parameter(start.clone())
        self.ids = IdEncoder(self.data.n_users, self.data.n_items, config.dim, ctx.torch_rng)
        self.fgsat = Fgsat(
            config.dim, 2 if config.ablation == "fgsat" else 3, config.own_bias, ctx.torch_rng
        )
        buffers = {
            "mean": torch.zeros(config.dim),
            "variance": torch.ones(config.dim),
            "centres": torch.zeros(config.K, config.dim),
            "labels": torch.zeros(self.data.n_items, dtype=torch.int64),
            "t_pre": torch.zeros(self.data.n_items, config.dim),
            # what the local graph was last built from
            "t_local": torch.zeros(self.data.n_items, config.dim),
            "uploads": torch.zeros((), dtype=torch.int64),
            "tuning": torch.zeros((), dtype=torch.bool),
        }
        for name, value in buffers.items():
            self.register_buffer(name, value)
        self.to(ctx.device)
        self.text = self.text.to(ctx.device)
        data = self.data
        self.adjacency = bipartite_adjacency(
            data.n_users, data.n_items, data.users, data.items, ctx.device
        )
        self.optimizer = self.new_optimizer()
        self.graphs: tuple[Tensor, Tensor] | None = None
        self.final: tuple[Tensor, Tensor] | None = None
        self.raw_neighbours: Tensor | None = None

    def new_optimizer(self) -> torch.optim.Adam:
        """Adam with the IDs at `lr` and everything that touches text at `lr_text`."""
        text = [self.phi, self.phi_local, *self.fgsat.parameters()]
        groups = [
            {"params": [self.ids.table], "lr": self.config.lr},
            {"params": text, "lr": self.config.lr_text},
        ]
        return torch.optim.Adam(groups, foreach=True)

    def adapted(self, t: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """t′ and t″ of items t [b, dim] with labels [b]: equations 8 to 12 in a row."""
        config = self.config
        centres = denormalise(self.centres, self.mean, self.variance)
        if config.ablation == "fgsat":
            moved, features = t, [t, centres[labels]]
        else:
            secondary = activated_centres(
                secondary_centres(t, labels, config.K, config.eta), self.fgsat.w1
            )
            edges, weights = semantic_edges(t, secondary, labels, config.fgsat_neighbours)
            z = semantic_propagation(torch.cat([t, secondary]), edges, weights, self.fgsat.w2)
            moved = t + z[: len(t)] if config.residual else z[: len(t)]
            features = [moved, centres[labels], secondary[labels]]
        stacked = torch.stack(features, dim=1)  # [b, 2 or 3, dim]
        return moved, fuse(stacked, attention(stacked, self.fgsat.w, self.fgsat.b))

    def build_graphs(self, local_only: bool = False) -> None:
        """S̃^local and S̃^pre; the latter from the raw text when there was no federated stage."""
        local = item_graph(self.t_local, self.config.neighbours)
        if self.graphs is None or not local_only:
            self.graphs = (
                local,
                item_graph(self.t_pre if self.uploads else self.text, self.config.neighbours),
            )
        else:
            self.graphs = local, self.graphs[1]

    @torch.no_grad()
    def vectors(self) -> tuple[Tensor, Tensor]:
        """The vectors that rank: users [n_users, dim] and items [n_items, dim]; cached until the
        next training step.
        """
        if self.final is None:
            users, ids = self.ids(self.adjacency, self.config.layers)
            if self.graphs is not None:
                hops = [convolve(graph, ids) for graph in self.graphs]
                items = item_vectors(ids, project(self.text, self.phi_local), *hops)
            else:
                fused = self.adapted(project(self.text, self.phi), self.labels)[1]
                items = ids + F.normalize(fused, dim=1)
            self.final = users, items
        return self.final


@torch.no_grad()
def upload(state: Domain, inbox: Mapping[str, Payload], ctx: Context) -> Out:
    """Project and normalise all item texts, and send them to the server."""
    t = project(state.text, state.phi)
    momentum = state.config.momentum if state.uploads else 0.0
    mean, variance = running_statistics(t, state.mean, state.variance, momentum)
    state.mean.copy_(mean)
    state.variance.copy_(variance)
    state.uploads += 1
    return Out({SERVER: {"item_vectors": normalise(t, mean, variance).cpu().numpy()}})


@dataclass
class Server:
    """The server's state: the last round's centres, None before the first round."""

    config: Config
    centres: npt.NDArray[np.float32] | None = None


def cluster(state: Server, inbox: Mapping[str, Payload], ctx: Context) -> Out:
    """Cluster the union of all domains' items; every domain gets the centres and its own items'
    labels.
    """
    vectors = [inbox[name]["item_vectors"] for name in ctx.peers]
    union = np.concatenate(vectors)
    if len(union) < state.config.K:
        raise CrossfedError(
            f"K = {state.config.K} clusters need at least as many items, but the domains "
            f"{', '.join(ctx.peers)} have only "
            f"{len(union)} items in total: set a smaller K"
        )
    fitted = global_clusters(
        union, state.config.K, state.centres, state.config.cluster_eps, int(ctx.rng.integers(2**31))
    )
    state.centres = fitted.cluster_centers_.astype(np.float32)
    labels = np.split(fitted.labels_, np.cumsum([len(v) for v in vectors])[:-1])
    send: dict[str, Payload] = {
        name: {"centres": state.centres, "labels": own}
        for name, own in zip(ctx.peers, labels, strict=True)
    }
    return Out(
        send,
        {
            "kmeans_iterations": float(fitted.n_iter_),
            "kmeans_inertia": fitted.inertia_ / len(union),
        },
    )


def adapt(state: Domain, inbox: Mapping[str, Payload], ctx: Context) -> Out:
    """One epoch of FGSAT and the recommender on the server's centres and labels."""
    config = state.config
    state.centres.copy_(torch.tensor(inbox[SERVER]["centres"]))
    state.labels.copy_(torch.tensor(inbox[SERVER]["labels"]))

    def losses(
        user: Tensor, items: Tensor, pos: Tensor, neg: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        users, ids = state.ids(state.adjacency, config.layers)
        t = project(state.text[items], state.phi)
        moved, fused = state.adapted(t, state.labels[items])
        u, x = users[user], ids[items] + F.normalize(fused, dim=1)
        rec = bpr((u * x[pos]).sum(1), (u * x[neg]).sum(1))
        kd, fa = distillation(u, fused[pos], t[pos]), alignment(moved[pos], fused[pos])
        return pretrain_loss(rec, kd, fa, config.lambda_kd, config.lambda_fa), {
            "rec": rec,
            "kd": kd,
            "fa": fa,
        }

    return Out(metrics=_epoch(state, ctx, losses) | _semantics(state))


@torch.no_grad()
def keep_prior(state: Domain, inbox: Mapping[str, Payload], ctx: Context) -> Out:
    """Freeze T^pre = t″ of all items."""
    state.t_pre.copy_(state.adapted(project(state.text, state.phi), state.labels)[1])
    return Out()


@torch.no_grad()
def begin_finetune(state: Domain, inbox: Mapping[str, Payload], ctx: Context) -> Out:
    """Build both graphs; start the optimizer anew, and the IDs where they are not taken over."""
    if not state.config.warm_start:
        fresh = IdEncoder(state.data.n_users, state.data.n_items, state.config.dim, ctx.torch_rng)
        state.ids.load_state_dict(fresh.state_dict())
    state.t_local.copy_(project(state.text, state.phi_local))
    state.optimizer, state.final = state.new_optimizer(), None
    state.tuning.fill_(True)
    state.build_graphs()
    return Out()


def finetune(state: Domain, inbox: Mapping[str, Payload], ctx: Context) -> Out:
    """One local epoch of stage 2."""
    config = state.config
    if ctx.round > 1 and (ctx.round - 1) % config.refresh_every == 0:
        state.t_local.copy_(project(state.text, state.phi_local).detach())
        state.build_graphs(local_only=True)
    # epochs that the IDs have been trained for
    passed = int(state.uploads) if config.warm_start else 0
    factor = config.lr_decay ** (passed + ctx.round - 1)
    for group, rate in zip(state.optimizer.param_groups, (config.lr, config.lr_text), strict=True):
        group["lr"] = rate * factor
    graphs = state.graphs
    assert graphs is not None, "begin_finetune has built them"

    def losses(
        user: Tensor, items: Tensor, pos: Tensor, neg: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        users, ids = state.ids(state.adjacency, config.layers)
        local, pre = (convolve(graph, ids, items) for graph in graphs)
        u, x = (
            users[user],
            item_vectors(ids[items], project(state.text[items], state.phi_local), local, pre),
        )
        rec = bpr((u * x[pos]).sum(1), (u * x[neg]).sum(1))
        bought = torch.unique(pos)
        con = u.new_zeros(())
        if config.ablation != "cl" and len(bought) > 1:
            con = contrast(local[bought], pre[bought], config.tau, config.contrast == "infonce")
        kd = distillation(u, pre[pos], local[pos])
        return finetune_loss(rec, con, kd, config.alpha, config.beta), {
            "rec": rec,
            "con": con,
            "kd": kd,
        }

    return Out(metrics=_epoch(state, ctx, losses))


def _epoch(
    state: Domain, ctx: Context, losses: Callable[..., tuple[Tensor, dict[str, Tensor]]]
) -> dict[str, float]:
    """One pass over the training pairs; the mean of every part of the loss.

    `losses(user, items, pos, neg)` gets the batch's users [b], its different items [m], and the
    places of the positives and negatives among these, [b] each.
    """
    state.final = None
    parts: list[Tensor] = []
    names: list[str] = []
    for batch in bpr_epoch(ctx.own, state.config.batch_size, ctx.rng):
        user, pos, neg = (column.to(state.device) for column in batch)
        items, where = torch.unique(torch.cat([pos, neg]), return_inverse=True)
        loss, part = losses(user, items, where[: len(pos)], where[len(pos) :])
        part["l2"] = state.ids.l2(user, pos, neg)
        state.optimizer.zero_grad()
        (loss + state.config.l2 * part["l2"]).backward()  # type: ignore[no-untyped-call]
        state.optimizer.step()
        names = [f"loss_{name}" for name in part]
        parts.append(torch.stack(list(part.values())).detach())
    means = torch.stack(parts).mean(0).tolist() if parts else []
    return dict(finite(dict(zip(names, means, strict=True)), ctx))


@torch.no_grad()
def _semantics(state: Domain) -> dict[str, float]:
    """What the text path still knows: rank of t″, clusters in use, neighbours shared with the raw
    text.
    """
    fused = state.adapted(project(state.text, state.phi), state.labels)[1]
    if state.raw_neighbours is None:
        state.raw_neighbours = top_cosine(state.text, state.config.neighbours)[0]
    neighbours = top_cosine(fused, state.config.neighbours)[0]
    return {
        "effective_rank": effective_rank(fused),
        "clusters_used": float(len(torch.unique(state.labels))),
        "text_neighbours_kept": neighbour_overlap(neighbours, state.raw_neighbours),
    }


def score(state: Domain, users: npt.NDArray[np.int64]) -> Tensor:
    """Eq. (22) for some users. int64 [b] -> float32 [b, n_items]."""
    user_vectors, items = state.vectors()
    return predict(user_vectors[torch.from_numpy(users).to(state.device)], items)


def export(state: Domain) -> dict[str, Tensor]:
    """The final user and item vectors: all that Eq. (22) needs."""
    users, items = state.vectors()
    return {"users": users, "items": items}


def state_dict(state: Domain | Server) -> dict[str, Any]:
    """A domain's parameters, buffers and optimizer, or the server's centres: all else is rebuilt
    from these.
    """
    if isinstance(state, Server):
        return {} if state.centres is None else {"centres": state.centres}
    return {"model": dict(state.state_dict()), "optimizer": state.optimizer.state_dict()}


def load_state_dict(state: Domain | Server, saved: Mapping[str, Any]) -> None:
    """Continue from `state_dict`'s result, bit for bit."""
    if isinstance(state, Server):
        state.centres = saved.get("centres")
        return
    state.load_state_dict(dict(saved["model"]))
    state.optimizer = state.new_optimizer()
    state.optimizer.load_state_dict(dict(saved["optimizer"]))
    state.final = state.graphs = None
    if state.tuning:
        state.build_graphs()


def stages(config: Config) -> tuple[Stage, ...]:
    """The federated stage, which the ablation "fed" skips, then the local one."""
    return (
        Stage(
            "pretrain",
            rounds=0 if config.ablation == "fed" else config.rounds,
            each=(Phase(upload), Phase(cluster, at="server"), Phase(adapt)),
            close=(Phase(keep_prior),),
            edges=frozenset({Direction.UP, Direction.DOWN}),
            keep_best=False,  # the next stage wants T^pre, not the best ranking of this one
        ),
        Stage(
            "finetune",
            rounds=config.epochs,
            open=(Phase(begin_finetune),),
            each=(Phase(finetune),),
            patience=config.patience,
        ),
    )


METHOD = Method(
    name="fedcrf",
    title="FedCRF: semantic clusters across domains, FGSAT and text-graph fine-tuning",
    paper="arXiv 2604.17681",
    Config=Config,
    stages=stages,
    init_domain=Domain,
    init_server=lambda config, ctx: Server(config),
    score=score,
    state_dict=state_dict,
    load_state_dict=load_state_dict,
    export=export,
    fields=(
        Field(
            "item_vectors",
            Direction.UP,
            ("n_items", "dim"),
            "normalised text vectors of the domain's items",
        ),
        Field("centres", Direction.DOWN, ("K", "dim"), "global cluster centres"),
        Field(
            "labels",
            Direction.DOWN,
            ("n_items",),
            "the domain's items' clusters",
            dtype="int64",
            high="K",
        ),
    ),
    artifacts=("text",),
)
