"""The prefix trie of a domain's semantic IDs as tables: which code may come next is a look-up, for
any number of beams at once.

Depth 0 is the root; a node of depth l stands for the first l codes of at least one item; a node of
depth L is a leaf and holds every item with that semantic ID. Nodes of one depth are numbered in the
order of their codes, so the children of neighbouring nodes are neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True, slots=True)
class Trie:
    """All valid prefixes of a catalogue. Build one with `Trie.build`.

    Attributes:
        codes: size C of every level's codebook.
        sizes: number of nodes per depth, [L + 1]; `sizes[0]` is 1, `sizes[-1]` the number of
            leaves.
        child: per depth below L, int32 [sizes[l] + 1, C]: the node of depth l + 1 that a code leads
            to, or `sizes[l + 1]` where no item goes on so. That number is also the row of the last,
            empty node: nothing leads out of it.
        parent, token: per depth above 0, int64 [sizes[l]]: the node's parent, and the code that
            leads from there to it.
        prefixes: per depth below L, int64 [sizes[l], l]: the codes that lead to each node.
        leaf: int64 [n_items], the leaf that holds each item.
        place: int64 [n_items], 0 for the first item of a leaf, 1 for the second, and so on, the
            most popular first.
    """

    codes: int
    sizes: tuple[int, ...]
    child: tuple[torch.Tensor, ...]
    parent: tuple[torch.Tensor, ...]
    token: tuple[torch.Tensor, ...]
    prefixes: tuple[torch.Tensor, ...]
    leaf: torch.Tensor
    place: torch.Tensor

    @classmethod
    def build(cls, sids: npt.NDArray[Any], popularity: npt.NDArray[Any], codes: int) -> Self:
        """The trie of a domain's items.

        Args:
            sids: int [n_items, L], every item's semantic ID.
            popularity: [n_items], any number that is larger for the item to be named first among
                those that share a leaf; equal numbers leave the lower item number first.
            codes: size of every level's codebook.

        Raises:
            ValueError: there are no items, a code lies outside 0 … codes - 1, or the popularity has
                another length.
        """
        sids, popularity = np.asarray(sids, np.int64), np.asarray(popularity)
        if sids.ndim != 2 or not sids.size:
            raise ValueError(
                f"semantic IDs must be [n_items, levels] with at least one of "
                f"each, got {sids.shape}"
            )
        if sids.min() < 0 or sids.max() >= codes:
            raise ValueError(f"codes must lie in 0 … {codes - 1}, got {sids.min()} … {sids.max()}")
        if popularity.shape != sids.shape[:1]:
            raise ValueError(f"popularity must be [{len(sids)}], got {popularity.shape}")
        paths, leaf = np.unique(sids, axis=0, return_inverse=True)
        leaf = leaf.reshape(-1)
        levels = paths.shape[1]
        above = np.zeros(len(paths), np.int64)  # the node of depth l that each path passes
        sizes, child, parent, token, prefixes = [1], [], [], [], []
        for level in range(levels):
            fresh = np.ones(len(paths), bool)
            fresh[1:] = (paths[1:, : level + 1] != paths[:-1, : level + 1]).any(axis=1)
            first = np.flatnonzero(fresh)
            prefixes.append(torch.from_numpy(paths[np.unique(above, return_index=True)[1], :level]))
            parent.append(torch.from_numpy(above[first]))
            token.append(torch.from_numpy(paths[first, level]))
            table = np.full((sizes[-1] + 1, codes), len(first), np.int32)
            table[above[first], paths[first, level]] = np.arange(len(first))
            child.append(torch.from_numpy(table))
            sizes.append(len(first))
            above = np.cumsum(fresh) - 1
        order = np.lexsort((np.arange(len(sids)), -popularity, leaf))
        sorted_leaf = leaf[order]
        place = np.empty(len(sids), np.int64)
        place[order] = np.arange(len(sids)) - np.searchsorted(sorted_leaf, sorted_leaf)
        return cls(
            codes, tuple(sizes), tuple(child), tuple(parent), tuple(token), tuple(prefixes),
            torch.from_numpy(leaf.astype(np.int64)), torch.from_numpy(place),
        )  # fmt: skip

    @property
    def levels(self) -> int:
        """Codes per semantic ID."""
        return len(self.child)

    def to(self, device: torch.device) -> Trie:
        """The same trie with its tables on another device."""

        def there(tables: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            return tuple(table.to(device) for table in tables)

        return replace(
            self, child=there(self.child), parent=there(self.parent), token=there(self.token),
            prefixes=there(self.prefixes), leaf=self.leaf.to(device), place=self.place.to(device),
        )  # fmt: skip
