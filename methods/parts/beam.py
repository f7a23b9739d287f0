"""Decoding semantic IDs: beam search within a trie, every item's score, and items that share a
semantic ID.

A model enters as one function: `next_codes(prefixes)` maps the codes so far, int64 [b, k, l] for b
users and k beams (l from 0 to L - 1), to log-probabilities of the next code, [b, k, C]. The users'
histories stay inside that function, so nothing of a user is ever copied once per beam.
Probabilities are over all C codes: a trie forbids codes, it does not share their probability out.

An item's score is Σ_l log p(c_l | history, c_1 … c_{l-1}) along its codes, the logarithm of
FedCGR's Eq. (3).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from crossfed.methods.parts.trie import Trie

NextCodes = Callable[[torch.Tensor], torch.Tensor]
"""prefixes int64 [b, k, l] -> log-probabilities [b, k, C]."""


def beam_search(
    next_codes: NextCodes, trie: Trie, batch: int, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best leaves of the trie for every user, as a beam of `width` finds them.

    One table look-up and one top-k per level, for all users and beams together. A beam as wide as
    the trie's widest level finds exactly the best leaves.

    Args:
        batch: b, the users that `next_codes` knows. width: beams kept per user.

    Returns:
        leaves int64 [b, w] and their scores [b, w], best first, w = min(width, leaves). Where a
        user has fewer than w, the rest is leaf `trie.sizes[-1]`, which does not exist, with score
        -inf.
    """
    device = trie.leaf.device
    prefixes = torch.zeros(batch, 1, 0, dtype=torch.int64, device=device)
    nodes = torch.zeros(batch, 1, dtype=torch.int64, device=device)
    scores = torch.zeros(batch, 1, device=device)
    for level in range(trie.levels):
        children = trie.child[level][nodes]  # [b, k, C]
        nowhere = children == trie.sizes[level + 1]
        reached = (
            (scores.unsqueeze(2) + next_codes(prefixes)).masked_fill(nowhere, -torch.inf).flatten(1)
        )
        scores, chosen = reached.topk(min(width, trie.sizes[level + 1], reached.shape[1]), dim=1)
        beam, code = chosen // trie.codes, chosen % trie.codes
        nodes = children.flatten(1).gather(1, chosen).long()
        before = prefixes.gather(1, beam.unsqueeze(2).expand(-1, -1, level))
        prefixes = torch.cat([before, code.unsqueeze(2)], dim=2)
    return nodes, scores


def all_leaves(next_codes: NextCodes, trie: Trie, batch: int, block: int = 2**22) -> torch.Tensor:
    """The score of every leaf, [b, n_leaves]: each prefix of the trie is continued once per user.

    Args:
        batch: b, the users that `next_codes` knows. block: log-probabilities held at a time.
    """
    scores = torch.zeros(batch, 1, device=trie.leaf.device)
    step = max(1, block // (batch * trie.codes))
    for level in range(trie.levels):
        prefixes, parent, token = trie.prefixes[level], trie.parent[level], trie.token[level]
        parts = []
        for start in range(0, trie.sizes[level], step):
            some = prefixes[start : start + step]
            # parents are in order, so the children of a block of them lie together
            low, high = torch.searchsorted(
                parent, torch.tensor([start, start + len(some)], device=parent.device)
            ).tolist()
            above, code = parent[low:high], token[low:high]
            log_p = next_codes(some.expand(batch, -1, -1))
            parts.append(scores[:, above] + log_p[:, above - start, code])
        scores = torch.cat(parts, dim=1)
    return scores


def item_scores(trie: Trie, leaf_scores: torch.Tensor) -> torch.Tensor:
    """Every item's score from its leaf's, the items of one leaf in their order (`Trie.place`).

    The p-th item of a leaf gets the leaf's score less p of the smallest steps that float64 knows.
    Half a billion such steps lie between two neighbouring float32 values, so items that share a
    semantic ID are told apart, the most popular first, and the order of different float32 scores is
    never touched.

    Args:
        leaf_scores: log-probabilities [b, n_leaves], none above 0.

    Returns:
        float64 [b, n_items]; -inf stays -inf.
    """
    scores = leaf_scores.double()[:, trie.leaf]
    # the bits of +0 would be counted in the other direction
    scores = torch.where(scores == 0, -0.0, scores)
    lowered = (scores.view(torch.int64) + trie.place).view(torch.float64)
    return torch.where(scores.isinf(), scores, lowered)


def score_items(next_codes: NextCodes, trie: Trie, batch: int, width: int | None) -> torch.Tensor:
    """Every item's score for every user, float64 [b, n_items].

    Args:
        width: beams; an item whose leaf no beam reached scores -inf. None scores all items exactly.
    """
    if width is None:
        return item_scores(trie, all_leaves(next_codes, trie, batch))
    leaves, scores = beam_search(next_codes, trie, batch, width)
    found = scores.new_full((batch, trie.sizes[-1] + 1), -torch.inf).scatter_(1, leaves, scores)
    return item_scores(trie, found[:, :-1])
