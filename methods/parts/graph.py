"""Graph propagation: normalised adjacencies as sparse CSR matrices, and products that use their
symmetry.

Every adjacency here is symmetric, so the gradient of `adj @ x` is `adj @ grad`: no transpose of it
is ever built, and a whole propagation is its own backward pass. Adjacencies are constants to which
no gradient flows, but for `weighted_product`, whose edge weights are learned. A loss that looks at
a batch's nodes needs the last layer at these only: `rows_of`.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch.autograd.function import once_differentiable

Index = npt.NDArray[np.int64] | torch.Tensor
"""Row numbers, [m], as a NumPy array or a tensor."""


def bipartite_adjacency(
    n_users: int, n_items: int, users: Index, items: Index, device: torch.device | str | None = None
) -> torch.Tensor:
    """The normalised user-item graph of LightGCN (arXiv 2002.02126, Eq. 7): D^-1/2 A D^-1/2,
    without self loops.

    Users are nodes `0 … n_users-1`, items `n_users … n_users+n_items-1`; a pair that occurs more
    than once counts once.

    Args:
        users, items: int64 [m], the interactions.

    Returns:
        Sparse CSR float32 [n_users + n_items, n_users + n_items]; an isolated node has an empty
        row.

    Raises:
        ValueError: a user or an item is out of range, or the two differ in length.
    """
    user, item = torch.as_tensor(users).long(), torch.as_tensor(items).long()
    if user.shape != item.shape or user.ndim != 1:
        raise ValueError(
            f"users {tuple(user.shape)} and items {tuple(item.shape)} must be vectors of one length"
        )
    _check_range(user, n_users, "user")
    _check_range(item, n_items, "item")
    n = n_users + n_items
    edges, weight = _undirected(user, item + n_users, torch.ones(len(user)), n)
    return _normalised_csr(edges, weight, n).to(device)


def symmetric_adjacency(n: int, rows: Index, cols: Index, weights: torch.Tensor) -> torch.Tensor:
    """A weighted graph made undirected and normalised: D^-1/2 W D^-1/2 with D the row sums of the
    symmetrised W.

    An edge given in both directions, or several times, takes the largest of its weights, so a
    mutual neighbour does not count twice. Self loops are kept where they are given; none are added.

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
    return _normalised_csr(*_undirected(row, col, weight, n), n)


def spmm(adj: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`adj @ x` for a *symmetric* CSR matrix [n, n] and x [n, d]; the gradient to x is
    `adj @ grad`, adj gets none.
    """
    return cast(torch.Tensor, _SymmetricProduct.apply(adj, x))  # type: ignore[no-untyped-call]


def propagate(adj: torch.Tensor, x: torch.Tensor, layers: int) -> torch.Tensor:
    """Mean over the layers 0 … L of `adj^l @ x`, the ego layer x included. [n, d] -> [n, d].

    LightGCN (arXiv 2002.02126), Eq. 4 and Eq. 8 with α_l = 1 / (L + 1). The operator is a
    polynomial of a symmetric matrix, hence symmetric itself: its backward pass is the same
    propagation of the gradient.

    Raises:
        ValueError: `layers` is negative.
    """
    if layers < 0:
        raise ValueError(f"layers must not be negative, got {layers}")
    return cast(torch.Tensor, _Propagation.apply(adj, x, layers))  # type: ignore[no-untyped-call]


def rows_of(adj: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Some rows of a CSR matrix, as one themselves: [n, n] and int64 [r] -> CSR [r, n].

    A batch's rows hold a part of a graph's edges: their product takes a part of a whole one's time.
    """
    pointer, cols, values = adj.crow_indices(), adj.col_indices(), adj.values()
    start = pointer[rows]
    count = pointer[rows + 1] - start
    chosen = torch.zeros(len(rows) + 1, dtype=pointer.dtype, device=pointer.device)
    torch.cumsum(count, 0, dtype=pointer.dtype, out=chosen[1:])
    total = int(chosen[-1])
    place = torch.arange(total, dtype=pointer.dtype, device=pointer.device)
    place += torch.repeat_interleave(start - chosen[:-1], count, output_size=total)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Sparse CSR tensor support is in beta.*")
        return torch.sparse_csr_tensor(
            chosen,
            cols.index_select(0, place),
            values.index_select(0, place),
            (len(rows), adj.shape[1]),
            check_invariants=False,
        )


def rows_product(adj: torch.Tensor, rows: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`(adj @ x)[rows]` for a *symmetric* CSR matrix [n, n], with gradient to x.

    Args:
        rows: int64 [r]. x: [n, d].

    Returns:
        [r, d].
    """
    return cast(torch.Tensor, _RowsProduct.apply(adj, rows, x))  # type: ignore[no-untyped-call]


def rows_adjoint(
    adj: torch.Tensor,
    rows: torch.Tensor,
    some: torch.Tensor,
    grad: torch.Tensor,
) -> torch.Tensor:
    """The transpose of `some = rows_of(adj, rows)` times grad, for a *symmetric* matrix.

    A transposed CSR matrix is sorted anew in every product, which pays for a small part of the
    edges only; for more, the whole matrix is multiplied by the rows' gradients, zeros between.

    Args:
        grad: [r, d].

    Returns:
        [n, d].
    """
    if 4 * len(some.values()) < len(adj.values()):
        return some.t() @ grad.contiguous()
    return adj @ grad.new_zeros(len(adj), grad.shape[1]).index_add_(0, rows, grad)


def distinct(nodes: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The distinct numbers of int64 [m] in 0 … n-1, ascending, and each one's place in them, [m].

    As `torch.unique` with the inverse, which sorts and takes many times as long.
    """
    there = torch.zeros(n, dtype=torch.bool, device=nodes.device)
    there[nodes] = True
    return there.nonzero()[:, 0], there.cumsum(0)[nodes] - 1


@dataclass(frozen=True, slots=True)
class Pattern:
    """Where an undirected graph's weights stand in its CSR matrix.

    Attributes:
        n: nodes. pointer: int32 [n + 1]. rows, cols: int32 [2m], both directions of every edge, by
            row.
        edge: int64 [2m], the number of the edge that an entry belongs to.
    """

    n: int
    pointer: torch.Tensor
    rows: torch.Tensor
    cols: torch.Tensor
    edge: torch.Tensor

    def matrix(self, values: torch.Tensor) -> torch.Tensor:
        """CSR [n, n] with these entries, [2m]."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*Sparse CSR tensor support is in beta.*")
            return torch.sparse_csr_tensor(
                self.pointer, self.cols, values, (self.n, self.n), check_invariants=False
            )


def bipartite_pattern(
    n_users: int, n_items: int, users: torch.Tensor, items: torch.Tensor
) -> Pattern:
    """The pattern of a user-item graph, users first.

    Args:
        users, items: int64 [m], the edges, no pair twice, in range (not checked: this runs once per
            batch).
    """
    n, m = n_users + n_items, len(users)
    rows, cols = torch.cat([users, items + n_users]), torch.cat([items + n_users, users])
    order = torch.argsort(rows * n + cols)
    pointer = torch.zeros(n + 1, dtype=torch.int32, device=users.device)
    torch.cumsum(torch.bincount(rows, minlength=n), 0, dtype=torch.int32, out=pointer[1:])
    return Pattern(n, pointer, rows[order].int(), cols[order].int(), order % max(m, 1))


def normalised_weights(
    pattern: Pattern, weights: torch.Tensor, floor: float = 1e-3
) -> torch.Tensor:
    """(D + floor)^-1/2 W (D + floor)^-1/2 of an undirected weighted graph, with gradient, that of
    the degrees D included.

    Args:
        weights: float32 [m], one per edge, non-negative.
        floor: added to the degrees. A node whose edges have nearly no weight is left nearly without
            neighbours, instead of having its weights blown up to a sum of 1 and their gradients to
            infinity.

    Returns:
        The entries of the CSR matrix, [2m].
    """
    entries = weights[pattern.edge]
    degree = torch.zeros(pattern.n, dtype=weights.dtype, device=weights.device).index_add(
        0, pattern.rows, entries
    )
    root = (degree + floor).rsqrt()
    normalised: torch.Tensor = (
        entries * root.index_select(0, pattern.rows) * root.index_select(0, pattern.cols)
    )
    return normalised


def weighted_product(pattern: Pattern, values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`A @ x` for the symmetric matrix A with these entries; gradients reach the entries and x.

    Args:
        values: [2m], both entries of an edge equal. x: [n, d].

    Returns:
        [n, d].
    """
    return cast(torch.Tensor, _WeightedProduct.apply(pattern, values, x))  # type: ignore[no-untyped-call]


def edge_products(pattern: Pattern, x: torch.Tensor) -> torch.Tensor:
    """x_u · x_v of every edge, with gradient to x; nothing is computed for other pairs. [n, d] ->
    [m].
    """
    return cast(torch.Tensor, _EdgeProducts.apply(pattern, x))  # type: ignore[no-untyped-call]


def _at_entries(pattern: Pattern, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a_i · b_j at the entries (i, j) of the pattern. [n, d] twice -> [2m]."""
    zeros = torch.zeros(len(pattern.cols), dtype=a.dtype, device=a.device)
    products: torch.Tensor = torch.sparse.sampled_addmm(
        pattern.matrix(zeros), a, b.T, beta=0.0
    ).values()
    return products


class _EdgeProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pattern: Pattern, x: torch.Tensor) -> torch.Tensor:
        ctx.pattern = pattern
        ctx.save_for_backward(x)
        once = pattern.rows < pattern.cols
        products = x.new_empty(len(pattern.cols) // 2)
        products[pattern.edge[once]] = _at_entries(pattern, x.contiguous(), x)[once]
        return products

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        (x,) = ctx.saved_tensors
        return None, ctx.pattern.matrix(grad[ctx.pattern.edge]) @ x


class _WeightedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pattern: Pattern, values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        ctx.pattern = pattern
        ctx.save_for_backward(values, x)
        return pattern.matrix(values) @ x

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(
        ctx: Any, grad: torch.Tensor
    ) -> tuple[None, torch.Tensor | None, torch.Tensor | None]:
        values, x = ctx.saved_tensors
        grad = grad.contiguous()
        to_values = to_x = None
        if ctx.needs_input_grad[1]:
            to_values = _at_entries(ctx.pattern, grad, x)
        if ctx.needs_input_grad[2]:
            to_x = ctx.pattern.matrix(values) @ grad
        return None, to_values, to_x


class _SymmetricProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, adj: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        ctx.adj = adj
        return adj @ x

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, ctx.adj @ grad.contiguous()


class _RowsProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, adj: torch.Tensor, rows: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        ctx.adj, ctx.rows, ctx.some = adj, rows, rows_of(adj, rows)
        product: torch.Tensor = ctx.some @ x
        return product

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None, torch.Tensor]:
        return None, None, rows_adjoint(ctx.adj, ctx.rows, ctx.some, grad)


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
    """(x + Ax + … + A^L x) / (L + 1) by Horner's rule: y <- x + A y, L times; one buffer instead of
    one per layer.
    """
    y = x
    for _ in range(layers - 1):
        y = torch.addmm(x, adj, y)
    mean = 1.0 / (layers + 1)  # taken by the last product on its way
    return torch.addmm(x, adj, y, beta=mean, alpha=mean) if layers else x.clone()


def _undirected(
    row: torch.Tensor, col: torch.Tensor, weight: torch.Tensor, n: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both directions of every edge, once each, by row and column; of repeated ones the largest
    weight.

    torch-geometric has it too (`to_undirected`), and is the oracle of the test, but takes three CPU
    seconds to import in every process that trains.

    Args:
        row, col: int64 [m]. weight: float [m].

    Returns:
        int64 [2, e] and float [e].
    """
    place, of = torch.unique(torch.cat([row * n + col, col * n + row]), return_inverse=True)
    largest = weight.new_zeros(len(place)).scatter_reduce_(
        0, of, torch.cat([weight, weight]), "amax", include_self=False
    )
    return torch.stack([place // max(n, 1), place % max(n, 1)]), largest


def _normalised_csr(edges: torch.Tensor, weight: torch.Tensor, n: int) -> torch.Tensor:
    """Symmetric normalisation of coalesced edges [2, m] (sorted by row), as CSR."""
    degree = torch.zeros(n, dtype=weight.dtype, device=weight.device).scatter_add_(
        0, edges[1], weight
    )
    root = degree.pow_(-0.5)
    root.masked_fill_(root == torch.inf, 0)
    weight = root[edges[0]] * weight * root[edges[1]]
    pointer = torch.zeros(n + 1, dtype=torch.int64, device=edges.device)
    torch.cumsum(torch.bincount(edges[0], minlength=n), 0, out=pointer[1:])
    # MKL and cuSPARSE take 32-bit indices; 64-bit ones are converted anew in every product.
    kind = torch.int32 if max(n, edges.shape[1]) < 2**31 else torch.int64
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Sparse CSR tensor support is in beta.*")
        return torch.sparse_csr_tensor(
            pointer.to(kind), edges[1].to(kind), weight, (n, n), check_invariants=True
        )


def _check_range(index: torch.Tensor, size: int, name: str) -> None:
    if index.numel() and not (int(index.min()) >= 0 and int(index.max()) < size):
        raise ValueError(
            f"{name} numbers must be in 0 … {size - 1}, got {int(index.min())} … {int(index.max())}"
        )
