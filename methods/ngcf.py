"""NGCF: graph convolution with weights and a bi-interaction, which every domain trains alone.

Paper
    Wang et al., "Neural Graph Collaborative Filtering", SIGIR 2019, arXiv 1905.08108 v2.

Notation
    ==========  =========================================  ================
    symbol      name                                       shape
    ==========  =========================================  ================
    M, N        users and items of the domain              –
    𝓛           D^-1/2 A D^-1/2 of the graph, Eq. (8)      CSR [M + N, M + N]
    E^(l)       embeddings at layer l; l = 0 is learned    [M + N, dim]
    W1, W2      weights of layer l                         [dim, dim]
    E*          concatenation of the layers 0 … L          [M + N, (L + 1) dim]
    L           layers                                     –
    λ           weight of the L2 term                      –
    b           training pairs in a batch                  –
    ==========  =========================================  ================

What crosses
    Nothing: the method has one local stage, without edges. A round is one epoch over the training
    pairs.

Departures
    - Each layer's vectors enter E* with length 1, as in the authors' code, on which published
      figures rest; `normalise=False` is Eq. (9). The next layer gets the vectors as they are,
      either way.
    - The authors' code takes D^-1 (A + I) for 𝓛 + I, 𝓛 with self loops in the bi-interaction, a
      LeakyReLU for each of the two summands, and biases. Eq. (7) and (8) are built, which have none
      of these.
    - Message dropout zeroes entries of a layer's output, as the authors' code does, not single
      messages.
    - λ‖Θ‖² is taken over all weights and over the rows of E^(0) that a batch uses, as ½‖·‖² / b;
      the loss is the mean over a batch's pairs instead of their sum.
    - The last layer is computed at a batch's nodes only, since no other enters the loss.

Not stated in the paper
    - LeakyReLU's slope: 0.2, as in the authors' code.
    - The learning rate and λ are searched; the defaults are those that the authors give for
      Gowalla.
    - Negatives are drawn afresh every epoch, one per pair, uniformly from the items not trained on.
    - Node dropout keeps each node with probability 1 - p by itself and divides by it, so that a
      neighbourhood's expected sum stays. It drops a node from 𝓛, not from the I of 𝓛 + I.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from crossfed.methods.parts.graph import bipartite_adjacency, distinct, rows_product, spmm
from crossfed.methods.parts.losses import bpr, finite, l2_ego
from crossfed.methods.parts.sampling import bpr_epoch
from crossfed.methods.parts.transformer import dropout
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
    """Hyperparameters of §4.2.3 of the paper, and those that its authors' code gives for Gowalla.
    ◇: chosen here.
    """

    dim: PositiveInt = Field(64, description="width of the embeddings and of every layer (§4.2.3)")
    layers: int = Field(3, ge=0, description="layers L (§4.2.3); 0 is plain factorisation")
    lr: PositiveFloat = Field(
        1e-4,
        description="Adam's learning rate (searched in §4.2.3; Gowalla's)",
    )
    batch_size: PositiveInt = Field(1024, description="training pairs in a batch (§4.2.3)")
    l2: NonNegativeFloat = Field(1e-5, description="λ of Eq. (11) (searched in §4.2.3; Gowalla's)")
    message_dropout: float = Field(0.1, ge=0, lt=1, description="rate on a layer's output (§4.2.3)")
    node_dropout: float = Field(
        0.1,
        ge=0,
        lt=1,
        description="share of nodes that send nothing (§3.4.2; Gowalla's)",
    )
    slope: float = Field(
        0.2,
        ge=0,
        le=1,
        description="LeakyReLU's slope below 0; 1 is no activation ◇",
    )
    normalise: bool = Field(
        True,
        description="whether each layer's vectors have length 1 in E* (the authors' code)",
    )
    epochs: int = Field(400, ge=0, description="local epochs at most (the authors' code)")
    patience: PositiveInt | None = Field(
        50,
        description="evaluations without a better one before stopping (§4.2.3)",
    )


Weights = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""W1 and W2 of every layer, [dim, dim] each."""


# --- Equations ---


def laplacian(data: Interactions, device: torch.device | None = None) -> torch.Tensor:
    """Eq. (8): 𝓛 = D^-1/2 A D^-1/2 with A = [[0, R], [R^T, 0]]. CSR [M + N, M + N], without self
    loops.
    """
    return bipartite_adjacency(data.n_users, data.n_items, data.users, data.items, device)


def layer(
    side: torch.Tensor,
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    slope: float,
) -> torch.Tensor:
    """Eq. (7): E^(l) = LeakyReLU((𝓛 + I) E^(l-1) W1 + 𝓛 E^(l-1) ⊙ E^(l-1) W2), for any nodes.

    It is Eq. (3) to (6) for all messages at once.

    Args:
        side: 𝓛 E^(l-1) at these nodes, [r, dim]. x: E^(l-1) at them, [r, dim].
        w1, w2: [dim, dim].

    Returns:
        [r, dim].
    """
    return F.leaky_relu(torch.addmm((side * x) @ w2, side + x, w1), slope)


def concatenated(levels: Sequence[torch.Tensor], normalise: bool) -> torch.Tensor:
    """Eq. (9): e* = e^(0) ‖ … ‖ e^(L). L + 1 times [r, dim] -> [r, (L + 1) dim].

    With `normalise` every layer but the learned one comes with length 1.
    """
    ego, *others = levels
    return torch.cat([ego, *(F.normalize(x, dim=1) if normalise else x for x in others)], 1)


def predict(users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
    """Eq. (10): ŷ_ui = e*_u^T e*_i, row by row. [b, width] twice -> [b]."""
    return (users * items).sum(-1)


def objective(
    final_rows: torch.Tensor,
    ego_rows: torch.Tensor,
    weights: Weights,
    l2: float,
) -> torch.Tensor:
    """Eq. (11): the mean of -ln σ(ŷ_ui - ŷ_uj) over a batch, + λ ½‖Θ‖² / b.

    Args:
        final_rows: the batch's users u, positives i and negatives j in E*, [3, b, width].
        ego_rows: the same in E^(0), [3, b, dim]. weights: all W1 and W2. l2: λ.

    Returns:
        A scalar.
    """
    user, positive, negative = final_rows
    squares = [w.square().sum() for pair in weights for w in pair]
    penalty = l2_ego(*ego_rows)
    if squares:
        penalty = penalty + 0.5 * torch.stack(squares).sum() / final_rows.shape[1]
    return bpr(predict(user, positive), predict(user, negative)) + l2 * penalty


# --- Propagation ---


def sending(x: torch.Tensor, rate: float) -> torch.Tensor:
    """What nodes send on under node dropout: their rows, or zero with probability `rate`. [n, dim]
    -> [n, dim].
    """
    if not rate:
        return x
    keep = torch.rand(len(x), 1, device=x.device) >= rate
    return x * (keep / (1 - rate))


def levels_at(
    rows: torch.Tensor,
    adj: torch.Tensor,
    ego: torch.Tensor,
    weights: Weights,
    config: Config,
) -> list[torch.Tensor]:
    """E^(0) … E^(L) at some nodes while training, under both kinds of dropout.

    Args:
        rows: int64 [r], the nodes. adj: 𝓛. ego: E^(0).

    Returns:
        L + 1 times [r, dim].
    """
    x, levels = ego, [ego.index_select(0, rows)]
    for number, (w1, w2) in enumerate(weights, 1):
        source = sending(x, config.node_dropout)
        if number < len(weights):
            x = layer(spmm(adj, source), x, w1, w2, config.slope)
            x = dropout(x, config.message_dropout, True)
            levels.append(x.index_select(0, rows))
        else:
            side = rows_product(adj, rows, source)
            last = layer(side, levels[-1], w1, w2, config.slope)
            levels.append(dropout(last, config.message_dropout, True))
    return levels


def final_embeddings(
    adj: torch.Tensor,
    ego: torch.Tensor,
    weights: Weights,
    config: Config,
) -> torch.Tensor:
    """E* of all nodes, without dropout. [M + N, (L + 1) dim]."""
    levels = [ego]
    for w1, w2 in weights:
        levels.append(layer(spmm(adj, levels[-1]), levels[-1], w1, w2, config.slope))
    return concatenated(levels, config.normalise)


# --- State ---


@dataclass(slots=True)
class State:
    """One domain's model.

    Attributes:
        adj: 𝓛. ego: E^(0). weights: W1 and W2 of every layer. adam: the optimiser of both.
        final: E* for scoring; None as long as nobody has asked for it since the last training step.
    """

    config: Config
    n_users: int
    adj: torch.Tensor
    ego: torch.nn.Parameter
    weights: list[tuple[torch.nn.Parameter, torch.nn.Parameter]]
    adam: torch.optim.Adam = field(init=False)
    final: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self.adam = torch.optim.Adam(self.parameters(), lr=self.config.lr, fused=True)

    def parameters(self) -> list[torch.nn.Parameter]:
        """E^(0), then W1 and W2 by layer."""
        return [self.ego, *(w for pair in self.weights for w in pair)]


def init_domain(config: Config, ctx: Context) -> State:
    """Draw everything on the CPU, Xavier uniform, so that a seed means the same model on every
    device.
    """
    data = ctx.own

    def xavier(rows: int) -> torch.Tensor:
        table = torch.empty(rows, config.dim)
        return torch.nn.init.xavier_uniform_(table, generator=ctx.torch_rng)

    def weight() -> torch.nn.Parameter:
        return torch.nn.Parameter(xavier(config.dim).to(ctx.device))

    ego = torch.nn.Parameter(torch.cat([xavier(data.n_users), xavier(data.n_items)]).to(ctx.device))
    weights = [(weight(), weight()) for _ in range(config.layers)]
    return State(config, data.n_users, laplacian(data, ctx.device), ego, weights)


def train_epoch(state: State, inbox: Mapping[str, Payload], ctx: Context) -> Out:
    """One pass over the training pairs."""
    config = state.config
    state.final = None
    total, count = torch.zeros((), device=ctx.device), 0
    for users, positives, negatives in bpr_epoch(ctx.own, config.batch_size, ctx.rng):
        b = len(users)
        nodes = torch.cat([users, positives + state.n_users, negatives + state.n_users])
        rows, place = (part.to(ctx.device) for part in distinct(nodes, len(state.ego)))
        levels = levels_at(rows, state.adj, state.ego, state.weights, config)
        final_rows = concatenated(levels, config.normalise).index_select(0, place).view(3, b, -1)
        ego_rows = levels[0].index_select(0, place).view(3, b, -1)
        loss = objective(final_rows, ego_rows, state.weights, config.l2)
        state.adam.zero_grad()
        loss.backward()
        state.adam.step()
        total += loss.detach() * b
        count += b
    state.adam.zero_grad()
    return Out(metrics=finite({"loss": float(total) / max(count, 1)}, ctx))


def embeddings(state: State) -> torch.Tensor:
    """E*, propagated once and kept until training goes on. [M + N, (L + 1) dim]."""
    if state.final is None:
        with torch.no_grad():
            state.final = final_embeddings(state.adj, state.ego, state.weights, state.config)
    return state.final


def score(state: State, users: npt.NDArray[np.int64]) -> torch.Tensor:
    """Eq. (10) for all items: [b, n_items]."""
    final = embeddings(state)
    return inner_product({"users": final[: state.n_users], "items": final[state.n_users :]}, users)


def export(state: State) -> dict[str, torch.Tensor]:
    """E* cut into users [M, width] and items [N, width], which is all that scoring needs."""
    users, items = embeddings(state).split([state.n_users, len(state.ego) - state.n_users])
    return {"users": users.clone(), "items": items.clone()}


def state_dict(state: State) -> dict[str, Any]:
    """E^(0), the weights, and the whole of Adam's state: what training continues from."""
    parameters = state.parameters()
    moments = [{k: v.clone() for k, v in state.adam.state[p].items()} for p in parameters]
    return {"parameters": [p.detach().clone() for p in parameters], "adam": moments}


def load_state_dict(state: State, saved: Mapping[str, Any]) -> None:
    """The reverse of `state_dict`, into a state of the same config and data."""
    for parameter, value, moments in zip(
        state.parameters(),
        saved["parameters"],
        saved["adam"],
        strict=True,
    ):
        with torch.no_grad():
            parameter.copy_(value)
        # `step` stays on the parameter's device as well: the fused Adam wants it there
        device = parameter.device
        state.adam.state[parameter] = {k: v.to(device, copy=True) for k, v in moments.items()}
    state.final = None


def stages(config: Config) -> tuple[Stage, ...]:
    """One local stage; a round is an epoch."""
    each, patience = (Phase(train_epoch),), config.patience
    return (Stage("train", rounds=config.epochs, each=each, patience=patience),)


METHOD = Method(
    name="ngcf",
    title="NGCF, trained by every domain alone",
    paper="arXiv 1905.08108",
    Config=Config,
    stages=stages,
    init_domain=init_domain,
    score=score,
    state_dict=state_dict,
    load_state_dict=load_state_dict,
    export=export,
    scope=Scope.LOCAL,
)
