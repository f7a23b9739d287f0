"""SASRec: self-attention over a user's history, as the sequential baseline that every domain trains
alone.

Paper
    Kang and McAuley, "Self-Attentive Sequential Recommendation", ICDM 2018, arXiv 1808.09781. The
    numbers count the displays of its section III in order:

    =====  ====================================  ======================================================
    no.    what                                  here
    =====  ====================================  ======================================================
    1      items plus positions                  `parts.next_item.NextItem.embed`
    2, 3   attention, self-attention             `parts.transformer.Attention`
    4      point-wise feed-forward net           `parts.transformer.FeedForward`
    5      stacked blocks                        `parts.transformer.Block`
    6, 7   residual step, layer norm             `parts.transformer.Residual`
    8, 9   relevance, with shared embeddings     `score`; only the shared one is built
    10     targets: the next item                `parts.sequences.windows`
    11     cross-entropy on sampled negatives    `parts.next_item.bce`
    =====  ====================================  ======================================================

Notation
    ==========  =========================================  ================
    symbol      name                                       shape
    ==========  =========================================  ================
    M           item embeddings, input and output          [n_items, dim]
    P           position embeddings                        [length, dim]
    F_t         output of the last block at position t     [dim]
    r_{i,t}     relevance of item i after t items          –
    n           items that are looked at, `length`         –
    ==========  =========================================  ================

What crosses
    Nothing: the method has one local stage, without edges. A round is one epoch over the domain's
    histories.

Departures
    - The loss is a setting, since it alone reorders methods. The default is the cross-entropy over
      all items at every position; the preset `paper` has Eq. (11).
    - Histories longer than n are cut into windows, so that every item is trained on once per epoch;
      the paper keeps the last n (`cut="last"`).
    - Batches hold windows of similar length and are padded at their end to the longest in them, not
      to n. With causal attention no position sees padding, so the results are those of padding at
      the front to n.
    - Attention has an output projection. With one head it adds nothing: it could be merged with the
      value projection.
    - The authors' code feeds the normalised query on instead of x in Eq. (6); the paper's equation
      is built.

Not stated in the paper
    - With the norm before the steps, M_s is multiplied by √dim, as in the authors' code, and the
      last block's output is normalised. With `norm="post"` the input is, as in BERT.
    - Negatives are drawn afresh every epoch, uniformly from the items the user has not trained on.
    - Weights start from N(0, 0.02²).
    - What is looked at when ranking is all that is known by then: the training history for
      validation, that and the validation items for the test. A user without history gets equal
      scores for all items.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from pydantic import Field
from torch import Tensor

from crossfed.methods.parts.next_item import Learner, NextItemConfig
from crossfed.platform.method import Context, Method, Out, Payload, Phase, Scope, Stage


class Config(NextItemConfig):
    """The network and its training, from section IV-B where said so. ◇: not in the paper, chosen
    here.
    """

    epochs: int = Field(200, ge=0, description="local epochs at most (section IV-B)")
    patience: int | None = Field(
        20, ge=1, description="evaluations without a better one before stopping (section IV-B)"
    )


def train(state: Learner, inbox: Mapping[str, Payload], ctx: Context) -> Out:
    """One epoch over the domain's histories: each position t predicts the item o_t after it."""
    return Out(metrics=state.train(ctx))


def score(state: Learner, users: npt.NDArray[np.int64]) -> Tensor:
    """Eq. (9): r_{i,t} = F_t M_iᵀ after the whole known history, for all items: [b, n_items]."""
    return state.score(users)


def stages(config: Config) -> tuple[Stage, ...]:
    """One local stage; a round is an epoch."""
    return (Stage("train", rounds=config.epochs, each=(Phase(train),), patience=config.patience),)


METHOD = Method(
    name="sasrec",
    title="SASRec, trained by every domain alone",
    paper="arXiv 1808.09781",
    Config=Config,
    stages=stages,
    init_domain=Learner,
    score=score,
    observe=Learner.observe,
    ordered=True,
    state_dict=Learner.state_dict,
    load_state_dict=Learner.load_state_dict,
    export=Learner.export,
    scope=Scope.LOCAL,
)
