"""TIGER: the next item's semantic ID, generated code by code; the generative baseline that every
domain trains alone.

Paper
    Rajput et al., "Recommender Systems with Generative Retrieval", NeurIPS 2023, arXiv 2305.05065.
    The paper numbers hardly any equation; those here are numbered as in FedCGR (arXiv 2608.10929),
    whose baseline this is:

    ====  ======================================  ===========================================
    no.   what                                    here
    ====  ======================================  ===========================================
    2, 4  residual quantisation, its loss         the artifact "sids" (`parts.quantiser`)
    3     p(item) = Π p(code | codes before)      `score`
    8, 9  items of the history, without CF        `parts.generative.Generator.embed`
    21    what the decoder asks at a level        `parts.generative.queries`
    22    probabilities of the next code          `parts.generative.log_probabilities`
    23    loss                                    `train`, `parts.generative.sid_loss`
    ====  ======================================  ===========================================

Notation
    ==========  =========================================  ======================
    symbol      name                                       shape
    ==========  =========================================  ======================
    c_v         semantic ID of item v                      [levels]
    E_l         embeddings of the codes of level l         [codebook, dim]
    M           the encoded history                        [b, 1 + T, dim]
    ==========  =========================================  ======================

What crosses
    Nothing: the method has one local stage, without edges. A round is one epoch. The tokeniser
    behind the semantic IDs is made from public item texts of all domains.

Departures
    - The network is FedCGR's without its additions, not T5: a history is one vector per item (the
      sum of its codes' embeddings), not one per code; positions are absolute, counted from the last
      item; every level has its own output layer; the decoder has one query per level. So the
      federated variants and FedCGR differ from it by what they add and by nothing else.
    - Users have no token. In its place there is one learned vector, the same for all.
    - Codes that no item has are excluded while decoding; the paper generates freely and counts how
      often it fails.

Not stated in the paper
    - Every item with at least one item before it is an instance of an epoch.
    - Items with the same semantic ID follow each other in the order of their training popularity;
      the paper gives them a code more. They are told apart by less than float32 can say, and no two
      items share a rank.
    - The learning rate's warm-up is in epochs; stopping is on the domain's own validation metric.
    - Embeddings start at N(0, 0.02²), like all weights (`embedding_std`).
    - A batch holds windows of similar length.
    - With `beam`, items that no beam has reached score -inf, which is exact for the ranks of those
      reached. Sampled negatives want `beam=null`, or a beam so wide that those among the first ten
      are on it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from pydantic import Field
from torch import Tensor

from crossfed.methods.parts.generative import (
    GenerativeLearner,
    Generator,
    GeneratorConfig,
    recommend_exported,
    schedule,
)
from crossfed.platform.method import Context, Method, Out, Payload, Phase, Scope, Stage


class Config(GeneratorConfig):
    """The network as in FedCGR's section 4.1.4, and the training of one domain. ◇: chosen here."""

    epochs: int = Field(
        80, ge=0, description="epochs at most; as many as 2 local epochs in 40 rounds ◇"
    )
    warmup: int = Field(10, ge=0, description="epochs in which the learning rate rises ◇")
    patience: int | None = Field(
        10, ge=1, description="evaluations without a better one before stopping ◇"
    )


def init_domain(config: Config, ctx: Context) -> GenerativeLearner:
    """A generator with weights of the domain's own."""
    return GenerativeLearner(config, ctx, Generator(config, ctx.torch_rng))


def train(state: GenerativeLearner, inbox: Mapping[str, Payload], ctx: Context) -> Out:
    """Eq. (23): one epoch on -1/L Σ_l log p(c_l | history, c_1 … c_{l-1})."""
    config = state.config
    assert isinstance(config, Config)
    return Out(metrics=state.train(ctx, scale=schedule(ctx.round, config.epochs, config.warmup)))


def score(state: GenerativeLearner, users: npt.NDArray[np.int64]) -> Tensor:
    """Eq. (3): log p(v | history) = Σ_l log p(c_l | history, c_1 … c_{l-1}) of all items; int64 [b]
    -> [b, n_items].
    """
    return state.score(users)


def stages(config: Config) -> tuple[Stage, ...]:
    """One local stage; a round is an epoch."""
    return (Stage("train", rounds=config.epochs, each=(Phase(train),), patience=config.patience),)


METHOD = Method(
    name="tiger",
    title="TIGER: generated semantic IDs, trained by every domain alone",
    paper="arXiv 2305.05065",
    Config=Config,
    stages=stages,
    init_domain=init_domain,
    score=score,
    observe=GenerativeLearner.observe,
    ordered=True,
    state_dict=GenerativeLearner.state_dict,
    load_state_dict=GenerativeLearner.load_state_dict,
    export=GenerativeLearner.export,
    score_exported=recommend_exported,
    artifacts=("sids",),
    scope=Scope.LOCAL,
)
