"""NeuMF: matrix factorisation and a perceptron side by side, which every domain trains alone.

Paper
    He et al., "Neural Collaborative Filtering", WWW 2017, arXiv 1708.05031 v2.

Notation
    ==========  =========================================  ================
    symbol      name                                       shape
    ==========  =========================================  ================
    M, N        users and items of the domain              –
    p^G, q^G    a user's and an item's vector in GMF       [factors]
    p^M, q^M    the same in the perceptron                 [mlp_dim]
    φ^GMF       p^G ⊙ q^G                                  [factors]
    φ^MLP       output of the perceptron's last layer      [widths[-1]]
    h           output weights, h^GMF and h^MLP            [factors], [widths[-1]]
    ŷ_ui        predicted interaction                      –
    α           share of GMF when two halves are joined    –
    b           training instances in a batch              –
    ==========  =========================================  ================

What crosses
    Nothing: all stages are local. A round is one epoch over the training pairs and their negatives.

Departures
    - `score` gives what σ is taken of in Eq. (12): the order is the same, and large values stay
      apart.
    - After pre-training the model is trained by plain SGD, as the paper has it; its rate is `lr`,
      too, since the paper gives no other.

Not stated in the paper
    - Section 4.1 says 32 → 16 → 8 for eight factors, and embeddings of 16. In the authors' code
      embeddings have 32 entries each and go through layers of 32, 16 and 8; that is the default.
    - Negatives are drawn afresh every epoch, uniformly from the items the user has not trained on.
    - A half that is pre-trained has output weights of its own and ends with its best epoch.
    - The perceptron's weights start as Glorot uniform, its biases at zero, as in the authors' code.
    - Dropout (before each layer of the perceptron, as in RecBole) and weight decay are off by
      default.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from pydantic import Field, PositiveFloat, PositiveInt

from crossfed.methods.parts.losses import finite
from crossfed.methods.parts.sampling import pointwise_epoch
from crossfed.methods.parts.transformer import dropout
from crossfed.platform.method import (
    Context,
    Method,
    MethodConfig,
    Out,
    Payload,
    Phase,
    Scope,
    Stage,
)


class Config(MethodConfig):
    """Hyperparameters of section 4.1 of the paper. ◇: chosen here."""

    factors: PositiveInt = Field(
        8,
        description="width of GMF's embeddings, the predictive factors (section 4.1)",
    )
    mlp_dim: PositiveInt = Field(
        32,
        description="width of the perceptron's embeddings, each (the authors' code)",
    )
    widths: tuple[PositiveInt, ...] = Field(
        (32, 16, 8),
        min_length=1,
        description="widths of the perceptron's layers (section 4.1)",
    )
    negatives: PositiveInt = Field(4, description="negatives per positive and epoch (section 4.1)")
    lr: PositiveFloat = Field(0.001, description="learning rate (section 4.1)")
    batch_size: PositiveInt = Field(
        256,
        description="instances in a batch, negatives included (section 4.1)",
    )
    std: PositiveFloat = Field(0.01, description="deviation of initial embeddings (section 4.1)")
    dropout: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="rate before each layer of the perceptron ◇",
    )
    weight_decay: float = Field(0.0, ge=0, description="Adam's, of all parameters ◇")
    pretrain: int = Field(
        0,
        ge=0,
        description="epochs that each half trains alone before; 0: from scratch (section 3.4.1)",
    )
    alpha: float = Field(
        0.5,
        ge=0,
        le=1,
        description="α of Eq. (13), after pre-training (section 3.4.1)",
    )
    epochs: int = Field(20, ge=0, description="epochs at most (the authors' code)")
    patience: PositiveInt | None = Field(
        5,
        description="evaluations without a better one before stopping ◇",
    )


Half = Literal["gmf", "mlp"]
Layers = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""W [in, out] and b [out] of every layer of the perceptron."""


# --- Equations ---


def gmf(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Eq. (8): φ^GMF = p^G ⊙ q^G. [b, factors] twice -> [b, factors]."""
    return p * q


def gmf_logit(p: torch.Tensor, q: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    """Eq. (9) before a_out = σ: h^T (p ⊙ q). [b, factors] twice, [factors] -> [b]."""
    return gmf(p, q) @ h


def mlp(p: torch.Tensor, q: torch.Tensor, layers: Layers, rate: float = 0.0) -> torch.Tensor:
    """Eq. (10): φ^MLP = ReLU(W_X^T ( … ReLU(W_1^T [p; q] + b_1) … ) + b_X), with dropout before
    each layer.

    Args:
        p, q: p^M and q^M, [b, mlp_dim] each.

    Returns:
        [b, widths[-1]].
    """
    z = torch.cat([p, q], 1)
    for weight, bias in layers:
        z = torch.addmm(bias, dropout(z, rate, True), weight).relu_()
    return z


def cross_entropy(logit: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Eq. (7): the mean of -y ln ŷ - (1 - y) ln(1 - ŷ), ŷ = σ(logit). [b] twice -> a scalar."""
    return F.binary_cross_entropy_with_logits(logit, y)


def joined(
    h_gmf: torch.Tensor,
    h_mlp: torch.Tensor,
    alpha: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Eq. (13): h = [α h^GMF; (1 - α) h^MLP]."""
    return alpha * h_gmf, (1 - alpha) * h_mlp


# --- State ---


@dataclass(slots=True)
class State:
    """One domain's model.

    Attributes:
        tables: p^G, q^G, p^M, q^M by "gmf_users", "gmf_items", "mlp_users", "mlp_items".
        layers: W and b of every layer of the perceptron. out: h^GMF and h^MLP by half.
        halves: those that are trained and asked now. optimizer: theirs.
    """

    config: Config
    tables: dict[str, torch.nn.Parameter]
    layers: list[tuple[torch.nn.Parameter, torch.nn.Parameter]]
    out: dict[str, torch.nn.Parameter]
    halves: tuple[Half, ...] = ("gmf", "mlp")
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        self.prepare(self.halves, "adam")

    def parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """All parameters of the halves in use, by name."""
        for half in self.halves:
            yield f"{half}_users", self.tables[f"{half}_users"]
            yield f"{half}_items", self.tables[f"{half}_items"]
            yield f"{half}_out", self.out[half]
        if "mlp" in self.halves:
            for number, (weight, bias) in enumerate(self.layers):
                yield f"mlp_{number}_kernel", weight
                yield f"mlp_{number}_bias", bias

    def everything(self) -> list[torch.nn.Parameter]:
        """All parameters, also those of a half that rests."""
        layers = [part for layer in self.layers for part in layer]
        return [*self.tables.values(), *self.out.values(), *layers]

    def prepare(self, halves: tuple[Half, ...], optimizer: Literal["adam", "sgd"]) -> None:
        """Train and ask these halves from now on, with a fresh optimizer."""
        self.halves = halves
        chosen = [parameter for _, parameter in self.parameters()]
        settings: dict[str, Any] = {
            "lr": self.config.lr,
            "weight_decay": self.config.weight_decay,
            "fused": True,
        }
        kinds = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}
        self.optimizer = kinds[optimizer](chosen, **settings)


def init_domain(config: Config, ctx: Context) -> State:
    """Draw everything on the CPU, so that a seed means the same model on every device."""
    sizes = {"users": ctx.own.n_users, "items": ctx.own.n_items}
    dims = {"gmf": config.factors, "mlp": config.mlp_dim}

    def parameter(value: torch.Tensor) -> torch.nn.Parameter:
        return torch.nn.Parameter(value.to(ctx.device))

    def glorot(rows: int, columns: int) -> torch.Tensor:
        return torch.nn.init.xavier_uniform_(torch.empty(rows, columns), generator=ctx.torch_rng)

    tables = {
        f"{half}_{side}": parameter(
            torch.empty(size, dim).normal_(std=config.std, generator=ctx.torch_rng),
        )
        for half, dim in dims.items()
        for side, size in sizes.items()
    }
    layers = [
        (parameter(glorot(before, after)), parameter(torch.zeros(after)))
        for before, after in pairwise([2 * config.mlp_dim, *config.widths])
    ]
    # both halves' output weights are drawn as those of one layer, which they are
    h = glorot(config.factors + config.widths[-1], 1)[:, 0]
    out = {
        "gmf": parameter(h[: config.factors].clone()),
        "mlp": parameter(h[config.factors :].clone()),
    }
    return State(config, tables, layers, out)


def logits(state: State, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
    """Eq. (12) before σ: h^T [φ^GMF; φ^MLP] = h^GMF·φ^GMF + h^MLP·φ^MLP; of one half alone while it
    is pre-trained.

    Args:
        users, items: int64 [b].

    Returns:
        [b].
    """
    total = torch.zeros(len(users), device=users.device)
    for half in state.halves:
        p = state.tables[f"{half}_users"].index_select(0, users)
        q = state.tables[f"{half}_items"].index_select(0, items)
        if half == "gmf":
            total = total + gmf_logit(p, q, state.out[half])
        else:
            total = total + mlp(p, q, state.layers, state.config.dropout) @ state.out[half]
    return total


def train_epoch(state: State, inbox: Mapping[str, Payload], ctx: Context) -> Out:
    """One pass over the training pairs and as many fresh negatives for each as the Config says."""
    config, optimizer = state.config, state.optimizer
    total, count = torch.zeros((), device=ctx.device), 0
    for users, items, labels in pointwise_epoch(
        ctx.own,
        config.batch_size,
        config.negatives,
        ctx.rng,
    ):
        loss = cross_entropy(
            logits(state, users.to(ctx.device), items.to(ctx.device)),
            labels.to(ctx.device),
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach() * len(users)
        count += len(users)
    optimizer.zero_grad()
    return Out(metrics=finite({"loss": float(total) / max(count, 1)}, ctx))


def begin_gmf(state: State, inbox: Mapping[str, Payload], ctx: Context) -> Out:
    """Pre-train GMF alone."""
    state.prepare(("gmf",), "adam")
    return Out()


def begin_mlp(state: State, inbox: Mapping[str, Payload], ctx: Context) -> Out:
    """Pre-train the perceptron alone."""
    state.prepare(("mlp",), "adam")
    return Out()


def join(state: State, inbox: Mapping[str, Payload], ctx: Context) -> Out:
    """Put the two pre-trained halves together by Eq. (13)."""
    with torch.no_grad():
        for half, h in zip(
            ("gmf", "mlp"),
            joined(state.out["gmf"], state.out["mlp"], state.config.alpha),
            strict=True,
        ):
            state.out[half].copy_(h)
    state.prepare(("gmf", "mlp"), "sgd")
    return Out()


# --- Recommendation ---


def score_exported(
    exported: Mapping[str, torch.Tensor],
    users: npt.NDArray[np.int64],
    entries: int = 2**20,
) -> torch.Tensor:
    """Eq. (12) before σ, for all items.

    The perceptron's first layer is linear in user and item apart, so each item's part is taken
    once. Users go through in blocks, so that no layer's output has more than `entries` numbers (or
    one user's).

    Args:
        exported: as from `export`. users: int64 [b].

    Returns:
        [b, n_items].
    """
    some = next(iter(exported.values()))
    chosen = torch.from_numpy(users).to(some.device)
    scores: torch.Tensor | None = None
    if "gmf_users" in exported:
        scores = (exported["gmf_users"][chosen] * exported["gmf_out"]) @ exported["gmf_items"].T
    if "mlp_users" not in exported:
        assert scores is not None
        return scores
    count = sum(name.endswith("_kernel") for name in exported)
    layers = [(exported[f"mlp_{k}_kernel"], exported[f"mlp_{k}_bias"]) for k in range(count)]
    first, bias = layers[0]
    p, q = exported["mlp_users"][chosen], exported["mlp_items"]
    of_users, of_items = p @ first[: p.shape[1]], torch.addmm(bias, q, first[p.shape[1] :])
    n_items = len(q)
    if scores is None:
        scores = of_users.new_zeros(len(users), n_items)
    widest = max(weight.shape[1] for weight, _ in layers)
    size = max(1, entries // max(n_items * widest, 1))
    for start in range(0, len(users), size):
        block = slice(start, start + size)
        z = (of_users[block, None] + of_items).relu_().flatten(0, 1)
        for weight, bias in layers[1:]:
            z = torch.addmm(bias, z, weight).relu_()
        scores[block] += (z @ exported["mlp_out"]).view(-1, n_items)
    return scores


@torch.no_grad()
def score(state: State, users: npt.NDArray[np.int64]) -> torch.Tensor:
    """Eq. (12) before σ, for all items: [b, n_items]."""
    return score_exported(dict(state.parameters()), users)


def export(state: State) -> dict[str, torch.Tensor]:
    """All parameters of the halves in use."""
    return {name: parameter.detach().clone() for name, parameter in state.parameters()}


def state_dict(state: State) -> dict[str, Any]:
    """All parameters, also of a half that rests, the halves in use, and the optimizer's state of
    these.
    """
    states = [state.optimizer.state[parameter] for _, parameter in state.parameters()]
    moments = [{k: v.clone() for k, v in each.items() if v is not None} for each in states]
    return {
        "parameters": [parameter.detach().clone() for parameter in state.everything()],
        "halves": list(state.halves),
        "optimizer": "sgd" if isinstance(state.optimizer, torch.optim.SGD) else "adam",
        "moments": moments,
    }


def load_state_dict(state: State, saved: Mapping[str, Any]) -> None:
    """The reverse of `state_dict`, into a state of the same config and data."""
    with torch.no_grad():
        for parameter, value in zip(state.everything(), saved["parameters"], strict=True):
            parameter.copy_(value)
    state.prepare(tuple(saved["halves"]), saved["optimizer"])
    # `step` stays on the parameter's device as well: the fused Adam wants it there
    for (_, parameter), moments in zip(state.parameters(), saved["moments"], strict=True):
        device = parameter.device
        state.optimizer.state[parameter] = {k: v.to(device, copy=True) for k, v in moments.items()}


def stages(config: Config) -> tuple[Stage, ...]:
    """The joint training, with a stage for each half before it where the Config asks for
    pre-training.
    """
    each, patience = (Phase(train_epoch),), config.patience
    train = Stage("train", rounds=config.epochs, each=each, patience=patience)
    if not config.pretrain:
        return (train,)
    return (
        Stage(
            "gmf",
            rounds=config.pretrain,
            each=each,
            open=(Phase(begin_gmf),),
            patience=patience,
        ),
        Stage(
            "mlp",
            rounds=config.pretrain,
            each=each,
            open=(Phase(begin_mlp),),
            patience=patience,
        ),
        Stage("train", rounds=config.epochs, each=each, open=(Phase(join),), patience=patience),
    )


METHOD = Method(
    name="neumf",
    title="NeuMF, trained by every domain alone",
    paper="arXiv 1708.05031",
    Config=Config,
    stages=stages,
    init_domain=init_domain,
    score=score,
    score_exported=score_exported,
    state_dict=state_dict,
    load_state_dict=load_state_dict,
    export=export,
    scope=Scope.LOCAL,
)
