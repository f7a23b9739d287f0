"""GRU4Rec: a recurrent network over histories, in the form of libraries and in that of its authors.

Paper
    Hidasi et al., "Session-based Recommendations with Recurrent Neural Networks", ICLR 2016, arXiv
    1511.06939 (A), and Hidasi and Karatzoglou, "Recurrent Neural Networks with Top-k Gains for
    Session-based Recommendations", CIKM 2018, arXiv 1706.03847 (B). A baseline of FedCGR (arXiv
    2608.10929), which does not say in which form. The numbers are ours:

    =====  ===============================================  ==================================
    no.    what                                             here
    =====  ===============================================  ==================================
    1      h_t = (1 - z) ⊙ n + z ⊙ h_{t-1} (A)              `torch.nn.GRU`, `step`
    2      z = σ(W_z x + U_z h_{t-1}), the update gate (A)  the same
    3      r = σ(W_r x + U_r h_{t-1}), the reset gate (A)   the same
    4      n = tanh(W x + r ⊙ (U h_{t-1}))                  the same, see Departures
    5      r_i = e_i h + b_i, the score of item i           `scores`
    6      softmax cross-entropy, over all items or (B)     `parts.next_item.softmax`,
           over the batch's and the sampled items           `sampled_softmax`
    7      logQ: r_i - q ln P(i)                            `correction`
    8      BPR-max with its regulariser (B)                 `bpr_max`
    9      negatives with probability ∝ count^α (B)         `Sampler`
    10     session-parallel batches (A)                     `session_parallel`
    11     Adagrad with momentum                            `Adagrad`
    =====  ===============================================  ==================================

Notation
    ==========  =========================================  ================
    symbol      name                                       shape
    ==========  =========================================  ================
    e           item embeddings, input and output          [n_items, dim]
    b           item biases, official form only            [n_items]
    h           hidden state                               [hidden]
    α           exponent of the sampling distribution      –
    q, λ        logQ's strength, weight of BPR-max's term  –
    m           sessions side by side                      –
    ==========  =========================================  ================

What crosses
    Nothing: the method has one local stage, without edges. A round is one epoch over the domain's
    histories.

Two forms
    "library" is what RecBole and tables like FedCGR's have: embeddings of width `dim`, a GRU of
    width `hidden` without biases, a linear layer back to `dim`, the cross-entropy over all items,
    back-propagation through the whole window, Adam.
    "official" is the authors': embeddings as wide as the hidden state, biases, sessions side by
    side, one item a step and no back-propagation beyond it, a hidden state that is carried on and
    reset where a session begins, negatives from the batch and sampled, Adagrad with momentum. A
    session is a user's training history. The authors say that this is made for sessions, not for
    whole histories.

Departures
    - Eq. (4) is torch's, as in the authors' PyTorch code and in RecBole. (A) has U(r ⊙ h_{t-1}).
    - Library form: RecBole has one row per target and trains its last position (`cut="prefixes"`);
      by default every position of a window is trained at once, on the same targets.
    - Official form: where fewer than two sessions are left and nothing is sampled, the epoch ends.

Not stated in the paper
    - Weights start from U(-a, a), a = √(6 / (rows + columns)), for each gate by itself in the
      official form; the library form's embeddings are normal with that variance, as in RecBole.
      Biases start from 0.
    - Official form, as in the authors' code: P of Eq. (7) is an item's count for the batch's
      targets and count^α for sampled items; neither is normalised. A sampled item, or another
      session's target, that equals a row's own target stays among its negatives. The loss is a sum
      over the sessions, divided by `batch_size`. Dropout of the hidden state is carried on with it.
    - What is looked at when ranking: the last `length` items in the library form, all in the
      official form. A user without history has equal scores in the library form; in the official
      one h = 0, which leaves the biases.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from crossfed.methods.parts.losses import finite
from crossfed.methods.parts.next_item import SequenceNet, train_epoch, user_vectors
from crossfed.methods.parts.sequences import Cut
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
)

Int64s = npt.NDArray[np.int64]

OFFICIAL = "with form=official"


WEIGHTS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
"""A GRU layer's parameters, in the order in which `torch.gru_cell` takes them."""


class Config(MethodConfig):
    """The network and its training, as in RecBole 1.2.1 where nothing is said. ◇: chosen here."""

    form: Literal["library", "official"] = Field("library", description="see `Two forms` ◇")
    dim: int = Field(64, ge=1, description="width of item embeddings; with form=official hidden's")
    hidden: int = Field(128, ge=1, description="width of the hidden state")
    layers: int = Field(1, ge=1, description="GRU layers")
    dropout_embed: float = Field(0.3, ge=0, lt=1, description="dropout of item embeddings")
    dropout_hidden: float = Field(0.0, ge=0, lt=1, description="dropout of hidden states")
    loss: Literal["softmax", "bce", "bpr-max"] = Field(
        "softmax",
        description="softmax: over all items (library) or those of Eq. (6) (official); "
        "bce: sampled negatives (library); bpr-max: Eq. (8) (official)",
    )
    length: int = Field(50, ge=1, description="items that are looked at, with form=library")
    cut: Cut = Field(
        "all",
        description="with form=library; all: every item a target once; last: the last `length`; "
        "prefixes: one row per target (RecBole) ◇",
    )
    negatives: int = Field(1, ge=1, description="negatives per position with loss=bce")
    samples: int = Field(2048, ge=0, description=f"sampled negatives of a batch {OFFICIAL} (B)")
    alpha: float = Field(0.5, ge=0, description=f"α, exponent of counts in Eq. (9) {OFFICIAL}")
    logq: float = Field(0.0, ge=0, description=f"q of Eq. (7) with loss=softmax {OFFICIAL}")
    bpreg: float = Field(1.0, ge=0, description="λ of Eq. (8) with loss=bpr-max")
    elu: float = Field(0.5, ge=0, description="ELU's α on scores with loss=bpr-max; 0: no ELU")
    momentum: float = Field(0.0, ge=0, lt=1, description=f"of Adagrad {OFFICIAL}")
    lr: float = Field(0.001, gt=0, description="learning rate of Adam, or of Adagrad (official)")
    batch_size: int = Field(128, ge=1, description="windows in a batch, or sessions side by side ◇")
    epochs: int = Field(200, ge=0, description="local epochs at most ◇")
    patience: int | None = Field(20, ge=1, description="evaluations without gain before stopping ◇")

    @property
    def calibration(self) -> float:
        """Plain cross-entropy with loss=bce."""
        return 0.0

    @model_validator(mode="after")
    def _fits_the_form(self) -> Config:
        if self.form == "library" and self.loss == "bpr-max":
            raise ValueError("loss=bpr-max needs form=official")
        if self.form == "official":
            if self.loss == "bce":
                raise ValueError("loss=bce needs form=library")
            if self.dim != self.hidden:
                raise ValueError(
                    "with form=official one table serves input and output: set dim and hidden to "
                    f"the same width (they are {self.dim} and {self.hidden})"
                )
            if self.batch_size < 2 and not self.samples:
                raise ValueError("without samples a batch needs two sessions for a negative")
        return self


class Recurrent(SequenceNet):
    """GRU layers over item embeddings, in either form.

    Args:
        n_items: the catalogue. config: form and sizes. rng: CPU generator of the first weights.
    """

    config: Config  # type: ignore[assignment]  # bpr-max is trained here, not by `train_epoch`

    def __init__(self, n_items: int, config: Config, rng: torch.Generator) -> None:
        super().__init__()
        self.config = config
        official, d, hidden = config.form == "official", config.dim, config.hidden
        self.items = nn.Parameter(torch.empty(n_items, d))
        self.layers = nn.ModuleList(
            nn.GRU(d if number == 0 else hidden, hidden, bias=official, batch_first=True)
            for number in range(config.layers)
        )
        self.bias = nn.Parameter(torch.zeros(n_items, 1)) if official else None
        self.out = None if official else nn.Linear(hidden, d)
        _initialise(self, official, rng)

    def forward(self, items: Tensor, count: Tensor) -> Tensor:
        """Eq. (1) along each window: int64 [b, T], int64 [b] -> [b, T, dim].

        A recurrent network never sees what comes later, so that lengths do not matter.
        """
        x = self._dropped(F.embedding(items, self.items), self.config.dropout_embed)
        for layer in self.layers:
            x = self._dropped(layer(x)[0], self.config.dropout_hidden)
        return x if self.out is None else self.out(x)

    def step(self, embedded: Tensor, state: Tensor) -> Tensor:
        """Eq. (1) to Eq. (4), once: the next hidden states of all layers.

        Args:
            embedded: item embeddings, [m, dim]. state: [layers, m, hidden].

        Returns:
            [layers, m, hidden]; the last one is what items are scored with.
        """
        x, new = self._dropped(embedded, self.config.dropout_embed), []
        for layer, before in zip(self.layers, state, strict=True):
            weights = [getattr(layer, f"{name}_l0") for name in WEIGHTS]
            x = self._dropped(torch.gru_cell(x, before, *weights), self.config.dropout_hidden)
            new.append(x)
        return torch.stack(new)

    def _dropped(self, x: Tensor, rate: float) -> Tensor:
        return dropout(x, rate, self.training)


@torch.no_grad()
def _initialise(net: Recurrent, official: bool, rng: torch.Generator) -> None:
    if official:
        nn.init.xavier_uniform_(net.items, generator=rng)
    else:
        nn.init.xavier_normal_(net.items, generator=rng)
    for layer in net.layers:
        for name, weight in layer.named_parameters():
            if "bias" in name:
                weight.zero_()
                continue
            for gate in weight.chunk(3) if official else [weight]:
                nn.init.xavier_uniform_(gate, generator=rng)
    if net.out is not None:
        nn.init.xavier_uniform_(net.out.weight, generator=rng)
        nn.init.zeros_(net.out.bias)


def scores(states: Tensor, items: Tensor, bias: Tensor | None) -> Tensor:
    """Eq. (5): r_i = e_i h + b_i. [b, dim], [n, dim], [n, 1] -> [b, n]."""
    r = states @ items.T
    return r if bias is None else r + bias[:, 0]


def correction(counts: Tensor, m: int, alpha: float, strength: float) -> Tensor:
    """Eq. (7): q ln P(i), what logQ takes from the scores of the batch's items. [n] -> [n].

    Args:
        counts: how often each item occurs in training; the first m items are the batch's targets.
        m: targets. alpha: α; P is count for a target and count^α for a sampled item. strength: q.
    """
    power = torch.full_like(counts, alpha)
    power[:m] = 1.0
    return strength * power * counts.clamp(min=1).log()


def sampled_softmax(r: Tensor) -> Tensor:
    """Eq. (6): Σ_i -ln softmax(r_i)_i; column i < m is row i's target. [m, n] -> a scalar."""
    own = torch.arange(len(r), device=r.device)
    return F.cross_entropy(r, own, reduction="sum")


def bpr_max(r: Tensor, weight: float, elu: float) -> Tensor:
    """Eq. (8): Σ_i [-ln Σ_j s_ij σ(r_ii - r_ij) + λ Σ_j s_ij r_ij²], s_i the negatives' softmax.

    Args:
        r: scores [m, n]; column i < m is row i's target, all others are its negatives.
        weight: λ. elu: α of the ELU that scores pass through first; 0 for none.

    Returns:
        A scalar.
    """
    if elu:
        r = F.elu(r, elu)
    own = torch.eye(*r.shape, dtype=torch.bool, device=r.device)
    log_s = r.masked_fill(own, -torch.inf).log_softmax(1)
    target = r.diagonal()[:, None]
    ranking = torch.logsumexp(log_s + F.logsigmoid(target - r), 1)
    return (weight * (log_s.exp() * r.square()).sum(1) - ranking).sum()


class Sampler:
    """Items with probability ∝ count^α, Eq. (9)."""

    def __init__(self, items: Int64s, n_items: int, alpha: float) -> None:
        self.counts = np.bincount(items, minlength=n_items)
        self._below = np.cumsum(self.counts.astype(np.float64) ** alpha)

    def draw(self, n: int, rng: np.random.Generator) -> Int64s:
        """n items with replacement, int64 [n]."""
        at = rng.random(n) * self._below[-1]
        drawn: Int64s = np.searchsorted(self._below, at, side="right")
        return drawn


def session_parallel(
    data: Interactions, m: int, two: bool = False
) -> Iterator[tuple[Int64s, Int64s, npt.NDArray[np.bool_]]]:
    """Eq. (10): steps through m sessions side by side; where one ends the next takes its place.

    Sessions are the histories of two items or more, ordered by the time of their first.

    Args:
        data: training interactions. m: sessions side by side at most.
        two: end where fewer than two sessions are left.

    Yields:
        For each step: where its inputs are in `data.items` (the targets are right after them), the
        slot that each session has, and whether it begins here; all [sessions left].
    """
    sessions = np.flatnonzero(np.diff(data.indptr) > 1)
    sessions = sessions[np.argsort(data.times[data.indptr[sessions]], kind="stable")]
    slots, following = np.arange(min(m, len(sessions))), min(m, len(sessions))
    at, end = data.indptr[sessions[slots]], data.indptr[sessions[slots] + 1] - 1
    begins = np.ones(len(slots), bool)
    while len(at) > two:
        yield at, slots, begins
        at = at + 1
        begins = at == end
        ended = np.flatnonzero(begins)
        if len(ended):
            new = sessions[following : following + len(ended)]
            following += len(new)
            at[ended[: len(new)]] = data.indptr[new]
            end[ended[: len(new)]] = data.indptr[new + 1] - 1
            kept = np.delete(np.arange(len(at)), ended[len(new) :])
            at, end, slots, begins = at[kept], end[kept], slots[kept], begins[kept]


class Adagrad(torch.optim.Optimizer):
    """Eq. (11): G ← G + g², v ← μ v - η g / √(G + 10⁻⁶), w ← w + v.

    A sparse gradient moves the rows it has, and no other row's G, v or w.
    """

    def __init__(self, parameters: Iterator[nn.Parameter], lr: float, momentum: float) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step on the gradients that there are."""
        for group in self.param_groups:
            for w in group["params"]:
                if w.grad is None:
                    continue
                state = self.state[w]
                if not state:
                    state["square"] = torch.zeros_like(w)
                    state["velocity"] = torch.zeros_like(w)
                self._move(w, state, group["lr"], group["momentum"])

    @staticmethod
    def _move(w: Tensor, state: dict[str, Tensor], lr: float, momentum: float) -> None:
        assert w.grad is not None
        square, velocity, rows, g = state["square"], state["velocity"], None, w.grad
        if g.is_sparse:
            g = g.coalesce()  # a row's gradient is the sum over its uses
            rows, g = g.indices()[0], g.values()
            square, velocity = square[rows], velocity[rows]
        square = square + g.square()
        velocity = momentum * velocity - lr * g / (square + 1e-6).sqrt()
        if rows is None:
            state["square"], state["velocity"] = square, velocity
            w.add_(velocity)
        else:
            state["square"].index_copy_(0, rows, square)
            state["velocity"].index_copy_(0, rows, velocity)
            w.index_add_(0, rows, velocity)


class State:
    """One domain's network, its optimizer, and the histories to recommend from."""

    def __init__(self, config: Config, ctx: Context) -> None:
        self.config = config
        self.net = Recurrent(ctx.own.n_items, config, ctx.torch_rng).to(ctx.device)
        self.optimizer: torch.optim.Optimizer
        if config.form == "official":
            self.optimizer = Adagrad(self.net.parameters(), config.lr, config.momentum)
        else:
            self.optimizer = torch.optim.Adam(self.net.parameters(), lr=config.lr, fused=True)
        self.known: Interactions = ctx.own
        self._users: Tensor | None = None

    def changed(self) -> None:
        """Forget the users' vectors, since the network or the histories are others now."""
        self._users = None

    def observe(self, known: Interactions) -> None:
        """Recommend from these histories from now on."""
        self.known = known
        self.changed()

    def users(self) -> Tensor:
        """h, or its projection, at the end of every known history; [n_users, dim]."""
        if self._users is None:
            longest = int(np.diff(self.known.indptr).max(initial=1))
            length = max(longest, 1) if self.config.form == "official" else self.config.length
            self._users = user_vectors(self.net, self.known, length)
        return self._users

    def export(self) -> dict[str, Tensor]:
        """Users [n_users, dim] and items [n_items, dim]; with biases, one more column each."""
        users, items, bias = self.users(), self.net.items.detach(), self.net.bias
        if bias is not None:
            users = torch.cat([users, users.new_ones(len(users), 1)], 1)
            items = torch.cat([items, bias.detach()], 1)
        return {"users": users, "items": items}

    def state_dict(self) -> dict[str, Any]:
        """Network and optimizer: what training continues from."""
        return {"net": dict(self.net.state_dict()), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """The reverse of `state_dict`, into a state of the same config and data."""
        self.net.load_state_dict(dict(saved["net"]))
        self.optimizer.load_state_dict(dict(saved["optimizer"]))
        self.changed()


def train(state: State, inbox: Mapping[str, Payload], ctx: Context) -> Out:
    """One epoch over the domain's histories, in the form that the config names."""
    state.changed()
    if state.config.form == "official":
        return Out(metrics=official_epoch(state.net, state.optimizer, ctx))
    return Out(metrics=train_epoch(state.net, state.optimizer, ctx.own, ctx))


def official_epoch(
    net: Recurrent,
    optimizer: torch.optim.Optimizer,
    ctx: Context,
) -> Mapping[str, float]:
    """One pass over all sessions, one item a step; the mean loss of a target.

    Raises:
        CrossfedError: the loss is not finite.
    """
    config, data, device = net.config, ctx.own, net.items.device
    sampler = Sampler(data.items, data.n_items, config.alpha)
    counts = torch.from_numpy(sampler.counts).to(device, net.items.dtype)
    net.train()
    state = net.items.new_zeros(config.layers, config.batch_size, config.hidden)
    total, seen = torch.zeros((), device=device), 0
    for at, slots, begins in session_parallel(data, config.batch_size, not config.samples):
        m, where = len(at), torch.from_numpy(slots).to(device)
        negatives = sampler.draw(config.samples, ctx.rng) if config.samples else at[:0]
        used = np.concatenate([data.items[at], data.items[at + 1], negatives])
        rows = torch.from_numpy(used).to(device)
        carried = state[:, where].masked_fill(torch.from_numpy(begins).to(device)[:, None], 0.0)
        loss = _loss(net, rows, carried, m, counts, state, where)
        optimizer.zero_grad()
        (loss / config.batch_size).backward()
        optimizer.step()
        total += loss.detach()
        seen += m
    return finite({"loss": float(total) / max(seen, 1)}, ctx)


def _loss(
    net: Recurrent,
    rows: Tensor,
    carried: Tensor,
    m: int,
    counts: Tensor,
    state: Tensor,
    where: Tensor,
) -> Tensor:
    """The summed loss of one step; the hidden states it ends with go into `state`, cut off.

    Args:
        rows: the items of inputs [m], targets [m] and samples, int64. carried: [layers, m, hidden].
        counts: [n_items]. state: [layers, slots, hidden]. where: the sessions' slots, int64 [m].
    """
    config, others = net.config, rows[m:]
    vectors = F.embedding(rows, net.items, sparse=True)
    new = net.step(vectors[:m], carried)
    state[:, where] = new.detach()
    assert net.bias is not None
    r = scores(new[-1], vectors[m:], F.embedding(others, net.bias, sparse=True))
    if config.loss == "bpr-max":
        return bpr_max(r, config.bpreg, config.elu)
    if config.logq:
        r = r - correction(counts[others], m, config.alpha, config.logq)
    return sampled_softmax(r)


@torch.no_grad()
def score(state: State, users: npt.NDArray[np.int64]) -> Tensor:
    """Eq. (5) for all items after the whole known history: int64 [b] -> [b, n_items]."""
    return scores(state.users()[torch.from_numpy(users)], state.net.items, state.net.bias)


def stages(config: Config) -> tuple[Stage, ...]:
    """One local stage; a round is an epoch."""
    return (Stage("train", rounds=config.epochs, each=(Phase(train),), patience=config.patience),)


METHOD = Method(
    name="gru4rec",
    title="GRU4Rec, trained by every domain alone",
    paper="arXiv 1511.06939, 1706.03847",
    Config=Config,
    stages=stages,
    init_domain=State,
    score=score,
    observe=State.observe,
    ordered=True,
    state_dict=State.state_dict,
    load_state_dict=State.load_state_dict,
    export=State.export,
    scope=Scope.LOCAL,
)
