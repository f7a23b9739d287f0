"""Toy methods over the real seam, whose right answer is known by hand; and methods that try to
leak.

Every domain's state is one vector. Its start is the domain's mean item number, so every domain
starts elsewhere.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from crossfed.platform.method import (
    SERVER,
    Context,
    Direction,
    Field,
    Method,
    MethodConfig,
    Out,
    Phase,
    Release,
    Stage,
)


class Config(MethodConfig):
    rounds: int = 4
    dim: int = 3
    K: int = 2
    step: float = 0.5
    patience: int | None = None
    marker: str = ""
    fault: str = "none"
    noise: float = 0.5
    count: int = 2
    apart: bool = False


class Toy:
    """A node's state: the vector, and a score table made of it."""

    def __init__(self, config: Config, ctx: Context):
        start = 0.0 if ctx.data is None else float(np.mean(ctx.data.items))
        self.config = config
        self.start = np.full(config.dim, start, np.float32)
        self.x = self.start.copy()
        self.sizes = (0, 0) if ctx.data is None else (ctx.data.n_users, ctx.data.n_items)
        self.noise = 0.0


def score(state: Toy, users: np.ndarray) -> torch.Tensor:
    items = np.arange(state.sizes[1], dtype=np.float32)
    return torch.from_numpy(np.sin(items[None, :] * (1 + state.x[0]) + users[:, None]))


def export(state: Toy) -> dict[str, torch.Tensor]:
    return {"x": torch.from_numpy(state.x), "sizes": torch.tensor(state.sizes)}


def score_exported(exported: Mapping[str, torch.Tensor], users: np.ndarray) -> torch.Tensor:
    items = np.arange(int(exported["sizes"][1]), dtype=np.float32)
    return torch.from_numpy(
        np.sin(items[None, :] * (1 + float(exported["x"][0])) + users[:, None]).astype(np.float32)
    )


def state_dict(state: Toy) -> dict[str, Any]:
    return {"x": state.x, "noise": state.noise}


def load_state_dict(state: Toy, saved: Mapping[str, Any]) -> None:
    state.x, state.noise = np.array(saved["x"]), saved["noise"]


def upload(state: Toy, inbox: Mapping, ctx: Context) -> Out:
    state.noise = float(ctx.rng.random() + torch.rand(1, generator=ctx.torch_rng))
    return Out({SERVER: {"x": state.x}}, {"noise": state.noise})


def average(state: Toy, inbox: Mapping, ctx: Context) -> Out:
    state.x = np.mean([inbox[name]["x"] for name in sorted(inbox)], axis=0, dtype=np.float32)
    return Out(
        {name: {"x": state.x} for name in ctx.peers}, {"norm": float(np.linalg.norm(state.x))}
    )


def adopt(state: Toy, inbox: Mapping, ctx: Context) -> Out:
    state.x = state.x + np.float32(state.config.step) * (inbox[SERVER]["x"] - state.x)
    return Out(metrics={"x": float(state.x[0])})


def gossip(state: Toy, inbox: Mapping, ctx: Context) -> Out:
    """Average with what arrived since the last round, then tell the neighbours."""
    arrived = [inbox[name]["x"] for name in sorted(inbox)]
    state.x = np.mean([state.x, *arrived], axis=0, dtype=np.float32)
    return Out({name: {"x": state.x} for name in ctx.peers}, {"x": float(state.x[0])})


def drift(state: Toy, inbox: Mapping, ctx: Context) -> Out:
    state.x = state.x + ctx.rng.normal(size=state.x.shape).astype(np.float32)
    return Out(metrics={"x": float(state.x[0])})


def _method(name: str, stages: Any, fields: tuple[Field, ...] = (), server: bool = True) -> Method:
    return Method(
        name=name,
        title=f"Toy {name}",
        paper="none",
        Config=Config,
        stages=stages,
        init_domain=Toy,
        score=score,
        state_dict=state_dict,
        load_state_dict=load_state_dict,
        export=export,
        score_exported=score_exported,
        init_server=Toy if server else None,
        fields=fields,
    )


X_UP = Field("x", Direction.UP, ("dim",), "the vector")
X_DOWN = Field("x", Direction.DOWN, ("dim",), "the mean vector")
X_PEER = Field("x", Direction.PEER, ("dim",), "the vector")
STAR = frozenset({Direction.UP, Direction.DOWN})
ROUND = (Phase(upload), Phase(average, "server"), Phase(adopt))

AVERAGE = _method(
    "average",
    lambda c: (Stage("mean", c.rounds, ROUND, edges=STAR, patience=c.patience),),
    (X_UP, X_DOWN),
)
TWO_STAGES = _method(
    "two_stages",
    lambda c: (
        Stage("mean", c.rounds, ROUND, edges=STAR, evaluate=False),
        Stage("drift", 3 * c.rounds, (Phase(drift),), patience=c.patience),
    ),
    (X_UP, X_DOWN),
)


def _mark(state: Toy, inbox: Mapping, ctx: Context) -> Out:
    state.noise = float(state.x[0])
    return Out()


CLOSES = _method(
    "closes",
    lambda c: (
        Stage("drift", 12, (Phase(drift),), patience=1, close=(Phase(_mark),)),
        Stage(
            "still",
            1,
            (
                Phase(
                    lambda state, inbox, ctx: Out(
                        metrics={"marked": state.noise, "x": float(state.x[0])}
                    )
                ),
            ),
        ),
    ),
    server=False,
)
GOSSIP = _method(
    "gossip",
    lambda c: (
        Stage(
            "talk", c.rounds, (Phase(gossip),), edges=frozenset({Direction.PEER}), keep_best=False
        ),
    ),
    (X_PEER,),
    server=False,
)


def whisper(state: Toy, inbox: Mapping, ctx: Context) -> Out:
    """Gossip under Laplace noise; to every peer the same message, or (`apart`) each its own."""
    gossip(state, inbox, ctx)

    def perturbed() -> np.ndarray:
        return (state.x + ctx.noise_rng.laplace(0.0, state.config.noise, state.x.shape)).astype(
            np.float32
        )

    same = perturbed()
    told = {name: {"x": perturbed() if state.config.apart else same} for name in ctx.peers}
    return Out(told, {"x": float(state.x[0])})


def _whisper_or_die(state: Toy, inbox: Mapping, ctx: Context) -> Out:
    _die_once(state, ctx)
    return whisper(state, inbox, ctx)


def _whispers(name: str, step: Any) -> Method:
    """Each message holds `count` releases of ε = 1 / noise; "the paper" counts 1 / noise for the
    whole message.
    """
    method = _method(
        name,
        lambda c: (
            Stage(
                "talk", c.rounds, (Phase(step),), edges=frozenset({Direction.PEER}), keep_best=False
            ),
            Stage(
                "still",
                1,
                (Phase(lambda state, inbox, ctx: Out(metrics={"x": float(state.x[0])})),),
            ),
        ),
        (X_PEER,),
        server=False,
    )
    return replace(
        method,
        releases=lambda c: (
            Release(
                "talk",
                ("x",),
                "laplace",
                "one interaction of a domain",
                1.0,
                c.noise,
                1 / c.noise,
                c.count,
            ),
        ),
    )


# -- leaks -----------------------------------------------------------------------------------------


def _leak(key: str, make: Any, receiver: Any = lambda ctx: SERVER) -> Method:
    def step(state: Toy, inbox: Mapping, ctx: Context) -> Out:
        return Out({receiver(ctx): {key: make(state, ctx)}})

    return _method(
        f"leak_{key}", lambda c: (Stage("leak", 1, (Phase(step),), edges=STAR),), (X_UP, X_DOWN)
    )


LEAK_USERS = _leak("user_ids", lambda state, ctx: np.unique(ctx.own.users))
LEAK_SHAPE = _leak("x", lambda state, ctx: np.zeros((ctx.own.n_users, 3), np.float32))
LEAK_OBJECT = _leak("x", lambda state, ctx: np.array([{"user": 1}] * 3, dtype=object))
LEAK_NAN = _leak("x", lambda state, ctx: np.full(3, np.nan, np.float32))
LEAK_TENSOR = _leak("x", lambda state, ctx: torch.zeros(3))
LEAK_PEER = _leak(
    "x", lambda state, ctx: np.zeros(3, np.float32), receiver=lambda ctx: ctx.peers[0]
)
LEAK_NOWHERE = _leak(
    "x", lambda state, ctx: np.zeros(3, np.float32), receiver=lambda ctx: "evil.example"
)


def _local_send(state: Toy, inbox: Mapping, ctx: Context) -> Out:
    return Out({SERVER: {"x": state.x}})


LEAK_LOCAL = _method(
    "leak_local", lambda c: (Stage("local", 1, (Phase(_local_send),)),), (X_UP, X_DOWN)
)


def _labels(state: Toy, inbox: Mapping, ctx: Context) -> Out:
    return Out({name: {"labels": np.array([0, state.config.K], np.int64)} for name in ctx.peers})


LEAK_RANGE = _method(
    "leak_range",
    lambda c: (Stage("leak", 1, (Phase(_labels, "server"),), edges=STAR),),
    (Field("labels", Direction.DOWN, (2,), "labels", dtype="int64", high="K"),),
)


def _by_users(state: Toy, inbox: Mapping, ctx: Context) -> Out:
    return Out({SERVER: {"shared": np.zeros(ctx.own.n_users, np.float32)}})


def _by_users_hidden(state: Toy, inbox: Mapping, ctx: Context) -> Out:
    return Out({SERVER: {"shared": np.zeros(ctx.own.n_users + 1, np.float32)}})


LEAK_VARIES = _method(
    "leak_varies",
    lambda c: (Stage("leak", 1, (Phase(_by_users_hidden),), edges=STAR),),
    (Field("shared", Direction.UP, None, "parameters"),),
)
LEAK_GROWS = _method(
    "leak_grows",
    lambda c: (Stage("leak", 1, (Phase(_by_users),), edges=STAR),),
    (Field("shared", Direction.UP, None, "parameters"),),
)


def _write_inbox(state: Toy, inbox: Mapping, ctx: Context) -> Out:
    inbox[SERVER]["x"][0] = 1.0
    return Out()


WRITES_INBOX = _method(
    "writes_inbox",
    lambda c: (
        Stage(
            "mean", 1, (Phase(upload), Phase(average, "server"), Phase(_write_inbox)), edges=STAR
        ),
    ),
    (X_UP, X_DOWN),
)


def _die_once(state: Toy, ctx: Context) -> None:
    """Die once, in the third round of one domain: the marker file remembers that it has
    happened.
    """
    import os
    from pathlib import Path

    marker = Path(state.config.marker)
    if ctx.round == 3 and ctx.peers and ctx.node < min(ctx.peers) and not marker.exists():
        marker.touch()
        os._exit(1)


def _exit_once(state: Toy, inbox: Mapping, ctx: Context) -> Out:
    _die_once(state, ctx)
    return upload(state, inbox, ctx)


DIES_ONCE = _method(
    "dies_once",
    lambda c: (
        Stage(
            "mean",
            c.rounds,
            (Phase(_exit_once), Phase(average, "server"), Phase(adopt)),
            edges=STAR,
        ),
    ),
    (X_UP, X_DOWN),
)
WHISPER = _whispers("whisper", whisper)
WHISPER_DIES = _whispers("whisper_dies", _whisper_or_die)


NO_STAGE = _method("no_stage", lambda c: ())


# -- for searches ----------------------------------------------------------------------------------


def _fail(state: Toy, inbox: Mapping, ctx: Context) -> Out:
    """Drift; in the second round do what `fault` says."""
    import os

    if ctx.round == 2 and state.config.fault == "nan":
        state.x = np.full_like(state.x, np.nan)
        return Out()
    if ctx.round == 2 and state.config.fault == "raise":
        raise RuntimeError("the toy breaks")
    if ctx.round == 2 and state.config.fault == "die":
        os._exit(1)
    state.x = state.x + np.float32(state.config.step)
    return Out(metrics={"x": float(state.x[0])})


FRAGILE = _method("fragile", lambda c: (Stage("walk", c.rounds, (Phase(_fail),)),), server=False)


def _trap(config: Config, ctx: Context) -> Toy:
    """A domain that cannot read its test split."""
    from crossfed.platform.federation.node import Node

    if ctx.data is not None:
        load = Node.load

        def guarded(self: Node, part: str) -> Any:
            if part == "test":
                raise RuntimeError("the test split was read")
            return load(self, part)

        Node.load = guarded  # type: ignore[method-assign]
    return Toy(config, ctx)


TRAPPED = replace(AVERAGE, name="trapped", init_domain=_trap)


def modules(node: Any) -> set[str]:
    """Names of the modules that a node's process has imported."""
    return set(sys.modules)
