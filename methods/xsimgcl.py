"""XSimGCL: LightGCN contrasted with one of its own layers under noise,
which every domain trains alone.

Paper
    Yu et al., "XSimGCL: Towards Extremely Simple Graph Contrastive Learning for Recommendation",
    TKDE 2024, arXiv 2209.02544 v4. The numbers are those of this list:

    =====  ==========================================================================
    no.    what
    =====  ==========================================================================
    1      the joint loss: recommendation + λ contrast
    2      the recommendation loss, BPR
    3      noise on a vector: direction of the vector, norm ε
    4      propagation, with noise at every layer; the mean of layers 1 … L
    5      contrast across layers: the final vectors against those of layer l*
    =====  ==========================================================================

Notation
    ==========  =========================================  ================
    symbol      name                                       shape
    ==========  =========================================  ================
    M, N        users and items of the domain              –
    Ã           D^-1/2 A D^-1/2, without self loops        CSR [M + N, M + N]
    E^(0)       the learned embeddings, users first        [M + N, dim]
    E^(l)       perturbed embeddings at layer l            [M + N, dim]
    E           final embeddings                           [M + N, dim]
    L, l*       layers, and the layer that is contrasted   –
    ε, τ        norm of the noise, temperature             –
    b           training pairs in a batch                  –
    r           distinct nodes of a batch                  –
    ==========  =========================================  ================

What crosses
    Nothing: the method has one local stage, without edges. A round is one epoch over the training
    pairs.

Departures
    - The L2 term is LightGCN's, ½‖rows of E^(0)‖² / b over users, positives and negatives. The
      authors' code takes norms instead of squares, of the final vectors, without the negatives.
    - The authors' code adds 1e-5 inside the logarithm of BPR, which is computed here as a softplus.
    - The last layer is computed at a batch's nodes only, since no other enters the loss. Noise has
      no gradient (the sign's is zero), so the backward pass is the propagation of the gradient,
      written out.

Not stated in the paper
    - The rows of the contrast are the batch's distinct users, and its distinct positive items, each
      against their own kind, as in the authors' code; the two means are added.
    - A node without edges has a zero vector, whose sign is zero: it gets no noise.
    - Number of layers: 2, as in the authors' configuration file; their table of results has 3.
    - Negatives are drawn afresh every epoch, one per pair, uniformly from the items not trained on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator
from torch.autograd.function import once_differentiable

from crossfed.methods.parts.graph import bipartite_adjacency, distinct, rows_adjoint, rows_of
from crossfed.methods.parts.losses import bpr, finite, info_nce, l2_ego
from crossfed.methods.parts.sampling import bpr_epoch
from crossfed.platform.method import (
    Context,
    Method,
    MethodConfig,
    Out,
    Payload,
    Phase,
    Scope,
    Stage,
    inner_product,
)


class Config(MethodConfig):
    """Hyperparameters of §4.1 of the paper and of its authors' configuration. ◇: chosen here."""

    dim: PositiveInt = Field(64, description="width of the embeddings (§4.1)")
    layers: PositiveInt = Field(2, description="layers L (the authors' configuration)")
    contrast_layer: PositiveInt = Field(
        1,
        description="the layer l* that is contrasted, 1 to L (§4.1)",
    )
    weight: NonNegativeFloat = Field(0.2, description="λ of Eq. (1) (the authors' configuration)")
    noise: NonNegativeFloat = Field(0.2, description="ε of Eq. (3) (the authors' configuration)")
    temperature: PositiveFloat = Field(0.15, description="τ of Eq. (5) (§4.1)")
    lr: PositiveFloat = Field(0.001, description="Adam's learning rate (§4.1)")
    batch_size: PositiveInt = Field(2048, description="training pairs in a batch (§4.1)")
    l2: NonNegativeFloat = Field(1e-4, description="weight of the L2 term (§4.1)")
    epochs: int = Field(100, ge=0, description="local epochs at most ◇")
    patience: PositiveInt | None = Field(
        10,
        description="evaluations without a better one before stopping ◇",
    )

    @model_validator(mode="after")
    def _layer_exists(self) -> Config:
        if self.contrast_layer > self.layers:
            raise ValueError(
                f"contrast_layer ({self.contrast_layer}) must be one of the {self.layers} layers",
            )
        return self


# --- Equations ---


def uniform(rows: int, dim: int, device: torch.device) -> torch.Tensor:
    """U up to a common factor, uniform on (0, 1), from torch's global generator: [rows, dim].

    On the CPU one 64-bit draw serves four entries, which takes them from 2^16 values, a fifth of
    the time.
    """
    if device.type != "cpu":
        return torch.rand(rows, dim, device=device)
    draws = torch.empty(-(-rows * dim // 4), dtype=torch.int64).random_(-(2**63), None)
    lanes = draws.view(torch.int16)
    return lanes[: rows * dim].view(rows, dim).float().add_(2**15 + 0.5)


def perturbed(x: torch.Tensor, noise: float) -> torch.Tensor:
    """Eq. (3): x + ε sign(x) ⊙ U / ‖U‖, row by row; x itself at ε = 0. [r, dim] -> [r, dim]."""
    if not noise:
        return x
    u = uniform(len(x), x.shape[1], x.device)
    u *= noise / u.norm(dim=1, keepdim=True)
    return x + u.mul_(x.sign())


def propagated(
    adj: torch.Tensor,
    ego: torch.Tensor,
    layers: int,
    noise: float,
) -> list[torch.Tensor]:
    """Eq. (4), its layers: E^(l) = Ã E^(l-1) perturbed by Eq. (3), for l = 1 … layers. [M + N, dim]
    each.
    """
    levels, x = [], ego
    for _ in range(layers):
        x = perturbed(adj @ x, noise)
        levels.append(x)
    return levels


def final_embeddings(adj: torch.Tensor, ego: torch.Tensor, layers: int) -> torch.Tensor:
    """Eq. (4) without noise: E = (E^(1) + … + E^(L)) / L, the ego layer left out. [M + N, dim]."""
    return torch.stack(propagated(adj, ego, layers, 0.0)).mean(0)


class _Encoder(torch.autograd.Function):
    """E, E^(l*) and E^(0) at a batch's nodes: a whole product for every layer but the last, which
    takes rows.
    """

    @staticmethod
    def forward(
        ctx: Any,
        ego: torch.Tensor,
        adj: torch.Tensor,
        rows: torch.Tensor,
        config: Config,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        some = rows_of(adj, rows)
        levels = propagated(adj, ego, config.layers - 1, config.noise)
        at_rows = [x.index_select(0, rows) for x in levels]
        at_rows.append(perturbed(some @ (levels[-1] if levels else ego), config.noise))
        ctx.adj, ctx.some, ctx.rows, ctx.config = adj, some, rows, config
        return (
            torch.stack(at_rows).mean(0),
            at_rows[config.contrast_layer - 1].clone(),
            ego.index_select(0, rows),
        )

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        """dL/dE^(l-1) = Ã dL/dE^(l) + what E^(l-1) itself adds to the loss, from the last layer
        down to E^(0).
        """
        to_final, to_contrast, to_ego = grads
        layers, contrasted = ctx.config.layers, ctx.config.contrast_layer
        share = to_final / layers
        last = share + to_contrast if contrasted == layers else share
        gradient = rows_adjoint(ctx.adj, ctx.rows, ctx.some, last)
        for level in range(layers - 1, 0, -1):
            gradient.index_add_(0, ctx.rows, share + to_contrast if contrasted == level else share)
            gradient = ctx.adj @ gradient
        return gradient.index_add_(0, ctx.rows, to_ego), None, None, None


def encode(
    ego: torch.Tensor,
    adj: torch.Tensor,
    rows: torch.Tensor,
    config: Config,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Eq. (4) at some nodes while training, with gradient to E^(0).

    Args:
        ego: E^(0). adj: Ã. rows: int64 [r], distinct nodes.

    Returns:
        E, E^(l*) and E^(0) at them, [r, dim] each.
    """
    encoded: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _Encoder.apply(
        ego,
        adj,
        rows,
        config,
    )  # type: ignore[no-untyped-call]
    return encoded


def contrast(final: torch.Tensor, other: torch.Tensor, temperature: float) -> torch.Tensor:
    """Eq. (5): the mean of -ln( exp(cos(e_i, e^(l*)_i) / τ) / Σ_j exp(cos(e_i, e^(l*)_j) / τ) ),
    one way only.

    Args:
        final, other: distinct users, or distinct items, in E and in E^(l*), [k, dim].

    Returns:
        A scalar.
    """
    return info_nce(final, other, temperature)


def recommendation(
    users: torch.Tensor,
    positives: torch.Tensor,
    negatives: torch.Tensor,
) -> torch.Tensor:
    """Eq. (2): the mean of -ln σ(e_u^T e_i - e_u^T e_j). [b, dim] three times -> a scalar."""
    return bpr((users * positives).sum(1), (users * negatives).sum(1))


def objective(
    encoded: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    place: torch.Tensor,
    n_users: int,
    config: Config,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Eq. (1): Eq. (2) + λ Eq. (5) of the users and of the positive items, and the L2 term.

    Args:
        encoded: E, E^(l*) and E^(0) at the batch's distinct nodes, users first, [r, dim] each.
        place: where users, positives and negatives are in them, int64 [3, b].
        n_users: how many of the nodes are users, k.

    Returns:
        The loss, and its parts by Eq. (2) and by Eq. (5), before λ.
    """
    final, other, ego = encoded
    ranking = recommendation(*(final.index_select(0, part) for part in place))
    apart = final.new_zeros(())
    if config.weight:
        chosen, _ = distinct(place[1], len(final))
        of_users = contrast(final[:n_users], other[:n_users], config.temperature)
        of_items = contrast(
            final.index_select(0, chosen),
            other.index_select(0, chosen),
            config.temperature,
        )
        apart = of_users + of_items
    penalty = l2_ego(*(ego.index_select(0, part) for part in place))
    return ranking + config.weight * apart + config.l2 * penalty, ranking, apart


# --- State ---


@dataclass(slots=True)
class State:
    """One domain's model.

    Attributes:
        adj: Ã. ego: E^(0), the parameter. adam: its optimiser.
        final: E for scoring; None as long as nobody has asked for it since the last training step.
    """

    config: Config
    n_users: int
    adj: torch.Tensor
    ego: torch.nn.Parameter
    adam: torch.optim.Adam
    final: torch.Tensor | None = None


def init_domain(config: Config, ctx: Context) -> State:
    """Draw E^(0) on the CPU, Xavier uniform, so that a seed means one model on every device."""
    data = ctx.own
    tables = [torch.empty(size, config.dim) for size in (data.n_users, data.n_items)]
    for table in tables:
        torch.nn.init.xavier_uniform_(table, generator=ctx.torch_rng)
    ego = torch.nn.Parameter(torch.cat(tables).to(ctx.device))
    adj = bipartite_adjacency(data.n_users, data.n_items, data.users, data.items, ctx.device)
    return State(config, data.n_users, adj, ego, torch.optim.Adam([ego], lr=config.lr, fused=True))


def train_epoch(state: State, inbox: Mapping[str, Payload], ctx: Context) -> Out:
    """One pass over the training pairs."""
    config = state.config
    state.final = None
    totals, count = torch.zeros(3, device=ctx.device), 0
    for users, positives, negatives in bpr_epoch(ctx.own, config.batch_size, ctx.rng):
        b = len(users)
        nodes = torch.cat([users, positives + state.n_users, negatives + state.n_users])
        rows, place = distinct(nodes, len(state.ego))
        n_users = int(torch.searchsorted(rows, state.n_users))
        encoded = encode(state.ego, state.adj, rows.to(ctx.device), config)
        losses = objective(encoded, place.to(ctx.device).view(3, b), n_users, config)
        state.adam.zero_grad()
        losses[0].backward()
        state.adam.step()
        totals += torch.stack(losses).detach() * b
        count += b
    state.adam.zero_grad()
    means = (totals / max(count, 1)).tolist()
    return Out(metrics=finite(dict(zip(("loss", "bpr", "contrast"), means, strict=True)), ctx))


def embeddings(state: State) -> torch.Tensor:
    """E without noise, propagated once and kept until training goes on. [M + N, dim]."""
    if state.final is None:
        with torch.no_grad():
            state.final = final_embeddings(state.adj, state.ego, state.config.layers)
    return state.final


def score(state: State, users: npt.NDArray[np.int64]) -> torch.Tensor:
    """e_u^T e_i for all items: [b, n_items]."""
    final = embeddings(state)
    return inner_product({"users": final[: state.n_users], "items": final[state.n_users :]}, users)


def export(state: State) -> dict[str, torch.Tensor]:
    """E cut into users [M, dim] and items [N, dim], which is all that scoring needs."""
    users, items = embeddings(state).split([state.n_users, len(state.ego) - state.n_users])
    return {"users": users.clone(), "items": items.clone()}


def state_dict(state: State) -> dict[str, Any]:
    """E^(0) and the whole of Adam's state: what training continues from."""
    moments = {key: value.clone() for key, value in state.adam.state[state.ego].items()}
    return {"ego": state.ego.detach().clone(), "adam": moments}


def load_state_dict(state: State, saved: Mapping[str, Any]) -> None:
    """The reverse of `state_dict`, into a state of the same config and data."""
    with torch.no_grad():
        state.ego.copy_(saved["ego"])
    # `step` stays on the parameter's device as well: the fused Adam wants it there
    device = state.ego.device
    moments = {key: value.to(device, copy=True) for key, value in saved["adam"].items()}
    state.adam.state[state.ego] = moments
    state.final = None


def stages(config: Config) -> tuple[Stage, ...]:
    """One local stage; a round is an epoch."""
    each, patience = (Phase(train_epoch),), config.patience
    return (Stage("train", rounds=config.epochs, each=each, patience=patience),)


METHOD = Method(
    name="xsimgcl",
    title="XSimGCL, trained by every domain alone",
    paper="arXiv 2209.02544",
    Config=Config,
    stages=stages,
    init_domain=init_domain,
    score=score,
    state_dict=state_dict,
    load_state_dict=load_state_dict,
    export=export,
    scope=Scope.LOCAL,
)
