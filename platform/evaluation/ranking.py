"""Ranking a domain's held-out items: mask what the user has seen, take the first K, measure.

Tie rule, pessimistic: among equal scores, items that are not held out come before items that are,
and within either kind the lower item number comes first. A scorer that cannot tell items apart
therefore puts the truth last, whatever the order of the catalogue; it cannot look good by luck.

Scores are made and ranked in blocks of users, so nothing of size users x items ever exists, only
block x items.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from crossfed.platform.errors import CrossfedError
from crossfed.platform.evaluation.candidates import Candidates, full_id
from crossfed.platform.evaluation.metrics import WHOLE, macro_metrics, per_user_metrics
from crossfed.platform.method import Array

Score = Callable[[npt.NDArray[np.int64]], torch.Tensor]
"""users int64 [b] -> float tensor [b, n_items] on any device."""

_FREE, _TRUTH, _MASKED = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Ranking:
    """What a ranking measured.

    Attributes:
        users: int64 [n_users], the domain's row numbers of the users ranked, in the given order;
            users without held-out items are left out.
        per_user: metric name -> float64 [n_users].
        macro: metric name -> mean over users; coverage is a share of the catalogue instead.
        candidates: what the truth was ranked among: "full:<n_items>" or the identifier of a sampled
            set.
        n_truth: int64 [n_users], held-out items per user.
    """

    users: npt.NDArray[np.int64]
    per_user: dict[str, npt.NDArray[np.float64]]
    macro: dict[str, float]
    candidates: str
    n_truth: npt.NDArray[np.int64]

    @property
    def n_users(self) -> int:
        """How many users were ranked."""
        return len(self.users)


def rank(
    score: Score,
    users: Array,
    seen_indptr: Array,
    seen_items: Array,
    truth_indptr: Array,
    truth_items: Array,
    n_items: int,
    ks: Sequence[int],
    candidates: Candidates | None = None,
    block_entries: int | None = None,
    whole: bool = False,
) -> Ranking:
    """Rank every user's held-out items among the items not seen, or among sampled candidates.

    Gradients are off while scoring. An infinite score is a score like any other; an unseen item
    scored -inf still ranks before anything masked. The score tensor is not written to. Lower
    precisions are ranked in float32, which holds them exactly.

    Args:
        score: users int64 [b] -> float tensor [b, n_items], on any device.
        users: [n], row numbers to rank.
        seen_indptr, seen_items: `seen_items[seen_indptr[u]:seen_indptr[u + 1]]` are user u's items
            that are not ranked.
        truth_indptr, truth_items: the held-out items, likewise.
        n_items: size of the catalogue.
        ks: cut-offs.
        candidates: one row of sampled items for each of `users`, in the same order; None ranks all
            unseen items.
        block_entries: how many scores to hold at a time; by default chosen by device.
        whole: also measure `metrics.WHOLE`, the reciprocal rank without a cut-off.

    Raises:
        CrossfedError: a score is NaN or of the wrong shape, nobody has held-out items, a held-out
            item is masked as seen, or the candidates do not belong to these users and items.
    """
    users = np.asarray(users, np.int64)
    ks = sorted(set(ks))
    if not ks or ks[0] < 1:
        raise CrossfedError(f"cut-offs must be positive integers, got {ks}")
    if candidates is not None and (
        candidates.n_items != n_items or not np.array_equal(candidates.users, users)
    ):
        raise CrossfedError(
            f"candidate set {candidates.id} was drawn for other users or "
            f"items; draw it for this data"
        )
    counts = (truth_indptr[users + 1] - truth_indptr[users]).astype(np.int64)
    kept = np.flatnonzero(counts)
    if not len(kept):
        raise CrossfedError("no user has a held-out interaction to rank; check the split")
    users, counts = users[kept], counts[kept]
    depth = ks[-1]
    hits = np.zeros((len(users), depth), bool)
    best = np.full(n_items, depth, np.int64)
    first = np.ones(len(users), np.int64)
    # The first block finds out where scores live: large blocks keep an accelerator busy, small ones
    # stay in a cache,
    # though never of so few users that scoring them is no matrix product any more.
    size = max(64, 2**20 // n_items) if block_entries is None else max(1, block_entries // n_items)
    start = 0
    with torch.no_grad():
        while start < len(users):
            block = slice(start, start + size)
            scores = _scores(score, users[block], n_items)
            state = _mask(scores, users[block], seen_indptr, seen_items, truth_indptr, truth_items)
            columns = None
            if candidates is not None:
                columns = _columns(
                    candidates, kept[block], users[block], truth_indptr, truth_items
                ).to(scores.device)
                scores, state = _restrict(scores, state, columns, candidates)
            items, found, real = top_k(scores, state, columns, depth)
            hits[block, : found.shape[1]] = found
            if whole:
                first[block] = first_place(scores, state)
            position = np.broadcast_to(np.arange(items.shape[1]), items.shape)
            np.minimum.at(best, items[real], position[real])
            start += size
            if block_entries is None and scores.device.type != "cpu":
                size = max(64, 2**26 // n_items)
    per_user = per_user_metrics(hits, counts, ks)
    if whole:
        per_user[WHOLE] = 1.0 / first
    name = full_id(n_items) if candidates is None else candidates.id
    return Ranking(users, per_user, macro_metrics(per_user, best, ks), name, counts)


def _scores(score: Score, users: npt.NDArray[np.int64], n_items: int) -> torch.Tensor:
    """The block's scores, checked, as a copy of its own in float32 or float64: [b, n_items]."""
    scores = score(users)
    if tuple(scores.shape) != (len(users), n_items):
        raise CrossfedError(
            f"score returned a tensor of shape {tuple(scores.shape)} for {len(users)} users; "
            f"it must be "
            f"({len(users)}, {n_items})"
        )
    dtype = (
        torch.float64
        if scores.dtype == torch.float64 or not scores.is_floating_point()
        else torch.float32
    )
    scores = scores.detach().to(dtype, copy=True, memory_format=torch.contiguous_format)
    # the maximum carries a NaN through, at a fraction of isnan()'s cost
    if bool(scores.amax().isnan()):
        row, item = scores.isnan().nonzero()[0].tolist()
        raise CrossfedError(
            f"score returned NaN for user row {users[row]}, item {item}; the model has diverged"
        )
    return scores


def _flat(
    users: npt.NDArray[np.int64], indptr: Array, items: Array, n_items: int
) -> npt.NDArray[np.int64]:
    """Positions of the users' items in a flattened [b, n_items] matrix."""
    row, where = _entries(users, indptr)
    return row * n_items + items[where]


def _entries(
    users: npt.NDArray[np.int64], indptr: Array
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """For each entry of these users' index lists: the user's place in the block, the entry's place
    in the items.
    """
    begin = indptr[users].astype(np.int64)
    length = indptr[users + 1].astype(np.int64) - begin
    row = np.repeat(np.arange(len(users)), length)
    offset = np.cumsum(length) - length
    return row, np.arange(len(row)) + (begin - offset)[row]


def _mask(
    scores: torch.Tensor,
    users: npt.NDArray[np.int64],
    seen_indptr: Array,
    seen_items: Array,
    truth_indptr: Array,
    truth_items: Array,
) -> torch.Tensor:
    """Set seen entries of `scores` to -inf and tell what each entry is (free, truth, masked): uint8
    [b, n_items].
    """
    n_items = scores.shape[1]
    state = torch.zeros(scores.numel(), dtype=torch.uint8, device=scores.device)
    truth = torch.from_numpy(_flat(users, truth_indptr, truth_items, n_items)).to(scores.device)
    seen = torch.from_numpy(_flat(users, seen_indptr, seen_items, n_items)).to(scores.device)
    state.index_fill_(0, truth, _TRUTH)
    both = state[seen] == _TRUTH
    if bool(both.any()):
        row, item = divmod(int(seen[both][0]), n_items)
        raise CrossfedError(
            f"item {item} of user row {users[row]} is both seen and held out; the split leaks"
        )
    state.index_fill_(0, seen, _MASKED)
    scores.view(-1).index_fill_(0, seen, -torch.inf)
    return state.view(scores.shape)


def _columns(
    candidates: Candidates,
    rows: npt.NDArray[np.int64],
    users: npt.NDArray[np.int64],
    truth_indptr: Array,
    truth_items: Array,
) -> torch.Tensor:
    """The items each user's list is made of: int64 [b, n + max n_truth], filled up with -1."""
    row, where = _entries(users, truth_indptr)
    length = np.bincount(row, minlength=len(users))
    place = np.arange(len(row)) - (np.cumsum(length) - length)[row]
    truth = np.full((len(users), int(length.max())), -1, np.int64)
    truth[row, place] = truth_items[where]
    return torch.from_numpy(
        np.concatenate([candidates.items[rows].astype(np.int64), truth], axis=1)
    )


def _restrict(
    scores: torch.Tensor, state: torch.Tensor, columns: torch.Tensor, candidates: Candidates
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores and states of the listed items alone: [b, width] each."""
    index = columns.clamp(min=0)
    scores, state = scores.gather(1, index), state.gather(1, index)
    if bool((state[:, : candidates.items.shape[1]] != _FREE).any()):
        raise CrossfedError(
            f"candidate set {candidates.id} holds items that a user has interacted with; it "
            f"belongs to other data"
        )
    absent = columns < 0
    return scores.masked_fill_(absent, -torch.inf), state.masked_fill_(absent, _MASKED)


def first_place(scores: torch.Tensor, state: torch.Tensor) -> npt.NDArray[np.int64]:
    """The place, from 1, of the first held-out item of each row in the whole order, free items
    first among equals.

    Args:
        scores: float [b, width], masked entries at -inf. state: uint8 [b, width], as in `top_k`; a
            held-out item in each row.

    Returns:
        int64 [b].
    """
    best = scores.masked_fill(state != _TRUTH, -torch.inf).amax(1, keepdim=True)
    before = ((scores >= best) & (state == _FREE)).sum(1)
    return (before + 1).cpu().numpy()


def top_k(
    scores: torch.Tensor, state: torch.Tensor, columns: torch.Tensor | None, depth: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """The first `depth` items of each row under the tie rule.

    Args:
        scores: float [b, width], masked entries at -inf.
        state: uint8 [b, width]: 0 free, 1 held out, 2 masked.
        columns: the item of each entry, int64 [b, width]; None where an entry's column is its item.
        depth: how many; fewer come back when there are not so many.

    Returns:
        items int64, whether held out, and whether there is an item at all (not masked): each [b,
        min(depth, width)].
    """
    width = scores.shape[1]
    depth = min(depth, width)
    # One more than needed shows whether the cut goes through a group of equal scores.
    values, top = torch.topk(scores, min(depth + 1, width), dim=1)
    tied = (values[:, 1:] == values[:, :-1]).any(dim=1).nonzero().squeeze(1)
    top = top[:, :depth].contiguous()
    if len(tied):
        top[tied] = _ordered(
            scores[tied], state[tied], None if columns is None else columns[tied], depth
        )
    found = state.gather(1, top)
    items = top if columns is None else columns.gather(1, top)
    return items.cpu().numpy(), (found == _TRUTH).cpu().numpy(), (found != _MASKED).cpu().numpy()


def _ordered(
    scores: torch.Tensor, state: torch.Tensor, columns: torch.Tensor | None, depth: int
) -> torch.Tensor:
    """Columns of the first `depth` entries of each row, equal scores in the stated order: int64 [b,
    depth].

    Only entries that can be among the first are sorted: those not below the row's `depth`-th value.
    """
    least = torch.topk(scores, depth, dim=1).values[:, -1:]
    entry = (scores >= least).nonzero()
    row, column = entry.T.cpu().numpy()
    value = scores[entry[:, 0], entry[:, 1]].cpu().numpy()
    kind = state[entry[:, 0], entry[:, 1]].cpu().numpy()  # free before truth before masked
    item = column if columns is None else columns[entry[:, 0], entry[:, 1]].cpu().numpy()
    order = np.lexsort((item, kind, -value, row))
    place = np.arange(len(row)) - np.searchsorted(row, row)
    return torch.from_numpy(column[order][place < depth].reshape(-1, depth)).to(scores.device)
