"""The prepared-data format: what is written is what is read, same input gives same bytes, and
damage is told.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from crossfed.platform.data import store
from crossfed.platform.data.store import PreparedData, Writer
from crossfed.platform.errors import CrossfedError

# user, item, time as handed over: user 1 has a tie at time 5 (items 2, 0 in that order)
USERS, ITEMS, TIMES = [1, 0, 1, 0, 1], [2, 1, 0, 0, 1], [5, 9, 5, 3, 1]


def write(
    path: Path, *, chunked: bool = False, recipe: dict | None = None, item_text: str = "soap"
) -> PreparedData:
    with Writer(path, recipe or {"k": 1}) as writer:
        if chunked:
            domain = writer.open_domain("b-1")
            domain.append_interactions([0, 0], [1, 0], [9, 3])
            domain.append_interactions([1, 1, 1], [2, 0, 1], [5, 5, 1])
            domain.append_users(["u0"])
            domain.append_users(["u1"])
            domain.append_items(["i0", "i1"], [item_text, ""])
            domain.append_items(["i2"], ["pen — £"])
        else:
            writer.add_domain(
                "b-1",
                USERS,
                ITEMS,
                TIMES,
                ["u0", "u1"],
                ["i0", "i1", "i2"],
                [item_text, "", "pen — £"],
            )
        writer.add_domain("a", [0, 1, 2], [0, 0, 0], [0, 0, 0], ["u1", "x", "u0"], ["i0"], ["cup"])
    return PreparedData.open(path)


def contents(path: Path) -> dict[str, bytes]:
    return {
        str(f.relative_to(path)): f.read_bytes() for f in sorted(path.rglob("*")) if f.is_file()
    }


def test_reads_back_sorted_by_user_time_and_given_order(tmp_path):
    data = write(tmp_path / "d")
    assert data.domains == ("b-1", "a")  # the order of writing, not of the alphabet
    users, items, times = data.interactions("b-1")
    assert users.tolist() == [0, 0, 1, 1, 1]
    assert items.tolist() == [0, 1, 1, 2, 0]
    assert times.tolist() == [3, 9, 1, 5, 5]
    assert users.dtype == items.dtype == times.dtype == np.int64
    assert data.item_texts("b-1") == ["soap", "", "pen — £"]
    assert data.item_ids("b-1") == ["i0", "i1", "i2"]
    assert data.user_ids("a") == ["u1", "x", "u0"]
    assert data.sizes("b-1") == (2, 3)


def test_manifest_counts(tmp_path):
    data = write(tmp_path / "d")
    assert data.manifest["domains"]["b-1"] == {
        "users": 2,
        "items": 3,
        "interactions": 5,
        "average_length": 5 / 2,
        "density": round(5 / (2 * 3), 12),
        "items_without_text": 1,
    }
    assert data.manifest["overlap"] == [{"domains": ["b-1", "a"], "users": 2, "of": 3}]
    assert data.synthetic is False


def test_overlap_of_pairs_and_of_all(tmp_path):
    with Writer(tmp_path / "d", {}, synthetic=True) as writer:
        for name, ids in {"a": "uvw", "b": "vwx", "c": "wxy"}.items():
            writer.add_domain(name, [0, 1, 2], [0, 0, 0], [0, 0, 0], list(ids), ["i"], [""])
    data = PreparedData.open(tmp_path / "d")
    assert [(o["domains"], o["users"], o["of"]) for o in data.manifest["overlap"]] == [
        (["a", "b"], 2, 4),  # v, w of u … x
        (["a", "c"], 1, 5),
        (["b", "c"], 2, 4),
        (["a", "b", "c"], 1, 5),
    ]
    assert data.synthetic is True


def test_same_input_same_bytes_also_in_chunks(tmp_path, monkeypatch):
    # several row groups, none of which ends where a chunk ends
    monkeypatch.setattr(store, "ROW_GROUP", 2)
    write(tmp_path / "one")
    write(tmp_path / "two")
    write(tmp_path / "three", chunked=True)
    assert contents(tmp_path / "one") == contents(tmp_path / "two") == contents(tmp_path / "three")
    assert pq.ParquetFile(tmp_path / "three/b-1/interactions.parquet").num_row_groups == 3


def test_fingerprint_follows_values_only(tmp_path):
    fingerprint = write(tmp_path / "one").fingerprint
    assert write(tmp_path / "recipe", recipe={"k": 2}).fingerprint == fingerprint
    assert write(tmp_path / "text", item_text="soaq").fingerprint != fingerprint


def test_text_boundaries_count_in_the_fingerprint(tmp_path):
    prints = set()
    for i, texts in enumerate([["ab", "c"], ["a", "bc"]]):
        with Writer(tmp_path / str(i), {}) as writer:
            writer.add_domain("d", [0, 0], [0, 1], [0, 0], ["u"], ["x", "y"], texts)
        prints.add(PreparedData.open(tmp_path / str(i)).fingerprint)
    assert len(prints) == 2


def test_nothing_is_left_after_an_error(tmp_path):
    with pytest.raises(ZeroDivisionError), Writer(tmp_path / "d", {}) as writer:
        writer.open_domain("a").append_users(["u"])
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_existing_directory_is_left_alone(tmp_path):
    before = write(tmp_path / "d").fingerprint
    with pytest.raises(CrossfedError, match="exists already"), Writer(tmp_path / "d", {}):
        pass
    assert PreparedData.open(tmp_path / "d").fingerprint == before


def test_unwritable_place(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(CrossfedError, match="Cannot write prepared data"),
        Writer(tmp_path / "file/d", {}),
    ):
        pass


def test_full_disk(tmp_path):
    with (
        pytest.raises(CrossfedError, match=r"Cannot write .*No space left"),
        Writer(tmp_path / "d", {}),
    ):
        raise OSError(28, "No space left on device")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("server", [0], [0], [0], ["u"], ["i"], [""]), "Domain name 'server'"),
        (("a/b", [0], [0], [0], ["u"], ["i"], [""]), "Domain name 'a/b'"),
        (("a", [], [], [], ["u"], ["i"], [""]), "Domain a has no interactions"),
        (("a", [1], [0], [0], ["u"], ["i"], [""]), "user number 1 occurs but only 1 users"),
        (("a", [0], [3], [0], ["u"], ["i"], [""]), "item number 3 occurs but only 1 items"),
        (("a", [0], [-1], [0], ["u"], ["i"], [""]), "negative"),
    ],
)
def test_impossible_domains(tmp_path, arguments, words):
    with pytest.raises(CrossfedError, match=words), Writer(tmp_path / "d", {}) as writer:
        writer.add_domain(*arguments)
    assert list(tmp_path.iterdir()) == []


def test_batches_of_one_user_are_refused(tmp_path):
    with (
        pytest.raises(CrossfedError, match="user 0 come after those of user 0"),
        Writer(tmp_path / "d", {}) as writer,
    ):
        domain = writer.open_domain("a")
        domain.append_interactions([0], [0], [0])
        domain.append_interactions([0], [1], [1])


def test_domain_twice(tmp_path):
    with pytest.raises(CrossfedError, match="occurs twice"), Writer(tmp_path / "d", {}) as writer:
        for _ in range(2):
            writer.add_domain("a", [0], [0], [0], ["u"], ["i"], [""])


def test_not_prepared_data(tmp_path):
    with pytest.raises(CrossfedError, match="does not exist"):
        PreparedData.open(tmp_path / "none")
    with pytest.raises(CrossfedError, match=r"no manifest\.json"):
        PreparedData.open(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(CrossfedError, match="cannot be read"):
        PreparedData.open(tmp_path)
    (tmp_path / "manifest.json").write_text("[]")
    with pytest.raises(CrossfedError, match="not the manifest"):
        PreparedData.open(tmp_path)


def test_another_version(tmp_path):
    path = write(tmp_path / "d").path
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"version": 99}))
    with pytest.raises(CrossfedError, match="format version 99, this crossfed reads version 1"):
        PreparedData.open(path)


@pytest.mark.parametrize(
    "domains",
    [["a", "b"], {"a": {}}, {"c": {"users": 1, "items": 1, "interactions": 1}}],
    ids=["a list", "without counts", "without files"],
)
def test_an_edited_manifest(tmp_path, domains):
    path = write(tmp_path / "d").path
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"domains": domains}))
    with pytest.raises(CrossfedError, match="disagrees with itself"):
        PreparedData.open(path)


def test_edited_counts(tmp_path):
    path = write(tmp_path / "d").path
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["domains"]["a"]["users"] += 1
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CrossfedError, match="disagrees with itself"):
        PreparedData.open(path)


def test_names_in_a_manifest_do_not_lead_out_of_the_directory(tmp_path):
    path = write(tmp_path / "d").path
    before = (path / "manifest.json").read_text()
    for name in ("../evil", "/etc", "x/y", "..", "server", ""):
        (path / "manifest.json").write_text(
            before.replace('"a/', f'"{name}/').replace('"a": {', f'"{name}": {{')
        )
        with pytest.raises(CrossfedError, match=r"names a domain|disagrees with itself"):
            PreparedData.open(path)
    manifest = json.loads(before)
    manifest["files"]["../../etc/passwd"] = manifest["files"]["a/users.parquet"]
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CrossfedError, match="disagrees with itself"):
        PreparedData.open(path)


def test_files_that_are_not_what_the_manifest_says(tmp_path):
    """Other columns, other counts, numbers of users that there are not: told when they are read,
    whatever the hashes say.
    """
    data = write(tmp_path / "d")
    file = data.path / "a/interactions.parquet"
    table = pq.read_table(file)
    told = {
        "other columns": table.drop_columns(["time"]),
        "rows where the manifest": pa.concat_tables([table, table]),
        "user numbers lie outside": table.set_column(
            0, table.schema[0], pa.array([10**6] * len(table), pa.int32())
        ),
        "item numbers lie outside": table.set_column(
            1, table.schema[1], pa.array([-1] * len(table), pa.int32())
        ),
    }
    for words, changed in told.items():
        pq.write_table(changed, file)
        with pytest.raises(CrossfedError, match=words):
            data.interactions("a")


def test_damage_is_found(tmp_path):
    data = write(tmp_path / "d")
    data.verify()
    file = data.path / "a/items.parquet"
    good = file.read_bytes()
    file.write_bytes(good[:-1] + b"\0")
    PreparedData.open(data.path)  # sizes agree
    with pytest.raises(CrossfedError, match=r"a/items\.parquet differs"):
        data.verify()
    with pytest.raises(CrossfedError, match=r"a/items\.parquet cannot be read"):
        data.item_ids("a")
    file.write_bytes(good[:-1])
    with pytest.raises(CrossfedError, match=r"a/items\.parquet has \d+ bytes where"):
        PreparedData.open(data.path)
    file.unlink()
    with pytest.raises(CrossfedError, match=r"a/items\.parquet is missing"):
        PreparedData.open(data.path)


def test_unknown_domain(tmp_path):
    with pytest.raises(CrossfedError, match=r"no domain 'z'; it has b-1, a\."):
        write(tmp_path / "d").interactions("z")
