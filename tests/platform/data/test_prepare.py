"""Preparation: every rule of a recipe against cases solved by hand, the published counts exactly,
and wrong specs told.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from crossfed.platform.data.prepare import Counts, Recipe, core, load_spec, prepare, shipped
from crossfed.platform.data.splits import assign
from crossfed.platform.data.stats import overlaps, table
from crossfed.platform.data.store import PreparedData
from crossfed.platform.errors import CrossfedError

SHARED = Path(os.environ.get("CROSSFED_SHARED_DATA", Path(__file__).parents[4] / "shared" / "data"))


def real(folder: str) -> Path:
    if not (SHARED / folder).is_dir():
        pytest.skip(f"no real data: {SHARED / folder} is not there (set CROSSFED_SHARED_DATA)")
    return SHARED


COLUMNS = {"user": "u", "item": "i", "time": "t", "rating": "r", "quantity": "q", "order": "o"}


def run(
    folder: Path,
    *domains: str,
    recipe: dict | None = None,
    own: dict | None = None,
    items: str = "",
    users: str = "all",
    out: str = "out",
    **more,
) -> PreparedData:
    """Prepare CSV domains named a, b …, by default without any filter."""
    spec: dict = {"name": "test", "users": users, "domains": {}}
    spec["recipe"] = {"user_core": 0, "item_core": 0} | (recipe or {})
    for name, rows in zip("abc", domains, strict=False):
        (folder / f"{name}.csv").write_text("u,i,t,r,q,o,d\n" + "\n".join(rows.split()) + "\n")
        source = {"path": f"{name}.csv", "columns": COLUMNS}
        spec["domains"][name] = {"interactions": source, "recipe": own or {}, **more}
        if items:
            (folder / "items").write_text(items)
            spec["domains"][name]["items"] = [{"path": "items"}]
    (folder / "spec.yaml").write_text(yaml.safe_dump(spec))
    return prepare(folder / "spec.yaml", folder / out)


def pairs(data: PreparedData, domain: str = "a") -> list[tuple[str, str, int]]:
    """User id, item id and time of every interaction, in stored order."""
    users, items, times = data.interactions(domain)
    user_ids, item_ids = data.user_ids(domain), data.item_ids(domain)
    return [(user_ids[u], item_ids[i], int(t)) for u, i, t in zip(users, items, times, strict=True)]


def counted(data: PreparedData, domain: str = "a") -> dict:
    return data.manifest["domains"][domain]["preparation"]


# user, item, time, rating, quantity, order, description
SHOP = """
y,b,30,5,1,100,Blue_Cup
x,b,20,1,2,101,blue_mug
x,a,10,4,-3,C102,red_cup
x,a,40,4,1,103,red_cup
y,a,30,3,1,104,
,a,50,3,1,105,green_cup
"""


def test_ids_are_numbered_in_order_and_rows_sorted(tmp_path):
    data = run(tmp_path, SHOP)
    assert data.user_ids("a") == ["x", "y"]
    assert data.item_ids("a") == ["a", "b"]
    # y's rows share time 30 and keep the file's order; x's second a is a duplicate
    assert pairs(data) == [("x", "a", 10), ("x", "b", 20), ("y", "b", 30), ("y", "a", 30)]
    assert counted(data)["dropped"] == {"without user": 1, "duplicates": 1}


@pytest.mark.parametrize(
    ("recipe", "expected", "dropped"),
    [
        ({"duplicates": "last"}, "xb20 xa40 yb30 ya30", {"duplicates": 1}),
        ({"unique": ["user"]}, "xa10 yb30", {"duplicates": 3}),
        ({"ties": "item"}, "xa10 xb20 ya30 yb30", {"duplicates": 1}),
        ({"min_rating": 4}, "xa10 yb30", {"below min_rating": 2, "duplicates": 1}),
        ({"min_quantity": 1}, "xb20 xa40 yb30 ya30", {"below min_quantity": 1}),
        ({"cancellations": "drop"}, "xb20 xa40 yb30 ya30", {"cancellations": 1}),
        ({"required": ["d"]}, "xa10 xb20 yb30", {"without d": 1, "duplicates": 1}),
        ({"user_core": 2, "item_core": 2}, "xa10 xb20 yb30 ya30", {"duplicates": 1}),
        (
            {"duplicates": "all", "min_quantity": 1},
            "xb20 xa40 yb30 ya30",
            {"below min_quantity": 1},
        ),
        (
            {"unique": ["o", "item"], "min_quantity": 1},
            "xb20 xa40 yb30 ya30",
            {"below min_quantity": 1},
        ),
    ],
)
def test_rules(tmp_path, recipe, expected, dropped):
    data = run(tmp_path, SHOP, recipe=recipe)
    assert " ".join(f"{u}{i}{t}" for u, i, t in pairs(data)) == expected
    assert counted(data)["dropped"] == {"without user": 1} | dropped


@pytest.mark.parametrize(
    "recipe",
    [{"duplicates": "all"}, {"unique": ["user", "item", "time"]}, {"unique": ["o", "item"]}],
)
def test_repeated_pairs_are_refused(tmp_path, recipe):
    """No split could part them: training would show what is tested."""
    with pytest.raises(
        CrossfedError, match="Domain a: 1 of 5 interactions repeat a user and an item"
    ):
        run(tmp_path, SHOP, recipe=recipe)


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        ({"contains": ["CUP"]}, "xa10 yb30"),
        ({"contains": ["mug", "blue"]}, "xb20 yb30"),
        ({"lacks": ["blue"]}, "xa10 ya30"),
        ({"contains": ["cup"], "lacks": ["red"]}, "yb30"),
    ],
)
def test_rows_by_words(tmp_path, keep, expected):
    data = run(tmp_path, SHOP, keep=[{"column": "d", **keep}])
    assert " ".join(f"{u}{i}{t}" for u, i, t in pairs(data)) == expected


def test_k_core_is_iterated_and_separate(tmp_path):
    """2-core of users: z (one row) goes, which leaves item c one row; 2-core of items: c goes,
    which leaves y one row; y goes, which leaves b two rows. With items unfiltered only z goes."""
    rows = "x,a,1 x,b,2 w,a,3 w,b,4 y,a,5 y,c,6 z,c,7".replace(" ", ",,,,\n") + ",,,,"
    kept = run(tmp_path, rows, recipe={"user_core": 2, "item_core": 2})
    assert {(u, i) for u, i, _ in pairs(kept)} == {("x", "a"), ("x", "b"), ("w", "a"), ("w", "b")}
    assert counted(kept)["dropped"] == {"by k-core": 3}
    only_users = run(tmp_path, rows, recipe={"user_core": 2}, out="users")
    assert only_users.sizes("a") == (3, 3)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(1, 4))
def test_core_is_the_largest_that_holds(seed, user_core, item_core):
    """Against dropping one row at a time, in any order, until nothing is below."""
    rng = np.random.default_rng(seed)
    users, items = rng.integers(0, 12, 40), rng.integers(0, 9, 40)
    left = set(range(40))
    while low := [
        row
        for row in left
        if sum(users[r] == users[row] for r in left) < user_core
        or sum(items[r] == items[row] for r in left) < item_core
    ]:
        left.discard(low[0])
    assert set(np.flatnonzero(core(users, items, user_core, item_core)).tolist()) == left


def test_shared_users_to_a_joint_fixed_point(tmp_path):
    """v is in a only. w is in both, but falls out of b by its 2-core of users, and so out of a,
    where item n then has one row and falls out of the 2-core of items."""
    a = (
        "x,m,1 x,n,2 y,m,3 y,k,4 z,m,5 z,k,6 w,m,7 w,n,8 v,m,9 v,n,10".replace(" ", ",,,,\n")
        + ",,,,"
    )
    b = "x,p,1 x,q,2 y,p,3 y,q,4 z,p,5 z,q,6 w,p,7".replace(" ", ",,,,\n") + ",,,,"
    recipe = {"user_core": 1, "item_core": 2}
    (tmp_path / "loose").mkdir()
    loose = run(tmp_path / "loose", a, b, recipe=recipe, users="shared")
    assert loose.user_ids("a") == loose.user_ids("b") == ["w", "x", "y", "z"]
    tight = run(tmp_path, a, b, recipe=recipe | {"user_core": 2}, users="shared")
    # without w, x has m and only n, which one row is not enough for: x goes too, and with it from b
    assert tight.user_ids("a") == tight.user_ids("b") == ["y", "z"]
    assert tight.item_ids("a") == ["k", "m"]


def test_all_users_and_overlap(tmp_path):
    data = run(tmp_path, SHOP, "y,p,1,,,,\nz,q,2,,,,")
    assert [(row.domain, row.users, row.items, row.interactions) for row in table(data)] == [
        ("a", 2, 2, 4),
        ("b", 2, 2, 2),
    ]
    assert table(data)[0].average_length == 4 / 2
    assert table(data)[0].density == 4 / (2 * 2)
    assert [(o.domains, o.users, o.ratio) for o in overlaps(data)] == [(("a", "b"), 1, 1 / 3)]


META = (
    "{'asin': 'a', 'title': 'T &amp; a', 'brand': 'B'}\n{'asin': 'a', 'title': 'again'}\n"
    "{'asin': 'other', 'title': 'other'}\n{'asin': 'b'}\n"
)


def test_texts_are_joined_in_order_and_counted(tmp_path):
    data = run(tmp_path, SHOP + "z,c,1,5,1,1,x", items=META, recipe={"text": ["brand", "title"]})
    assert data.item_texts("a") == ["B T & a", "", ""]
    assert data.manifest["domains"]["a"]["items_without_text"] == 2
    assert counted(data)["text_fields"] == {"brand": 1, "title": 1}
    assert counted(data)["items_without_row"] == 1
    assert counted(data)["item_files"]["items"]["duplicates"] == 1


def test_items_without_text_are_dropped_before_the_core_counts(tmp_path):
    """Without b, y has one row left and falls out of the 2-core of users."""
    rows = "x,a,1 x,c,2 y,a,3 y,b,4".replace(" ", ",,,,\n") + ",,,,"
    meta = META + "{'asin': 'c', 'title': 'c'}\n"
    data = run(
        tmp_path,
        rows,
        items=meta,
        recipe={"text": ["title"], "without_text": "drop", "user_core": 2},
    )
    assert pairs(data) == [("x", "a", 1), ("x", "c", 2)]
    assert counted(data)["dropped"] == {"items without text": 1, "by k-core": 1}
    with pytest.raises(
        CrossfedError,
        match=r"Domain a: 1 of [0-9]+ items have no text, b "
        r"among them",
    ):
        run(
            tmp_path,
            rows,
            items=meta,
            recipe={"text": ["title"], "without_text": "fail"},
            out="fail",
        )


def test_no_item_with_text_is_not_blamed_on_the_core(tmp_path):
    with pytest.raises(CrossfedError, match="Domain a: 2 of 2 items have no text, a among them"):
        meta = "{'asin': 'a'}\n{'asin': 'b'}\n"
        run(
            tmp_path,
            "x,a,1,,,, y,b,2,,,,",
            items=meta,
            recipe={"text": ["title"], "without_text": "drop"},
        )


def test_text_of_rows_is_the_most_frequent(tmp_path):
    """a: red twice against green, blue and an empty one. b: a tie, the earliest counts."""
    rows = (
        "x,a,1,,,,green y,a,2,,,,red z,a,3,,,,red w,a,4,,,,blue v,a,5,,,, x,b,6,,,,late "
        "y,b,1,,,,early"
    )
    data = run(tmp_path, rows, recipe={"text": ["d"]})
    assert data.item_texts("a") == ["red", "early"]


def test_recipe_of_a_domain_changes_only_what_it_says(tmp_path):
    data = run(
        tmp_path, SHOP, recipe={"duplicates": "last", "min_rating": 2}, own={"min_rating": 4}
    )
    assert [time for *_, time in pairs(data)] == [40, 30]
    assert data.manifest["recipe"]["domains"]["a"]["recipe"]["duplicates"] == "last"


def test_same_bytes_again_and_no_place_in_the_manifest(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    contents = []
    for folder in (one, two):
        out = run(folder, SHOP, items=META, recipe={"text": ["title"]}).path
        contents.append({f.name: f.read_bytes() for f in out.rglob("*") if f.is_file()})
    assert contents[0] == contents[1]
    assert str(tmp_path).encode() not in contents[0]["manifest.json"]


def test_other_counts_than_the_papers_are_reported(tmp_path):
    messages: list[str] = []
    run(tmp_path, SHOP, paper={"users": 2, "items": 3, "interactions": 4})
    data = prepare(tmp_path / "spec.yaml", tmp_path / "again", report=messages.append)
    assert counted(data)["paper"] == {"users": 2, "items": 3, "interactions": 4}
    assert messages[-2:] == [
        "a: 2 users, 2 items, 4 interactions",
        "a: the paper has 2 users, 3 items, 4 interactions",
    ]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"recipe": {"user_core": 9}},
            r"Domain a is emptied by its 9-core of users and 0-core of items \(before it: 2",
        ),
        (
            {"recipe": {"min_rating": 6}},
            r"Domain a: no row of a\.csv is left after the "
            r"recipe's filters",
        ),
        ({"recipe": {"unique": ["user", "where"]}}, r"a\.csv .* has no column 'where'"),
        (
            {"recipe": {"text": ["title"]}},
            r"a\.csv .* has no column 'title' for title; it has "
            r"u, i, t, r, q, o, d\.",
        ),
        (
            {"recipe": {"user_core": -1}},
            r"wrong at recipe\.user_core: Input should be greater "
            r"than or equal to 0",
        ),
        ({"recipe": {"k": 5}}, r"wrong at recipe\.k: no such key"),
        ({"users": "shared"}, "users: shared needs at least two domains"),
        ({"domains": {}}, r"wrong at domains: .* at least 1 item"),
        ({"domains": {"server": {"interactions": {"path": "a.csv"}}}}, "domain name 'server'"),
        (
            {"domains": {"a": {"interactions": {"path": "no.csv", "published": "x.org"}}}},
            r"no\.csv \(published at x\.org",
        ),
        (
            {"domains": {"a": {"interactions": {"path": "a.csv"}, "recipe": {"ties": "id"}}}},
            r"wrong at domains\.a\.recipe\.ties",
        ),
    ],
)
def test_wrong_specs_are_told(tmp_path, change, words):
    run(tmp_path, SHOP)
    spec = yaml.safe_load((tmp_path / "spec.yaml").read_text())
    for key, value in change.items():
        spec[key] = spec[key] | value if key == "recipe" else value
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(spec))
    with pytest.raises(CrossfedError, match=words):
        prepare(tmp_path / "spec.yaml", tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_specs_that_are_not_there_or_not_yaml(tmp_path):
    with pytest.raises(
        CrossfedError,
        match=r"no spec none\.yaml; give a YAML file or one of "
        r"beauty-office",
    ):
        load_spec("none.yaml")
    (tmp_path / "s.yaml").write_text("a: b: c")
    with pytest.raises(CrossfedError, match=r"s\.yaml is not YAML: .* line 1"):
        load_spec(tmp_path / "s.yaml")
    (tmp_path / "s.yaml").write_text("")
    with pytest.raises(CrossfedError, match=r"s\.yaml is wrong at the spec"):
        load_spec(tmp_path / "s.yaml")
    with pytest.raises(
        CrossfedError, match="comes with crossfed; say where its files are with --sources"
    ):
        prepare("gift-cards", tmp_path / "out")
    with pytest.raises(CrossfedError, match="The directory of sources"):
        prepare("gift-cards", tmp_path / "out", tmp_path / "none")


PAPERS = {
    "fedcrf": ["care-beauty", "food-onlineretail", "kitchen-food"],
    "fedcgr": ["fk", "gb", "gs", "fkb", "gbs", "gkbs"],
    "p2p-iagr": ["elec-cell", "game-movie", "food-kitchen"],
}


def test_shipped_specs_are_valid_and_say_where_files_are_published():
    specs = {name: load_spec(name) for name in shipped()}
    assert {f"{paper}-{name}" for paper, names in PAPERS.items() for name in names} <= specs.keys()
    for name, spec in specs.items():
        assert spec.name == name
        for domain in spec.domains.values():
            assert all(source.published for source in domain.sources)


def test_papers_recipes():
    """FedCRF, section 4.2; FedCGR, 4.1.1; P2P-IAGR, 4.1: shared users, at least 5 per user and 10
    per item.
    """
    assert load_spec("fedcrf-care-beauty").recipe_of("care") == Recipe(
        text=("title", "description", "brand")
    )
    fedcgr = load_spec("fedcgr-gkbs")
    assert list(fedcgr.domains) == ["grocery", "kitchen", "beauty", "sports"]
    assert (fedcgr.users, fedcgr.recipe.user_core, fedcgr.recipe.item_core) == ("all", 5, 5)
    iagr = load_spec("p2p-iagr-elec-cell")
    assert (iagr.users, iagr.recipe.user_core, iagr.recipe.item_core) == ("shared", 5, 10)
    assert iagr.domains["elec"].paper == Counts(users=14591, items=11270, interactions=397034)


# Real data: the counts of the README beside them, exactly.


def sizes(data: PreparedData, domain: str) -> tuple[int, int, int]:
    return (*data.sizes(domain), data.manifest["domains"][domain]["interactions"])


def test_real_beauty_and_office(tmp_path):
    data = prepare("beauty-office", tmp_path / "d", real("amazon_beauty_2014"))
    assert sizes(data, "beauty") == (22_363, 12_101, 198_502)
    assert sizes(data, "office") == (4_905, 2_420, 53_258)
    assert [o.users for o in overlaps(data)] == [2_028]
    assert counted(data, "beauty")["text_fields"] == {
        "title": 12_094,
        "brand": 10_003,
        "categories": 12_101,
        "description": 0,
    }
    assert all(data.item_texts("beauty"))
    split = assign(*data.interactions("beauty"), 22_363, "leave-one-out")
    assert np.bincount(split).tolist() == [198_502 - 2 * 22_363, 22_363, 22_363]


@pytest.mark.parametrize(("name", "folder", "domain", "expected"), [
    ("gift-cards", "amazon_gift_cards_2018", "giftcards", (453, 147, 2_941)),
    ("movielens-100k", "movielens_100k", "movies", (943, 1_349, 99_287)),
])  # fmt: skip
def test_real_small_ones_and_their_bytes(tmp_path, name, folder, domain, expected):
    contents = []
    for out in ("one", "two"):
        data = prepare(name, tmp_path / out, real(folder))
        assert sizes(data, domain) == expected
        contents.append({f.name: f.read_bytes() for f in data.path.rglob("*") if f.is_file()})
    assert contents[0] == contents[1]


def retail(
    tmp_path: Path,
    file: str,
    out: str,
    user: str = "InvoiceNo",
    report=lambda message: None,
    **recipe,
) -> PreparedData:
    spec = yaml.safe_load(shipped()["onlineretail"].read_text())
    spec["domains"]["onlineretail"]["interactions"] |= {
        "path": f"online_retail/{file}",
        "columns": {"user": user},
    }
    spec["recipe"] |= recipe
    (tmp_path / f"{out}.yaml").write_text(yaml.safe_dump(spec))
    return prepare(tmp_path / f"{out}.yaml", tmp_path / out, real("online_retail"), report)


def test_real_online_retail_from_both_layouts(tmp_path):
    one = prepare("onlineretail", tmp_path / "one", real("online_retail"))
    two = retail(tmp_path, "online_retail_utf8.csv.gz", "two")
    assert sizes(one, "onlineretail") == (16_517, 3_466, 514_649)
    assert one.fingerprint == two.fingerprint
    assert one.manifest["domains"]["onlineretail"]["items_without_text"] == 0


@pytest.mark.slow
def test_real_online_retail_by_other_recipes(tmp_path):
    told: list[str] = []
    with pytest.raises(CrossfedError, match="of 525,297 interactions repeat a user and an item"):
        retail(tmp_path, "data.csv.gz", "rows", report=told.append, duplicates="all")
    assert told[-1] == "onlineretail: 16,529 users, 3,471 items, 525,297 interactions"
    customers = retail(
        tmp_path, "data.csv.gz", "c", "CustomerID", cancellations="drop", min_quantity=1
    )
    assert sizes(customers, "onlineretail") == (4_078, 3_149, 265_082)


@pytest.mark.slow
def test_real_shop_parts_overlap(tmp_path):
    data = prepare("onlineretail-kitchen-decoration", tmp_path / "d", real("online_retail"))
    assert overlaps(data)[0].users > 2_000


@pytest.mark.slow
def test_real_office_item_file_of_recbole(tmp_path):
    """Amazon_Beauty.item has a tab and a newline inside quotes: 12,101 items, not 12,102."""
    from crossfed.platform.data.readers import Source, read_items

    path = real("amazon_beauty_2014") / "amazon_beauty_2014" / "Amazon_Beauty.item"
    beauty = prepare("beauty-office", tmp_path / "d", SHARED)
    items = read_items(path, Source(path=path.name), ["title"], set(beauty.item_ids("beauty")))
    assert (len(items.texts), items.progress.rows, items.layout) == (12_101, 12_101, "recbole")
