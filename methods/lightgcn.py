"""LightGCN: graph convolution without transformations, as the baseline that every domain trains
alone.

Paper
    He et al., "LightGCN: Simplifying and Powering Graph Convolution Network for Recommendation",
    SIGIR 2020, arXiv 2002.02126 v4.

Notation
    ==========  =========================================  ================
    symbol      name                                       shape
    ==========  =========================================  ================
    M, N        users and items of the domain              –
    R           training interactions, 0 or 1              [M, N]
    A, D        graph of Eq. (6) and its degrees           [M + N, M + N]
    Ã           D^-1/2 A D^-1/2, Eq. (7)                   CSR [M + N, M + N]
    E^(k)       embeddings at layer k; k = 0 is learned    [M + N, dim]
    E           final embeddings, users first              [M + N, dim]
    K           layers                                     –
    λ           weight of the L2 term                      –
    b           training pairs in a batch                  –
    ==========  =========================================  ================

What crosses
    Nothing: the method has one local stage, without edges. A round is one epoch over the domain's
    training pairs.

Departures
    - The defaults are those of the protocol that compares it with federated methods (FedCRF, arXiv
      2604.17681, sections 4.4 and 4.5): two layers, learning rate 0.005. The preset `paper` has
      LightGCN's own.
    - λ‖E^(0)‖² is taken over the rows of a batch, as ½‖rows‖² / b, which is what the authors' code
      does; so is the mean over the pairs of a batch instead of their sum.
    - Equations (3), (7) and (8) are computed as one product per layer on a prebuilt sparse matrix.
      Ã is symmetric, so the backward pass is the same propagation of the gradient (`parts.graph`).

Not stated in the paper
    - Negatives are drawn afresh every epoch, one per pair, uniformly from the items the user has
      not trained on.
    - "Xavier" is read as the uniform one, on the user and the item table apart; `init="normal"` is
      the authors' code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from crossfed.methods.parts.graph import bipartite_adjacency, propagate
from crossfed.methods.parts.losses import bpr, finite, l2_ego
from crossfed.methods.parts.sampling import bpr_epoch
from crossfed.platform.method import (
    Context,
    Interactions,
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
    """Hyperparameters, from §4.1.2 of LightGCN and from FedCRF §4.5, the protocol shared by all
    compared methods.
    """

    dim: PositiveInt = Field(64, description="width of the embeddings (§4.1.2)")
    layers: int = Field(
        2, ge=0, description="layers K (FedCRF §4.5; the paper: 1 to 4); 0 is plain factorisation"
    )
    lr: PositiveFloat = Field(
        0.005, description="Adam's learning rate (FedCRF §4.5; the paper: 0.001)"
    )
    batch_size: PositiveInt = Field(1024, description="training pairs in a batch (§4.1.2)")
    l2: NonNegativeFloat = Field(1e-4, description="λ of Eq. (15) (§4.1.2)")
    epochs: int = Field(60, ge=0, description="local epochs at most (the paper: 1000)")
    patience: PositiveInt | None = Field(
        5, description="evaluations without a better one before stopping"
    )
    init: Literal["xavier", "normal"] = Field(
        "xavier", description="xavier: Xavier uniform; normal: N(0, 0.1)"
    )


# --- Equations ---


def adjacency(data: Interactions, device: torch.device | None = None) -> torch.Tensor:
    """Eq. (7): Ã = D^-1/2 A D^-1/2, with A = [[0, R], [R^T, 0]] of Eq. (6). CSR [M + N, M + N], no
    self loops.
    """
    return bipartite_adjacency(data.n_users, data.n_items, data.users, data.items, device)


def final_embeddings(adj: torch.Tensor, ego: torch.Tensor, layers: int) -> torch.Tensor:
    """Eq. (8): E = α_0 E^(0) + α_1 Ã E^(0) + … + α_K Ã^K E^(0), every α_k = 1 / (K + 1). [M + N,
    dim].

    It is Eq. (3) applied K times and combined by Eq. (4), for all users and items at once.
    """
    return propagate(adj, ego, layers)


def predict(users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
    """Eq. (5): ŷ_ui = e_u^T e_i, row by row. [b, dim] twice -> [b]."""
    return (users * items).sum(-1)


def objective(
    final_rows: torch.Tensor, ego_rows: torch.Tensor, l2: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Eq. (15): the mean of -ln σ(ŷ_ui - ŷ_uj) over a batch, + λ ½‖E^(0)‖² / b over its rows; and
    its gradient.

    Args:
        final_rows: the batch's users u, positives i and negatives j in E, [3, b, dim].
        ego_rows: the same in E^(0), [3, b, dim].
        l2: λ.

    Returns:
        The loss, a scalar, and its gradients to `final_rows` and `ego_rows`, [3, b, dim] each.
    """
    user, positive, negative = final_rows
    y_positive, y_negative = predict(user, positive), predict(user, negative)
    loss = bpr(y_positive, y_negative) + l2 * l2_ego(*ego_rows)
    b = final_rows.shape[1]
    slope = (torch.sigmoid(y_negative - y_positive) / -b)[:, None]  # d loss / d (ŷ_ui - ŷ_uj)
    return (
        loss,
        torch.stack([slope * (positive - negative), slope * user, -slope * user]),
        ego_rows * (l2 / b),
    )


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
    """Draw E^(0) on the CPU, so that a seed means the same model on every device."""
    data = ctx.own
    tables = [torch.empty(size, config.dim) for size in (data.n_users, data.n_items)]
    for table in tables:
        if config.init == "xavier":
            torch.nn.init.xavier_uniform_(table, generator=ctx.torch_rng)
        else:
            torch.nn.init.normal_(table, std=0.1, generator=ctx.torch_rng)
    ego = torch.nn.Parameter(torch.cat(tables).to(ctx.device))
    adam = torch.optim.Adam([ego], lr=config.lr, fused=True)
    return State(config, data.n_users, adjacency(data, ctx.device), ego, adam)


@torch.no_grad()
def train_epoch(state: State, inbox: Mapping[str, Payload], ctx: Context) -> Out:
    """One pass over the training pairs.

    The gradient is written out. E = P E^(0), and P of Eq. (8) is symmetric, so dL/dE^(0) = P dL/dE
    + the L2 term: one scatter and one propagation, where autograd would make a matrix of the size
    of E for each gather.
    """
    config, ego = state.config, state.ego
    state.final = None
    total, count = torch.zeros((), device=ctx.device), 0
    for users, positives, negatives in bpr_epoch(ctx.own, config.batch_size, ctx.rng):
        b = len(users)
        rows = torch.cat([users, positives + state.n_users, negatives + state.n_users]).to(
            ctx.device
        )
        final = final_embeddings(state.adj, ego, config.layers)
        final_rows, ego_rows = (
            table.index_select(0, rows).view(3, b, -1) for table in (final, ego)
        )
        loss, to_final, to_ego = objective(final_rows, ego_rows, config.l2)
        gradient = torch.zeros_like(final).index_add_(0, rows, to_final.view(3 * b, -1))
        gradient = final_embeddings(state.adj, gradient, config.layers)
        ego.grad = gradient.index_add_(0, rows, to_ego.view(3 * b, -1))
        state.adam.step()
        total += loss * b
        count += b
    ego.grad = None
    return Out(metrics=finite({"loss": float(total) / max(count, 1)}, ctx))


def embeddings(state: State) -> torch.Tensor:
    """E, propagated once and kept until training goes on. [M + N, dim]."""
    if state.final is None:
        with torch.no_grad():
            state.final = final_embeddings(state.adj, state.ego, state.config.layers)
    return state.final


def score(state: State, users: npt.NDArray[np.int64]) -> torch.Tensor:
    """Eq. (5) for all items: [b, n_items]."""
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
    state.adam.state[state.ego] = {
        key: value.to(state.ego.device, copy=True) for key, value in saved["adam"].items()
    }
    state.final = None


def stages(config: Config) -> tuple[Stage, ...]:
    """One local stage; a round is an epoch."""
    return (
        Stage("train", rounds=config.epochs, each=(Phase(train_epoch),), patience=config.patience),
    )


METHOD = Method(
    name="lightgcn",
    title="LightGCN, trained by every domain alone",
    paper="arXiv 2002.02126",
    Config=Config,
    stages=stages,
    init_domain=init_domain,
    score=score,
    state_dict=state_dict,
    load_state_dict=load_state_dict,
    export=export,
    scope=Scope.LOCAL,
)
