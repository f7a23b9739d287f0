"""Popularity: every user is recommended what the domain's users have most. The floor of all floors.

Paper
    None: the usual baseline that knows no user. Counting recent interactions only is the baseline
    that Ji et al., "A Re-visit of the Popularity Baseline in Recommender Systems", SIGIR 2020,
    arXiv 2005.13829, ask for. Its one equation is numbered here.

Notation
    ==========  =========================================  ================
    symbol      name                                       shape
    ==========  =========================================  ================
    n_i         users who have item i, among those counted [n_items]
    s_ui        score of item i for user u                 –
    ==========  =========================================  ================

What crosses
    Nothing: the method has one local stage of a single round, without edges.

Departures
    - "Recent" is a share of the domain's training interactions, not a number of days before the
      prediction.

Not stated in the paper
    - Only training interactions are counted, also when the test items are ranked.
    - Items of one count tie; ranking puts held-out items last among equals.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field

from crossfed.platform.method import (
    Context,
    Interactions,
    Method,
    MethodConfig,
    Out,
    Payload,
    Phase,
    Scope,
    Stage,
)


class Config(MethodConfig):
    """What is counted."""

    recent: float = Field(
        1.0,
        gt=0,
        le=1,
        description="share of the domain's training interactions that is counted, the latest ones",
    )


def popularity(data: Interactions, recent: float) -> torch.Tensor:
    """Eq. (1): s_ui = n_i over the latest interactions, the same for every user. Float32
    [n_items]."""
    count = math.ceil(recent * len(data.items))
    latest = np.argsort(data.times, kind="stable")[len(data.items) - count :]
    pairs = np.unique(data.users[latest] * data.n_items + data.items[latest])
    return torch.from_numpy(
        np.bincount(pairs % data.n_items, minlength=data.n_items).astype(np.float32)
    )


@dataclass(slots=True)
class State:
    """One domain's counts n, [n_items]; 0 before they are made."""

    config: Config
    counts: torch.Tensor


def init_domain(config: Config, ctx: Context) -> State:
    """Nothing is counted yet."""
    return State(config, torch.zeros(ctx.own.n_items))


def count(state: State, inbox: Mapping[str, Payload], ctx: Context) -> Out:
    """The only round: count the training interactions."""
    state.counts = popularity(ctx.own, state.config.recent)
    return Out(metrics={"largest": float(state.counts.max()) if len(state.counts) else 0.0})


def same_for_all(
    exported: Mapping[str, torch.Tensor], users: npt.NDArray[np.int64]
) -> torch.Tensor:
    """`counts` [n_items] for every user: int64 [b] -> [b, n_items]."""
    return exported["counts"].expand(len(users), -1)


def score(state: State, users: npt.NDArray[np.int64]) -> torch.Tensor:
    """Eq. (1) for all items: [b, n_items]."""
    return same_for_all(export(state), users)


def export(state: State) -> dict[str, torch.Tensor]:
    """n, [n_items]."""
    return {"counts": state.counts}


def state_dict(state: State) -> dict[str, Any]:
    """n."""
    return {"counts": state.counts.clone()}


def load_state_dict(state: State, saved: Mapping[str, Any]) -> None:
    """The reverse of `state_dict`, into a state of the same config and data."""
    if saved["counts"].shape != state.counts.shape:
        raise ValueError(
            f"counts of {len(saved['counts'])} items for a domain of {len(state.counts)}"
        )
    state.counts = saved["counts"].clone()


def stages(config: Config) -> tuple[Stage, ...]:
    """One local stage of one round."""
    return (Stage("count", rounds=1, each=(Phase(count),)),)


METHOD = Method(
    name="pop",
    title="Popularity, counted by every domain alone",
    paper="–",
    Config=Config,
    stages=stages,
    init_domain=init_domain,
    score=score,
    state_dict=state_dict,
    load_state_dict=load_state_dict,
    export=export,
    score_exported=same_for_all,
    scope=Scope.LOCAL,
    deterministic=True,
)
