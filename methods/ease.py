"""EASE: a linear item-item model in closed form, item text as side information where wanted.

Paper
    Steck, "Embarrassingly Shallow Autoencoders for Sparse Data", WWW 2019, arXiv 1905.03375. Side
    information as in Jeunen, Van Balen and Goethals, "Closed-Form Models for Collaborative
    Filtering with Side-Information", RecSys 2020 (its collective EASE), equation (4) here. Numbers
    of the first paper, in order: the score, the objective that (3) solves, the solution.

Notation
    ==========  =========================================  =========================
    symbol      name                                       shape
    ==========  =========================================  =========================
    X           training interactions, 0 or 1              CSR [n_users, n_items]
    V           text vectors of the items, of length 1     [n_items, width]
    λ           L2 regularisation                          –
    α           weight of text                             –
    G           Gram matrix                                [n_items, n_items]
    P           inverse of G + λI                          [n_items, n_items]
    B           item-item weights, zero diagonal           [n_items, n_items]
    ==========  =========================================  =========================

What crosses
    Nothing: the method has one local stage of a single round, without edges.

Departures
    - Computed in float32 by Cholesky factors (G + λI is positive definite); the paper inverts in
      float64.

Not stated in the paper
    - Memory grows with the square of the catalogue: three matrices [n_items, n_items] at once. A
      domain that would pass `memory_gb` is refused before anything is computed.
    - The weight of the rows of V in collective EASE, α, is a setting, 0 by default. An item without
      text has a zero row.
    - `history` and the saved model are those of `itemknn`.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field, NonNegativeFloat, PositiveFloat

from crossfed.methods.parts.item_based import ItemBased, listed, train, user_items
from crossfed.platform.errors import CrossfedError
from crossfed.platform.method import (
    RANKING,
    Context,
    Interactions,
    Method,
    MethodConfig,
    Phase,
    Scope,
    Stage,
)

MATRICES = 3
"""Dense [n_items, n_items] float32 matrices held at once: a factor, the inverse made of it, and
B."""


class Config(MethodConfig):
    """Regularisation, side information, and what may be spent. ◇: chosen here."""

    l2: PositiveFloat = Field(
        250.0, description="λ of Eq. (3) (the paper: 200 to 1000, by data set)"
    )
    text: NonNegativeFloat = Field(
        0.0, description="α of Eq. (4), weight of item text; 0 is EASE ◇"
    )
    history: Literal["train", "known"] = Field(
        "train",
        description="items to recommend from: those trained on, or all that are known when "
        "ranking ◇",
        json_schema_extra=RANKING,
    )
    memory_gb: PositiveFloat = Field(
        8.0, description="most memory that a domain's matrices may take, in GB (10⁹ bytes) ◇"
    )


# --- Equations ---


def gram(data: Interactions, text: npt.NDArray[np.float32], config: Config) -> torch.Tensor:
    """Eq. (4): G = XᵀX + α VVᵀ, the Gram matrix of [X; √α Vᵀ]. Float32 [n_items, n_items].

    Args:
        text: [n_items, width]; used where α > 0.
    """
    x = user_items(data)
    g = torch.from_numpy((x.T @ x).toarray())
    if config.text:
        v = torch.nn.functional.normalize(torch.from_numpy(np.array(text)), dim=1)
        g.addmm_(v, v.T, alpha=config.text)
    return g


def weights(g: torch.Tensor, l2: float) -> torch.Tensor:
    """Eq. (3): B_ij = -P_ij / P_jj for i ≠ j and 0 for i = j, with P = (G + λI)^-1. [n_items,
    n_items]; `g` is overwritten.

    It minimises Eq. (2), ‖X − XB‖²_F + λ‖B‖²_F over B with a zero diagonal.
    """
    g.diagonal().add_(l2)
    torch.linalg.cholesky(g, out=g)
    p = torch.cholesky_inverse(g)
    b = torch.div(p, -p.diagonal(), out=g)
    b.fill_diagonal_(0.0)
    return b


def score(state: ItemBased, users: npt.NDArray[np.int64]) -> torch.Tensor:
    """Eq. (1): s_u = x_u B for all items. Int64 [b] -> float32 [b, n_items]."""
    return state.score(users)


# --- State ---


def needed_gb(n_items: int) -> float:
    """What fitting holds at its peak, in GB: `MATRICES` of n_items² float32."""
    return MATRICES * 4 * n_items**2 / 1e9


def check_memory(node: str, n_items: int, limit: float) -> None:
    """Raise CrossfedError where a catalogue needs more than `limit` GB."""
    if (needed := needed_gb(n_items)) > limit:
        raise CrossfedError(
            f"Domain {node}: EASE over {n_items:,} items holds {MATRICES} dense item-item "
            f"matrices, {needed:,.1f} GB, and "
            f"memory_gb allows {limit:g}; raise memory_gb if the machine has it, or use "
            f"itemknn, whose matrix is sparse."
        )


def fit(
    data: Interactions, text: npt.NDArray[np.float32], config: Config, device: torch.device
) -> npt.NDArray[np.float32]:
    """B of one domain, in main memory, solved on its device."""
    b: npt.NDArray[np.float32] = (
        weights(gram(data, text, config).to(device), config.l2).cpu().numpy()
    )
    return b


def init_domain(config: Config, ctx: Context) -> ItemBased:
    """A model that makes B in its only round."""
    check_memory(ctx.node, ctx.own.n_items, config.memory_gb)
    solve = partial(fit, ctx.own, ctx.artifacts["text"], config, ctx.device)
    return ItemBased(solve, ctx, observed=config.history == "known")


def stages(config: Config) -> tuple[Stage, ...]:
    """One local stage of one round."""
    return (Stage("fit", rounds=1, each=(Phase(train),)),)


METHOD = Method(
    name="ease",
    title="EASE, solved by every domain alone",
    paper="arXiv 1905.03375",
    Config=Config,
    stages=stages,
    init_domain=init_domain,
    score=score,
    observe=ItemBased.observe,
    state_dict=ItemBased.state_dict,
    load_state_dict=ItemBased.load_state_dict,
    export=ItemBased.export,
    score_exported=listed,
    artifacts=("text",),
    scope=Scope.LOCAL,
    deterministic=True,
)
