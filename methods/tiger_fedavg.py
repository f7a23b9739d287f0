"""TIGER+FedAvg and TIGER+FedProx: the generator of semantic IDs, averaged whole over domains.

Paper
    Li et al., "Federated Optimization in Heterogeneous Networks" (FedProx), MLSys 2020, arXiv
    1812.06127. With μ = 0 it is FedAvg (McMahan et al., AISTATS 2017). The network is
    `crossfed.methods.parts.generative`. Both are baselines of FedCGR (arXiv 2608.10929, Table 3),
    whose sizes and schedule they have; Eq. (1) and Eq. (2) here are FedProx's, its objective and
    what a device minimises.

Notation
    ==========  =========================================  ================
    symbol      name                                       shape
    ==========  =========================================  ================
    w           all parameters of the generator            as in the network
    n_k         training instances of domain k             –
    p_k         n_k / Σ n                                  –
    μ           weight of the proximal term                –
    E           local epochs of a round                    –
    ==========  =========================================  ================

What crosses
    up:   all parameters w (4.36 M at the paper's sizes, 17.4 MB), and n_k.
    down: the average of w.
    No parameter has a row per user or item: items are told apart by their semantic IDs alone.

Departures
    - FedProx samples devices in each round; here every domain takes part.
    - The local solver is Adam with a learning rate that changes between rounds, not SGD.
    - The network departs from TIGER's as `crossfed.methods.tiger` says.

Not stated in the paper
    - What FedCGR's TIGER+FedAvg shares. All of it is shared here, which comes to the 17.4 MB that
      are reported.
    - Adam's moments stay with their domain over the rounds. The server draws the first w.
    - What is evaluated and kept is the average; all domains stop together, on the mean of their
      validation metrics.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field

from crossfed.methods.parts.averaging import Server, Sharing, opening, proximal, rounds
from crossfed.methods.parts.generative import (
    GenerativeLearner,
    Generator,
    GeneratorConfig,
    recommend_exported,
    schedule,
)
from crossfed.methods.parts.next_item import n_targets
from crossfed.platform.method import Context, Direction, Method, Out, Payload, Stage

SHARING = Sharing(
    {
        "tokens": "embeddings of the codes",
        "positions": "position embeddings",
        "lead": "what the encoder reads before a history",
        "start": "what the decoder asks first",
        "level_embeddings": "embeddings of the levels",
        "encoder.*": "attention, feed-forward nets and layer norms of the encoder",
        "decoder.*": "attention to the memory, feed-forward nets and layer norms of the decoder",
        "heads.*": "output layers, one per level",
    }
)


class Config(GeneratorConfig):
    """The network and the federation as in FedCGR's section 4.1.4. ◇: not in the paper, chosen
    here.
    """

    rounds: int = Field(40, ge=0, description="federated rounds at most")
    local_epochs: int = Field(2, ge=1, description="E, local epochs in a round")
    warmup: int = Field(5, ge=0, description="rounds in which the learning rate rises")
    mu: float = Field(
        0.0, ge=0, description="μ of Eq. (2); 0 is FedAvg (FedCGR's μ for FedProx: 0.01)"
    )
    patience: int | None = Field(
        None, ge=1, description="evaluations without a better one before stopping ◇"
    )


def init_domain(config: Config, ctx: Context) -> GenerativeLearner:
    """A generator, whose weights the server's will replace."""
    return GenerativeLearner(config, ctx, Generator(config, ctx.torch_rng))


def train(state: GenerativeLearner, inbox: Mapping[str, Payload], ctx: Context) -> Out:
    """Eq. (2): E epochs on h_k(w; w^t) = F_k(w) + (μ/2)‖w - w^t‖², w^t being the average that the
    round starts from.
    """
    config = state.config
    assert isinstance(config, Config)
    weights = list(SHARING.parameters(state.net).values())
    start = [w.detach().clone() for w in weights]
    penalty = (lambda: proximal(weights, start, config.mu)) if config.mu else None
    scale = schedule(ctx.round, config.rounds, config.warmup)
    return Out(metrics=state.train(ctx, config.local_epochs, scale, penalty))


def init_server(config: Config, ctx: Context) -> Server:
    """The first w."""
    return Server(SHARING.upload(Generator(config, ctx.torch_rng)))


def stages(config: Config) -> tuple[Stage, ...]:
    """One federated stage; Eq. (1)'s weights p_k = n_k / n are those of
    `parts.averaging.average`.
    """
    return (
        Stage(
            "federated",
            rounds=config.rounds,
            open=opening(SHARING),
            each=rounds(SHARING, train, n_targets),
            edges=frozenset({Direction.UP, Direction.DOWN}),
            patience=config.patience,
        ),
    )


METHOD = Method(
    name="tiger_fedavg",
    title="TIGER averaged over domains by FedAvg or FedProx",
    paper="arXiv 1812.06127",
    Config=Config,
    stages=stages,
    init_domain=init_domain,
    init_server=init_server,
    score=GenerativeLearner.score,
    observe=GenerativeLearner.observe,
    ordered=True,
    state_dict=lambda state: state.state_dict(),
    load_state_dict=lambda state, saved: state.load_state_dict(saved),
    export=GenerativeLearner.export,
    score_exported=recommend_exported,
    fields=SHARING.fields,
    artifacts=("sids",),
)
