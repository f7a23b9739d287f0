"""Preparation of files as people have them: what is lost or odd is told, what cannot be meant is
refused.
"""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from crossfed.platform.data import prepare as prepare_module
from crossfed.platform.data.prepare import load_spec, prepare
from crossfed.platform.data.store import PreparedData
from crossfed.platform.errors import CrossfedError


def made(
    folder: Path, interactions, *, items=None, recipe=None, out="out", report=None, **more
) -> PreparedData:
    spec = {
        "name": "test",
        "recipe": {"user_core": 0, "item_core": 0} | (recipe or {}),
        "domains": {
            "a": {"interactions": interactions, **({"items": items} if items else {}), **more}
        },
    }
    (folder / "spec.yaml").write_text(yaml.safe_dump(spec))
    return prepare(folder / "spec.yaml", folder / out, report=report or (lambda message: None))


def histories(data: PreparedData, domain: str = "a") -> dict[str, str]:
    users, items, _ = data.interactions(domain)
    user_ids, item_ids = data.user_ids(domain), data.item_ids(domain)
    found: dict[str, str] = {}
    for user, item in zip(users, items, strict=True):
        found[user_ids[user]] = f"{found.get(user_ids[user], '')} {item_ids[item]}".strip()
    return found


# -- order -----------------------------------------------------------------------------------------

REVERSED = [(f"i{k}", k) for k in reversed(range(7))]


def in_csv(path: Path, time) -> dict:
    path.write_text("user,item,time\n" + "".join(f"u0,{item},{time(k)}\n" for item, k in REVERSED))
    return {"path": path.name}


def in_recbole(path: Path, time) -> dict:
    rows = "".join(f"u0\t{item}\t{time(k)}\n" for item, k in REVERSED)
    path.write_text(f"user_id:token\titem_id:token\ttimestamp:float\n{rows}")
    return {"path": path.name}


def in_parquet(path: Path, unit: str, step: int) -> dict:
    times = pa.array([1_600_000_000 * step + k for _, k in REVERSED], pa.timestamp(unit))
    pq.write_table(
        pa.table({"user": ["u0"] * 7, "item": [item for item, _ in REVERSED], "time": times}), path
    )
    return {"path": path.name}


@pytest.mark.parametrize(
    "write",
    [
        lambda path: in_csv(path, lambda k: f"1600000000.{k}00"),
        lambda path: in_csv(path, lambda k: f"2020-09-13T12:26:40.{k}00Z"),
        lambda path: in_csv(path, lambda k: f"1600000000.00000000{k}"),
        lambda path: in_csv(path, lambda k: f'"1600000000.00000000{k}"'),
        lambda path: in_recbole(path, lambda k: f"1600000000.{k}"),
        lambda path: in_parquet(path, "ms", 10**3),
        lambda path: in_parquet(path, "ns", 10**9),
        lambda path: in_csv(path, lambda k: 1600000000000000 + k) | {"time": "microseconds"},
        lambda path: in_csv(path, lambda k: 1600000000000000000 + k) | {"time": "nanoseconds"},
    ],
    ids=["seconds", "iso", "finest", "quoted", "recbole", "ms", "ns", "micro", "nano"],
)
def test_fractions_of_a_second_decide_the_order(tmp_path, write):
    data = made(tmp_path, write(tmp_path / "f"))
    assert histories(data) == {"u0": "i0 i1 i2 i3 i4 i5 i6"}
    assert set(data.interactions("a")[2].tolist()) == {1_600_000_000}


def test_equal_pairs_at_different_fractions_are_not_repeated(tmp_path):
    (tmp_path / "f").write_text("user,item,time\nu,i,5.1\nu,i,5.2\nu,i,5.2\n")
    told: list[str] = []
    with pytest.raises(
        CrossfedError,
        match=r"1 of 2 interactions repeat a user and an item "
        r"\(user 'u' has item 'i' 2",
    ):
        made(
            tmp_path, {"path": "f"}, recipe={"unique": ["user", "item", "time"]}, report=told.append
        )
    assert "a: dropped 1 repeated in user, item, time (first kept); 2 of 3 rows are left" in told


# -- ids -------------------------------------------------------------------------------------------


def table(path: Path, **columns) -> None:
    pq.write_table(pa.table(columns), path)


IDS = ["0", "1", "2"]


def numbers_in_parquet(folder: Path) -> None:
    table(folder / "f", user=["u"] * 3, item=[0.0, 1.0, 2.0], time=[1, 2, 3])
    table(folder / "g", item=[0.0, 1.0, 2.0], title=["one", "two", "three"])


def numbers_in_json(folder: Path) -> None:
    (folder / "f").write_text(
        "".join(json.dumps({"user": "u", "item": float(k), "time": k}) + "\n" for k in range(3))
    )
    (folder / "g").write_text(
        "".join(json.dumps({"item": k, "title": f"t{k}"}) + "\n" for k in range(3))
    )


def point_zero_in_csv(folder: Path) -> None:
    (folder / "f").write_text("user,item,time\nu,0.0,1\nu,1.0,2\nu,2.0,3\n")
    (folder / "g").write_text("item,title\n0,one\n1,two\n2,three\n7,seven\n")


def point_zero_in_items(folder: Path) -> None:
    (folder / "f").write_text("user,item,time\nu,0,1\nu,1,2\nu,2,3\n")
    (folder / "g").write_text(
        '{"item": "0.0", "title": "a"}\n{"item": "1.0", "title": "b"}\n{"item": "2.0", '
        '"title": "c"}\n'
    )


def blanks_in_json(folder: Path) -> None:
    (folder / "f").write_text("user,item,time\nu,0,1\nu,1,2\nu,2,3\n")
    (folder / "g").write_text(
        "".join(json.dumps({"item": f"{k} ", "title": f"t{k}"}) + "\n" for k in range(3))
    )


def binary_in_parquet(folder: Path) -> None:
    table(folder / "f", user=[b"u"] * 3, item=[b"0", b"1", b"2"], time=[1, 2, 3])
    table(folder / "g", item=[b"0", b"1", b"2"], title=["Café".encode(), b"two", b"three"])


@pytest.mark.parametrize(
    "write",
    [
        numbers_in_parquet,
        numbers_in_json,
        point_zero_in_csv,
        point_zero_in_items,
        blanks_in_json,
        binary_in_parquet,
    ],
)
def test_ids_are_the_same_on_both_sides(tmp_path, write):
    write(tmp_path)
    data = made(tmp_path, {"path": "f"}, items=[{"path": "g"}], recipe={"text": ["title"]})
    assert data.item_ids("a") == IDS
    assert data.user_ids("a") == ["u"]
    assert all(data.item_texts("a"))
    if write is binary_in_parquet:
        assert data.item_texts("a")[0] == "Café"


def test_latin1_ids_of_json_items(tmp_path):
    (tmp_path / "f").write_bytes("user,item,time\nu,Café,1\nu,O'Neil,2\n".encode("latin-1"))
    (tmp_path / "g").write_bytes(
        '{"item": "Café", "title": "x"}\n{"item": "O\'Neil", "title": "y"}\n'.encode("latin-1")
    )
    latin = {"encoding": "latin-1"}
    data = made(
        tmp_path, {"path": "f"} | latin, items=[{"path": "g"} | latin], recipe={"text": ["title"]}
    )
    assert data.item_texts("a") == ["x", "y"]


def test_binary_that_is_no_text_is_refused(tmp_path):
    table(tmp_path / "f", user=[b"u", b"\xff\xfe"], item=["i", "j"], time=[1, 2])
    with pytest.raises(
        CrossfedError,
        match="f: a value of 'user' is binary and not UTF-8; write the column as text",
    ):
        made(tmp_path, {"path": "f"})
    table(tmp_path / "f", user=["u", "v"], item=["i", "j"], time=[1, 2])
    table(tmp_path / "g", item=["i", "j"], title=[b"fine", b"\xe9"])
    with pytest.raises(
        CrossfedError, match="g, line 2: the item or a text of it is binary and not UTF-8"
    ):
        made(tmp_path, {"path": "f"}, items=[{"path": "g"}], recipe={"text": ["title"]})


def test_item_files_without_any_of_the_items_are_refused_with_examples(tmp_path):
    (tmp_path / "f").write_text("user,item,time\nu,0001,1\nu,0002,2\nu,0003,3\n")
    (tmp_path / "g").write_text("item,title\n1,one\n2,two\n3,three\n")
    with pytest.raises(
        CrossfedError,
        match=r"0 of 3 items have a row in g; .* '0001' and "
        r"'0002', .* '1' and '2'",
    ):
        made(tmp_path, {"path": "f"}, items=[{"path": "g"}], recipe={"text": ["title"]})
    (tmp_path / "g").write_text("item,title\n0001,one\n2,two\n3,three\n")
    told: list[str] = []
    made(
        tmp_path,
        {"path": "f"},
        items=[{"path": "g"}],
        recipe={"text": ["title"]},
        report=told.append,
    )
    assert any(
        "note: only 1 of 3 items have a row in g" in line and "'0002' and '0003'" in line
        for line in told
    )


# -- what is told ----------------------------------------------------------------------------------


def test_every_step_is_told(tmp_path):
    lines = ["user,item,rating,time"] + [
        f"u{k % 9},i{k % 11},{k % 5},{k}000000" for k in range(1, 200)
    ]
    lines[5] = "u1,i1,3"
    lines[7] = ",i1,3,9000000"
    lines[9] = "nan,i1,3,9000000"
    lines[11] = "u1,i9,3,"
    lines[13] = "u1,i2,3,1"
    (tmp_path / "f").write_text("\n".join(lines) + "\n")
    told: list[str] = []
    recipe = {"missing_time": "drop", "min_rating": 1, "user_core": 2, "item_core": 2}
    data = made(tmp_path, {"path": "f"}, recipe=recipe, report=told.append)
    screen = "\n".join(told)
    assert (
        "a: 198 rows in f (read as table, parted by ,), 1 broken lines, the first 6 (3 "
        "fields where 4"
    ) in screen
    assert "dropped 1 without user, 1 without time, 38 below min_rating, " in screen
    assert "repeated in user, item (first kept);" in screen
    assert "note: user is 'nan' (1 rows), which looks like none" in screen
    assert (
        "1 of 197 times are before 1970-01-02 or after next year, e.g. 1970-01-01T00:00:01"
    ) in screen
    assert "2-core of users and 2-core of items: " in screen
    assert data.manifest["domains"]["a"]["preparation"]["dropped"]["without time"] == 1


def test_columns_used_twice_and_names_given_twice_are_told(tmp_path):
    (tmp_path / "f").write_text("user,item,item,time\nu,i,j,1\nv,i,j,2\n")
    told: list[str] = []
    made(tmp_path, {"path": "f", "columns": {"user": "item"}}, report=told.append)
    assert "a: note: its header names 'item' more than once; the first is taken" in told
    assert "a: note: user and item are the same column 'item'" in told


# -- the recipe ------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [{"missing_time": "drop"}, {"required": ["time"]}])
def test_rows_without_a_time_can_be_dropped(tmp_path, recipe):
    (tmp_path / "f").write_text("user,item,time\nu,i,1\nu,j,\nu,k,3\n")
    with pytest.raises(
        CrossfedError,
        match=r"f, line 3: '' in 'time' is no time "
        r"\(`missing_time: drop`",
    ):
        made(tmp_path, {"path": "f"})
    assert histories(made(tmp_path, {"path": "f"}, recipe=recipe)) == {"u": "i k"}


def test_repeated_pairs_are_refused_by_their_ids(tmp_path):
    (tmp_path / "f").write_text(
        "user,item,time\nbo,cup,1\nal,cup,1\nal,mug,2\nal,cup,3\nal,cup,4\n"
    )
    with pytest.raises(
        CrossfedError,
        match=r"2 of 5 .*user 'al' has item 'cup' 3 times.*set `duplicates: "
        r"first` or `last`",
    ):
        made(tmp_path, {"path": "f"}, recipe={"duplicates": "all"})


def test_the_first_text_that_is_not_empty_counts(tmp_path):
    (tmp_path / "f").write_text("user,item,time\nu,i,1\nu,j,2\nu,k,3\n")
    (tmp_path / "g").write_text("item,title\ni,\ni,late\ni,later\nj,\n")
    (tmp_path / "h").write_text("item,title\ni,no\nj,second\nk,third\n")
    data = made(
        tmp_path, {"path": "f"}, items=[{"path": "g"}, {"path": "h"}], recipe={"text": ["title"]}
    )
    assert data.item_texts("a") == ["late", "second", "third"]
    assert data.manifest["domains"]["a"]["preparation"]["text_fields"] == {"title": 3}


# -- formats ---------------------------------------------------------------------------------------

PLAIN = "user,item,time\nal,x,1\nbo,y,2\nal,z,3\n"
EXPECTED = {"al": "x z", "bo": "y"}


def utf16(text: str, name: str) -> bytes:
    return text.encode(name)


@pytest.mark.parametrize(
    ("content", "source"),
    [
        (PLAIN.replace(",", "::").encode(), {}),
        (PLAIN.replace(",", "||").encode(), {"separator": "||"}),
        (PLAIN.replace(",", " ").encode(), {}),
        (PLAIN.replace(",", "   ").encode(), {}),
        (PLAIN.replace(",", ";").encode(), {}),
        (PLAIN.replace(",", "\t").encode(), {"separator": "\\t"}),
        (("# " + PLAIN).encode(), {}),
        (("# made by hand\n# in 2020\n" + PLAIN).encode(), {}),
        (("# made by hand\n" + PLAIN.partition("\n")[2]).encode(), {"columns": {"user": 1, "item": 2, "time": 3}}),  # noqa: E501
        (("sep=,\n" + PLAIN).encode(), {}),
        (PLAIN.replace("\n", "\r").encode(), {}),
        (PLAIN.replace("\n", "\r\n").encode(), {}),
        (("\n\n" + PLAIN.replace("\n", "\n\n")).encode("utf-8-sig"), {}),
        (bz2.compress(PLAIN.encode()), {}),
        (lzma.compress(PLAIN.encode()), {}),
        (pa.compress(PLAIN.encode(), codec="zstd", asbytes=True), {}),
        (PLAIN.encode("utf-16"), {}),
        (PLAIN.encode("utf-16-le"), {}),
        (PLAIN.encode("utf-16-be"), {"encoding": "utf-16-be"}),
        (PLAIN.encode("utf-32"), {}),
        (bz2.compress(PLAIN.encode("utf-16")), {}),
        (json.dumps([{"user": "al", "item": "x", "time": 1}, {"user": "bo", "item": "y", "time": 2},
                     {"user": "al", "item": "z", "time": 3}]).encode(), {}),
        (json.dumps([{"user": "al", "item": "x", "time": 1}, {"user": "bo", "item": "y", "time": 2},
                     {"user": "al", "item": "z", "time": 3}], indent=1).encode(), {}),
        (json.dumps({"al": ["x", "z"], "bo": ["y"]}).encode(), {}),
        (json.dumps({"al": ["x", "z"], "bo": ["y"]}, indent=1).encode(), {}),
        (b'{"user": "al", "items": ["x", "z"]}\n{"user": "bo", "items": ["y"]}\n', {"columns": {"items": "items"}}),  # noqa: E501
        (b"al x z\nbo y\n", {"layout": "sequence"}),
        (b"al\tx,z\nbo\ty\n", {"layout": "sequence"}),
        (b"al: x z\nbo: y\n", {"layout": "sequence"}),
        (b"al|x y|z\nbo|y\n".replace(b"x y", b"x"), {"layout": "sequence", "separator": "|"}),
        (b"user_id:token\titem_id_list:token_seq\titem_id:token\nal\tx\tz\nbo\ty\t\n".replace(b"\t\n", b"\ty\n"), {}),  # noqa: E501
        (b"user,history\nal,\"['x', 'z']\"\nbo,y\n", {"columns": {"items": "history"}}),
    ],
)  # fmt: skip
def test_formats(tmp_path, content, source):
    (tmp_path / "f").write_bytes(content)
    assert histories(made(tmp_path, {"path": "f", **source})) == EXPECTED


def test_movielens_1m_as_it_is_published(tmp_path):
    (tmp_path / "ratings.dat").write_text(
        "1::1193::5::978300760\n1::661::3::978302109\n2::1193::4::978298413\n"
    )
    (tmp_path / "movies.dat").write_bytes(
        "661::James and the Giant Peach (1996)::Animation|Children's|Musical\n"
        "1193::Cité des enfants perdus, La (1995)::Adventure|Sci-Fi\n".encode("latin-1")
    )
    data = made(
        tmp_path,
        {"path": "ratings.dat", "columns": {"user": 1, "item": 2, "rating": 3, "time": 4}},
        items=[
            {
                "path": "movies.dat",
                "columns": {"item": 1, "title": 2, "genres": 3},
                "encoding": "latin-1",
            }
        ],
        recipe={"text": ["title", "genres"]},
    )
    assert histories(data) == {"1": "1193 661", "2": "1193"}
    assert data.item_texts("a")[0] == "Cité des enfants perdus, La (1995) Adventure|Sci-Fi"


def test_several_interaction_files_of_one_domain(tmp_path):
    (tmp_path / "f").write_text("user,item,time\nal,x,5.5\n")
    (tmp_path / "g").write_text(
        '{"user": "al", "item": "y", "time": 5.25}\n{"user": "bo", "item": "x", "time": 1}\n'
    )
    data = made(tmp_path, [{"path": "f"}, {"path": "g"}])
    assert histories(data) == {"al": "y x", "bo": "x"}
    assert data.manifest["domains"]["a"]["preparation"]["rows"] == 3
    (tmp_path / "g").write_text("al w\nal v\n")
    with pytest.raises(CrossfedError, match=r"times of several kinds \(order, seconds\)"):
        made(tmp_path, [{"path": "f"}, {"path": "g", "layout": "sequence"}], out="no")
    both = [{"path": "g", "layout": "sequence"}, {"path": "f", "time": "row"}]
    assert histories(made(tmp_path, both, out="order")) == {"al": "w v x"}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"7z\xbc\xaf\x27\x1c...", "is a 7-Zip archive; unpack it first"),
        (b"\x80\x04\x95abc", "is a Python pickle, which is not loaded"),
        (b"<!DOCTYPE html><html>", "is a web page, not data"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is a pointer of Git LFS"),
        (b"\xd0\xcf\x11\xe0abc", "is an Excel workbook of the old kind"),
        (gzip.compress(gzip.compress(PLAIN.encode(), mtime=0), mtime=0), "is compressed twice"),
        (
            json.dumps({"user": {"0": "u"}, "item": {"0": "i"}}).encode(),
            "is one JSON object of columns",
        ),
        (b"SQLite format 3\0", "is an SQLite database"),
        (
            "user,item,time\nu,“i”,5\n".encode("cp1252"),
            r"line 2: byte 0x93 is not utf-8; set `encoding`.*e\.g\. cp1252",
        ),
        (
            "user,item,time\nu,é,5\n".encode("latin-1"),
            r"line 2: byte 0xe9 is not utf-8; set `encoding`.*e\.g\. latin-1",
        ),
        (bz2.compress(PLAIN.encode() * 999)[:-20], "the compressed data are damaged or cut off"),
        (lzma.compress(PLAIN.encode() * 999)[:-20], "the compressed data are damaged or cut off"),
        (b'{"al": {\n"x": 1}}', "neither an array of objects nor an object of user"),
    ],
)
def test_hints_look_at_the_bytes(tmp_path, content, words):
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(CrossfedError, match=words):
        made(tmp_path, {"path": "f"})


def test_a_sequence_file_may_have_a_header(tmp_path):
    (tmp_path / "f").write_text("user items\nal x z\nbo y\n")
    assert histories(made(tmp_path, {"path": "f", "layout": "sequence"})) == EXPECTED


# -- specs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name: x\nrecipe: {}\nrecipe: {}\n", "not YAML: .*the key 'recipe' stands twice.* line 3"),
        (
            "name: x\ndomains: {a: {interactions: {path: f, path: g}}}\n",
            "the key 'path' stands twice",
        ),
        (
            "name: x\ndomains: {a: {interactions: {path: f, seperator: ';'}}}\n",
            r"wrong at domains\.a\.interactions\.seperator: no such key; did you mean "
            r"separator\? Allowed: columns, encoding",
        ),
        (
            "name: x\nrecipe: {core: 5}\ndomains: {}\n",
            r"recipe\.core: no such key; .* Allowed: cancellations, duplicates",
        ),
        ("name: x\ndomains: {a: {interaction: {path: f}}}\n", r"wrong at domains\.a\.inter"),
    ],
)
def test_wrong_specs_name_what_is_allowed(tmp_path, text, words):
    (tmp_path / "s.yaml").write_text(text)
    with pytest.raises(CrossfedError, match=words):
        load_spec(tmp_path / "s.yaml")


def test_a_spec_in_place_of_data_must_be_prepared_first(tmp_path):
    (tmp_path / "s.yaml").write_text("name: x\n")
    with pytest.raises(
        CrossfedError,
        match=r"s\.yaml is a spec, which must be prepared first: "
        r"crossfed data prepare",
    ):
        PreparedData.open(tmp_path / "s.yaml")


# -- no order --------------------------------------------------------------------------------------


def test_data_without_order(tmp_path):
    (tmp_path / "f").write_text("user,item\nal,x\nbo,y\nal,z\n")
    data = made(tmp_path, {"path": "f", "time": "none"})
    assert data.times("a") == "none"
    assert not np.any(data.interactions("a")[2])
    # the file's order is kept within a user, for those who say that they mean it
    assert histories(data) == EXPECTED
    with pytest.raises(CrossfedError, match=r"has no column for time; .*`time: none` says so"):
        made(tmp_path, {"path": "f"}, out="again")


def test_every_key_is_in_the_readme():
    text = (Path(prepare_module.__file__).parent / "README.md").read_text(encoding="utf-8")
    for rows in prepare_module.keys().values():
        for key, _, meaning in rows:
            assert f"{key}`" in text, key
            assert meaning and meaning in text, key
