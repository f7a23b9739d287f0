"""Graph propagation: normalised adjacencies as sparse CSR matrices, and products that use their symmetry.

Every matrix here is symmetric, so the gradient of `adj @ x` is `adj @ grad`: no transpose is ever built, and a whole
propagation is its own backward pass. Adjacencies are constants; no gradient flows to them.
"""

from __future__ import annotations

import warnings
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch.autograd.function import once_differentiable
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import coalesce, to_undirected

Index = npt.NDArray[np.int64] | torch.Tensor
"""Row numbers, [m], as a NumPy array or a tensor."""


def bipartite_adjacency(
    n_users: int, n_items: int, users: Index, items: Index, device: torch.device | str | None = None
) -> torch.Tensor:
    """The normalised user-item graph of LightGCN (arXiv 2002.02126, Eq. 7): D^-1/2 A D^-1/2, without self loops.

    Users are nodes `0 … n_users-1`, items `n_users … n_users+n_items-1`; a pair that occurs more than once counts once.

    Args:
        users, items: int64 [m], the interactions.

    Returns:
        Sparse CSR float32 [n_users + n_items, n_users + n_items]; an isolated node has an empty row.

    Raises:
        ValueError: a user or an item is out of range, or the two differ in length.
    """
    user, item = torch.as_tensor(users).long(), torch.as_tensor(items).long()
    if user.shape != item.shape or user.ndim != 1:
        raise ValueError(f"users {tuple(user.shape)} and items {tuple(item.shape)} must be vectors of one length")
    _check_range(user, n_users, "user")
    _check_range(item, n_items, "item")
    n = n_users + n_items
    edges = coalesce(torch.stack([user, item + n_users]), num_nodes=n)
    edges = to_undirected(edges, num_nodes=n)
    return _normalised_csr(edges, torch.ones(edges.shape[1]), n).to(device)


def symmetric_adjacency(n: int, rows: Index, cols: Index, weights: torch.Tensor) -> torch.Tensor:
    """A weighted graph made undirected and normalised: D^-1/2 W D^-1/2 with D the row sums of the symmetrised W.

    An edge given in both directions, or several times, takes the largest of its weights, so a mutual neighbour does not
    count twice. Self loops are kept where they are given; none are added.

    Args:
        n: number of nodes.
        rows, cols: int64 [m], the edges.
        weights: float32 [m], non-negative.

    Returns:
        Sparse CSR float32 [n, n] on the device of `weights`; a node without edges has an empty row.

    Raises:
        ValueError: an index is out of range, or a weight is negative or not finite.
    """
    weight = weights.detach().float()
    row = torch.as_tensor(rows).to(weight.device, torch.int64)
    col = torch.as_tensor(cols).to(weight.device, torch.int64)
    _check_range(row, n, "row")
    _check_range(col, n, "column")
    if weight.numel() and not bool((torch.isfinite(weight) & (weight >= 0)).all()):
        raise ValueError("edge weights must be finite and non-negative")
    edges, weight = to_undirected(torch.stack([row, col]), weight, num_nodes=n, reduce="max")
    return _normalised_csr(edges, weight, n)


def spmm(adj: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`adj @ x` for a *symmetric* CSR matrix [n, n] and x [n, d]; the gradient to x is `adj @ grad`, adj gets none."""
    return cast(torch.Tensor, _SymmetricProduct.apply(adj, x))  # type: ignore[no-untyped-call]


def propagate(adj: torch.Tensor, x: torch.Tensor, layers: int) -> torch.Tensor:
    """Mean over the layers 0 … L of `adj^l @ x`, the ego layer x included. [n, d] -> [n, d].

    LightGCN (arXiv 2002.02126), Eq. 4 and Eq. 8 with α_l = 1 / (L + 1). The operator is a polynomial of a symmetric
    matrix, hence symmetric itself: its backward pass is the same propagation of the gradient.

    Raises:
        ValueError: `layers` is negative.
    """
    if layers < 0:
        raise ValueError(f"layers must not be negative, got {layers}")
    return cast(torch.Tensor, _Propagation.apply(adj, x, layers))  # type: ignore[no-untyped-call]


class _SymmetricProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, adj: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        ctx.adj = adj
        return adj @ x

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, ctx.adj @ grad.contiguous()


class _Propagation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, adj: torch.Tensor, x: torch.Tensor, layers: int) -> torch.Tensor:
        ctx.adj, ctx.layers = adj, layers
        return _layer_mean(adj, x, layers)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor, None]:
        return None, _layer_mean(ctx.adj, grad.contiguous(), ctx.layers), None


def _layer_mean(adj: torch.Tensor, x: torch.Tensor, layers: int) -> torch.Tensor:
    """(x + Ax + … + A^L x) / (L + 1) by Horner's rule: y <- x + A y, L times; one buffer instead of one per layer."""
    y = x
    for _ in range(layers - 1):
        y = torch.addmm(x, adj, y)
    mean = 1.0 / (layers + 1)  # taken by the last product on its way
    return torch.addmm(x, adj, y, beta=mean, alpha=mean) if layers else x.clone()


def _normalised_csr(edges: torch.Tensor, weight: torch.Tensor, n: int) -> torch.Tensor:
    """Symmetric normalisation of coalesced edges [2, m] (sorted by row), as CSR."""
    edges, weight = gcn_norm(edges, weight, n, add_self_loops=False)
    pointer = torch.zeros(n + 1, dtype=torch.int64, device=edges.device)
    torch.cumsum(torch.bincount(edges[0], minlength=n), 0, out=pointer[1:])
    # MKL and cuSPARSE take 32-bit indices; 64-bit ones are converted anew in every product.
    kind = torch.int32 if max(n, edges.shape[1]) < 2**31 else torch.int64
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Sparse CSR tensor support is in beta.*")
        return torch.sparse_csr_tensor(pointer.to(kind), edges[1].to(kind), weight, (n, n), check_invariants=True)


def _check_range(index: torch.Tensor, size: int, name: str) -> None:
    if index.numel() and not (int(index.min()) >= 0 and int(index.max()) < size):
        raise ValueError(f"{name} numbers must be in 0 … {size - 1}, got {int(index.min())} … {int(index.max())}")
