"""Residual quantisers: public item vectors to semantic IDs, and back.

Both kinds map a vector to a short latent vector and that to L codes, each the codeword nearest to
what the codes before it left over:

    ResidualKMeans   the latent space is spanned by the principal axes; codewords are K-means centres, level by level
    ResidualVAE      starts as that, then learns axes, codewords and a network beside each set of axes by gradients (RQ-VAE)

Equation numbers are those of FedCGR (arXiv 2608.10929). Notation: n vectors x of width d_x, latent
vectors of width d, L levels, C codewords z per level, r_l the residual at level l.

Not stated in the paper, and chosen here: the networks (one hidden layer, added to a linear map; a
start at the principal axes needs tens of epochs where a random start needs thousands), the
regularisers behind L_entropy and L_collision, and that the codewords learn by van den Oord's
codebook loss, which is added to Eq. (4).
"""  # noqa: E501

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from threadpoolctl import threadpool_limits
from torch import Tensor, nn

from crossfed.platform.method import generators

Floats = npt.NDArray[np.floating[Any]]

BLOCK = 4096
"""Rows that are encoded at a time."""


# -- quantising ------------------------------------------------------------------------------------


def next_residual(r: Tensor, codebook: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Eq. (2): c = argmin_j ‖r - z_j‖ and r' = r - z_c.

    Args:
        r: residuals [n, d]. codebook: [C, d].

    Returns:
        codes int64 [n], residuals of the next level [n, d] (no gradient goes through what was taken
        away), and the squared distances to all codewords [n, C].
    """
    inner = r @ codebook.T
    distances = (
        r.square().sum(dim=1, keepdim=True) - 2 * inner + codebook.square().sum(dim=1)
    ).clamp(min=0)
    codes = distances.argmin(dim=1)
    return codes, r - codebook[codes].detach(), distances


def quantise(latent: Tensor, codebooks: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Eq. (2), level by level.

    Args:
        latent: r_1, [n, d]. codebooks: [L, C, d].

    Returns:
        codes int64 [n, L]; the residuals r_1 … r_{L+1}, each [n, d]; the squared distances per
        level, each [n, C].
    """
    codes, residuals, distances = [], [latent], []
    for codebook in codebooks:
        code, left, distance = next_residual(residuals[-1], codebook)
        codes.append(code)
        residuals.append(left)
        distances.append(distance)
    return torch.stack(codes, dim=1), residuals, distances


# -- the loss --------------------------------------------------------------------------------------


def pull(a: Sequence[Tensor], b: Sequence[Tensor], width: int) -> Tensor:
    """Σ over levels of the mean over rows of ‖a - b‖² / width.

    Divided by the width of x, not of the latent space: at the principal axes that is the share of
    the variance that is lost, the unit of the reconstruction loss.

    Args:
        a, b: per level, [n, d].
    """
    return (
        torch.stack([(u - v).square().sum(dim=1).mean() for u, v in zip(a, b, strict=True)]).sum()
        / width
    )


def soft_codes(distances: Tensor) -> Tensor:
    """How likely each code were if codes were drawn by nearness: softmax(-distance / T), [n, C] ->
    [n, C].

    T is the mean squared distance to the nearest codeword, so that a level's own scale does not
    matter; no gradient goes through it.
    """
    temperature = distances.detach().amin(dim=1).mean().clamp(min=1e-8)
    return (-distances / temperature).softmax(dim=1)


def entropy_gap(soft: Sequence[Tensor]) -> Tensor:
    """L_entropy: the mean over levels of ln C - H(p), with p the mean of the soft codes over the
    rows.

    Args:
        soft: per level, [n, C].

    Returns:
        a scalar from 0 (all codes used alike) to ln C (one code).
    """
    used = [q.mean(dim=0) for q in soft]
    return torch.stack([math.log(len(p)) + torch.special.xlogy(p, p).sum() for p in used]).mean()


def colliding_pairs(codes: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows that have all codes in common though their vectors differ.

    Every row is paired with the next one of the same codes, so there are fewer pairs than rows,
    however many collide.

    Args:
        codes: int64 [n, L]. x: the vectors, [n, d_x].

    Returns:
        two int64 tensors of row numbers, of one length.
    """
    _, group = codes.unique(dim=0, return_inverse=True)
    group, order = group.sort(stable=True)
    first, second = order[:-1], order[1:]
    wrong = (group[:-1] == group[1:]) & (x[first] != x[second]).any(dim=1)
    return first[wrong], second[wrong]


def collision(soft: Sequence[Tensor], codes: Tensor, x: Tensor) -> Tensor:
    """L_collision: Σ over colliding pairs (i, j) of Π_l cos(q_i^l, q_j^l) / n, q the soft codes.

    The product is 1 for two items that no codebook could tell apart and falls as any level begins
    to.

    Args:
        soft: per level, [n, C]. codes: int64 [n, L]. x: [n, d_x].

    Returns:
        a scalar in 0 … 1; 0 where different vectors have different codes.
    """
    i, j = colliding_pairs(codes, x)
    alike = torch.stack([F.cosine_similarity(q[i], q[j], dim=1) for q in soft]).prod(dim=0)
    return alike.sum() / len(codes)


def tokeniser_loss(
    terms: Mapping[str, Tensor], beta: float, entropy: float, collision: float
) -> Tensor:
    """Eq. (4): L_recon + β L_commit + λ_e L_entropy + λ_c L_collision, plus the codebook loss that
    moves the codewords.

    Args:
        terms: "recon", "commit", "codebook", "entropy", "collision": scalars.
    """
    regularised = entropy * terms["entropy"] + collision * terms["collision"]
    return terms["recon"] + terms["codebook"] + beta * terms["commit"] + regularised


# -- starting values -------------------------------------------------------------------------------


def principal_axes(x: Tensor, dim: int) -> Tensor:
    """The `dim` orthonormal directions of largest variance of centred rows, [n, d_x] -> [d_x,
    dim].
    """
    x = x.double()
    axes: Tensor = torch.linalg.eigh(x.T @ x).eigenvectors.flip(1)[:, :dim]
    return axes


def kmeans(x: Floats, k: int, seed: int) -> Floats:
    """K-means centres of the rows of x, [n, d] -> [k, d]; with fewer than k distinct rows the last
    centre is repeated.

    On one thread: on several, which one is first decides the last bits.
    """
    # here, because it takes scipy.stats and pandas with it; its threads are limited once loaded
    from sklearn.cluster import KMeans

    found = min(k, len(np.unique(x, axis=0)))
    with threadpool_limits(1):
        centres = KMeans(found, n_init=1, max_iter=50, random_state=seed).fit(x).cluster_centers_
    return np.concatenate([centres, np.repeat(centres[-1:], k - found, axis=0)])


# -- the two kinds ---------------------------------------------------------------------------------


class ResidualKMeans(nn.Module):
    """Principal axes and K-means codewords of the residuals.

    Axes beyond `dim` are left out: the residuals of long vectors differ so much in length that
    K-means would spend most centres on a few outliers.

    Args:
        width: d_x. dim: d, cut to d_x. levels: L. codes: C.
    """

    mean: Tensor
    scale: Tensor

    def __init__(self, width: int, dim: int, levels: int, codes: int) -> None:
        super().__init__()
        dim = min(dim, width)
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("scale", torch.ones(()))
        self.into, self.out = (
            nn.Parameter(torch.zeros(width, dim)),
            nn.Parameter(torch.zeros(dim, width)),
        )
        self.codebooks = nn.Parameter(torch.zeros(levels, codes, dim))

    def encode(self, x: Tensor) -> Tensor:
        """Standardised vectors [n, d_x] -> latent vectors [n, d]."""
        return x @ self.into

    def decode(self, latent: Tensor) -> Tensor:
        """Latent vectors [n, d] -> standardised vectors [n, d_x]."""
        return latent @ self.out

    def standardise(self, x: Tensor) -> Tensor:
        """(x - mean) / scale, [n, d_x]: columns of mean 0, and 1 as the mean of their variances."""
        return (x - self.mean) / self.scale

    @torch.no_grad()
    def fit(self, x: Tensor, seed: int) -> None:
        """Fit scale, axes and codewords to raw vectors [n, d_x]."""
        self.mean.copy_(x.mean(dim=0))
        self.scale.copy_((x - self.mean).square().mean().sqrt().clamp(min=1e-12))
        axes = principal_axes(self.standardise(x), self.into.shape[1])
        self.into.copy_(axes)
        self.out.copy_(axes.T)
        left = self.latent(x)
        for level, codebook in enumerate(self.codebooks):
            codebook.copy_(
                torch.from_numpy(kmeans(left.cpu().numpy(), len(codebook), seed + level))
            )
            left = next_residual(left, codebook)[1]

    @torch.no_grad()
    def latent(self, x: Tensor) -> Tensor:
        """Latent vectors of raw vectors, [n, d_x] -> [n, d]."""
        return torch.cat([self.encode(self.standardise(rows)) for rows in x.split(BLOCK)])

    @torch.no_grad()
    def codes(self, x: Tensor) -> Tensor:
        """Semantic IDs of raw vectors, [n, d_x] -> int64 [n, L]."""
        return torch.cat(
            [quantise(rows, self.codebooks)[0] for rows in self.latent(x).split(BLOCK)]
        )

    @torch.no_grad()
    def errors(self, x: Tensor) -> list[float]:
        """Per level l, the share of the variance of raw vectors [n, d_x] that the first l codes
        leave unexplained.
        """
        total = torch.zeros(1 + len(self.codebooks), dtype=torch.float64)
        for rows in x.split(BLOCK):
            target = self.standardise(rows)
            latent = self.encode(target)
            total[0] += target.square().sum(dtype=torch.float64).cpu()
            for level, left in enumerate(quantise(latent, self.codebooks)[1][1:], start=1):
                total[level] += (
                    (self.decode(latent - left) - target).square().sum(dtype=torch.float64).cpu()
                )
        return [float(value) for value in total[1:] / total[0].clamp(min=1e-12)]


class ResidualVAE(ResidualKMeans):
    """RQ-VAE (Lee et al. 2022; Rajput et al. 2023): a network with one hidden layer beside each set
    of axes.

    The networks' last layers start at zero, so that `fit` starts the model as the residual K-means.

    Args:
        hidden: width of the hidden layers. rng: CPU generator of their start.
    """

    def __init__(
        self, width: int, dim: int, levels: int, codes: int, hidden: int, rng: torch.Generator
    ) -> None:
        super().__init__(width, dim, levels, codes)
        dim = min(dim, width)
        self.down, self.down_to = nn.Linear(width, hidden), nn.Linear(hidden, dim)
        self.up, self.up_to = nn.Linear(dim, hidden), nn.Linear(hidden, width)
        with torch.no_grad():
            for first in (self.down, self.up):
                first.weight.normal_(std=first.in_features**-0.5, generator=rng)
            for zero in (
                self.down.bias,
                self.up.bias,
                *self.down_to.parameters(),
                *self.up_to.parameters(),
            ):
                zero.zero_()

    def encode(self, x: Tensor) -> Tensor:
        bent: Tensor = self.down_to(F.gelu(self.down(x)))
        return super().encode(x) + bent

    def decode(self, latent: Tensor) -> Tensor:
        bent: Tensor = self.up_to(F.gelu(self.up(latent)))
        return super().decode(latent) + bent

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """The terms of `tokeniser_loss` on a batch of raw vectors [n, d_x]; "recon" is a mean over
        rows and columns.
        """
        target = self.standardise(x)
        latent = self.encode(target)
        codes, residuals, distances = quantise(latent, self.codebooks)
        words = [codebook[column] for codebook, column in zip(self.codebooks, codes.T, strict=True)]
        rounded = torch.stack(words).sum(dim=0)
        # to the encoder, as if nothing had been rounded
        straight = latent + (rounded - latent).detach()
        soft = [soft_codes(distance) for distance in distances]
        width = x.shape[1]
        return {
            "recon": F.mse_loss(self.decode(straight), target),
            "commit": pull(residuals[:-1], [word.detach() for word in words], width),
            "codebook": pull(words, [left.detach() for left in residuals[:-1]], width),
            "entropy": entropy_gap(soft),
            "collision": collision(soft, codes, x),
        }


# -- training --------------------------------------------------------------------------------------


def shuffle_groups(codes: Tensor, rng: torch.Generator) -> Tensor:
    """A random order of the rows that keeps rows of the same codes side by side, so that colliding
    items share a batch.

    Args:
        codes: int64 [n, L].

    Returns:
        int64 [n], row numbers.
    """
    _, group = codes.cpu().unique(dim=0, return_inverse=True)
    return torch.randperm(int(group.max()) + 1, generator=rng)[group].argsort(stable=True)


@torch.no_grad()
def revive(quantiser: ResidualKMeans, x: Tensor, rng: torch.Generator) -> int:
    """Move codewords that no vector uses onto residuals of their level, drawn with the squared
    error there as weight.

    Args:
        x: raw vectors, [n, d_x].

    Returns:
        how many codewords were moved.
    """
    left, moved = quantiser.latent(x), 0
    for codebook in quantiser.codebooks:
        codes, after, _ = next_residual(left, codebook)
        unused = (torch.bincount(codes, minlength=len(codebook)) == 0).nonzero().squeeze(1)
        weight = after.square().sum(dim=1).double().cpu()
        if 0 < len(unused) <= int((weight > 0).sum()):
            codebook[unused] = left[
                torch.multinomial(weight, len(unused), generator=rng).to(left.device)
            ]
            moved += len(unused)
            after = next_residual(left, codebook)[1]
        left = after
    return moved


class Training:
    """The epochs of a ResidualVAE; the same numbers wherever it runs, and after any interruption
    between epochs.

    Args:
        model: fitted (`fit`), on its device. x: raw vectors [n, d_x], all of them, on that device.
        epochs, batch_size, lr: Adam with a learning rate that falls along a cosine from `lr` to 0.
        beta, entropy, collision: the weights of `tokeniser_loss`.
        seed: of the batches and of revived codewords.
        wrap: makes the model data-parallel; it shares its parameters. rank, workers: this process's
            part of every batch.
    """

    def __init__(
        self,
        model: ResidualVAE,
        x: Tensor,
        *,
        epochs: int,
        batch_size: int,
        lr: float,
        beta: float,
        entropy: float,
        collision: float,
        seed: int,
        wrap: Callable[[nn.Module], nn.Module] = lambda module: module,
        rank: int = 0,
        workers: int = 1,
    ) -> None:
        self.model, self.x, self.epochs, self.batch_size, self.lr = model, x, epochs, batch_size, lr
        self.weights = {"beta": beta, "entropy": entropy, "collision": collision}
        self.seed, self.rank, self.workers = seed, rank, workers
        self.parallel = wrap(model)
        self.optimiser = torch.optim.Adam(model.parameters(), lr=lr)
        self.done = 0

    def epoch(self) -> dict[str, float]:
        """One pass over all vectors; returns the mean of every loss term over this process's
        part.
        """
        _, rng = generators(self.seed, "tokeniser", self.done + 1)
        for group in self.optimiser.param_groups:
            group["lr"] = self.lr * 0.5 * (1 + math.cos(math.pi * self.done / self.epochs))
        order = shuffle_groups(self.model.codes(self.x), rng)
        sums: dict[str, float] = {}
        batches = order.tensor_split(max(1, round(len(order) / self.batch_size)))
        for batch in batches:
            # neighbours stay together in a worker's part too
            terms = self.parallel(self.x[batch.tensor_split(self.workers)[self.rank]])
            self.optimiser.zero_grad()
            tokeniser_loss(terms, **self.weights).backward()
            self.optimiser.step()
            for name, value in terms.items():
                sums[name] = sums.get(name, 0.0) + float(value.detach()) / len(batches)
        sums["revived"] = float(revive(self.model, self.x, rng))
        self.done += 1
        return sums

    def state_dict(self) -> dict[str, Any]:
        """All that training continues from."""
        return {
            "model": self.model.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "done": self.done,
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self.model.load_state_dict(saved["model"])
        self.optimiser.load_state_dict(saved["optimiser"])
        self.done = saved["done"]
