"""What a domain exports of a finished run: the files that its model is served from."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


def write_index(
    folder: Path, domain: str, user_ids: Iterable[str], item_ids: Sequence[str]
) -> None:
    """Write `<domain>.users.parquet` (digests of user ids, and their key) and
    `<domain>.items.parquet` (item ids).

    Args:
        user_ids, item_ids: the source's ids, in row order.
    """
    key = secrets.token_bytes(16)
    digests = np.array([user_digest(key, user) for user in user_ids], np.int64)
    order = np.argsort(digests, kind="stable")
    _, users, items = files(folder, domain)
    table = pa.table({"digest": digests[order], "row": order.astype(np.int64)})
    pq.write_table(table.replace_schema_metadata({"key": key.hex()}), users)
    pq.write_table(pa.table({"id": pa.array(item_ids, pa.string())}), items)


def user_digest(key: bytes, user: str) -> int:
    """A keyed 64-bit digest of a user's id: enough to recognise an id that somebody brings, no way
    back to it.
    """
    return int.from_bytes(
        hashlib.blake2b(user.encode(), digest_size=8, key=key).digest(), "little", signed=True
    )


def files(folder: Path, domain: str) -> tuple[Path, ...]:
    """What a domain's model consists of, beside the run's `config.yaml`: tensors, user index, item
    ids.
    """
    return tuple(
        folder / f"{domain}.{ending}"
        for ending in ("safetensors", "users.parquet", "items.parquet")
    )
