"""What a domain exports: digests in place of user ids."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq

from crossfed.platform.federation import export


def test_digests_tell_users_apart_and_differ_from_run_to_run(tmp_path: Path) -> None:
    users = [f"u{number}" for number in range(3000)] + ["ü", "", "u" * 5000]
    told = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        export.write_index(tmp_path / name, "shop", users, ["i0"])
        told.append(set(pd.read_parquet(tmp_path / name / "shop.users.parquet")["digest"]))
    assert len(told[0]) == len(users) and not told[0] & told[1]


def test_a_users_id_leads_to_its_row_with_the_key_alone(tmp_path: Path) -> None:
    export.write_index(tmp_path, "shop", ["ann", "bob"], ["x", "y", "x y"])
    _, users, items = export.files(tmp_path, "shop")
    table = pq.read_table(users)
    key = bytes.fromhex(table.schema.metadata[b"key"].decode())
    rows = dict(zip(table["digest"].to_pylist(), table["row"].to_pylist(), strict=True))
    assert [rows[export.user_digest(key, user)] for user in ("ann", "bob")] == [0, 1]
    assert export.user_digest(key, "eve") not in rows
    assert export.user_digest(bytes(16), "ann") not in rows
    assert table["digest"].to_pylist() == sorted(rows), "sorted, so that a search finds them"
    assert pq.read_table(items)["id"].to_pylist() == ["x", "y", "x y"]
