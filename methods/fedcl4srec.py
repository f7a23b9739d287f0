"""FedCL4SRec: CL4SRec whose attention encoder is averaged; everything else stays with its domain.

Paper
    Named as a baseline by FedDCSR (Zhang et al., SDM 2024, arXiv 2309.08420) and by FedCGR (arXiv
    2608.10929, Table 4), neither of which writes it down. It is CL4SRec (arXiv 2010.14395), see
    `crossfed.methods.cl4srec`, averaged by FedAvg (McMahan et al., AISTATS 2017) or, with μ > 0, by
    FedProx (Li et al., MLSys 2020, arXiv 1812.06127). The numbers are ours:

    =====  ====================================  ===========================================
    no.    what                                  here
    =====  ====================================  ===========================================
    1      the local loss with a proximal term   `train`
    2      the average by data volume            `parts.averaging.average`
    =====  ====================================  ===========================================

Notation
    ==========  =========================================  ================
    symbol      name                                       shape
    ==========  =========================================  ================
    w           shared parameters: the attention blocks    as in the network
    n_k         training positions of domain k             –
    μ           weight of the proximal term                –
    E           local epochs of a round                    –
    ==========  =========================================  ================

What crosses
    up:   the attention blocks w, and n_k; before the first round the domain's own first w.
    down: the average of w; before the first round the first domain's w.
    Item and position embeddings, the mask and the layer norm outside the blocks never leave their
    domain, and nothing has a row per user or item.

Departures
    - The proximal term is FedProx's, (μ/2)‖w - w̄‖²; FedDCSR's code has the norm, not its square.
    - FedDCSR's code has an output layer of its own; here items are scored against their embeddings,
      as in CL4SRec, which stay as well.

Not stated in the paper
    - A block's own layer norms are part of the encoder and cross. FedDCSR's code also counts the
      norm after the last block as part of it; here it stays, as does the one on the input with
      `norm="post"`.
    - n_k counts training positions, as for FedSASRec.
    - Adam's moments stay with their domain over the rounds. What is evaluated and kept is the
      average; all domains stop together, on the mean of their validation metrics.
    - All start from the first domain's w, so that one domain alone trains as CL4SRec does: with
      E = 1 a run of it is that method's run, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field

from crossfed.methods.parts.averaging import Server, Sharing, adopt_step, proximal, rounds
from crossfed.methods.parts.contrast import ViewsConfig, ViewsLearner
from crossfed.methods.parts.next_item import n_targets
from crossfed.platform.method import SERVER, Context, Direction, Method, Out, Payload, Phase, Stage

SHARING = Sharing({"blocks.*": "attention, feed-forward nets and layer norms of all blocks"})


class Config(ViewsConfig):
    """CL4SRec's network, views and training, and the federation's. ◇: chosen here."""

    rounds: int = Field(40, ge=0, description="federated rounds at most (FedDCSR's code)")
    local_epochs: int = Field(3, ge=1, description="E, local epochs in a round (FedDCSR's code)")
    mu: float = Field(0.0, ge=0, description="μ of Eq. (1); 0 is FedAvg")
    patience: int | None = Field(10, ge=1, description="evaluations without gain before stopping ◇")


def train(state: ViewsLearner, inbox: Mapping[str, Payload], ctx: Context) -> Out:
    """Eq. (1): E epochs on CL4SRec's loss + (μ/2)‖w - w̄‖², w̄ being what the round starts from."""
    config = state.config
    assert isinstance(config, Config)
    shared = list(SHARING.parameters(state.net).values())
    start = [w.detach().clone() for w in shared]
    penalty = (lambda: proximal(shared, start, config.mu)) if config.mu else None
    epochs = [state.train(ctx, penalty) for _ in range(config.local_epochs)]
    return Out(metrics={name: sum(e[name] for e in epochs) / len(epochs) for name in epochs[0]})


def propose(state: ViewsLearner, inbox: Mapping[str, Payload], ctx: Context) -> Out:
    """Before the first round: every domain's own first w, of which the server takes one."""
    return Out({SERVER: SHARING.upload(state.net)})


def choose(state: Server, inbox: Mapping[str, Payload], ctx: Context) -> Out:
    """Before the first round: the first domain's w goes to all."""
    state.shared = {name: value.copy() for name, value in inbox[ctx.peers[0]].items()}
    return Out(dict.fromkeys(ctx.peers, state.shared))


def stages(config: Config) -> tuple[Stage, ...]:
    """One federated stage; Eq. (2)'s average Σ_k (n_k / n) w_k is that of `parts.averaging`.

    It has the name of CL4SRec's stage, since random numbers depend on a stage's name.
    """
    return (
        Stage(
            "train",
            rounds=config.rounds,
            open=(Phase(propose), Phase(choose, at="server"), Phase(adopt_step(SHARING))),
            each=rounds(SHARING, train, n_targets),
            edges=frozenset({Direction.UP, Direction.DOWN}),
            patience=config.patience,
        ),
    )


METHOD = Method(
    name="fedcl4srec",
    title="FedCL4SRec: CL4SRec's attention encoder averaged by FedAvg or FedProx, all else private",
    paper="arXiv 2309.08420 (as a baseline)",
    Config=Config,
    stages=stages,
    init_domain=ViewsLearner,
    init_server=lambda config, ctx: Server({}),
    score=ViewsLearner.score,
    observe=ViewsLearner.observe,
    ordered=True,
    state_dict=lambda state: state.state_dict(),
    load_state_dict=lambda state, saved: state.load_state_dict(saved),
    export=ViewsLearner.export,
    fields=SHARING.fields,
)
