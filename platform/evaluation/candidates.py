"""Sampled candidates: for each user, items never interacted with, among which the held-out items are ranked.

They are drawn once, from a seed and the data alone, and stored with their hash, so every method ranks among the same items.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Candidates:
    """One row of sampled items per user.

    Attributes:
        users: int64 [n_users], row numbers in the domain.
        items: int32 [n_users, n], ascending in each row.
        n_items: size of the catalogue.
    """

    users: npt.NDArray[np.int64]
    items: npt.NDArray[np.int32]
    n_items: int

    @cached_property
    def sha256(self) -> str:
        """Hash of users and items, in hexadecimal."""
        digest = hashlib.sha256(f"{self.n_items} {self.items.shape}".encode())
        digest.update(np.ascontiguousarray(self.users, "<i8").tobytes())
        digest.update(np.ascontiguousarray(self.items, "<i4").tobytes())
        return digest.hexdigest()

    @property
    def id(self) -> str:
        """Short identifier, e.g. `sampled-99:5d41402abc4b`."""
        return f"sampled-{self.items.shape[1]}:{self.sha256[:12]}"
