"""Transformer parts for sequences: fused multi-head attention, feed-forward nets, residual steps in
both norm placements.

Layout: activations are [b, T, d]; a batch is padded at its end, so that with `causal` no real
position ever looks at padding and no mask is needed. Everything else takes a mask, True where a key
may be seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Placement = Literal["pre", "post"]
"""Where a residual step normalises: before its function, or after the sum."""

Activation = Literal["relu", "gelu"]
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu}

EPS = 1e-8
"""ε of layer normalisation."""


class _Dropped(torch.autograd.Function):
    """x · mask · scale, the mask kept as booleans."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keep: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(keep)
        ctx.scale = scale
        return (x * keep).mul_(scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (keep,) = ctx.saved_tensors
        return (grads[0] * keep).mul_(ctx.scale), None, None


def dropout(x: Tensor, rate: float, training: bool) -> Tensor:
    """Each entry zero with probability `rate`, the others divided by 1 - rate, from torch's global
    generator.

    On the CPU, where torch draws one number per entry, one 64-bit draw serves four: a fourth of the
    time. The rate is rounded to a multiple of 2⁻¹⁶ there, and the scale is that of the rounded
    rate, so the mean stays exact.
    """
    if not training or not rate:
        return x
    if x.device.type != "cpu":
        return F.dropout(x, rate)
    lanes = (
        torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None).view(torch.int16)
    )
    dropped = round(rate * 2**16)  # of the 2^16 values of a lane
    keep = (lanes[: x.numel()] >= dropped - 2**15).view(x.shape)
    kept: Tensor = _Dropped.apply(x, keep, 2**16 / (2**16 - dropped))  # type: ignore[no-untyped-call]
    return kept


class Dropout(nn.Module):
    """`dropout` while training."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        return dropout(x, self.rate, self.training)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    rate: float = 0.0,
) -> Tensor:
    """softmax(QKᵀ / √d) V, fused where there is nothing to drop. [..., T, d], [..., S, d], [..., S,
    d'] -> [..., T, d'].

    Args:
        mask: bool, two axes or more, broadcast to [..., T, S], True where a key may be seen.
        causal: query t sees keys 1 … t; not together with a mask.
        rate: share of the attention weights to drop.
    """
    if not rate or q.device.type != "cpu":
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=rate, is_causal=causal
        )
    scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(-2, -1)
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return dropout(scores.softmax(-1), rate, True) @ v


class Attention(nn.Module):
    """softmax(QKᵀ / √d_head) V in `heads` heads, with an output projection (Vaswani et al. 2017,
    section 3.2).

    Args:
        dim: width d of input and output. heads: divides d. dropout: of the attention weights.

    Raises:
        ValueError: `dim` is not a multiple of `heads`.
    """

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        if dim % heads:
            raise ValueError(f"dim {dim} is not a multiple of heads {heads}")
        self.heads, self.dropout = heads, dropout
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        mask: Tensor | None = None,
        causal: bool = False,
    ) -> Tensor:
        """[b, T, d] -> [b, T, d].

        Args:
            x: what asks. memory: what is looked at, [b, S, d]; x itself by default.
            mask: bool, [T, S] or broadcast to [b, heads, T, S], True where a key may be seen.
            causal: position t sees positions up to t only; not together with a mask.
        """
        memory = x if memory is None else memory
        q, k, v = (
            self._split(self.query(x)),
            self._split(self.key(memory)),
            self._split(self.value(memory)),
        )
        p = self.dropout if self.training else 0.0
        mixed = attend(q, k, v, mask, causal, p)
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _split(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        return x.view(b, t, self.heads, d // self.heads).transpose(1, 2)  # [b, heads, T, d / heads]


class FeedForward(nn.Module):
    """act(xW₁ + b₁)W₂ + b₂, at every position alike. [..., dim] -> [..., dim]."""

    def __init__(self, dim: int, inner: int, activation: Activation) -> None:
        super().__init__()
        self.inner, self.outer, self.activation = (
            nn.Linear(dim, inner),
            nn.Linear(inner, dim),
            activation,
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(ACTIVATIONS[self.activation](self.inner(x)))  # type: ignore[no-any-return]


class Residual(nn.Module):
    """One residual step around a function g that keeps the shape.

    "pre":  x + Dropout(g(LayerNorm(x))).
    "post": LayerNorm(x + Dropout(g(x))).
    """

    def __init__(self, dim: int, dropout: float, placement: Placement) -> None:
        super().__init__()
        self.norm, self.dropout, self.placement = (
            nn.LayerNorm(dim, eps=EPS),
            Dropout(dropout),
            placement,
        )

    def forward(self, x: Tensor, g: Callable[[Tensor], Tensor]) -> Tensor:
        if self.placement == "pre":
            return x + self.dropout(g(self.norm(x)))  # type: ignore[no-any-return]
        return self.norm(x + self.dropout(g(x)))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Self-attention, attention to a memory where `cross`, then a feed-forward net; each a residual
    step.

    Args:
        dim, heads: as in `Attention`. inner: width of the feed-forward net. dropout: of attention
            weights and of every step's output. placement, activation: see `Residual`,
            `FeedForward`. cross: whether there is a memory.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        inner: int,
        dropout: float,
        placement: Placement,
        activation: Activation,
        cross: bool = False,
    ) -> None:
        super().__init__()
        self.attention, self.around_attention = (
            Attention(dim, heads, dropout),
            Residual(dim, dropout, placement),
        )
        self.cross = Attention(dim, heads, dropout) if cross else None
        self.around_cross = Residual(dim, dropout, placement) if cross else None
        self.feed, self.around_feed = (
            FeedForward(dim, inner, activation),
            Residual(dim, dropout, placement),
        )

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        causal: bool = False,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
    ) -> Tensor:
        """[b, T, d] -> [b, T, d]; memory [b, S, d] and the masks as in `Attention.forward`."""
        x = self.around_attention(x, lambda z: self.attention(z, mask=mask, causal=causal))
        if self.cross is not None and self.around_cross is not None:
            cross = self.cross
            x = self.around_cross(x, lambda z: cross(z, memory, mask=memory_mask))
        return self.around_feed(x, self.feed)  # type: ignore[no-any-return]


@torch.no_grad()
def initialise(module: nn.Module, std: float, rng: torch.Generator) -> None:
    """Weights of every linear layer and parameter matrix from N(0, std²), biases 0, layer norms the
    identity.

    Draws in the order of registration from `rng` (a CPU generator), so call it before moving the
    module to a device.
    """
    norms = {
        id(p)
        for part in module.modules()
        if isinstance(part, nn.LayerNorm)
        for p in part.parameters()
    }
    for parameter in module.parameters():
        if id(parameter) in norms:
            continue
        if parameter.ndim > 1:
            parameter.normal_(std=std, generator=rng)
        else:
            parameter.zero_()
