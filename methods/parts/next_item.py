"""SASRec's network and how it learns, as a part: for SASRec itself, its federation, and methods
that train it inside.

Notation
    ==========  =========================================  ================
    symbol      name                                       shape
    ==========  =========================================  ================
    M           item embeddings, input and output          [n_items, dim]
    P           position embeddings                        [length, dim]
    F           outputs of the last block                  [b, T, dim]
    r_{i,t}     relevance of item i after t items          –
    ==========  =========================================  ================

Equation numbers count the displays of section III of Kang and McAuley, "Self-Attentive Sequential
Recommendation", ICDM 2018, arXiv 1808.09781; `crossfed.methods.sasrec` lists them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from crossfed.methods.parts.losses import finite
from crossfed.methods.parts.sampling import draw_negatives
from crossfed.methods.parts.sequences import Cut, batches, histories, padded, windows
from crossfed.methods.parts.transformer import (
    EPS,
    Activation,
    Block,
    Dropout,
    Placement,
    initialise,
)
from crossfed.platform.method import Context, Interactions, MethodConfig


class NextItemConfig(MethodConfig):
    """The network and its training. Values of SASRec's section IV-B where a section is named; ◇:
    chosen here.
    """

    dim: int = Field(64, ge=1, description="width d of items and hidden layers (the paper: 50) ◇")
    layers: int = Field(2, ge=0, description="blocks b (section IV-B)")
    heads: int = Field(2, ge=1, description="attention heads; must divide dim (the paper: 1) ◇")
    inner: int = Field(256, ge=1, description="width of the feed-forward nets (the paper: d) ◇")
    dropout: float = Field(
        0.5, ge=0, lt=1, description="rate everywhere (section IV-B, for sparse data)"
    )
    length: int = Field(
        50,
        ge=1,
        description="items of the history that are looked at (section IV-B, for sparse data)",
    )
    norm: Placement = Field(
        "pre",
        description="layer norm before each step (the paper), or after it as in BERT (RecBole)",
    )
    activation: Activation = Field(
        "relu", description="of the feed-forward nets (Eq. (4)); RecBole: gelu"
    )
    positions: Literal["start", "end"] = Field(
        "end",
        description="positions counted from the window's last item (the authors' "
        "padding) or its first (RecBole)",
    )
    loss: Literal["bce", "softmax"] = Field(
        "softmax",
        description="bce: sampled negatives (Eq. (11)); softmax: cross-entropy over all items ◇",
    )
    negatives: int = Field(1, ge=1, description="negatives per position with bce (the paper: 1)")
    calibration: float = Field(
        0.0,
        ge=0,
        le=1,
        description="t of gBCE (arXiv 2308.07192) with bce; 0 is plain cross-entropy ◇",
    )
    cut: Cut = Field(
        "all",
        description="all: every item a target once; last: the last `length` (paper); prefixes: "
        "one row per target ◇",
    )
    lr: float = Field(0.001, gt=0, description="Adam's learning rate (section IV-B)")
    batch_size: int = Field(128, ge=1, description="windows in a batch (section IV-B)")


class Training(Protocol):
    """The settings that `train_epoch` and `user_vectors` read; `NextItemConfig` describes them."""

    @property
    def dim(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def loss(self) -> Literal["bce", "softmax"]: ...
    @property
    def negatives(self) -> int: ...
    @property
    def calibration(self) -> float: ...
    @property
    def cut(self) -> Cut: ...
    @property
    def batch_size(self) -> int: ...


class SequenceNet(nn.Module):
    """A causal network over items: int64 [b, T] padded at the end, int64 [b] -> [b, T, dim].

    Attributes:
        items: the embeddings that its outputs are scored against, [n_items, dim].
        config: how it is trained.
    """

    items: nn.Parameter
    config: Training


class NextItem(SequenceNet):
    """A causal transformer over a user's items, scored against the same item embeddings.

    Args:
        n_items: the catalogue. config: sizes. rng: CPU generator that the initial weights, N(0,
            0.02²), come from.
    """

    def __init__(self, n_items: int, config: NextItemConfig, rng: torch.Generator) -> None:
        super().__init__()
        d = config.dim
        self.config: NextItemConfig = config
        self.items = nn.Parameter(torch.empty(n_items, d))
        self.positions = nn.Parameter(torch.empty(config.length, d))
        self.norm = nn.LayerNorm(d, eps=EPS)  # of the output with "pre", of the input with "post"
        self.blocks = nn.ModuleList(
            Block(d, config.heads, config.inner, config.dropout, config.norm, config.activation)
            for _ in range(config.layers)
        )
        self.dropout = Dropout(config.dropout)
        initialise(self, 0.02, rng)

    def embed(self, items: Tensor, count: Tensor) -> Tensor:
        """Eq. (1): Ê = M_s + P. Windows int64 [b, T], padded at the end, their lengths [b] -> [b,
        T, dim].

        With the norm before the steps nothing else would set the scale of M_s: it is multiplied by
        √dim.
        """
        place = torch.arange(items.shape[1], device=items.device)
        if self.config.positions == "end":
            position = self.positions[(count[:, None] - 1 - place).clamp(min=0)]
        else:
            position = self.positions[place]
        rows = self.rows(items)
        if self.config.norm == "pre":
            return rows * math.sqrt(self.config.dim) + position
        return rows + position

    def rows(self, items: Tensor) -> Tensor:
        """M at some items. int64 [b, T] -> [b, T, dim]."""
        return F.embedding(items, self.items)

    def forward(self, items: Tensor, count: Tensor) -> Tensor:
        """F at every position; those after a window's end mean nothing. int64 [b, T], int64 [b] ->
        [b, T, dim].
        """
        x = self.embed(items, count)
        post = self.config.norm == "post"
        x = self.dropout(self.norm(x) if post else x)
        for block in self.blocks:
            x = block(x, causal=True)
        return x if post else self.norm(x)  # type: ignore[no-any-return]


def relevance(states: Tensor, items: Tensor) -> Tensor:
    """Eq. (9): r_{i,t} = F_t M_iᵀ for every item. [n, dim], [n_items, dim] -> [n, n_items]."""
    return states @ items.T


def bce(
    states: Tensor, items: Tensor, positive: Tensor, negative: Tensor, power: float = 1.0
) -> Tensor:
    """Eq. (11): the mean over positions of -β ln σ(r_{o,t}) - Σ_j ln(1 - σ(r_{j,t})).

    Args:
        states: F at the trained positions, [n, dim]. items: M.
        positive: the targets o, int64 [n]. negative: items j outside the user's history, int64 [n,
            k].
        power: β of gBCE, `gbce_power`; 1 in the paper.

    Returns:
        A scalar.
    """
    rows = items.index_select(0, torch.cat([positive[:, None], negative], 1).flatten()).view(
        len(states), -1, states.shape[1]
    )
    r = (rows * states[:, None]).sum(2)  # [n, 1 + k], the target first
    return (power * F.softplus(-r[:, 0]) + F.softplus(r[:, 1:]).sum(1)).mean()


def gbce_power(negatives: int, n_items: int, t: float) -> float:
    """β = α(t(1 - 1/α) + 1/α) with α = negatives / (n_items - 1), Petrov and Macdonald 2023; t = 0
    gives 1, t = 1 gives α.
    """
    rate = min(negatives / max(n_items - 1, 1), 1.0)
    return rate * (t * (1 - 1 / rate) + 1 / rate)


class _Softmax(torch.autograd.Function):
    """The mean cross-entropy and both gradients in one pass over blocks of rows: nothing of size
    [n, n_items] is kept.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, items: Tensor, target: Tensor, entries: int) -> Tensor:
        total, n = states.new_zeros(()), len(states)
        to_states, to_items = torch.empty_like(states), torch.zeros_like(items)
        size = max(1, entries // len(items))
        for begin in range(0, n, size):
            rows, goal = states[begin : begin + size], target[begin : begin + size, None]
            p = rows @ items.T
            top = p.amax(1, keepdim=True)
            total += (top - p.gather(1, goal)).sum()
            p.sub_(top).exp_()
            mass = p.sum(1, keepdim=True)
            total += mass.log().sum()
            p.div_(mass * n)
            p.scatter_add_(1, goal, p.new_full((1, 1), -1 / n).expand_as(goal))
            torch.mm(p, items, out=to_states[begin : begin + size])
            to_items.addmm_(p.T, rows)
        ctx.save_for_backward(to_states, to_items)
        return total / n

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        to_states, to_items = ctx.saved_tensors
        return to_states * grads[0], to_items * grads[0], None, None


def softmax(states: Tensor, items: Tensor, target: Tensor, entries: int = 2**20) -> Tensor:
    """The mean over positions of -ln softmax(r_t)_o over all items.

    Args:
        states: [n, dim]. items: [n_items, dim]. target: int64 [n].
        entries: how many of the n · n_items logits to hold at a time.

    Returns:
        A scalar.
    """
    loss: Tensor = _Softmax.apply(states, items, target, entries)  # type: ignore[no-untyped-call]
    return loss


@dataclass(frozen=True, slots=True)
class Batch:
    """The windows of one batch, for terms of the loss that look at them.

    Attributes:
        start, count: where each window begins in `Interactions.items` and how many inputs it has,
            int64 [b]; its last target is at start + count.
        inputs: the windows' items, padded at the end, int64 [b, T]. Not to be written into.
        outputs: the network's outputs at every position, [b, T, dim].
    """

    start: npt.NDArray[np.int64]
    count: npt.NDArray[np.int64]
    inputs: npt.NDArray[np.int64]
    outputs: Tensor


Term = Callable[[Batch], Tensor]
"""A term that is added to the loss of each batch: a scalar."""


def train_epoch(
    net: SequenceNet,
    optimizer: torch.optim.Optimizer,
    data: Interactions,
    ctx: Context,
    penalty: Callable[[], Tensor] | None = None,
    contrast: Term | None = None,
) -> Mapping[str, float]:
    """One pass over the training windows of `data`; the mean losses.

    All positions of a window are trained at once: position t predicts item t + 1 from items 1 … t.
    With `cut="prefixes"` only the last one is.

    Args:
        penalty: added to every batch's loss, e.g. a proximal term.
        contrast: added as well; it sees the batch.

    Raises:
        CrossfedError: the loss is not finite.
    """
    config, device = net.config, net.items.device
    net.train()
    pieces = windows(data, config.length, config.cut, ctx.rng)
    sampled = config.loss == "bce"
    if sampled:
        owners = np.repeat(data.users, config.negatives)
        drawn = draw_negatives(data, owners, ctx.rng).reshape(-1, config.negatives)
        power = gbce_power(config.negatives, data.n_items, config.calibration)
    terms: dict[str, Term] = {} if contrast is None else {"contrast": contrast}
    if penalty is not None:
        terms["penalty"] = lambda batch: penalty()
    total, seen = torch.zeros((), device=device), 0
    sums = {name: torch.zeros((), device=device) for name in terms}
    for rows in batches(pieces.count, config.batch_size, ctx.rng):
        start, count = pieces.start[rows], pieces.count[rows]
        inputs = padded(data.items, start, count)
        place = np.arange(inputs.shape[1])
        trained = (
            place == count[:, None] - 1 if config.cut == "prefixes" else place < count[:, None]
        )
        if sampled:  # a user who has every item has no negative
            trained &= drawn[start + 1, :1] >= 0
        target = (start[:, None] + 1 + place)[trained]  # where the targets are in the data
        if not len(target):
            continue
        outputs = net(torch.from_numpy(inputs).to(device), torch.from_numpy(count).to(device))
        chosen = torch.from_numpy(np.flatnonzero(trained)).to(device)
        states = outputs.flatten(0, 1).index_select(0, chosen)
        positive = torch.from_numpy(data.items[target]).to(device)
        if sampled:
            loss = bce(
                states, net.items, positive, torch.from_numpy(drawn[target]).to(device), power
            )
        else:
            loss = softmax(states, net.items, positive)
        total += loss.detach() * len(target)
        for name, term in terms.items():
            added = term(Batch(start, count, inputs, outputs))
            sums[name] += added.detach() * len(target)
            loss = loss + added
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen += len(target)
    means = {"loss": float(total) / max(seen, 1)}
    means |= {name: float(value) / max(seen, 1) for name, value in sums.items()}
    return finite(means, ctx)


class Learner:
    """One domain's network, its optimizer, and the histories to recommend from; the state of
    methods built on it.

    Attributes:
        net, adam: what training continues from. known: the histories that are looked at when
            ranking.
    """

    def __init__(self, config: NextItemConfig, ctx: Context) -> None:
        self.config = config
        self.net = self.network(ctx).to(ctx.device)
        self.adam = torch.optim.Adam(self.net.parameters(), lr=config.lr, fused=True)
        self.known: Interactions = ctx.own
        self._users: Tensor | None = None

    def network(self, ctx: Context) -> NextItem:
        """The network that is trained, with its first weights, on the CPU."""
        return NextItem(ctx.own.n_items, self.config, ctx.torch_rng)

    def contrast(self, ctx: Context) -> Term | None:
        """What an epoch adds to the loss of each batch besides a penalty; nothing here."""
        return None

    def changed(self) -> None:
        """Forget the users' vectors, since the network or the histories are others now."""
        self._users = None

    def observe(self, known: Interactions) -> None:
        """Recommend from these histories from now on."""
        self.known = known
        self.changed()

    def users(self) -> Tensor:
        """F at the end of every known history, [n_users, dim]; kept until something changes."""
        if self._users is None:
            self._users = user_vectors(self.net, self.known)
        return self._users

    def train(
        self, ctx: Context, penalty: Callable[[], Tensor] | None = None
    ) -> Mapping[str, float]:
        """`train_epoch` on the domain's own data."""
        self.changed()
        return train_epoch(self.net, self.adam, ctx.own, ctx, penalty, self.contrast(ctx))

    @torch.no_grad()
    def score(self, users: npt.NDArray[np.int64]) -> Tensor:
        """`relevance` of all items after the whole known history of some users. int64 [b] -> [b,
        n_items].
        """
        return relevance(self.users()[torch.from_numpy(users)], self.net.items)

    def export(self) -> dict[str, Tensor]:
        """F of every user's history [n_users, dim] and M [n_items, dim]: all that `relevance`
        needs.
        """
        return {"users": self.users(), "items": self.net.items.detach()}

    def state_dict(self) -> dict[str, Any]:
        """Network and optimizer: what training continues from."""
        return {"net": dict(self.net.state_dict()), "adam": self.adam.state_dict()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """The reverse of `state_dict`, into a state of the same config and data."""
        self.net.load_state_dict(dict(saved["net"]))
        self.adam.load_state_dict(dict(saved["adam"]))
        self.changed()


def n_targets(data: Interactions) -> int:
    """How many training positions a domain has: every item but each user's first."""
    return int(np.maximum(np.diff(data.indptr) - 1, 0).sum())


@torch.no_grad()
def user_vectors(net: SequenceNet, data: Interactions, length: int | None = None) -> Tensor:
    """F at the last position of every user's history, without dropout: [n_users, dim].

    A user without history gets the zero vector, so that all items tie.

    Args:
        length: items of a history that are looked at; the config's by default.
    """
    device, was = net.items.device, net.training
    net.eval()
    last = histories(data, length or net.config.length)
    vectors = net.items.new_zeros(data.n_users, net.config.dim)
    order = np.argsort(last.count, kind="stable")
    for begin in range(0, len(order), 512):
        rows = order[begin : begin + 512]
        count = torch.from_numpy(last.count[rows]).to(device)
        inputs = torch.from_numpy(padded(data.items, last.start[rows], last.count[rows])).to(device)
        ends = net(inputs, count)[torch.arange(len(rows), device=device), count - 1]
        vectors[torch.from_numpy(last.user[rows]).to(device)] = ends
    net.train(was)
    return vectors
