"""Item vectors and graphs from text: projections, top-N cosine neighbours found in blocks, and what
they keep.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from crossfed.methods.parts.graph import symmetric_adjacency

BLOCK_ELEMENTS = 1 << 24
"""How many similarities are held at once (64 MiB of float32)."""


def top_cosine(x: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The n rows most similar to each row by cosine, itself excluded. Without gradient.

    Rows are taken in blocks, so a catalogue of any size needs at most `BLOCK_ELEMENTS` similarities
    at a time.

    Args:
        x: [m, d]; a zero row has similarity 0 with everything.
        n: how many neighbours, at least 1; a row has at most m - 1.

    Returns:
        int64 [m, min(n, m - 1)], the neighbours, most similar first; float32 of the same shape,
        their cosines.
    """
    if n < 1:
        raise ValueError(f"a graph needs at least one neighbour per row, got {n}")
    unit = F.normalize(x.detach().float(), dim=1)
    m = len(unit)
    keep = min(n, m - 1)
    step = max(1, BLOCK_ELEMENTS // max(m, 1))
    index, value = [], []
    for start in range(0, m, step):
        block = unit[start : start + step]
        similarity = block @ unit.T
        own = torch.arange(len(block), device=x.device)
        similarity[own, own + start] = -2.0  # below any cosine
        top = similarity.topk(keep, dim=1)
        index.append(top.indices)
        value.append(top.values)
    if not index:
        return torch.empty(0, 0, dtype=torch.int64, device=x.device), torch.empty(
            0, 0, device=x.device
        )
    return torch.cat(index), torch.cat(value)


def cosine_edges(x: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Directed edges from every row to its top n, weighted by max(cosine, 0). [m, d] -> int64 [2,
    e], float32 [e].
    """
    index, value = top_cosine(x, n)
    rows = torch.arange(len(x), device=x.device).repeat_interleave(index.shape[1])
    return torch.stack([rows, index.flatten()]), value.flatten().clamp(min=0.0)


def cosine_graph(x: torch.Tensor, n: int) -> torch.Tensor:
    """D^-1/2 S D^-1/2 of the top-n cosine graph made undirected, without self loops. [m, d] -> CSR
    [m, m].
    """
    (rows, cols), weights = cosine_edges(x, n)
    return symmetric_adjacency(len(x), rows, cols, weights)


def row_product(graph: torch.Tensor, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Some rows of `graph @ x`, without computing the others. Gradient flows to x only.

    Args:
        graph: CSR [m, m], a constant.
        x: [m, d].
        rows: int64 [b].

    Returns:
        [b, d].
    """
    pointer = graph.crow_indices().long()
    start, count = pointer[rows], pointer[rows + 1] - pointer[rows]
    offsets = count.cumsum(0) - count
    entries = torch.arange(int(count.sum()), device=x.device) + (start - offsets).repeat_interleave(
        count
    )
    return F.embedding_bag(
        graph.col_indices()[entries].long(),
        x,
        offsets,
        mode="sum",
        per_sample_weights=graph.values()[entries],
    )


def neighbour_overlap(a: torch.Tensor, b: torch.Tensor) -> float:
    """Mean share of a row's neighbours that two neighbour tables have in common, in 0 … 1.

    Args:
        a, b: int64 [m, n], as from `top_cosine`, no neighbour twice in a row.
    """
    if a.shape != b.shape:
        raise ValueError(f"neighbour tables differ in shape: {tuple(a.shape)} and {tuple(b.shape)}")
    if not a.numel():
        return 1.0
    m = len(a)
    shift = torch.arange(m, device=a.device)[:, None] * m
    return float(torch.isin(a + shift, b + shift).float().mean())


def effective_rank(x: torch.Tensor) -> float:
    """exp of the entropy of the centred rows' normalised singular values (Roy & Vetterli 2007). [m,
    d] -> 1 … d.
    """
    centred = (x.detach() - x.detach().mean(0)).double()
    values = torch.linalg.eigvalsh(centred.T @ centred).clamp(min=0.0).sqrt()
    share = values / values.sum().clamp(min=torch.finfo(torch.float64).tiny)
    return float(torch.exp(torch.special.entr(share).sum()))


def aligned_projection(x: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """The rows' principal directions V, rotated by the orthogonal Q that makes ‖VQ − reference‖
    smallest (Procrustes).

    It keeps as much variance as PCA does, in coordinates that are comparable between data sets that
    share `reference`.

    Args:
        x: [m, width].
        reference: [width, d] with orthonormal columns.

    Returns:
        float32 [width, d] with orthonormal columns.
    """
    centred = (x - x.mean(0)).double()
    principal = torch.linalg.eigh(centred.T @ centred).eigenvectors[:, -reference.shape[1] :]
    left, _, right = torch.linalg.svd(principal.T @ reference.double())
    rotated: torch.Tensor = principal @ (left @ right)
    return rotated.float()
