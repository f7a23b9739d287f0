"""FedSASRec: SASRec whose transformer is averaged over domains while every domain keeps its item
embeddings.

Paper
    Li et al., "Federated Optimization in Heterogeneous Networks" (FedProx), MLSys 2020, arXiv
    1812.06127. With μ = 0 it is FedAvg (McMahan et al., AISTATS 2017). The network is SASRec's,
    `crossfed.methods.parts.next_item`. FedSASRec is a baseline of FedCGR (arXiv 2608.10929, Table
    4) and of FedDCSR.

Notation
    ==========  =========================================  ================
    symbol      name                                       shape
    ==========  =========================================  ================
    w           shared parameters: P, blocks, layer norm   as in the network
    M           item embeddings, private                   [n_items, dim]
    n_k         training positions of domain k             –
    μ           weight of the proximal term                –
    E           local epochs of a round                    –
    ==========  =========================================  ================

What crosses
    up:   the shared parameters w, and n_k.
    down: the average of w. Item embeddings, which are the output layer as well, never leave their
    domain, and nothing has a row per user or item.

Departures
    - FedProx samples devices in each round; here every domain takes part.
    - The local solver is Adam, not SGD.

Not stated in the paper
    - Adam's moments of shared parameters stay with their domain over the rounds.
    - What is evaluated and kept is the average, put into every domain's network beside its own item
      embeddings. All domains stop together, on the mean of their validation metrics.
    - The server draws the first w.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field

from crossfed.methods.parts.averaging import Server, Sharing, opening, proximal, rounds
from crossfed.methods.parts.next_item import Learner, NextItem, NextItemConfig, n_targets
from crossfed.platform.method import Context, Direction, Method, Out, Payload, Stage

SHARING = Sharing(
    {
        "positions": "position embeddings P",
        "norm.*": "layer norm of the input or the output",
        "blocks.*": "attention, feed-forward nets and layer norms of all blocks",
    }
)


class Config(NextItemConfig):
    """SASRec's network and training, and the federation's. ◇: not in the paper, chosen here."""

    rounds: int = Field(100, ge=0, description="federated rounds at most ◇")
    local_epochs: int = Field(1, ge=1, description="E, local epochs in a round ◇")
    mu: float = Field(0.0, ge=0, description="μ of Eq. (2); 0 is FedAvg (the paper: 0.001 to 1)")
    patience: int | None = Field(
        10, ge=1, description="evaluations without a better one before stopping ◇"
    )


def train(state: Learner, inbox: Mapping[str, Payload], ctx: Context) -> Out:
    """Eq. (2): E epochs on h_k(w; w^t) = F_k(w) + (μ/2)‖w - w^t‖², w^t being the average that the
    round starts from.
    """
    config = state.config
    assert isinstance(config, Config)
    shared = list(SHARING.parameters(state.net).values())
    start = [w.detach().clone() for w in shared]
    penalty = (lambda: proximal(shared, start, config.mu)) if config.mu else None
    epochs = [state.train(ctx, penalty) for _ in range(config.local_epochs)]
    return Out(
        metrics={name: sum(epoch[name] for epoch in epochs) / len(epochs) for name in epochs[0]}
    )


def init_server(config: Config, ctx: Context) -> Server:
    """The first w: those of a network of one item, since none of them knows how many items there
    are.
    """
    return Server(SHARING.upload(NextItem(1, config, ctx.torch_rng)))


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
    name="fedsasrec",
    title="FedSASRec: SASRec's transformer averaged by FedAvg or FedProx, item embeddings private",
    paper="arXiv 1812.06127",
    Config=Config,
    stages=stages,
    init_domain=Learner,
    init_server=init_server,
    score=Learner.score,
    observe=Learner.observe,
    ordered=True,
    state_dict=lambda state: state.state_dict(),
    load_state_dict=lambda state, saved: state.load_state_dict(saved),
    export=Learner.export,
    fields=SHARING.fields,
)
