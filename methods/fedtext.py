"""FedText: a map of item text, averaged by FedAvg; users and item offsets private. What must
transfer, at its simplest.

Paper
    None as a whole: a content-based factorisation (as the item side of Lops et al., 2011, and of
    two-tower models) trained by BPR (Rendle et al., UAI 2009, arXiv 1205.2618) or softmax, its map
    averaged by FedAvg (McMahan et al., AISTATS 2017, arXiv 1602.05629). It is the reference for
    methods that let more cross. The equations are numbered here.

Notation
    ==========  =========================================  =========================
    symbol      name                                       shape
    ==========  =========================================  =========================
    t_i         frozen text vector of item i               [width]
    f           map of text, shared                        width -> dim
    o_i         offset of item i, private                  [dim]
    p_u         vector of user u, private                  [dim]
    z_i         item vector                                [dim]
    H_u         training history of user u                 set of items
    S           similarities of item-kNN with text         CSR [n_items, n_items]
    κ           weight of the floor                        –
    n_k         training interactions of domain k          –
    ==========  =========================================  =========================

What crosses
    Up: the parameters of f and the number of training interactions. Down: the average of f. Users,
    offsets and S stay.

Departures
    None.

Not stated in the paper
    - The server draws the first f, so that all domains start from the same. It learns its shapes
      from what the domains send before the first round, of which it uses nothing else; a domain
      alone (`control=solo`) starts from the same f.
    - With `start="knntext"` a score is that of item-kNN with text plus the learned part, which is
      small at the start: the method begins at that floor, and learns what it lacks. S has no
      diagonal, so that a training item does not speak for itself.
    - p and o start from N(0, 0.01²) and 0; offsets have a regularisation of their own, since what
      they explain is not shared.
    - Softmax goes over all items of the domain; its logits, a batch times the catalogue, are held
      at once.
    - With a floor the saved model lists the best items of every user (`parts.item_based.LISTED`),
      and neither S nor a history.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp
import torch
import torch.nn.functional as F
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor, nn

from crossfed.methods.parts.averaging import (
    Server,
    Sharing,
    adopt_step,
    check_same,
    rounds,
)
from crossfed.methods.parts.item_based import best_listed, cosine, listed, text_cosine, user_items
from crossfed.methods.parts.losses import bpr, finite, l2_ego
from crossfed.methods.parts.sampling import bpr_epoch
from crossfed.platform.method import (
    SERVER,
    Context,
    Direction,
    Interactions,
    Method,
    MethodConfig,
    Out,
    Payload,
    Phase,
    Stage,
    inner_product,
)

SHARING = Sharing({"tower.*": "the map from text vectors to item vectors"})


class Config(MethodConfig):
    """The map, its training, and the floor it may start from. All values are chosen here."""

    dim: PositiveInt = Field(64, description="width of item and user vectors")
    layers: Literal[1, 2] = Field(1, description="layers of the map f; 1 is linear")
    inner: PositiveInt = Field(256, description="width of the hidden layer of a map of two layers")
    loss: Literal["bpr", "softmax"] = Field(
        "bpr", description="bpr: one random negative; softmax: all items"
    )
    lr: PositiveFloat = Field(0.003, description="Adam's learning rate")
    batch_size: PositiveInt = Field(1024, description="training pairs in a batch")
    l2: NonNegativeFloat = Field(1e-4, description="weight of ½‖p_u‖² by pair")
    l2_offsets: NonNegativeFloat = Field(1e-2, description="weight of ½‖o_i‖² by pair")
    rounds: int = Field(60, ge=0, description="rounds at most")
    local_epochs: PositiveInt = Field(1, description="epochs of a domain in a round")
    patience: PositiveInt | None = Field(
        8, description="evaluations without a better one before stopping"
    )
    start: Literal["random", "knntext"] = Field(
        "random", description="knntext: on top of item-kNN with text"
    )
    floor_weight: PositiveFloat = Field(10.0, description="κ of Eq. (2), with a floor")
    shrinkage: NonNegativeFloat = Field(10.0, description="of the floor, as in knntext")
    neighbours: PositiveInt | None = Field(None, description="of the floor, as in knntext")
    text: NonNegativeFloat = Field(0.1, description="of the floor, as in knntext")
    text_neighbours: PositiveInt = Field(20, description="of the floor, as in knntext")


# --- Network ---


class Net(nn.Module):
    """f, p and o. The tower's first weights are overwritten by the server's.

    Args:
        n_users, n_items: of the domain. width: of a text vector. rng: CPU generator of the first
            values.
    """

    def __init__(
        self, n_users: int, n_items: int, width: int, config: Config, rng: torch.Generator
    ) -> None:
        super().__init__()
        sizes = [width, config.dim] if config.layers == 1 else [width, config.inner, config.dim]
        steps: list[nn.Module] = []
        for source, target in itertools.pairwise(sizes):
            steps += [*([nn.ReLU()] if steps else []), nn.Linear(source, target)]
        self.tower = nn.Sequential(*steps)
        self.users = nn.Parameter(0.01 * torch.randn(n_users, config.dim, generator=rng))
        self.offsets = nn.Parameter(torch.zeros(n_items, config.dim))


def first_tower(
    shapes: Mapping[str, tuple[int, ...]], rng: torch.Generator
) -> dict[str, npt.NDArray[np.float32]]:
    """f at the start: Xavier-uniform matrices, zero biases."""
    drawn = {}
    for name, shape in shapes.items():
        value = torch.zeros(shape)
        if len(shape) == 2:
            nn.init.xavier_uniform_(value, generator=rng)
        drawn[name] = value.numpy()
    return drawn


# --- Equations ---


def item_vectors(tower: nn.Module, text: Tensor, offsets: Tensor) -> Tensor:
    """Eq. (1): z_i = f(t_i) + o_i. [n, width], [n, dim] -> [n, dim]."""
    vectors: Tensor = tower(text) + offsets
    return vectors


def scores(users: Tensor, items: Tensor, floor: Tensor | None, kappa: float) -> Tensor:
    """Eq. (2): s_ui = p_u·z_i + κ Σ_{j in H_u} S_ji, the second only with a floor.

    Args:
        users: p [b, dim]. items: z, of all [n_items, dim], or of one item for each user [b, dim]
            with a floor [b] or none.
        floor: the sum, [b, n_items].

    Returns:
        [b, n_items].
    """
    found = users @ items.T
    return found if floor is None else found + kappa * floor


def pair_loss(positive: Tensor, negative: Tensor) -> Tensor:
    """Eq. (3): the mean of -ln σ(s_ui - s_uj). [b], [b] -> a scalar."""
    return bpr(positive, negative)


def softmax_loss(logits: Tensor, items: Tensor) -> Tensor:
    """Eq. (4): the mean of -ln softmax(s_u)_i over all items. [b, n_items], int64 [b] -> a
    scalar.
    """
    return F.cross_entropy(logits, items)


# Eq. (5), f̄ = Σ_k n_k f_k / Σ_k n_k, is `parts.averaging.average` with n_k = `n_pairs`.


def n_pairs(data: Interactions) -> int:
    """n_k: training interactions of a domain."""
    return len(data.items)


def floor_similarity(
    data: Interactions, text: npt.NDArray[np.float32], config: Config
) -> sp.csr_matrix:
    """S of item-kNN with text: cosines by co-occurrence, plus those of the nearest by text at their
    weight.
    """
    found = cosine(user_items(data), config.shrinkage, config.neighbours)
    if config.text:
        found = found + np.float32(config.text) * text_cosine(text, config.text_neighbours)
    return found.tocsr()


# --- State ---


class Domain:
    """One domain's network, its optimiser, and its floor.

    Attributes:
        net, adam: what training continues from. text: [n_items, width]. history: R. floor: Sᵀ, None
            without one.
    """

    def __init__(self, config: Config, ctx: Context) -> None:
        data, text = ctx.own, ctx.artifacts["text"]
        self.config, self.n_items = config, data.n_items
        self.text = torch.from_numpy(np.array(text)).to(ctx.device)
        self.net = Net(data.n_users, data.n_items, text.shape[1], config, ctx.torch_rng).to(
            ctx.device
        )
        self.adam = torch.optim.Adam(self.net.parameters(), lr=config.lr, fused=True)
        self.history = user_items(data)
        self.floor: sp.csr_matrix | None = None
        if config.start == "knntext":
            self.floor = floor_similarity(data, text, config).T.tocsr()
        self._items: Tensor | None = None

    def changed(self) -> None:
        """Forget the item vectors, since the network is another now."""
        self._items = None

    @torch.no_grad()
    def items(self) -> Tensor:
        """z of all items, [n_items, dim]; kept until something changes."""
        if self._items is None:
            self._items = item_vectors(self.net.tower, self.text, self.net.offsets)
        return self._items

    def floor_of_pairs(self, users: Tensor, items: Tensor) -> Tensor | None:
        """Σ_{j in H_u} S_ji of pairs (u, i). int64 [b] twice -> [b], None without a floor."""
        if self.floor is None:
            return None
        history, speaks = self.history[users.numpy()], self.floor[items.numpy()]
        return torch.from_numpy(np.asarray(history.multiply(speaks).sum(1), np.float32).ravel()).to(
            self.text.device
        )

    def floor_of_users(self, users: npt.NDArray[np.int64]) -> Tensor | None:
        """The same for all items: int64 [b] -> [b, n_items], None without a floor."""
        if self.floor is None:
            return None
        return torch.from_numpy((self.history[users] @ self.floor.T).toarray()).to(self.text.device)

    @torch.no_grad()
    def score(self, users: npt.NDArray[np.int64]) -> Tensor:
        """Eq. (2) for all items. Int64 [b] -> [b, n_items]."""
        rows = self.net.users[torch.from_numpy(users).to(self.text.device)]
        return scores(rows, self.items(), self.floor_of_users(users), self.config.floor_weight)

    def export(self) -> dict[str, Tensor]:
        """p [n_users, dim] and z [n_items, dim]; with a floor, the best items of every user."""
        if self.floor is None:
            return {"users": self.net.users.detach(), "items": self.items()}
        return best_listed(self.score, len(self.net.users), self.n_items)

    def state_dict(self) -> dict[str, Any]:
        """Network and optimiser."""
        return {"net": dict(self.net.state_dict()), "adam": self.adam.state_dict()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """The reverse of `state_dict`, into a state of the same config and data."""
        self.net.load_state_dict(dict(saved["net"]))
        self.adam.load_state_dict(dict(saved["adam"]))
        self.changed()


# --- Steps ---


def batch_loss(state: Domain, users: Tensor, items: Tensor, others: Tensor) -> Tensor:
    """Eq. (3) or Eq. (4) of a batch, and the regularisation. Int64 [b] three times -> a scalar."""
    net, config, device = state.net, state.config, state.text.device
    u, i, j = (rows.to(device) for rows in (users, items, others))
    p = net.users[u]
    if config.loss == "softmax":
        z = item_vectors(net.tower, state.text, net.offsets)
        logits = scores(p, z, state.floor_of_users(users.numpy()), config.floor_weight)
        loss, offsets = softmax_loss(logits, i), [net.offsets[i]]
    else:
        both = torch.cat([i, j])
        z = item_vectors(net.tower, state.text[both], net.offsets[both])
        s_i, s_j = (p * z[: len(i)]).sum(1), (p * z[len(i) :]).sum(1)
        f_i, f_j = (state.floor_of_pairs(users, rows) for rows in (items, others))
        if f_i is not None and f_j is not None:
            s_i, s_j = s_i + config.floor_weight * f_i, s_j + config.floor_weight * f_j
        loss, offsets = pair_loss(s_i, s_j), [net.offsets[i], net.offsets[j]]
    return loss + config.l2 * l2_ego(p) + config.l2_offsets * l2_ego(*offsets)


def train(state: Domain, inbox: Mapping[str, Payload], ctx: Context) -> Out:
    """Local epochs over the domain's training pairs."""
    state.changed()
    total, count = torch.zeros((), device=state.text.device), 0
    for _ in range(state.config.local_epochs):
        for users, items, others in bpr_epoch(ctx.own, state.config.batch_size, ctx.rng):
            loss = batch_loss(state, users, items, others)
            state.adam.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            state.adam.step()
            total += loss.detach() * len(users)
            count += len(users)
    return Out(metrics=finite({"loss": float(total) / max(count, 1)}, ctx))


def introduce(state: Domain, inbox: Mapping[str, Payload], ctx: Context) -> Out:
    """Show the server a map, of which it takes the shapes."""
    return Out({SERVER: SHARING.upload(state.net)})


def draw(state: Server, inbox: Mapping[str, Payload], ctx: Context) -> Out:
    """Draw the first f and send it to all.

    Raises:
        CrossfedError: domains have maps of different shapes, since their text vectors differ in
            width.
    """
    shapes = {name: value.shape for name, value in inbox[ctx.peers[0]].items()}
    for name in ctx.peers:
        check_same(name, inbox[name], shapes)
    state.shared = first_tower(shapes, ctx.torch_rng)
    return Out(dict.fromkeys(ctx.peers, state.shared))


def init_server(config: Config, ctx: Context) -> Server:
    """A server that does not know yet how wide text vectors are."""
    return Server({})


def score_exported(exported: Mapping[str, Tensor], users: npt.NDArray[np.int64]) -> Tensor:
    """`Domain.score` from what was exported: int64 [b] -> [b, n_items]."""
    return listed(exported, users) if "scores" in exported else inner_product(exported, users)


def stages(config: Config) -> tuple[Stage, ...]:
    """One federated stage."""
    return (
        Stage(
            "federated",
            rounds=config.rounds,
            open=(Phase(introduce), Phase(draw, at="server"), Phase(adopt_step(SHARING))),
            each=rounds(SHARING, train, n_pairs),
            edges=frozenset({Direction.UP, Direction.DOWN}),
            patience=config.patience,
        ),
    )


METHOD = Method(
    name="fedtext",
    title="FedText: a map of item text averaged by FedAvg, users and item offsets private",
    paper="arXiv 1602.05629 and 1205.2618",
    Config=Config,
    stages=stages,
    init_domain=Domain,
    init_server=init_server,
    score=Domain.score,
    state_dict=lambda state: state.state_dict(),
    load_state_dict=lambda state, saved: state.load_state_dict(saved),
    export=Domain.export,
    score_exported=score_exported,
    fields=SHARING.fields,
    artifacts=("text",),
)
