"""FedCGR: federated generation of semantic IDs; the server answers every domain with an average of
its own.

Paper
    Liu et al., "FedCGR: Federated Cross-Domain Generative Recommendation", arXiv 2608.10929 v1.
    Items of all domains speak one language, the semantic IDs of a frozen tokeniser. Stage "cf" is
    local: SASRec's item embeddings, then frozen. Stage "federated" trains a generator, whose shared
    parameters come back averaged by how alike the domains' prototypes are.

    =====  =====================================  ================================================
    no.    section, what                          here
    =====  =====================================  ================================================
    1      2.1 FedAvg                             `personalise` with `tau_a=inf`
    2, 4   2.2, 3.2 residual quantisation         the artifact "sids" (`parts.quantiser`)
    3      2.2 p(item) = Π p(code | codes before) `score`
    5      3.2 local CF embeddings                `freeze` (on `parts.next_item`)
    6, 7   3.2 adapter, reliability               `Adapter`, `reliability`
    8, 9   3.2 input, domain embedding            `cf_residual`, `parts.generative.Generator.embed`
    10-12  3.2 dense head, its target, its loss   `unit`, `dense_loss`
    13,14  3.3 encoder layer                      `parts.generative.EncoderLayer`
    15,16  3.3 experts, load balance              `route`, `mixture`, `load_balance`
    17,18  3.3 prototype, its moving average      `mean_memory`, `moving_prototype`
    19,20  3.3 personalised average               `personalise`, `aggregation_weights`
    21-23  3.4 decoder, its loss                  `parts.generative`
    24     3.4 local objective                    `objective`
    =====  =====================================  ================================================

Notation
    ==========  =========================================  ======================
    symbol      name                                       shape
    ==========  =========================================  ======================
    c_v         semantic ID of item v                      [levels]
    e^cf        CF embeddings, frozen                      [n_items, cf_dim]
    ρ           reliability of items                       [n_items]
    g           the domain's gate σ(α)                     –
    M           the encoded history                        [b, 1 + T, dim]
    N_s, N_e    shared experts, all experts                –
    p           the domain's prototype                     [dim]
    ω_ij        weight of domain j in i's average          [domains, domains]
    W_sh        shared parameters                          as in the network
    ==========  =========================================  ======================

What crosses
    up:   the shared parameters (5.15 M at the paper's sizes, 20.6 MB), the prototype p [dim], the number n of instances.
    down: the domain's own average of the shared parameters. Never: domain embedding, gate, adapter,
    dense head, private experts and their router rows, CF embeddings, reliabilities. A prototype is
    a mean over users' histories without noise: what it tells about a domain with few users is not
    bounded.

Departures
    - Items that share a semantic ID are ordered by training popularity, not by that of the
      validation items.
    - Positions are counted from the last item of a history.
    - Without gain over a single query there is no self-attention in the decoder; see
      `parts.generative`.
    - At width 256 a prototype is 1,024 bytes, a kilobyte and not less.

Not stated in the paper
    - Every item with at least one item before it is a training instance, n_i their number.
    - f_ctx of Eq. (21) is the sum, and the decoder's nets have four times the width: what is
      counted (20.6 MB, and 17.4 MB for TIGER) leaves no room for a learned map. Position, level and
      start embeddings are shared, like all that is not listed as local.
    - e^cf are the item embeddings of SASRec trained with cross-entropy over all items; its dropout,
      rate and batches.
    - Weights start at N(0, 0.02²), embeddings too (`embedding_std`). It decides whether Eq. (20)
      tells domains apart: the CF adapter ends in a layer norm, so that beside embeddings that small
      an item is nearly its CF residual, in coordinates that no two domains share, and prototypes of
      different domains are orthogonal before anything is trained (cosines -.1 to .3 with the preset
      `small`; with deviation 0.2 .67 to .78, with 1 .92 to .95).
    - p̄ of Eq. (17) is not of length one, so that its share in Eq. (18) is more than 1 - β.
    - A batch holds windows of similar length; the negatives of Eq. (12) are such windows' targets.
    - The gate starts at ½. Router rows have no bias. Routing weights are the top two probabilities,
      divided by their sum.
    - L_aux counts real positions only and is the mean over encoder layers; f_j is the share of all
      choices.
    - L_dense is as printed: an item that is the target of two instances of a batch is a negative of
      itself.
    - The prototype's mean is over up to `prototype_users` users drawn anew each round, without
      dropout, after local training and before averaging; p starts at zero, so that the first p is
      the first mean, normalised.
    - Adam; its moments stay with their domain. The learning rate changes between rounds, not
      within. Gradients of shared and local parameters are clipped together.
    - What is evaluated, kept and recommended with is the domain's average beside its local
      parameters, as at the start of a round.
    - `ablation="fedavg"`: where the paper averages all experts, there are N_s + 1 shared ones and
      no private one. `ablation="split"`: one shared net of the width of an expert. Without the CF
      residual the dense head stays.
"""  # noqa: E501

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from pydantic import Field as Setting
from pydantic import PositiveFloat, field_validator, model_validator
from torch import Tensor, nn

from crossfed.methods.parts import next_item
from crossfed.methods.parts.averaging import (
    COUNT,
    Server,
    Sharing,
    adopt_step,
    check_same,
    opening,
    proximal,
    volume_weights,
    weighted_average,
)
from crossfed.methods.parts.generative import (
    GenerativeLearner,
    Generator,
    GeneratorConfig,
    Memory,
    recommend_exported,
    sample_memories,
    schedule,
)
from crossfed.methods.parts.transformer import Dropout, FeedForward, initialise
from crossfed.platform.method import (
    SERVER,
    Array,
    Context,
    Direction,
    Field,
    Method,
    Out,
    Payload,
    Phase,
    Stage,
    in_stage,
)

PROTOTYPE = "prototype"
CfStage = functools.partial(Setting, json_schema_extra=in_stage("cf"))  # only stage "cf" reads it

SHARING = Sharing(
    {
        "tokens": "embeddings of the codes",
        "positions": "position embeddings",
        "start": "what the decoder asks first",
        "level_embeddings": "embeddings of the levels",
        "encoder.*": "attention, layer norms, shared experts and their router rows",
        "decoder.*": "attention to the memory, feed-forward nets and layer norms",
        "heads.*": "output layers, one per level",
    }
)

Ablation = Literal[
    "none",
    "cf",
    "confidence",
    "gate",
    "dense",
    "dense-confidence",
    "fedavg",
    "prototype",
    "split",
    "private",
    "cf-fedavg",
]


class Config(GeneratorConfig):
    """Section 4.1.4 where not said otherwise. ◇: not in the paper, chosen here."""

    cf_dim: int = Setting(128, ge=1, description="d_cf, width of the CF embeddings")
    cf_layers: int = Setting(2, ge=0, description="blocks of the local SASRec")
    cf_heads: int = Setting(2, ge=1, description="its attention heads; must divide cf_dim")
    cf_epochs: int = CfStage(15, ge=1, description="its epochs")
    cf_dropout: float = CfStage(0.2, ge=0, lt=1, description="its dropout ◇")
    cf_lr: float = CfStage(0.001, gt=0, description="its learning rate ◇")
    cf_batch_size: int = CfStage(128, ge=1, description="its windows in a batch ◇")
    adapter_dropout: float = Setting(0.1, ge=0, lt=1, description="dropout of the CF adapter")
    epsilon: float = Setting(1e-8, gt=0, description="ε of Eq. (7) ◇")
    dense_inner: int = Setting(64, ge=1, description="width of the dense head's hidden layer")
    tau: float = Setting(0.07, gt=0, description="τ, temperature of the dense loss")
    lambda_d: float = Setting(0.1, ge=0, description="λ_d, weight of the dense loss")
    shared_experts: int = Setting(2, ge=1, description="N_s, shared experts of an encoder layer")
    top_k: int = Setting(2, ge=1, description="experts per position")
    lambda_a: float = Setting(0.01, ge=0, description="λ_a, weight of the load balance")
    mu: float = Setting(0.01, ge=0, description="μ, weight of the proximal term")
    tau_a: PositiveFloat | Literal["inf"] = Setting(
        0.1, description="τ_a, temperature of the personalised average (Figure 4); inf is FedAvg"
    )
    beta: float = Setting(0.9, ge=0, lt=1, description="β, momentum of the prototype")
    prototype_users: int = Setting(
        1024, ge=1, description="users that a prototype is the mean of ◇"
    )
    rounds: int = Setting(40, ge=0, description="federated rounds at most")
    local_epochs: int = Setting(2, ge=1, description="E, local epochs in a round")
    warmup: int = Setting(5, ge=0, description="rounds in which the learning rate rises")
    patience: int | None = Setting(
        None, ge=1, description="evaluations without a better one before stopping ◇"
    )
    ablation: Ablation = Setting(
        "none",
        description="a row of Table 5: w/o CF residual (cf), ρ (confidence), gate, dense head, "
        "ρ in its loss "
        "(dense-confidence), personalised average and private experts (fedavg), prototype "
        "weights (prototype), experts (split), "
        "private expert (private), or both (cf-fedavg)",
    )

    @field_validator("tau_a", mode="before")
    @classmethod
    def _infinite(cls, value: Any) -> Any:
        """Infinity is the word inf, which YAML, JSON and search spaces keep."""
        return "inf" if isinstance(value, float) and value == math.inf else value

    @model_validator(mode="after")
    def _cf_divisible(self) -> Self:
        if self.cf_dim % self.cf_heads:
            raise ValueError(f"cf_dim={self.cf_dim} is not a multiple of cf_heads={self.cf_heads}")
        return self

    @property
    def temperature(self) -> float:
        """τ_a as a number."""
        plain = self.ablation in ("fedavg", "prototype", "cf-fedavg")
        return math.inf if plain else float(self.tau_a)

    @property
    def private(self) -> bool:
        """Whether every encoder layer has an expert of the domain's own."""
        return self.ablation not in ("fedavg", "cf-fedavg", "split", "private")

    @property
    def n_shared(self) -> int:
        """Shared experts of an encoder layer."""
        return self.shared_experts + (self.ablation in ("fedavg", "cf-fedavg"))

    @property
    def residual(self) -> bool:
        """Whether CF embeddings are added to the items of a history."""
        return self.ablation not in ("cf", "cf-fedavg")

    @property
    def dense(self) -> bool:
        """Whether there is a dense head."""
        return self.lambda_d > 0 and self.ablation != "dense"

    @property
    def extractor(self) -> next_item.NextItemConfig:
        """The local SASRec."""
        return next_item.NextItemConfig(
            dim=self.cf_dim,
            layers=self.cf_layers,
            heads=self.cf_heads,
            inner=self.cf_dim,
            dropout=self.cf_dropout,
            length=self.length,
            lr=self.cf_lr,
            batch_size=self.cf_batch_size,
        )


# -- the reliability-aware interface ---------------------------------------------------------------


class Adapter(nn.Module):
    """Eq. (6): A(e) = Dropout(LayerNorm(W e + b)). [..., cf_dim] -> [..., dim]."""

    def __init__(self, cf_dim: int, dim: int, rate: float) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = (
            nn.Linear(cf_dim, dim),
            nn.LayerNorm(dim),
            Dropout(rate),
        )

    def forward(self, e: Tensor) -> Tensor:
        return self.dropout(self.norm(self.linear(e)))  # type: ignore[no-any-return]


def reliability(counts: npt.NDArray[np.int64], epsilon: float) -> npt.NDArray[np.float32]:
    """Eq. (7): ρ_v = log(1 + n_v) / (ε + max_w log(1 + n_w)).

    Args:
        counts: training interactions n of each item, [n_items].

    Returns:
        float32 [n_items], between 0 and 1.
    """
    logs = np.log1p(counts)
    return np.asarray(logs / (epsilon + logs.max(initial=0)), np.float32)


def cf_residual(adapted: Tensor, rho: Tensor, gate: Tensor | float) -> Tensor:
    """Eq. (8), last term: ρ_v · g · A(e_v). [b, T, dim], [b, T], a scalar -> [b, T, dim]."""
    return rho.unsqueeze(-1) * gate * adapted


def unit(x: Tensor) -> Tensor:
    """Eq. (10) and Eq. (11): rows of length one, of what the head predicts and of the targets' CF
    embeddings.
    """
    return F.normalize(x, dim=-1)


def dense_loss(predicted: Tensor, target: Tensor, rho: Tensor, tau: float) -> Tensor:
    """Eq. (12): -1/|B| Σ_n ρ_n log( exp(ẑ_n·z_n / τ) / Σ_m exp(ẑ_n·z_m / τ) ); no gradient reaches
    z.

    Args:
        predicted: ẑ, [b, cf_dim]. target: z, [b, cf_dim]; both of unit length. rho: of the targets,
            [b].

    Returns:
        A scalar.
    """
    logits = predicted @ target.detach().T / tau
    return -(rho * logits.log_softmax(1).diagonal()).mean()


# -- experts ---------------------------------------------------------------------------------------


def route(logits: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Eq. (15), the weights a_e(x): the k largest of softmax(logits), divided by their sum.

    Args:
        logits: [n, N_e], shared experts first.

    Returns:
        all probabilities [n, N_e]; the chosen experts, int64 [n, k]; their weights [n, k].
    """
    p = logits.softmax(1)
    top = p.topk(min(k, p.shape[1]), dim=1)
    return p, top.indices, top.values / top.values.sum(1, keepdim=True)


def mixture(x: Tensor, experts: Sequence[nn.Module], chosen: Tensor, weights: Tensor) -> Tensor:
    """Eq. (15): Σ over the chosen experts of a_e(x) E_e(x); an expert sees only those x that chose
    it.

    Args:
        x: [n, dim]. chosen, weights: [n, k], as from `route`.

    Returns:
        [n, dim].
    """
    out = torch.zeros_like(x)
    for number, expert in enumerate(experts):
        row, place = (chosen == number).nonzero(as_tuple=True)
        out = out.index_add(0, row, expert(x[row]) * weights[row, place].unsqueeze(1))
    return out


def load_balance(p: Tensor, chosen: Tensor) -> Tensor:
    """Eq. (16): N_e Σ_j f_j p_j, f the share of choices and p the mean probability per expert; 1
    when both are even.

    Args:
        p: [n, N_e]. chosen: int64 [n, k].

    Returns:
        A scalar; the gradient goes through p alone.
    """
    return p.shape[1] * (expert_shares(p, chosen) * p.mean(0)).sum()


def expert_shares(p: Tensor, chosen: Tensor) -> Tensor:
    """f of Eq. (16): the share of all choices that fell on each expert, [N_e]."""
    return torch.bincount(chosen.flatten(), minlength=p.shape[1]) / max(chosen.numel(), 1)


class SharedExperts(nn.Module):
    """The part of a layer's experts that crosses: the shared ones and their router rows [n,
    dim].
    """

    def __init__(self, n: int, dim: int, inner: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(FeedForward(dim, inner, "relu") for _ in range(n))
        self.router = nn.Parameter(torch.empty(n, dim))


class PrivateExpert(nn.Module):
    """The part that stays: one expert and its router row [1, dim]."""

    def __init__(self, dim: int, inner: int) -> None:
        super().__init__()
        self.expert = FeedForward(dim, inner, "relu")
        self.router = nn.Parameter(torch.empty(1, dim))


class Local(nn.Module):
    """What stays with the domain besides its embedding: gate, adapter, dense head, one expert per
    encoder layer.

    Attributes:
        alpha: α, [1]; the gate is its sigmoid. Like the others None where an ablation leaves it
            out.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        d, hidden = config.dim, config.dense_inner
        gated = config.residual and config.ablation != "gate"
        self.alpha = nn.Parameter(torch.empty(1)) if gated else None
        self.adapter = (
            Adapter(config.cf_dim, d, config.adapter_dropout) if config.residual else None
        )
        head = nn.Sequential(nn.Linear(d, hidden), nn.GELU(), nn.Linear(hidden, config.cf_dim))
        self.dense = head if config.dense else None
        layers = config.encoder_layers if config.private else 0
        self.experts = nn.ModuleList(PrivateExpert(d, config.inner) for _ in range(layers))

    @property
    def gate(self) -> Tensor | float:
        """g = σ(α); 1 where it is left out."""
        return 1.0 if self.alpha is None else self.alpha.sigmoid()


class Net(Generator):
    """The generator with experts, and what stays with the domain: `local`, and its embedding, which
    is the `lead`.

    Attributes:
        routed: per encoder layer of the last `encode`, probabilities and choices of its experts.
    """

    config: Config

    def __init__(self, config: Config, rng: torch.Generator) -> None:
        super().__init__(config, rng)
        self.routed: list[tuple[Tensor, Tensor]] = []
        self.local = Local(config)
        initialise(self.local, 0.02, rng)

    def make_feed(self) -> nn.Module:
        """Shared experts, or one net for all where the experts are left out."""
        config = self.config
        if config.ablation == "split":
            return FeedForward(config.dim, config.inner, "relu")
        return SharedExperts(config.n_shared, config.dim, config.inner)

    def feed(self, layer: int, x: Tensor) -> Tensor:
        """Eq. (15) at the real positions of a batch, over the union of shared and private experts:
        [n, dim] -> [n, dim].
        """
        shared: Any = self.encoder[layer].feed
        if not isinstance(shared, SharedExperts):
            return shared(x)  # type: ignore[no-any-return]
        experts: list[nn.Module] = list(shared.experts)
        rows: Tensor = shared.router
        if self.config.private:
            own: Any = self.local.experts[layer]
            experts, rows = [*experts, own.expert], torch.cat([rows, own.router])
        p, chosen, weights = route(x @ rows.T, self.config.top_k)
        self.routed.append((p, chosen))
        return mixture(x, experts, chosen, weights)

    def encode(self, x: Tensor, real: Tensor) -> Memory:
        self.routed = []
        return super().encode(x, real)


# -- prototypes and the server ---------------------------------------------------------------------


def mean_memory(pooled: Tensor) -> Tensor:
    """Eq. (17): p̄ = 1/|S| Σ_u MeanPool(M_u), over item positions alone, without gradient. [users,
    dim] -> [dim].
    """
    return pooled.detach().mean(0)


def moving_prototype(former: Tensor, mean: Tensor, beta: float) -> Tensor:
    """Eq. (18): norm(β p + (1 - β) p̄). [dim], [dim] -> [dim], of length one."""
    return F.normalize(beta * former + (1 - beta) * mean, dim=0)


def cosines(prototypes: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """cos(p_i, p_j): [domains, dim] -> float64 [domains, domains]; equal pairs give equal bits."""
    p = np.asarray(prototypes, np.float64)
    length = np.sqrt((p**2).sum(1))
    # a matrix product may round equal rows differently
    inner = np.stack([(p[i] * p).sum(1) for i in range(len(p))])
    return np.asarray(inner / np.maximum(length[:, None] * length, 1e-12), np.float64)


def aggregation_weights(
    prototypes: npt.NDArray[Any], counts: npt.ArrayLike, tau_a: float
) -> npt.NDArray[np.float64]:
    """Eq. (20): ω_ij = n_j exp(cos(p_i, p_j) / τ_a) / Σ_k n_k exp(cos(p_i, p_k) / τ_a).

    Args:
        prototypes: [domains, dim]. counts: training instances n, [domains].
        tau_a: positive; infinite for FedAvg's weights.

    Returns:
        float64 [domains, domains]; every row sums to one.
    """
    told = cosines(prototypes)
    # the largest is 1, so that nothing overflows
    affinity = np.exp((told - told.max(1, keepdims=True)) / tau_a)
    return np.stack([volume_weights(counts, row) for row in affinity])


def objective(terms: Mapping[str, Tensor], lambda_d: float, lambda_a: float) -> Tensor:
    """Eq. (24): L_sid + λ_d L_dense + λ_a L_aux + (μ/2)‖W_sh - W̄_sh‖².

    Args:
        terms: scalars "loss_sid", and where they exist "loss_dense", "loss_balance" and "penalty",
            the last one with its μ.
    """
    weights = {"loss_dense": lambda_d, "loss_balance": lambda_a}
    return torch.stack([weights.get(name, 1.0) * value for name, value in terms.items()]).sum()


@dataclass(slots=True)
class Center(Server):
    """The server's state: the shared parameters that all start from, and τ_a."""

    tau_a: float = math.inf


# -- a domain --------------------------------------------------------------------------------------


class Domain(GenerativeLearner):
    """A domain's generator, CF embeddings, reliabilities and prototype.

    Attributes:
        extractor: the local SASRec. cf: its item embeddings once frozen, [n_items, cf_dim].
        rho: [n_items]. prototype: [dim].
    """

    config: Config

    def __init__(self, config: Config, ctx: Context) -> None:
        super().__init__(config, ctx, Net(config, ctx.torch_rng))
        self.extractor = next_item.Learner(config.extractor, ctx)
        self.cf: Tensor | None = None
        counts = np.bincount(ctx.own.items, minlength=ctx.own.n_items)
        self.rho = torch.from_numpy(reliability(counts, config.epsilon)).to(ctx.device)
        self.prototype = torch.zeros(config.dim, device=ctx.device)

    def residual(self, items: Tensor) -> Tensor | None:
        """What CF adds to the items of a history, int64 [b, T] -> [b, T, dim]."""
        if not self.config.residual or self.cf is None:
            return None
        rho = (
            torch.ones_like(items, dtype=self.rho.dtype)
            if self.config.ablation == "confidence"
            else self.rho[items]
        )
        return cf_residual(self.net.local.adapter(self.cf[items]), rho, self.net.local.gate)

    def losses(self, memory: Memory, target: Tensor) -> dict[str, Tensor]:
        """L_sid, L_dense and L_aux of a batch."""
        terms = super().losses(memory, target)
        if self.config.dense and self.cf is not None:
            plain = self.config.ablation == "dense-confidence"
            rho = torch.ones_like(self.rho[target]) if plain else self.rho[target]
            predicted = unit(self.net.local.dense(memory.pooled()))
            terms["loss_dense"] = dense_loss(predicted, unit(self.cf[target]), rho, self.config.tau)
        if self.net.routed:
            terms["loss_balance"] = torch.stack(
                [load_balance(*layer) for layer in self.net.routed]
            ).mean()
        return terms

    def objective(self, terms: Mapping[str, Tensor]) -> Tensor:
        """`objective` with the weights of the Config."""
        return objective(terms, self.config.lambda_d, self.config.lambda_a)

    def diagnostics(self) -> dict[str, float]:
        """Gate and mean reliability (Table 6), and the use of experts in the last `encode`, the
        mean over layers.
        """
        told = {"confidence": float(self.rho.mean())}
        if self.config.residual:
            with torch.no_grad():
                told["gate"] = float(self.net.local.gate)
        if self.net.routed:
            use = torch.stack([expert_shares(*layer) for layer in self.net.routed]).mean(0).tolist()
            names = [f"shared_{number}" for number in range(1, self.config.n_shared + 1)]
            told |= {
                f"expert_use_{name}": share
                for name, share in zip([*names, "private"], use, strict=False)
            }
        return told

    def state_dict(self) -> dict[str, Any]:
        """Generator, optimizer, prototype, and the SASRec or what is left of it."""
        cf = {
            "cf": self.cf,
            "extractor": None if self.cf is not None else self.extractor.state_dict(),
        }
        return {**super().state_dict(), "prototype": self.prototype, **cf}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """The reverse of `state_dict`."""
        super().load_state_dict(saved)
        self.prototype = saved["prototype"].to(self.device)
        self.cf = None if saved["cf"] is None else saved["cf"].to(self.device)
        if saved["extractor"] is not None:
            self.extractor.load_state_dict(saved["extractor"])


# -- steps -----------------------------------------------------------------------------------------


def train_cf(state: Domain, inbox: Mapping[str, Payload], ctx: Context) -> Out:
    """One epoch of the local SASRec."""
    return Out(metrics={"loss_cf": state.extractor.train(ctx)["loss"]})


def freeze(state: Domain, inbox: Mapping[str, Payload], ctx: Context) -> Out:
    """Eq. (5): keep SASRec's item embeddings [n_items, cf_dim] as they are now."""
    state.cf = state.extractor.net.items.detach().clone()
    state.changed()
    return Out()


def train(state: Domain, inbox: Mapping[str, Payload], ctx: Context) -> Out:
    """Eq. (24) for E epochs from the domain's average W̄_sh; then its prototype; then both, with n,
    to the server.
    """
    config = state.config
    shared = list(SHARING.parameters(state.net).values())
    start = [w.detach().clone() for w in shared]
    scale = schedule(ctx.round, config.rounds, config.warmup)
    penalty = (lambda: proximal(shared, start, config.mu)) if config.mu else None
    metrics = dict(state.train(ctx, config.local_epochs, scale, penalty))
    memory = sample_memories(state, ctx.own, config.prototype_users, ctx.rng)
    if memory is not None:
        state.prototype = moving_prototype(
            state.prototype, mean_memory(memory.pooled()), config.beta
        )
    payload: dict[str, Array] = SHARING.upload(state.net)
    payload[PROTOTYPE] = state.prototype.cpu().numpy().copy()
    payload[COUNT] = np.array([next_item.n_targets(ctx.own)], np.int64)
    return Out({SERVER: payload}, metrics | state.diagnostics())


def personalise(state: Center, inbox: Mapping[str, Payload], ctx: Context) -> Out:
    """Eq. (19): W̄_i = Σ_j ω_ij W_j for every domain i; Eq. (1) for all where τ_a is infinite."""
    shapes = {name: value.shape for name, value in state.shared.items()}
    payloads = [
        {key: inbox[name][key] for key in inbox[name] if key not in (COUNT, PROTOTYPE)}
        for name in ctx.peers
    ]
    for name, payload in zip(ctx.peers, payloads, strict=True):
        check_same(name, payload, shapes)
    prototypes = np.stack([inbox[name][PROTOTYPE] for name in ctx.peers])
    counts = [int(inbox[name][COUNT][0]) for name in ctx.peers]
    weights, told = aggregation_weights(prototypes, counts, state.tau_a), cosines(prototypes)
    pairs = [(i, j) for i in range(len(counts)) for j in range(len(counts))]
    metrics = {f"weight_{ctx.peers[i]}_{ctx.peers[j]}": float(weights[i, j]) for i, j in pairs}
    metrics |= {
        f"cosine_{ctx.peers[i]}_{ctx.peers[j]}": float(told[i, j]) for i, j in pairs if i < j
    }
    averages = [weighted_average(payloads, row) for row in weights]
    return Out(dict(zip(ctx.peers, averages, strict=True)), metrics)


def score(state: Domain, users: npt.NDArray[np.int64]) -> Tensor:
    """Eq. (3): log p(v | history) = Σ_l log p(c_l | history, c_1 … c_{l-1}) of all items; int64 [b]
    -> [b, n_items].
    """
    return state.score(users)


def init_server(config: Config, ctx: Context) -> Center:
    """The first shared parameters, and τ_a."""
    return Center(SHARING.upload(Net(config, ctx.torch_rng)), config.temperature)


def stages(config: Config) -> tuple[Stage, ...]:
    """Stage "cf" without messages or evaluation, then the federation; a round ends with the
    averages in place.
    """
    adopt = Phase(adopt_step(SHARING))
    wanted = config.residual or config.dense
    return (
        Stage(
            "cf",
            rounds=config.cf_epochs if wanted else 0,
            each=(Phase(train_cf),),
            close=(Phase(freeze),),
            evaluate=False,
            keep_best=False,
        ),
        Stage(
            "federated",
            rounds=config.rounds,
            open=opening(SHARING),
            each=(Phase(train), Phase(personalise, at="server"), adopt),
            edges=frozenset({Direction.UP, Direction.DOWN}),
            patience=config.patience,
        ),
    )


METHOD = Method(
    name="fedcgr",
    title="FedCGR: generated semantic IDs, averaged for each domain by prototypes",
    paper="arXiv 2608.10929",
    Config=Config,
    stages=stages,
    init_domain=Domain,
    init_server=init_server,
    score=score,
    observe=Domain.observe,
    ordered=True,
    state_dict=lambda state: state.state_dict(),
    load_state_dict=lambda state, saved: state.load_state_dict(saved),
    export=Domain.export,
    score_exported=recommend_exported,
    fields=(
        *SHARING.fields,
        Field(PROTOTYPE, Direction.UP, ("dim",), "mean encoded history of the domain, length one"),
    ),
    artifacts=("sids",),
)
