"""Losses that several methods share; pure functions of tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F

from crossfed.platform.errors import CrossfedError
from crossfed.platform.method import Context


def bpr(positive: torch.Tensor, negative: torch.Tensor) -> torch.Tensor:
    """Bayesian personalised ranking (Rendle et al. 2009): mean of -ln σ(positive - negative).

    Args:
        positive, negative: scores of the observed and of the unobserved item, [b].

    Returns:
        A scalar.
    """
    return F.softplus(negative - positive).mean()


def l2_ego(*rows: torch.Tensor) -> torch.Tensor:
    """½ Σ ‖row‖² / b over the embedding rows a batch used; weight decay that touches only these
    rows.

    Args:
        rows: tensors [b, d], the batch's users, positives and negatives before propagation.

    Returns:
        A scalar.
    """
    total = torch.stack([row.square().sum() for row in rows]).sum()
    return 0.5 * total / rows[0].shape[0]


def info_nce(
    a: torch.Tensor, b: torch.Tensor, temperature: float, keep_positive: bool = True
) -> torch.Tensor:
    """Contrast of matching rows (van den Oord et al. 2018): the mean over i of

        -ln( exp(cos(a_i, b_i) / τ) / Σ_j exp(cos(a_i, b_j) / τ) )

    One direction only: the candidates of row a_i are all rows of b. Add the call with a and b
    exchanged for both.

    Args:
        a, b: the two views, [n, d]; row i of one matches row i of the other. They need not be
            normalised.
        temperature: τ, positive.
        keep_positive: whether j = i is part of the sum in the denominator. Without it the loss can
            be negative.

    Returns:
        A scalar.

    Raises:
        ValueError: without the positive pair a batch needs at least two rows.
    """
    similarity = (F.normalize(a, dim=1) / temperature) @ F.normalize(b, dim=1).T  # [n, n]
    # the cross-entropy of a classifier whose right answer is the row's own number
    if keep_positive:
        return F.cross_entropy(similarity, torch.arange(len(a), device=a.device))
    if len(a) < 2:
        raise ValueError(
            "a contrast without the positive pair in the denominator needs at least two rows"
        )
    positive = similarity.diagonal()
    own = torch.eye(len(a), dtype=torch.bool, device=a.device)
    return (similarity.masked_fill(own, float("-inf")).logsumexp(1) - positive).mean()


def bernoulli_kl(p_logits: torch.Tensor, q_logits: torch.Tensor) -> torch.Tensor:
    """KL(Bernoulli(σ(p)) ‖ Bernoulli(σ(q))), element by element, from logits.

    Written with log σ so that logits of any size give a finite value.

    Args:
        p_logits, q_logits: tensors of one shape.

    Returns:
        A non-negative tensor of that shape, in nats; zero where the logits agree.
    """
    one = torch.sigmoid(p_logits) * (F.logsigmoid(p_logits) - F.logsigmoid(q_logits))
    zero = torch.sigmoid(-p_logits) * (F.logsigmoid(-p_logits) - F.logsigmoid(-q_logits))
    return one + zero


def finite(means: Mapping[str, float], ctx: Context) -> Mapping[str, float]:
    """The mean losses of an epoch, unchanged.

    Raises:
        CrossfedError: one is NaN or infinite: the training has diverged.
    """
    wrong = [name for name, value in means.items() if not math.isfinite(value)]
    if wrong:
        raise CrossfedError(
            f"{ctx.node}: training has diverged in {ctx.stage}, round {ctx.round}: "
            f"{', '.join(wrong)} is not finite; "
            "use a smaller learning rate"
        )
    return means
