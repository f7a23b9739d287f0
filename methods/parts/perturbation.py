"""Clipping and noise for what leaves a domain: the Laplace mechanism, and how much signal it
leaves.

All in float64. What floating-point noise does and does not promise is told by
`crossfed.platform.method.noise_generator`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating[Any]]
Doubles = npt.NDArray[np.float64]

_INWARDS = 1.0 - 1e-12
"""A clipped vector ends just inside the ball, so that rounding cannot put it outside."""


def clip_l1(x: Floats, bound: float) -> Doubles:
    """Each row scaled down to an L1 norm of at most `bound`: x_i · min(1, bound / ‖x_i‖₁). [n, d]
    -> float64 [n, d].

    Two clipped rows differ by at most 2 · bound in L1 norm, whatever they were computed from.

    Raises:
        ValueError: `bound` is not positive.
    """
    if not bound > 0:
        raise ValueError(f"the clipping bound must be positive, got {bound}")
    rows = np.asarray(x, np.float64)
    norms = np.abs(rows).sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        return rows * np.where(norms > bound, bound / norms * _INWARDS, 1.0)


def laplace_scale(sensitivity: float, epsilon: float) -> float:
    """b = sensitivity / ε: Laplace(0, b) on every coordinate hides a change of that L1 size at that
    ε (Dwork et al. 2006).
    """
    return sensitivity / epsilon


def add_laplace(x: Floats, scale: float, rng: np.random.Generator) -> npt.NDArray[np.float32]:
    """x plus independent Laplace(0, scale) noise, drawn and added in float64, rounded once to
    float32. Same shape as x.
    """
    return (np.asarray(x, np.float64) + rng.laplace(0.0, scale, np.shape(x))).astype(np.float32)


def signal_to_noise(x: Floats, scale: float) -> float:
    """Σ x² over what Laplace(0, scale) noise adds to it on average, 2 · scale² a coordinate. [n, d]
    -> a ratio of powers.
    """
    return float(np.square(x, dtype=np.float64).sum() / (2.0 * scale**2 * np.size(x)))
