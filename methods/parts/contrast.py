"""Contrastive terms for next-item networks: InfoNCE over two views of a batch, and CL4SRec's views.

Notation
    ==========  =========================================  ================
    symbol      name                                       shape
    ==========  =========================================  ================
    a, b        two views of the same sequences            [n, dim] each
    τ           temperature                                –
    λ           weight of the term                         –
    ==========  =========================================  ================

Equation numbers are those that `crossfed.methods.cl4srec` gives.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from pydantic import Field, field_validator
from torch import Tensor, nn

from crossfed.methods.parts.augmentation import Operator, two_views
from crossfed.methods.parts.next_item import (
    Batch,
    Learner,
    NextItem,
    NextItemConfig,
    SequenceNet,
    Term,
)
from crossfed.platform.method import Context


def two_view_nce(a: Tensor, b: Tensor, tau: float, cosine: bool = False) -> Tensor:
    """Eq. (2): InfoNCE over the 2n rows of two views, each row's positive being its other view.

    The candidates of a row are all 2n - 1 others, so that 2(n - 1) of them are negatives. The mean
    over the 2n rows.

    Args:
        a, b: the views, [n, dim]; row i of one belongs to row i of the other.
        tau: τ, positive. cosine: similarity by the cosine instead of the dot product.

    Returns:
        A scalar; 0 with n = 1, where nothing is to be told apart.
    """
    rows = torch.cat([a, b])
    if cosine:
        rows = F.normalize(rows, dim=1)
    similarity = (rows / tau) @ rows.T
    similarity = similarity.masked_fill(_diagonal(len(rows), rows.device), -torch.inf)
    other = torch.arange(len(rows), device=rows.device).roll(len(a))
    return F.cross_entropy(similarity, other)


def _diagonal(size: int, device: torch.device) -> Tensor:
    return torch.eye(size, dtype=torch.bool, device=device)


def last_outputs(
    net: SequenceNet,
    items: npt.NDArray[np.int64],
    count: npt.NDArray[np.int64],
    groups: int = 1,
) -> Tensor:
    """The network's outputs at the last position of each sequence: [b, T], [b] -> [b, dim].

    Args:
        groups: how many groups of similar length to go through the network in, each cut to the
            longest in it: less padding where lengths differ much.
    """
    device, ends = net.items.device, []
    order = np.argsort(count, kind="stable") if groups > 1 else np.arange(len(count))
    for rows in np.array_split(order, min(groups, len(order))):
        sizes = torch.from_numpy(count[rows]).to(device)
        inputs = torch.from_numpy(items[rows, : count[rows].max()]).to(device)
        ends.append(at_end(net(inputs, sizes), sizes))
    back = torch.from_numpy(np.argsort(order)).to(device)
    return torch.cat(ends)[back]


def at_end(outputs: Tensor, count: Tensor) -> Tensor:
    """Each sequence's output at its last position. [b, T, dim], int64 [b] -> [b, dim]."""
    return outputs[torch.arange(len(count), device=count.device), count - 1]


class ContrastConfig(NextItemConfig):
    """SASRec's network and training with a contrastive term. ◇: chosen here."""

    batch_size: int = Field(256, ge=1, description="windows in a batch")
    lambda_: float = Field(0.1, ge=0, description="λ, weight of the contrastive term; 0: SASRec")
    tau: float = Field(1.0, gt=0, description="τ, temperature of the contrastive term")
    cosine: bool = Field(False, description="contrast by the cosine instead of the dot product ◇")


class ViewsConfig(ContrastConfig):
    """CL4SRec's views: the same for the method itself and for its federation."""

    operators: tuple[Operator, ...] = Field(
        ("crop", "mask", "reorder"),
        min_length=1,
        description="what views are made by; two different ones a sequence where there are two",
    )
    eta: float = Field(0.6, gt=0, le=1, description="η, share of a sequence that crop keeps")
    gamma: float = Field(0.3, ge=0, le=1, description="γ, share of its items that mask hides")
    beta: float = Field(0.6, ge=0, le=1, description="β, share of a sequence that reorder shuffles")

    @field_validator("operators")
    @classmethod
    def _once_each(cls, value: tuple[Operator, ...]) -> tuple[Operator, ...]:
        if len(set(value)) < len(value):
            raise ValueError("an operator is named twice")
        return value


class MaskedNextItem(NextItem):
    """`NextItem` with one more input, number n_items: the mask, which is never a target.

    Its vector is drawn after all others, so that those are the ones a `NextItem` would have.
    """

    def __init__(self, n_items: int, config: ViewsConfig, rng: torch.Generator) -> None:
        super().__init__(n_items, config, rng)
        self.mask = nn.Parameter(torch.empty(config.dim).normal_(std=0.02, generator=rng))

    def rows(self, items: Tensor) -> Tensor:
        """M at some items, and the mask's vector at number n_items. int64 [b, T] -> [b, T, dim]."""
        n = len(self.items)
        rows = F.embedding(items.clamp(max=n - 1), self.items)
        return torch.where((items == n)[..., None], self.mask, rows)


class ViewsLearner(Learner):
    """A domain of CL4SRec: next items, and the contrast of two views of every window."""

    config: ViewsConfig

    def network(self, ctx: Context) -> NextItem:
        """The network, which knows the mask."""
        return MaskedNextItem(ctx.own.n_items, self.config, ctx.torch_rng)

    def contrast(self, ctx: Context) -> Term | None:
        """λ · Eq. (2) on the outputs after the last items of Eq. (3) to Eq. (5)'s views.

        Views come from a generator of their own: windows and batches are those of SASRec.
        """
        config, token = self.config, ctx.own.n_items
        if not config.lambda_:
            return None
        (rng,) = ctx.rng.spawn(1)
        shares = config.eta, config.gamma, config.beta

        def term(batch: Batch) -> Tensor:
            views = two_views(batch.inputs, batch.count, config.operators, shares, token, rng)
            a, b = last_outputs(self.net, *views).chunk(2)
            return config.lambda_ * two_view_nce(a, b, config.tau, config.cosine)

        return term
