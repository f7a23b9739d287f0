"""Generating the next item's semantic ID: the encoder-decoder, how it learns and how it recommends,
for TIGER and FedCGR.

Notation
    ==========  =========================================  ======================
    symbol      name                                       shape
    ==========  =========================================  ======================
    c_v         semantic ID of item v                      [levels], int64
    E_l         embeddings of the codes of level l         [codebook, dim]
    h_t         the t-th item of a history                 [dim]
    X           what the encoder reads: lead, h_1 … h_T    [b, 1 + T, dim]
    M           what it makes of X, the memory             [b, 1 + T, dim]
    q_l         what the decoder asks at level l           [dim]
    ==========  =========================================  ======================

Equation numbers are those of FedCGR, arXiv 2608.10929, which describes generator and baselines
alike.

A history is [b, T], padded at its end; in front of it the encoder reads one learned vector, the
lead, so that a user without history has a memory too. The decoder has one query per level, which
holds all codes before it. A query is alone, so there is nothing for it to attend to but the memory:
a decoder layer has no self-attention. Together with a net of four times the width and f_ctx as a
sum this is 5.15 M shared parameters, the 20.6 MB that the paper counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from crossfed.methods.parts.beam import all_leaves, beam_search, item_scores
from crossfed.methods.parts.losses import finite
from crossfed.methods.parts.sequences import batches, histories, padded, windows
from crossfed.methods.parts.transformer import (
    Attention,
    Dropout,
    FeedForward,
    Residual,
    attend,
    initialise,
)
from crossfed.methods.parts.trie import Trie
from crossfed.platform.method import RANKING, Context, Interactions, MethodConfig

USERS = 256
"""Users whose histories are encoded at a time when recommending."""


class GeneratorConfig(MethodConfig):
    """The generator and its training. Values of FedCGR's section 4.1.4; ◇: chosen here."""

    levels: int = Field(3, ge=1, description="L, codes per semantic ID")
    codebook: int = Field(256, ge=2, description="C, codes per level")
    dim: int = Field(256, ge=1, description="width of the model")
    heads: int = Field(4, ge=1, description="attention heads; must divide dim")
    encoder_layers: int = Field(3, ge=1, description="encoder layers")
    decoder_layers: int = Field(3, ge=1, description="decoder layers")
    inner: int = Field(
        512, ge=1, description="width of the encoder's feed-forward nets, or of each expert"
    )
    decoder_inner: int = Field(1024, ge=1, description="width of the decoder's feed-forward nets ◇")
    dropout: float = Field(0.15, ge=0, lt=1, description="rate in the generator")
    length: int = Field(50, ge=1, description="items of the history that are looked at")
    embedding_std: float = Field(
        0.02, gt=0, description="standard deviation of all initial embeddings ◇"
    )
    smoothing: float = Field(0.1, ge=0, lt=1, description="label smoothing of the codes")
    lr: float = Field(
        3e-4,
        gt=0,
        description="Adam's highest learning rate; rises over the warm-up, falls along a cosine",
    )
    clip: float = Field(1.0, gt=0, description="largest norm of a batch's gradient")
    batch_size: int = Field(1024, ge=1, description="training instances in a batch")
    beam: int | None = Field(
        50,
        ge=1,
        description="beams per user when recommending, the other items score -inf; null scores "
        "all items (sampled negatives)",
        json_schema_extra=RANKING,
    )

    @model_validator(mode="after")
    def _divisible(self) -> Self:
        if self.dim % self.heads:
            raise ValueError(f"dim={self.dim} is not a multiple of heads={self.heads}")
        return self


# -- equations -------------------------------------------------------------------------------------


def item_embedding(tokens: Tensor, codes: Tensor) -> Tensor:
    """Eq. (8), first term: Σ_l E_l(c_l).

    Args:
        tokens: E, [levels, codebook, dim]. codes: int64 [..., l], the first l ≤ levels codes.

    Returns:
        [..., dim].
    """
    shape, levels = codes.shape[:-1], codes.shape[-1]
    rows = codes + torch.arange(levels, device=codes.device) * tokens.shape[1]
    summed = F.embedding_bag(rows.reshape(-1, levels), tokens.flatten(0, 1), mode="sum")
    return summed.view((*shape, tokens.shape[2]))


def queries(tokens: Tensor, start: Tensor, level_embeddings: Tensor, prefixes: Tensor) -> Tensor:
    """Eq. (21): q_1 = e_sos, q_l = f_ctx(E_1(c_1), …, E_{l-1}(c_{l-1})), f_ctx the sum; plus the
    level's embedding.

    Args:
        tokens: E. start: e_sos, [1, dim]. level_embeddings: [levels, dim].
        prefixes: int64 [b, k, l - 1], the codes so far.

    Returns:
        [b, k, dim].
    """
    level = prefixes.shape[2]
    if level == 0:
        return (start + level_embeddings[:1]).expand(*prefixes.shape[:2], -1)
    return item_embedding(tokens, prefixes) + level_embeddings[level]


def log_probabilities(states: Tensor, head: nn.Linear) -> Tensor:
    """Eq. (22): log softmax(W_l q̂_l + b_l). [..., dim] -> [..., codebook]."""
    return F.log_softmax(head(states), dim=-1)


def sid_loss(log_p: Sequence[Tensor], codes: Tensor, smoothing: float) -> Tensor:
    """Eq. (23): the mean over levels and instances of -log p(c_l | history, c_1 … c_{l-1}),
    smoothed.

    With smoothing s the wanted distribution is 1 - s on the target and s / C on each of the C
    codes.

    Args:
        log_p: per level, [b, codebook]. codes: the targets' semantic IDs, int64 [b, levels].

    Returns:
        A scalar.
    """
    terms = []
    for told, code in zip(log_p, codes.unbind(1), strict=True):
        hit = told.gather(1, code.unsqueeze(1)).mean()
        terms.append(-(1 - smoothing) * hit - smoothing * told.mean())
    return torch.stack(terms).mean()


def schedule(round: int, rounds: int, warmup: int) -> float:
    """The share of the learning rate in round 1 … rounds: up in equal steps over the warm-up, then
    down along a cosine.
    """
    if round <= warmup:
        return round / warmup
    return 0.5 * (1 + math.cos(math.pi * (round - warmup) / (rounds - warmup + 1)))


# -- the network -----------------------------------------------------------------------------------


class EncoderLayer(nn.Module):
    """Self-attention, then a net at every real position; both residual with the norm after the sum.

    Args:
        feed: the net, called by `Generator.feed`.
    """

    def __init__(self, config: GeneratorConfig, feed: nn.Module) -> None:
        super().__init__()
        self.attention = Attention(config.dim, config.heads, config.dropout)
        self.around_attention = Residual(config.dim, config.dropout, "post")
        self.feed, self.around_feed = feed, Residual(config.dim, config.dropout, "post")

    def forward(
        self, x: Tensor, mask: Tensor, places: Tensor, feed: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """[b, S, dim] -> [b, S, dim].

        Args:
            mask: bool [b, 1, 1, S], where x is real. places: int64 [n], the real positions of the
                flattened batch.
            feed: maps the real positions [n, dim] to as many vectors.
        """

        def at_real(z: Tensor) -> Tensor:
            flat = z.flatten(0, 1)
            return (
                torch.zeros_like(flat)
                .index_copy(0, places, feed(flat.index_select(0, places)))
                .view_as(z)
            )

        x = self.around_attention(x, lambda z: self.attention(z, mask=mask))
        return self.around_feed(x, at_real)  # type: ignore[no-any-return]


class DecoderLayer(nn.Module):
    """Attention to the memory, then a feed-forward net; both residual with the norm after the
    sum.
    """

    def __init__(self, config: GeneratorConfig) -> None:
        super().__init__()
        self.cross = Attention(config.dim, config.heads, config.dropout)
        self.around_cross = Residual(config.dim, config.dropout, "post")
        self.feed = FeedForward(config.dim, config.decoder_inner, "relu")
        self.around_feed = Residual(config.dim, config.dropout, "post")

    def project(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a memory [b, S, dim], each [b, heads, S, dim / heads]."""
        return self._split(self.cross.key(memory)), self._split(self.cross.value(memory))

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Queries [b, k, dim], each by itself -> [b, k, dim]; the mask as in `EncoderLayer`."""
        rate = self.cross.dropout if self.training else 0.0

        def look(z: Tensor) -> Tensor:
            seen = attend(self._split(self.cross.query(z)), keys, values, mask, rate=rate)
            out: Tensor = self.cross.out(seen.transpose(1, 2).flatten(2))
            return out

        return self.around_feed(self.around_cross(x, look), self.feed)  # type: ignore[no-any-return]

    def _split(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        return x.view(b, t, self.cross.heads, d // self.cross.heads).transpose(1, 2)


class Memory:
    """Encoded histories, their keys and values ready for the decoder.

    Attributes:
        states: M, [b, S, dim]; the lead first, then the items. real: bool [b, S].
        projected: per decoder layer, keys and values. mask: `real` as [b, 1, 1, S].
    """

    def __init__(self, net: Generator, states: Tensor, real: Tensor) -> None:
        self.states, self.real, self.mask = states, real, real[:, None, None]
        self.projected = [layer.project(states) for layer in net.layers()]

    def pooled(self) -> Tensor:
        """MeanPool over item positions, the lead left out: [b, dim]; zero for an empty history."""
        weight = self.real[:, 1:, None].to(self.states.dtype)
        return (self.states[:, 1:] * weight).sum(1) / weight.sum(1).clamp(min=1)


class Generator(nn.Module):
    """The encoder-decoder over semantic IDs.

    Args:
        config: sizes. rng: CPU generator that the initial weights come from: N(0, 0.02²),
            embeddings with the Config's deviation in its place.
    """

    def __init__(self, config: GeneratorConfig, rng: torch.Generator) -> None:
        super().__init__()
        d = config.dim
        self.config = config
        self.tokens = nn.Parameter(torch.empty(config.levels, config.codebook, d))
        self.positions = nn.Parameter(torch.empty(config.length, d))
        self.lead = nn.Parameter(torch.empty(1, d))
        self.start = nn.Parameter(torch.empty(1, d))
        self.level_embeddings = nn.Parameter(torch.empty(config.levels, d))
        self.encoder = nn.ModuleList(
            EncoderLayer(config, self.make_feed()) for _ in range(config.encoder_layers)
        )
        self.decoder = nn.ModuleList(DecoderLayer(config) for _ in range(config.decoder_layers))
        self.heads = nn.ModuleList(nn.Linear(d, config.codebook) for _ in range(config.levels))
        self.dropout = Dropout(config.dropout)
        initialise(self, 0.02, rng)
        with torch.no_grad():
            for embedding in (
                self.tokens,
                self.positions,
                self.lead,
                self.start,
                self.level_embeddings,
            ):
                embedding.mul_(config.embedding_std / 0.02)

    def make_feed(self) -> nn.Module:
        """The net of one encoder layer."""
        return FeedForward(self.config.dim, self.config.inner, "relu")

    def feed(self, layer: int, x: Tensor) -> Tensor:
        """The net of an encoder layer at real positions, [n, dim] -> [n, dim]."""
        net: Any = self.encoder[layer].feed
        return net(x)  # type: ignore[no-any-return]

    def layers(self) -> list[DecoderLayer]:
        """The decoder's layers."""
        return list(self.decoder)  # type: ignore[arg-type]

    def embed(
        self, codes: Tensor, count: Tensor, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Eq. (8) and Eq. (9): X = [lead; h_1; …; h_T], h_t = Σ_l E_l(c_l) + position + residual.

        Positions are counted from the last item, so that the most recent one has the same in every
        history.

        Args:
            codes: int64 [b, T, levels], padded at the end. count: int64 [b], the histories'
                lengths.
            residual: added to the items, [b, T, dim].

        Returns:
            X [b, 1 + T, dim], and where it is real, bool [b, 1 + T].
        """
        place = torch.arange(codes.shape[1], device=codes.device)
        h = (
            item_embedding(self.tokens, codes)
            + self.positions[(count[:, None] - 1 - place).clamp(min=0)]
        )
        if residual is not None:
            h = h + residual
        real = torch.cat(
            [torch.ones_like(count[:, None], dtype=torch.bool), place < count[:, None]], dim=1
        )
        return torch.cat([self.lead.expand(len(codes), 1, -1), h], dim=1), real

    def encode(self, x: Tensor, real: Tensor) -> Memory:
        """X and where it is real, as from `embed` -> the memory."""
        mask, places = real[:, None, None], real.flatten().nonzero().squeeze(1)
        x = self.dropout(x)
        for number, layer in enumerate(self.encoder):
            x = layer(x, mask, places, lambda z, n=number: self.feed(n, z))
        return Memory(self, x, real)

    def next_codes(self, memory: Memory, prefixes: Tensor) -> Tensor:
        """Eq. (22) after some codes: int64 [b, k, l] -> log-probabilities [b, k, codebook] of code
        l + 1.
        """
        x = self.decode(memory, queries(self.tokens, self.start, self.level_embeddings, prefixes))
        return log_probabilities(x, self.heads[prefixes.shape[2]])  # type: ignore[arg-type]

    def target_codes(self, memory: Memory, codes: Tensor) -> list[Tensor]:
        """Eq. (22) at every level of known targets, int64 [b, levels] -> per level,
        log-probabilities [b, codebook].
        """
        prefixes = [codes[:, None, :level] for level in range(self.config.levels)]
        asked = [queries(self.tokens, self.start, self.level_embeddings, some) for some in prefixes]
        x = self.decode(memory, torch.cat(asked, dim=1))
        return [log_probabilities(x[:, level], head) for level, head in enumerate(self.heads)]  # type: ignore[arg-type]

    def decode(self, memory: Memory, x: Tensor) -> Tensor:
        """Queries [b, k, dim] -> q̂ [b, k, dim]."""
        for layer, (keys, values) in zip(self.decoder, memory.projected, strict=True):
            x = layer(x, keys, values, memory.mask)
        return x


# -- learning and recommending ---------------------------------------------------------------------


class GenerativeLearner:
    """One domain's generator, its optimizer, its trie, and the histories to recommend from; the
    state of methods built on it.

    Args:
        config, ctx: the context of a domain, with the artifact "sids". net: the generator; moved to
            the domain's device.

    Attributes:
        sids: int64 [n_items, levels], the items' semantic IDs. trie: of these, the items of a leaf
            by training popularity.
        known: the histories that are looked at when ranking.
    """

    def __init__(self, config: GeneratorConfig, ctx: Context, net: Generator) -> None:
        self.config, self.device = config, ctx.device
        self.net: Any = net.to(ctx.device)
        self.adam = torch.optim.Adam(self.net.parameters(), lr=config.lr, fused=True)
        sids = np.array(ctx.artifacts["sids"], np.int64)
        popularity = np.bincount(ctx.own.items, minlength=ctx.own.n_items)
        self.sids = torch.from_numpy(sids).to(ctx.device)
        self.trie = Trie.build(sids, popularity, config.codebook).to(ctx.device)
        self.known: Interactions = ctx.own
        self._found: tuple[Tensor, Tensor, npt.NDArray[np.bool_]] | None = None

    # -- what methods may replace

    def residual(self, items: Tensor) -> Tensor | None:
        """What is added to the items of a history, int64 [b, T] -> [b, T, dim]; nothing here."""
        return None

    def losses(self, memory: Memory, target: Tensor) -> dict[str, Tensor]:
        """The loss terms of a batch by name; targets are items, int64 [b]."""
        codes = self.sids[target]
        return {
            "loss_sid": sid_loss(self.net.target_codes(memory, codes), codes, self.config.smoothing)
        }

    def objective(self, terms: Mapping[str, Tensor]) -> Tensor:
        """What is minimised: the sum of the terms."""
        return torch.stack(list(terms.values())).sum()

    # -- learning

    def encode(
        self, data: Interactions, start: npt.NDArray[np.int64], count: npt.NDArray[np.int64]
    ) -> Memory:
        """The memory of windows `data.items[start : start + count]`, int64 [b] each; count 0 is an
        empty history.
        """
        items = torch.from_numpy(padded(data.items, start, count)).to(self.device)
        x, real = self.net.embed(
            self.sids[items], torch.from_numpy(count).to(self.device), self.residual(items)
        )
        return self.net.encode(x, real)  # type: ignore[no-any-return]

    def train(
        self,
        ctx: Context,
        epochs: int = 1,
        scale: float = 1.0,
        penalty: Callable[[], Tensor] | None = None,
    ) -> Mapping[str, float]:
        """Passes over the domain's training instances; the mean loss terms.

        An instance is an item with up to `length` items before it; the first item of a history is
        none.

        Args:
            epochs: passes. scale: of the learning rate. penalty: one more term, e.g. a proximal
                one.

        Raises:
            CrossfedError: a term is not finite.
        """
        self.changed()
        for group in self.adam.param_groups:
            group["lr"] = self.config.lr * scale
        self.net.train()
        sums: dict[str, Tensor] = {}
        data, seen = ctx.own, 0
        for _ in range(epochs):
            pieces = windows(data, self.config.length, "prefixes", ctx.rng)
            for rows in batches(pieces.count, self.config.batch_size, ctx.rng):
                start, count = pieces.start[rows], pieces.count[rows]
                target = torch.from_numpy(data.items[start + count]).to(self.device)
                terms = self.losses(self.encode(data, start, count), target)
                if penalty is not None:
                    terms["penalty"] = penalty()
                loss = self.objective(terms)
                self.adam.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                nn.utils.clip_grad_norm_(self.net.parameters(), self.config.clip)
                self.adam.step()
                for name, value in terms.items():
                    sums[name] = sums.get(
                        name, torch.zeros((), device=self.device)
                    ) + value.detach() * len(rows)
                seen += len(rows)
        return finite({name: float(value) / seen for name, value in sums.items()}, ctx)

    def changed(self) -> None:
        """Forget what was found, since the network or the histories are others now."""
        self._found = None

    # -- recommending

    def observe(self, known: Interactions) -> None:
        """Recommend from these histories from now on."""
        self.known = known
        self.changed()

    @torch.no_grad()
    def leaves(self, users: npt.NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """The leaves found for some users and their scores, Eq. (3)'s logarithm: int64 and float32,
        [b, w] each.

        With `beam` these are the best of a beam; found once and kept until something changes.
        Without it, all leaves in their order. Where a beam found fewer than w leaves, the rest is
        the leaf that does not exist, with -inf.
        """
        if self.config.beam is None:  # too many to keep
            return self._search(users)
        if self._found is None:
            width = min(self.config.beam, self.trie.sizes[-1])
            leaves = torch.full(
                (self.known.n_users, width), self.trie.sizes[-1], device=self.device
            )
            scores = torch.full((self.known.n_users, width), -torch.inf, device=self.device)
            self._found = leaves, scores, np.zeros(self.known.n_users, bool)
        leaves, scores, done = self._found
        missing = np.unique(users[~done[users]])
        if len(missing):
            rows = torch.from_numpy(missing).to(self.device)
            found = self._search(missing)
            leaves[rows, : found[0].shape[1]], scores[rows, : found[0].shape[1]] = found
            done[missing] = True
        rows = torch.from_numpy(users).to(self.device)
        return leaves[rows], scores[rows]

    def _search(self, users: npt.NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        was = self.net.training
        self.net.eval()
        count = np.minimum(np.diff(self.known.indptr)[users], self.config.length)
        start = np.minimum(self.known.indptr[users + 1] - count, max(len(self.known.items) - 1, 0))
        order = np.argsort(count, kind="stable")  # histories of similar length together
        leaves, scores = [], []
        for begin in range(0, len(users), USERS):
            rows = order[begin : begin + USERS]
            ask = partial(self.net.next_codes, self.encode(self.known, start[rows], count[rows]))
            if self.config.beam is None:
                every = torch.arange(self.trie.sizes[-1], device=self.device)
                found = every.expand(len(rows), -1), all_leaves(ask, self.trie, len(rows))
            else:
                found = beam_search(ask, self.trie, len(rows), self.config.beam)
            leaves.append(found[0])
            scores.append(found[1])
        self.net.train(was)
        back = torch.from_numpy(np.argsort(order)).to(self.device)
        return torch.cat(leaves)[back], torch.cat(scores)[back]

    def score(self, users: npt.NDArray[np.int64]) -> Tensor:
        """`recommend` from the leaves found: int64 [b] -> float64 [b, n_items]."""
        return recommend(*self.leaves(users), self.trie)

    def export(self) -> dict[str, Tensor]:
        """For every user the leaves found and their scores [n_users, w]; for every item its leaf
        and its place there.
        """
        leaves, scores = self.leaves(np.arange(self.known.n_users))
        return {
            "leaves": leaves.int(),
            "scores": scores,
            "leaf": self.trie.leaf,
            "place": self.trie.place,
        }

    # -- keeping

    def state_dict(self) -> dict[str, Any]:
        """Network and optimizer: what training continues from."""
        return {"net": dict(self.net.state_dict()), "adam": self.adam.state_dict()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """The reverse of `state_dict`, into a state of the same config and data."""
        self.net.load_state_dict(dict(saved["net"]))
        self.adam.load_state_dict(dict(saved["adam"]))
        self.changed()


def recommend(leaves: Tensor, scores: Tensor, trie: Trie) -> Tensor:
    """Every item's score from the leaves found: its leaf's, or -inf; items of one leaf are told
    apart by popularity.

    Args:
        leaves, scores: [b, w] each, as from `GenerativeLearner.leaves`.

    Returns:
        float64 [b, n_items].
    """
    dense = scores.new_full((len(scores), trie.sizes[-1] + 1), -torch.inf).scatter_(
        1, leaves.long(), scores
    )
    return item_scores(trie, dense[:, :-1])


def recommend_exported(exported: Mapping[str, Tensor], users: npt.NDArray[np.int64]) -> Tensor:
    """`GenerativeLearner.score` from what was exported: int64 [b] -> float64 [b, n_items]."""
    rows, leaf = torch.from_numpy(users), exported["leaf"]
    items = Trie(0, (int(leaf.max()) + 1,), (), (), (), (), leaf, exported["place"])
    return recommend(exported["leaves"][rows], exported["scores"][rows], items)


def sample_memories(
    state: GenerativeLearner, data: Interactions, size: int, rng: np.random.Generator
) -> Memory | None:
    """The memory of up to `size` users' histories, drawn without replacement; None where nobody has
    any. No gradient.
    """
    last = histories(data, state.config.length)
    if not len(last):
        return None
    rows = rng.choice(len(last), min(size, len(last)), replace=False)
    was = state.net.training
    state.net.eval()
    with torch.no_grad():
        memory = state.encode(data, last.start[rows], last.count[rows])
    state.net.train(was)
    return memory
