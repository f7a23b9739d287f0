"""Item-based models: item similarities, found in blocks, added up over a history.

Notation
    ==========  =============================================  =========================
    symbol      name                                           shape
    ==========  =============================================  =========================
    R           interactions of the domain, 0 or 1             CSR [n_users, n_items]
    H           the histories that are recommended from        CSR [n_users, n_items]
    S           similarities; row j is what item j speaks for  [n_items, n_items]
    ==========  =============================================  =========================

Nothing of size users × items, or items × items where S is sparse, ever exists.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import scipy.sparse as sp
import torch

from crossfed.methods.parts.text_graph import top_cosine
from crossfed.platform.method import Context, Interactions, Out, Payload

BLOCK_ENTRIES = 1 << 23
"""How many entries of a product are held at once (about 100 MB with their indices)."""
LISTED = 200
"""How many items the saved model keeps for a user."""

Similarity: TypeAlias = sp.csr_matrix | npt.NDArray[np.float32]
"""S, sparse or dense."""


def user_items(data: Interactions) -> sp.csr_matrix:
    """R: CSR float32 [n_users, n_items]; a pair that occurs more than once counts once."""
    ones = np.ones(len(data.items), np.float32)
    matrix = sp.csr_matrix((ones, data.items, data.indptr), (data.n_users, data.n_items))
    matrix.sum_duplicates()
    matrix.data.fill(1.0)
    return matrix


def keep_largest(matrix: sp.csr_matrix, count: int | None) -> sp.csr_matrix:
    """The `count` largest entries of every row; of equal ones those of the lower columns.

    Args:
        matrix: CSR float32 [m, n] without negative entries. count: at least 1; None keeps all.

    Raises:
        ValueError: an entry is negative.
    """
    if count is None or not matrix.nnz or int(np.diff(matrix.indptr).max()) <= count:
        return matrix
    if float(matrix.data.min()) < 0:
        raise ValueError("keep_largest orders entries by their bits and takes none below 0")
    matrix.sort_indices()
    row = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))
    # floats from 0 upwards are ordered as their bits are: one integer key sorts by row, then by
    # value
    bits = matrix.data.astype(np.float32).view(np.int32).astype(np.int64)
    order = np.argsort((row.astype(np.int64) << 32) - bits, kind="stable")
    place = np.arange(len(order)) - matrix.indptr[row]
    kept = np.sort(order[place < count])
    pointer = np.concatenate([[0], np.cumsum(np.minimum(np.diff(matrix.indptr), count))])
    return sp.csr_matrix((matrix.data[kept], matrix.indices[kept], pointer), matrix.shape)


def blocks(cost: npt.NDArray[np.int64], limit: int) -> list[slice]:
    """Consecutive rows whose costs add up to at most `limit`; a row that costs more is a block by
    itself."""
    found, begin, total = [], 0, 0
    for row, entries in enumerate(cost.tolist()):
        if total + entries > limit and row > begin:
            found.append(slice(begin, row))
            begin, total = row, 0
        total += entries
    return [*found, slice(begin, len(cost))] if len(cost) else []


def cosine(
    r: sp.csr_matrix, shrinkage: float, neighbours: int | None, limit: int = BLOCK_ENTRIES
) -> sp.csr_matrix:
    """S_ij = r_i·r_j / (‖r_i‖‖r_j‖ + h) for i ≠ j and r_i a column of R; the largest of each row.

    Args:
        r: R. shrinkage: h. neighbours: how many entries a row keeps; None keeps all.
        limit: how many entries of RᵀR to hold at once, at most (a single row may have more).

    Returns:
        CSR float32 [n_items, n_items], an empty diagonal.
    """
    items = r.T.tocsr()
    n = items.shape[0]
    norm = np.sqrt(np.diff(items.indptr)).astype(np.float32)
    per_user = np.diff(r.indptr).astype(np.int64)
    # item i meets at most Σ_u |history of u| others over its users u
    reach = np.concatenate([[0], np.cumsum(per_user[items.indices])])
    cost = np.minimum(reach[items.indptr[1:]] - reach[items.indptr[:-1]], n)
    parts = []
    for rows in blocks(cost, limit):
        product = items[rows] @ r
        row = np.repeat(np.arange(rows.start, rows.stop), np.diff(product.indptr))
        product.data /= norm[row] * norm[product.indices] + np.float32(shrinkage)
        product.data[row == product.indices] = 0.0
        product.eliminate_zeros()
        parts.append(keep_largest(product, neighbours))
    return sp.vstack(parts, format="csr") if parts else sp.csr_matrix((n, n), dtype=np.float32)


def text_cosine(text: npt.NDArray[np.float32], neighbours: int) -> sp.csr_matrix:
    """T_ij = max(cos(t_i, t_j), 0) for the j nearest to i, no item its own. [n_items, width] -> CSR
    [n_items, n_items]."""
    n = len(text)
    index, value = top_cosine(torch.from_numpy(np.array(text)), neighbours)
    pointer = np.arange(n + 1) * index.shape[1]
    near = sp.csr_matrix(
        (value.clamp(min=0.0).numpy().ravel(), index.numpy().ravel(), pointer), (n, n)
    )
    near.eliminate_zeros()
    return near


class ItemBased:
    """One domain's item-based model: s_u = h_u S. What it learns is a function of the training
    interactions alone.

    Args:
        fit: makes S; called when the model is trained.
        ctx: the domain. observed: whether `observe` changes H; otherwise H stays R.

    Attributes:
        similarity: S, None before training. known: H.
    """

    def __init__(self, fit: Callable[[], Similarity], ctx: Context, observed: bool) -> None:
        self._fit, self._observed = fit, observed
        self.n_items = ctx.own.n_items
        self.known = user_items(ctx.own)
        self.similarity: Similarity | None = None

    def observe(self, known: Interactions) -> None:
        """Recommend from these histories from now on, where the model is to look at what is
        observed."""
        if self._observed:
            self.known = user_items(known)

    def train(self) -> None:
        """Make S, unless it is there: it never changes."""
        if self.similarity is None:
            self.similarity = self._fit()

    def score(self, users: npt.NDArray[np.int64]) -> torch.Tensor:
        """h_u S: float32 [b, n_items]; a model that is not trained scores 0."""
        if self.similarity is None:
            return torch.zeros(len(users), self.n_items)
        scores = self.known[users] @ self.similarity
        return torch.from_numpy(scores.toarray() if sp.issparse(scores) else np.asarray(scores))

    def export(self) -> dict[str, torch.Tensor]:
        """The best `LISTED` items of every user and their scores, [n_users, LISTED], and the number
        of items, [1].

        Neither S nor a history: with both, the model would hold the domain's interactions as they
        are.
        """
        return best_listed(self.score, self.known.shape[0], self.n_items)

    def state_dict(self) -> dict[str, Any]:
        """Whether S is there: it is made anew from the data, to the same bits, and need not be
        kept."""
        return {"trained": self.similarity is not None}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """The reverse of `state_dict`, into a state of the same config and data."""
        if saved["trained"]:
            self.train()
        else:
            self.similarity = None


def train(state: ItemBased, inbox: Mapping[str, Payload], ctx: Context) -> Out:
    """The only round: S from the domain's training interactions."""
    state.train()
    found = state.similarity
    assert found is not None
    size = found.size if isinstance(found, np.ndarray) else found.nnz
    return Out(metrics={"entries": float(size)})


def best_listed(
    score: Callable[[npt.NDArray[np.int64]], torch.Tensor], n_users: int, n_items: int
) -> dict[str, torch.Tensor]:
    """The best `LISTED` items of every user, "items", and their "scores", [n_users, LISTED];
    "n_items" [1].

    Args:
        score: int64 [b] -> float32 [b, n_items].
    """
    width = min(LISTED, n_items)
    items, scores = torch.zeros(n_users, width, dtype=torch.int32), torch.zeros(n_users, width)
    step = max(1, BLOCK_ENTRIES // max(n_items, 1))
    for begin in range(0, n_users, step):
        best = score(np.arange(begin, min(begin + step, n_users))).topk(width, dim=1)
        scores[begin : begin + step] = best.values
        items[begin : begin + step] = best.indices.int()
    return {"items": items, "scores": scores, "n_items": torch.tensor([n_items])}


def listed(exported: Mapping[str, torch.Tensor], users: npt.NDArray[np.int64]) -> torch.Tensor:
    """`ItemBased.score` from what was exported; items beyond a user's list score -inf. int64 [b] ->
    [b, n_items]."""
    rows = torch.from_numpy(users)
    scores = torch.full((len(users), int(exported["n_items"])), -torch.inf)
    return scores.scatter_(1, exported["items"][rows].long(), exported["scores"][rows])
