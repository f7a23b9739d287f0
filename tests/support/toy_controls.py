"""Toys for transfer controls: one that is deaf, one that copies its peer's answer, and one that
lives alone.

`COPIES` has nothing of its own: it ranks by what the peer tells it. `twins` are two shops of equal
catalogues in which the same few items are in demand, so that the peer's answer is right here, too,
and all of the toy's gain comes from what crosses.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from crossfed.platform.method import (
    SERVER,
    Context,
    Direction,
    Field,
    Interactions,
    Method,
    MethodConfig,
    Out,
    Phase,
    Scope,
    Stage,
)

HOT = 20
"""Items of a twin that anybody wants."""


def twins(path: Path, n_users: int = 60, n_items: int = 1000) -> Path:
    """Two shops whose users want 10 of the same `HOT` items each; nothing else is ever bought."""
    from crossfed.platform.data.store import Writer

    with Writer(path, {"kind": "test twins"}) as writer:
        hot = np.random.default_rng(0).choice(n_items, HOT, replace=False)
        for number, name in enumerate(("left", "right")):
            rng = np.random.default_rng(number + 1)
            pairs = [
                (user, item)
                for user in range(n_users)
                for item in rng.choice(hot, 10, replace=False)
            ]
            users, items = np.array(pairs).T
            writer.add_domain(
                name,
                users,
                items,
                np.arange(len(users)),
                [f"{name}-u{u}" for u in range(n_users)],
                [f"{name}-i{i}" for i in range(n_items)],
                [f"{name} item {i}" for i in range(n_items)],
            )
    return path


class Config(MethodConfig):
    rounds: int = 3
    fault: bool = False
    patience: int | None = None


class Ranker:
    """A node's state: one score per item, guessed at the start."""

    def __init__(self, config: Config, ctx: Context):
        data: Interactions = ctx.own
        self.config, self.n_users = config, data.n_users
        self.demand = np.bincount(data.items, minlength=data.n_items).astype(np.float32)
        self.scores = ctx.rng.random(data.n_items, np.float32)


def _score(state: Ranker, users: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(state.scores).expand(len(users), -1)


def tell(state: Ranker, inbox: Mapping, ctx: Context) -> Out:
    """What is in demand here, as whole numbers and as shares; in the first round nothing is known
    yet.
    """
    known = state.demand if ctx.round > 1 else np.zeros_like(state.demand)
    payload = {
        "demand": known,
        "rank": np.argsort(np.argsort(known, kind="stable")).astype(np.int64),
    }
    return Out(dict.fromkeys(ctx.peers, payload))


def copy(state: Ranker, inbox: Mapping, ctx: Context) -> Out:
    """Rank by the peer's demand."""
    if not inbox:  # alone
        return Out()
    (payload,) = inbox.values()
    if payload["demand"].any():
        state.scores = np.array(payload["demand"])
    if state.config.fault and payload["demand"].min() < 0:
        state.scores[:] = np.nan
    told = float(np.dot(payload["demand"], np.arange(len(state.scores))))
    return Out(
        metrics={"told": told, "rank": float(payload["rank"][0]), "clean": float(state.scores[0])}
    )


def learn(state: Ranker, inbox: Mapping, ctx: Context) -> Out:
    """Rank by the own demand, with a little chance; what arrived is not looked at."""
    state.scores = state.demand + ctx.rng.normal(size=len(state.demand)).astype(np.float32)
    return Out(metrics={"chance": float(ctx.rng.random() + torch.rand(1, generator=ctx.torch_rng))})


def guess(state: Ranker, inbox: Mapping, ctx: Context) -> Out:
    """Leave the scores as they were drawn."""
    return Out()


def _method(
    name: str, stage: Stage, fields: tuple[Field, ...], scope: Scope = Scope.FEDERATED
) -> Method:
    return Method(
        name=name,
        title=f"Toy {name}",
        paper="none",
        Config=Config,
        stages=lambda c: (Stage(stage.name, c.rounds, stage.each, edges=stage.edges),),
        init_domain=Ranker,
        score=_score,
        fields=fields,
        scope=scope,
        state_dict=lambda state: {"scores": state.scores},
        load_state_dict=lambda state, saved: setattr(state, "scores", np.array(saved["scores"])),
        export=lambda state: {
            "scores": torch.from_numpy(state.scores),
            "n_users": torch.tensor(state.n_users),
        },
        score_exported=lambda exported, users: exported["scores"].expand(len(users), -1),
    )


PEER = frozenset({Direction.PEER})
FIELDS = (
    Field("demand", Direction.PEER, ("n_items",), "how often every item was bought"),
    Field("rank", Direction.PEER, ("n_items",), "the items' places by demand", dtype="int64"),
)
COPIES = _method("copies", Stage("talk", 0, (Phase(tell), Phase(copy)), edges=PEER), FIELDS)
DEAF = _method("deaf", Stage("talk", 0, (Phase(tell), Phase(learn)), edges=PEER), FIELDS)


class Pooler:
    """A server's state: how often it has answered."""

    def __init__(self, config: Config, ctx: Context):
        self.answers = 0


def hand_in(state: Ranker, inbox: Mapping, ctx: Context) -> Out:
    """The own demand, to the server."""
    return Out({SERVER: {"demand": state.demand}})


def add_up(state: Pooler, inbox: Mapping, ctx: Context) -> Out:
    """The sum of what came, and how many domains it is of; the same to all."""
    state.answers += 1
    total = np.sum([payload["demand"] for payload in inbox.values()], axis=0, dtype=np.float32)
    told = {"total": total, "of": np.array([len(inbox)], np.int64)}
    return Out(dict.fromkeys(ctx.peers, told), {"answers": state.answers, "peers": len(ctx.peers)})


def follow(state: Ranker, inbox: Mapping, ctx: Context) -> Out:
    """Rank by the sum; say how much of it is another's, and how many were in it."""
    total = inbox[SERVER]["total"]
    state.scores = np.array(total) + ctx.rng.normal(size=len(total)).astype(np.float32) * 1e-3
    foreign = float(np.abs(total - state.demand).max())
    return Out(
        metrics={"foreign": foreign, "of": float(inbox[SERVER]["of"][0]), "peers": len(ctx.peers)}
    )


SUMS = Method(
    name="sums", title="Toy sums", paper="none", Config=Config,
    stages=lambda c: (
        Stage(
            "sum", c.rounds, (Phase(hand_in), Phase(add_up, "server"), Phase(follow)),
            edges=frozenset({Direction.UP, Direction.DOWN}), patience=c.patience,
        ),
    ),
    init_domain=Ranker, init_server=Pooler, score=_score,
    fields=(
        Field("demand", Direction.UP, ("n_items",), "how often every item was bought"),
        Field("total", Direction.DOWN, ("n_items",), "the sum over domains"),
        Field("of", Direction.DOWN, (1,), "how many domains", dtype="int64"),
    ),
    state_dict=lambda s: {"answers": s.answers} if isinstance(s, Pooler) else {"scores": s.scores},
    load_state_dict=lambda s, saved: (
        setattr(s, "answers", saved["answers"])
        if isinstance(s, Pooler)
        else setattr(s, "scores", np.array(saved["scores"]))
    ),
    export=lambda s: {"scores": torch.from_numpy(s.scores), "n_users": torch.tensor(s.n_users)},
    score_exported=lambda exported, users: exported["scores"].expand(len(users), -1),
)  # fmt: skip
"""Averaging over a server, whose answer holds a domain's own share."""
ALONE = _method("alone", Stage("guess", 0, (Phase(guess),)), (), Scope.LOCAL)
