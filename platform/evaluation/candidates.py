"""Sampled candidates: for each user, items never interacted with, among which the held-out items
are ranked.

They are drawn once, from a seed and the data alone, and stored with their hash, so that every
method ranks among the same items and a result can name them.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from crossfed.platform.errors import CrossfedError
from crossfed.platform.method import Array

_BLOCK_ENTRIES = 2**21  # fixed, since which random number a user gets depends on it


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
        digest.update(np.ascontiguousarray(self.users, "<i8").data)
        digest.update(np.ascontiguousarray(self.items, "<i4").data)
        return digest.hexdigest()

    @property
    def id(self) -> str:
        """Short identifier, e.g. `sampled-99:5d41402abc4b`."""
        return f"sampled-{self.items.shape[1]}:{self.sha256[:12]}"


def full_id(n_items: int) -> str:
    """Identifier of the candidate set that holds every item the user has not seen."""
    return f"full:{n_items}"


def draw(
    users: Array,
    known_indptr: Array,
    known_items: Array,
    n_items: int,
    n: int,
    seed: int,
) -> Candidates:
    """Draw n items per user, uniformly and without replacement, from the items the user never
    interacted with.

    Works in blocks of users, so that the memory besides the result does not grow with users or
    items.

    Args:
        users: [n_users], row numbers to draw for.
        known_indptr, known_items: `known_items[known_indptr[u]:known_indptr[u + 1]]` are all items
            of user u in any split; repetitions do no harm.
        n_items: size of the catalogue.
        n: how many items per user.
        seed: the evaluation's seed, not the run's, so that all runs rank among the same items.

    Raises:
        CrossfedError: a user has fewer than n items left.
    """
    users = np.asarray(users, np.int64)
    rng = np.random.default_rng(seed)
    items = np.empty((len(users), n), np.int32)
    # A user costs at most 2n working entries, and one per known item.
    cost = np.cumsum(2 * n + known_indptr[users + 1].astype(np.int64) - known_indptr[users])
    for block in np.split(
        np.arange(len(users)), np.flatnonzero(np.diff(cost // _BLOCK_ENTRIES)) + 1
    ):
        items[block] = _draw_block(users[block], known_indptr, known_items, n_items, n, rng)
    return Candidates(users, items, n_items)


def _draw_block(
    users: npt.NDArray[np.int64],
    known_indptr: Array,
    known_items: Array,
    n_items: int,
    n: int,
    rng: np.random.Generator,
) -> npt.NDArray[np.int64]:
    """Items drawn for one block of users: [b, n], ascending in each row."""
    begin = known_indptr[users].astype(np.int64)
    length = known_indptr[users + 1].astype(np.int64) - begin
    row = np.repeat(np.arange(len(users)), length)
    where = np.arange(len(row)) + (begin - (np.cumsum(length) - length))[row]
    known = np.unique(row * n_items + known_items[where])
    row = known // n_items
    count = np.bincount(row, minlength=len(users))
    first = np.cumsum(count) - count
    left = n_items - count
    if left.size and left.min() < n:
        worst = int(left.argmin())
        raise CrossfedError(
            f"user row {users[worst]} has only {left[worst]} items never interacted with, but "
            f"the protocol asks for "
            f"{n} sampled candidates; choose one with fewer or with full ranking"
        )
    places = _distinct(left, n, rng)
    # The p-th unknown item of a user is p + (how many known items lie before it). Known item number
    # j (ascending, from
    # 0) lies before it exactly when item_j - j <= p; keyed by row, these differences ascend over
    # the whole block.
    before = (known % n_items) - (np.arange(len(known)) - first[row])
    keys = row * n_items + before
    rows = np.arange(len(users))[:, None]
    return places + np.searchsorted(keys, rows * n_items + places, side="right") - first[:, None]


def _distinct(
    limits: npt.NDArray[np.int64], n: int, rng: np.random.Generator
) -> npt.NDArray[np.int64]:
    """For each limit a uniform n-subset of 0 … limit-1: int64 [len(limits), n], ascending in each
    row.

    Small ranges (up to 2n) are shuffled whole. In large ones repeated values are drawn again until
    there are none. No step treats one value differently from another, so all n-subsets are equally
    likely.
    """
    result = np.empty((len(limits), n), np.int64)
    small = np.flatnonzero(limits <= 2 * n)
    if len(small):
        keys = rng.random((len(small), 2 * n))
        keys[np.arange(2 * n) >= limits[small, None]] = np.inf
        result[small] = np.sort(np.argpartition(keys, n - 1, axis=1)[:, :n], axis=1)
    rest = np.flatnonzero(limits > 2 * n)
    values = rng.integers(0, limits[rest, None], (len(rest), n))
    while len(rest):
        values.sort(axis=1)
        row, column = np.nonzero(values[:, 1:] == values[:, :-1])
        repeated = np.zeros(len(rest), bool)
        repeated[row] = True
        result[rest[~repeated]] = values[~repeated]
        values[row, column + 1] = rng.integers(0, limits[rest[row]])
        rest, values = rest[repeated], values[repeated]
    return result


def load_or_draw(
    directory: Path,
    part: str,
    users: Array,
    known_indptr: Array,
    known_items: Array,
    n_items: int,
    n: int,
    seed: int,
) -> Candidates:
    """The stored candidates of this data and seed, or new ones, which are then stored.

    The file is `<part>-<n>-<key>.parquet`, where the key is a hash of the data and the seed; other
    data or another seed makes another file. It appears whole or not at all, and any number of
    processes may race for it.

    Args:
        directory: where they are stored; made when absent.
        part: "validation" or "test": the part whose users these are; it only names the file.
        users, known_indptr, known_items, n_items, n, seed: as in `draw`.

    Raises:
        CrossfedError: as `draw`; the stored file is damaged or does not have the hash it was stored
            with; the directory cannot be written to.
    """
    users = np.asarray(users, np.int64)
    path = (
        directory / f"{part}-{n}-{_key(users, known_indptr, known_items, n_items, n, seed)}.parquet"
    )
    if path.exists():
        return _load(path)
    candidates = draw(users, known_indptr, known_items, n_items, n, seed)
    _save(path, candidates)
    return candidates


def _key(
    users: npt.NDArray[np.int64],
    known_indptr: Array,
    known_items: Array,
    n_items: int,
    n: int,
    seed: int,
) -> str:
    digest = hashlib.sha256(f"{n_items} {n} {seed} {len(users)} {len(known_indptr)}".encode())
    for array in (users, known_indptr, known_items):
        digest.update(np.ascontiguousarray(array, "<i8").data)
    return digest.hexdigest()[:12]


def _save(path: Path, candidates: Candidates) -> None:
    n = candidates.items.shape[1]
    items = pa.FixedSizeListArray.from_arrays(pa.array(candidates.items.ravel()), n)
    table = pa.table({"user": candidates.users, "items": items})
    table = table.replace_schema_metadata(
        {"n_items": str(candidates.n_items), "sha256": candidates.sha256}
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.stem}-{secrets.token_hex(8)}.part")
        try:
            pq.write_table(table, part, compression="zstd")
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise CrossfedError(
            f"cannot store the sampled candidates at {path}: {error.strerror or error}"
        ) from error


def _load(path: Path) -> Candidates:
    try:
        table = pq.read_table(path)
        metadata = table.schema.metadata
        users = table["user"].to_numpy().astype(np.int64)
        column = table["items"].combine_chunks()
        items = (
            column.flatten().to_numpy().astype(np.int32).reshape(len(users), column.type.list_size)
        )
        candidates = Candidates(users, items, int(metadata[b"n_items"]))
        stored = metadata[b"sha256"].decode()
    except (OSError, pa.ArrowException, KeyError, TypeError, ValueError, AttributeError) as error:
        raise CrossfedError(
            f"{path} is not a readable candidate file; delete it to draw the candidates again"
        ) from error
    if candidates.sha256 != stored:
        raise CrossfedError(
            f"{path} does not have the hash it was stored with; delete it to "
            f"draw the candidates again"
        )
    return candidates
