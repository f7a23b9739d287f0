"""Item-kNN: items that are often found together with those of a user's history.

Paper
    Deshpande and Karypis, "Item-Based Top-N Recommendation Algorithms", TOIS 22(1), 2004 (its
    section 4, cosine), with the shrinkage term of Ferrari Dacrema et al., "Are We Really Making
    Much Progress?", RecSys 2019, arXiv 1907.06902. The two equations are numbered here.

Notation
    ==========  =========================================  =========================
    symbol      name                                       shape
    ==========  =========================================  =========================
    R           training interactions, 0 or 1              CSR [n_users, n_items]
    r_i         column of R: who has item i                [n_users]
    h           shrinkage                                  –
    k           neighbours that an item keeps              –
    S           similarities                               CSR [n_items, n_items]
    H_u         history of user u                          set of items
    s_ui        score of item i for user u                 –
    ==========  =========================================  =========================

What crosses
    Nothing: the method has one local stage of a single round, without edges.

Departures
    - Interactions are 0 or 1 and users are not weighted by the length of their history; rows of S
      are not normalised.

Not stated in the paper
    - k counts the neighbours of the history's items (row j of S holds what j speaks for), as in
      Deshpande and Karypis. By default all are kept.
    - `history`: what is recommended from. "train", the default, is what methods with user
      parameters know, so that the two can be set side by side; "known" adds, for the test, the
      validation items, which is what sequence methods look at.
    - Of equal similarities at the cut the lower item numbers stay.
    - The saved model holds the best items of every user with their scores
      (`parts.item_based.LISTED`), neither S nor a history; items beyond a user's list score -inf
      there.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp
import torch
from pydantic import Field, NonNegativeFloat, PositiveInt

from crossfed.methods.parts.item_based import ItemBased, cosine, listed, train, user_items
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
    """The similarity. ◇: chosen here."""

    shrinkage: NonNegativeFloat = Field(10.0, description="h of Eq. (1); 0 is the plain cosine ◇")
    neighbours: PositiveInt | None = Field(
        None, description="k, the most similar items that an item keeps; null keeps all ◇"
    )
    history: Literal["train", "known"] = Field(
        "train",
        description="items to recommend from: those trained on, or all that are known when "
        "ranking ◇",
        json_schema_extra=RANKING,
    )


def similarity(data: Interactions, config: Config) -> sp.csr_matrix:
    """Eq. (1): S_ij = r_i·r_j / (‖r_i‖‖r_j‖ + h) for i ≠ j, the k largest of each row. CSR float32
    [n_items, n_items]."""
    return cosine(user_items(data), config.shrinkage, config.neighbours)


def score(state: ItemBased, users: npt.NDArray[np.int64]) -> torch.Tensor:
    """Eq. (2): s_ui = Σ_{j in H_u} S_ji for all items. Int64 [b] -> float32 [b, n_items]."""
    return state.score(users)


def init_domain(config: Config, ctx: Context) -> ItemBased:
    """A model that makes S in its only round."""
    return ItemBased(partial(similarity, ctx.own, config), ctx, observed=config.history == "known")


def stages(config: Config) -> tuple[Stage, ...]:
    """One local stage of one round."""
    return (Stage("fit", rounds=1, each=(Phase(train),)),)


METHOD = Method(
    name="itemknn",
    title="Item-kNN: cosines of co-occurrence, by every domain alone",
    paper="doi 10.1145/963770.963776",
    Config=Config,
    stages=stages,
    init_domain=init_domain,
    score=score,
    observe=ItemBased.observe,
    state_dict=ItemBased.state_dict,
    load_state_dict=ItemBased.load_state_dict,
    export=ItemBased.export,
    score_exported=listed,
    scope=Scope.LOCAL,
    deterministic=True,
)
