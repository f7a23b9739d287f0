"""DuoRec: SASRec that contrasts a history under dropout with another one of the same next item.

Paper
    Qiu et al., "Contrastive Learning for Representation Degeneration Problem in Sequential
    Recommendation", WSDM 2022, arXiv 2110.05730. A baseline of FedCGR (arXiv 2608.10929). The
    numbers are ours, in the paper's order:

    =====  ====================================  ===========================================
    no.    what                                  here
    =====  ====================================  ===========================================
    1      the main loss: the next item          `parts.next_item`, SASRec's Eq. (1) to (11)
    2      unsupervised view: other dropout      `DuoRec.contrast`
    3      supervised view: the same next item   `same_next`
    4      the contrast of two views             `parts.contrast.two_view_nce`
    5      both losses together                  `train`
    =====  ====================================  ===========================================

Notation
    ==========  =========================================  ================
    symbol      name                                       shape
    ==========  =========================================  ================
    M           item embeddings, input and output          [n_items, dim]
    h           output after a window's last item          [dim]
    h′          the same under another dropout mask        [dim]
    h″          of another history with its next item      [dim]
    τ, λ        temperature and weight of the contrast     –
    ==========  =========================================  ================

What crosses
    Nothing: the method has one local stage, without edges. A round is one epoch over the domain's
    histories.

Departures
    - The authors train one row per target; here every position of a window is trained at once and
      the contrast is taken after the window's last item (`cut="prefixes"` is the authors').
    - The network is SASRec's of this package, with the norm before its steps; the preset `recbole`
      has the authors'.
    - Batches are padded at their end, as for SASRec.

Not stated in the paper
    - The default contrasts h′ with h″ alone, as the authors' code does in what it calls `us_x`; the
      other `views` contrast h with h′ (unsupervised) or h with h″ (supervised).
    - The other history is drawn anew in every epoch, uniformly from all places of the training data
      where the same item comes next; it is the history itself where there is no other. Further
      histories with that next item stay among the negatives, as in the authors' code.
    - It is drawn from random numbers of its own, so that with λ = 0 a run is SASRec's, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field
from torch import Tensor

from crossfed.methods.parts.contrast import (
    ContrastConfig,
    at_end,
    last_outputs,
    two_view_nce,
)
from crossfed.methods.parts.next_item import Batch, Learner, Term
from crossfed.methods.parts.sequences import padded
from crossfed.platform.method import (
    Context,
    Interactions,
    Method,
    Out,
    Payload,
    Phase,
    Scope,
    Stage,
)

Int64s = npt.NDArray[np.int64]


class Config(ContrastConfig):
    """The network, its training and its views. ◇: not in the paper, chosen here."""

    views: Literal["both", "unsupervised", "supervised"] = Field(
        "both", description="h′ against h″, h against h′, or h against h″"
    )
    epochs: int = Field(200, ge=0, description="local epochs at most ◇")
    patience: int | None = Field(20, ge=1, description="evaluations without gain before stopping ◇")


@dataclass(frozen=True, slots=True)
class SameNext:
    """The places of a domain's training data, grouped by the item there.

    A place is a number into `Interactions.items` that has an item before it in its history.

    Attributes:
        order: places sorted by their item, int64 [m].
        rank: each place's number among those of its item, int64 [n_interactions]; -1 for others.
        first, size: where each item's places begin in `order`, and how many they are, [n_items].
    """

    order: Int64s
    rank: Int64s
    first: Int64s
    size: Int64s

    @classmethod
    def of(cls, data: Interactions) -> SameNext:
        """The groups of a domain's training data."""
        has_input = np.arange(len(data.items)) > data.indptr[data.users]
        places = np.flatnonzero(has_input)
        order = places[np.argsort(data.items[places], kind="stable")]
        size = np.bincount(data.items[places], minlength=data.n_items)
        first = np.cumsum(size) - size
        rank = np.full(len(data.items), -1)
        rank[order] = np.arange(len(order)) - first[data.items[order]]
        return cls(order, rank, first, size)


def same_next(at: Int64s, groups: SameNext, data: Interactions, rng: np.random.Generator) -> Int64s:
    """Eq. (3): for each place another one with the same item, drawn uniformly; itself if alone.

    Args:
        at: places of the targets, int64 [b].

    Returns:
        int64 [b].
    """
    items = data.items[at]
    others = groups.size[items] - 1
    drawn = rng.integers(0, np.maximum(others, 1))
    drawn += (drawn >= groups.rank[at]) & (others > 0)  # leave the place itself out
    return groups.order[groups.first[items] + np.where(others > 0, drawn, groups.rank[at])]


def before(at: Int64s, data: Interactions, length: int) -> tuple[Int64s, Int64s]:
    """The up to `length` items before each place, in its history: [b, T] padded, lengths [b]."""
    start = np.maximum(data.indptr[data.users[at]], at - length)
    return padded(data.items, start, at - start), at - start


class DuoRec(Learner):
    """A domain of DuoRec: next items, and the contrast of two views after every window."""

    config: Config

    def contrast(self, ctx: Context) -> Term | None:
        """λ · Eq. (4) between two of h, Eq. (2)'s h′ (the window once more) and Eq. (3)'s h″."""
        config, net, data = self.config, self.net, ctx.own
        if not config.lambda_:
            return None
        (rng,) = ctx.rng.spawn(1)
        groups = SameNext.of(data)

        def again(batch: Batch) -> Tensor:
            return last_outputs(net, batch.inputs, batch.count)

        def term(batch: Batch) -> Tensor:
            if config.views == "both":
                a = again(batch)
            else:
                a = at_end(batch.outputs, torch.from_numpy(batch.count).to(batch.outputs.device))
            if config.views == "unsupervised":
                b = again(batch)
            else:
                at = same_next(batch.start + batch.count, groups, data, rng)
                b = last_outputs(net, *before(at, data, config.length), groups=4)
            return config.lambda_ * two_view_nce(a, b, config.tau, config.cosine)

        return term


def train(state: DuoRec, inbox: Mapping[str, Payload], ctx: Context) -> Out:
    """Eq. (5): one epoch on L_next + λ L_contrast, both means over the same batches of windows."""
    return Out(metrics=state.train(ctx))


def stages(config: Config) -> tuple[Stage, ...]:
    """One local stage; a round is an epoch."""
    return (Stage("train", rounds=config.epochs, each=(Phase(train),), patience=config.patience),)


METHOD = Method(
    name="duorec",
    title="DuoRec, trained by every domain alone",
    paper="arXiv 2110.05730",
    Config=Config,
    stages=stages,
    init_domain=DuoRec,
    score=DuoRec.score,
    observe=DuoRec.observe,
    ordered=True,
    state_dict=DuoRec.state_dict,
    load_state_dict=DuoRec.load_state_dict,
    export=DuoRec.export,
    scope=Scope.LOCAL,
)
