"""Item-kNN with text: what is found together, plus what reads alike; the floor of text methods.

Paper
    None as a whole. The first part is item-kNN (Deshpande and Karypis, TOIS 22(1), 2004) with
    shrinkage, as `itemknn`; the second a content-based kNN on frozen text vectors; their weighted
    sum is the usual hybrid (Burke, "Hybrid Recommender Systems", UMUAI 12, 2002, weighted). The
    equations are numbered here.

Notation
    ==========  =========================================  =========================
    symbol      name                                       shape
    ==========  =========================================  =========================
    R           training interactions, 0 or 1              CSR [n_users, n_items]
    t_i         text vector of item i                      [width]
    C           similarities by co-occurrence              CSR [n_items, n_items]
    T           similarities by text                       CSR [n_items, n_items]
    w           weight of text                             –
    S           both                                       CSR [n_items, n_items]
    H_u         history of user u                          set of items
    s_ui        score of item i for user u                 –
    ==========  =========================================  =========================

What crosses
    Nothing: the method has one local stage of a single round, without edges.

Departures
    - As those of `itemknn`.

Not stated in the paper
    - `text_of`: whose nearest neighbours by text count. "history": what the items of the history
      have nearest; "candidate": what the item to be scored has nearest; "both": the sum of the two.
    - An item without text has no text neighbours, and is none.
    - `history` and the saved model are those of `itemknn`.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp
import torch
from pydantic import Field, NonNegativeFloat, PositiveInt

from crossfed.methods.parts.item_based import (
    ItemBased,
    cosine,
    listed,
    text_cosine,
    train,
    user_items,
)
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


class Config(MethodConfig):
    """The two similarities and their weight. ◇: chosen here."""

    shrinkage: NonNegativeFloat = Field(10.0, description="h of Eq. (1); 0 is the plain cosine ◇")
    neighbours: PositiveInt | None = Field(
        None,
        description="the most similar items by co-occurrence that an item keeps; null keeps all ◇",
    )
    text: NonNegativeFloat = Field(0.1, description="w of Eq. (3); 0 is item-kNN ◇")
    text_neighbours: PositiveInt = Field(
        20, description="the most similar items by text that an item keeps ◇"
    )
    text_of: Literal["history", "candidate", "both"] = Field(
        "history",
        description="whose nearest items by text count: the history's, the scored "
        "item's, or both ◇",
    )
    history: Literal["train", "known"] = Field(
        "train",
        description="items to recommend from: those trained on, or all that are known when "
        "ranking ◇",
        json_schema_extra=RANKING,
    )


def co_occurrence(data: Interactions, config: Config) -> sp.csr_matrix:
    """Eq. (1): C_ij = r_i·r_j / (‖r_i‖‖r_j‖ + h) for i ≠ j, the largest of each row. CSR float32
    [n_items, n_items]."""
    return cosine(user_items(data), config.shrinkage, config.neighbours)


def text_similarity(text: npt.NDArray[np.float32], config: Config) -> sp.csr_matrix:
    """Eq. (2): T_ij = max(cos(t_i, t_j), 0) where j is among the nearest of i, or i of j. [n_items,
    width] -> CSR.

    The first for `text_of="history"`, the second for "candidate", and the sum of the two for
    "both".
    """
    near = text_cosine(text, config.text_neighbours)
    if config.text_of == "history":
        return near
    return near.T.tocsr() if config.text_of == "candidate" else near + near.T


def similarity(data: Interactions, text: npt.NDArray[np.float32], config: Config) -> sp.csr_matrix:
    """Eq. (3): S = C + w T. CSR float32 [n_items, n_items]."""
    if not config.text:
        return co_occurrence(data, config)
    return co_occurrence(data, config) + np.float32(config.text) * text_similarity(text, config)


def score(state: ItemBased, users: npt.NDArray[np.int64]) -> torch.Tensor:
    """Eq. (4): s_ui = Σ_{j in H_u} S_ji for all items. Int64 [b] -> float32 [b, n_items]."""
    return state.score(users)


def init_domain(config: Config, ctx: Context) -> ItemBased:
    """A model that makes S in its only round."""
    fit = partial(similarity, ctx.own, ctx.artifacts["text"], config)
    return ItemBased(fit, ctx, observed=config.history == "known")


def stages(config: Config) -> tuple[Stage, ...]:
    """One local stage of one round."""
    return (Stage("fit", rounds=1, each=(Phase(train),)),)


METHOD = Method(
    name="knntext",
    title="Item-kNN with text neighbours, by every domain alone",
    paper="doi 10.1145/963770.963776 and text",
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
