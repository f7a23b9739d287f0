"""CL4SRec: SASRec that also learns to recognise two distorted views of the same history.

Paper
    Xie et al., "Contrastive Learning for Sequential Recommendation", ICDE 2022, arXiv 2010.14395.
    A baseline of FedCGR (arXiv 2608.10929). The numbers are ours, in the paper's order:

    =====  ====================================  ===========================================
    no.    what                                  here
    =====  ====================================  ===========================================
    1      the main loss: the next item          `parts.next_item`, SASRec's Eq. (1) to (11)
    2      the contrast of two views             `parts.contrast.two_view_nce`
    3      crop                                  `parts.augmentation.crop`
    4      mask                                  `parts.augmentation.mask`
    5      reorder                               `parts.augmentation.reorder`
    6      both losses together                  `train`
    =====  ====================================  ===========================================

Notation
    ==========  =========================================  ================
    symbol      name                                       shape
    ==========  =========================================  ================
    M           item embeddings, input and output          [n_items, dim]
    F_t         output of the last block at position t     [dim]
    η, γ, β     shares of crop, mask and reorder           –
    τ, λ        temperature and weight of the contrast     –
    ==========  =========================================  ================

What crosses
    Nothing: the method has one local stage, without edges. A round is one epoch over the domain's
    histories.

Departures
    - The main loss is a setting, since it alone reorders methods: by default the cross-entropy over
      all items, as for SASRec here; the paper contrasts each target with one sampled item
      (`loss="bce"` comes closest).
    - Views are made of a batch's windows. Histories longer than n are cut into windows, each
      trained at all its positions; the paper keeps the last n items (`cut="last"`).
    - Batches are padded at their end, as for SASRec.

Not stated in the paper
    - The two operators of a sequence are different ones wherever there is a choice.
    - Lengths are rounded down, and a crop keeps at least one item: a short history may have a view
      that is the history itself.
    - The mask is a vector of its own, the same for all places.
    - The dot product is the similarity and τ is 1, as in public code; `cosine` and `tau` change it.
      Outputs are normalised by layer, so that their products are large at first and outweigh the
      main loss for many epochs; with the cosine it is learnt from the start.
    - Views are drawn anew in every epoch, from random numbers of their own, so that with λ = 0 a
      run is SASRec's, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field

from crossfed.methods.parts.contrast import ViewsConfig, ViewsLearner
from crossfed.platform.method import Context, Method, Out, Payload, Phase, Scope, Stage


class Config(ViewsConfig):
    """The network, its training and its views. ◇: not in the paper, chosen here."""

    epochs: int = Field(200, ge=0, description="local epochs at most ◇")
    patience: int | None = Field(20, ge=1, description="evaluations without gain before stopping ◇")


def train(state: ViewsLearner, inbox: Mapping[str, Payload], ctx: Context) -> Out:
    """Eq. (6): one epoch on L_next + λ L_contrast, both means over the same batches of windows."""
    return Out(metrics=state.train(ctx))


def stages(config: Config) -> tuple[Stage, ...]:
    """One local stage; a round is an epoch."""
    return (Stage("train", rounds=config.epochs, each=(Phase(train),), patience=config.patience),)


METHOD = Method(
    name="cl4srec",
    title="CL4SRec, trained by every domain alone",
    paper="arXiv 2010.14395",
    Config=Config,
    stages=stages,
    init_domain=ViewsLearner,
    score=ViewsLearner.score,
    observe=ViewsLearner.observe,
    ordered=True,
    state_dict=ViewsLearner.state_dict,
    load_state_dict=ViewsLearner.load_state_dict,
    export=ViewsLearner.export,
    scope=Scope.LOCAL,
)
