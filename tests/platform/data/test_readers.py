"""Readers: every published layout is recognised and read alike, memory follows the columns, and bad
files are told.
"""

from __future__ import annotations

import gzip
import io
import json
import tracemalloc
import zipfile
from datetime import datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from openpyxl import Workbook

from crossfed.platform.data.readers import Source, Table, read_items, read_table
from crossfed.platform.errors import CrossfedError

REVIEW_2014 = (
    '{"reviewerID": "A1", "asin": "B000000001", "helpful": [0, 1], "reviewText": "so '
    '\\"so\\"", "overall": 4.0, '
    '"unixReviewTime": 1400630400, "reviewTime": "05 21, 2014"}\n'
    '{"reviewerID": "A2", "asin": "0000013714", "helpful": [2, 3], "reviewText": "", '
    '"overall": 5.0, '
    '"unixReviewTime": 1252800000, "reviewTime": "09 13, 2009"}\n'
)
REVIEW_2018 = (
    '{"overall": 4.0, "verified": true, "reviewerID": "A1", "asin": "B000000001", "style": '
    '{"Size:": " 50"}, '
    '"unixReviewTime": 1400630400}\n'
    '{"overall": 5.0, "vote": "2", "reviewerID": "A2", "asin": "0000013714", "unixReviewTime": '
    "1252800000}\n"
)
REVIEW_2023 = (
    '{"rating": 4.0, "title": "x", "text": "y", "images": [], "asin": "B9", "parent_asin": '
    '"B000000001", '
    '"user_id": "A1", "timestamp": 1400630400123, "verified_purchase": true}\n'
    '{"rating": 5.0, "title": "x", "text": "y", "images": [], "asin": "B8", "parent_asin": '
    '"0000013714", '
    '"user_id": "A2", "timestamp": 1252800000000, "verified_purchase": true}\n'
)
CSV_2023 = "user_id,parent_asin,rating,timestamp\nA1,B000000001,4.0,1400630400123\nA2,0000013714,5.0,1252800000000\n"  # noqa: E501
RATINGS_2014 = "A1,B000000001,4.0,1400630400\nA2,0000013714,5.0,1252800000\n"
RATINGS_2018 = "B000000001,A1,4.0,1400630400\n0000013714,A2,5.0,1252800000\n"
RECBOLE = (
    "user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
    "A1\tB000000001\t4\t1400630400.0\nA2\t0000013714\t5\t1252800000.0\n"
)
SEMICOLONS = (
    "when;who;what;stars\n2014-05-21;A1;B000000001;4\n2009-09-13T00:00:00;A2;0000013714;5\n"
)
MAPPING = {"user": "who", "item": "what", "rating": "stars", "time": "when"}

LAYOUTS = {
    "2014": (REVIEW_2014, "amazon-reviews", {}),
    "2018": (REVIEW_2018, "amazon-reviews", {}),
    "2023": (REVIEW_2023, "amazon-reviews-2023", {}),
    "2023-csv": (CSV_2023, "amazon-reviews-2023", {}),
    "ratings-2014": (RATINGS_2014, "amazon-ratings", {}),
    "ratings-2018": (RATINGS_2018, "amazon-ratings-2018", {}),
    "recbole": (RECBOLE, "recbole", {}),
    "mapping": (SEMICOLONS, "table", {"columns": MAPPING}),
    "no-header": (
        RATINGS_2014.replace(",", "|"),
        "table",
        {"columns": {"user": 1, "item": 2, "rating": 3, "time": 4}},
    ),
}


def read(path: Path, texts=("user", "item"), numbers=("rating",), **source) -> Table:
    return read_table(path, Source(path=path.name, **source), texts, numbers)


def rows(table: Table) -> list[tuple]:
    """Everything that was read, row by row, with times in seconds."""
    texts = [
        [c.values[code] if code >= 0 else None for code in c.codes] for c in table.texts.values()
    ]
    return list(zip(*texts, *table.numbers.values(), table.times.whole, strict=True))


@pytest.mark.parametrize("compress", [False, True], ids=["plain", "gzip"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_are_recognised_by_content(tmp_path, name, compress):
    text, layout, source = LAYOUTS[name]
    path = tmp_path / "file"
    path.write_bytes(gzip.compress(text.encode()) if compress else text.encode())
    table = read(path, **source)
    assert table.layout == layout
    assert rows(table) == [
        ("A1", "B000000001", 4.0, 1400630400),
        ("A2", "0000013714", 5.0, 1252800000),
    ]
    assert table.progress.counts() == {"rows": 2, "broken_lines": 0}


def test_milliseconds_keep_their_order(tmp_path):
    path = tmp_path / "f.csv"
    path.write_text(CSV_2023)
    times = read(path).times
    assert times.whole.tolist() == [1400630400, 1252800000]
    assert times.nanoseconds.tolist() == [123_000_000, 0]


def test_layout_can_be_said(tmp_path):
    """Ids that look like no ASIN: the order of columns has to be said."""
    path = tmp_path / "f.csv"
    path.write_text("a,b,1.0,7\n")
    assert rows(read(path, layout="amazon-ratings")) == [("a", "b", 1.0, 7)]
    assert rows(read(path, layout="amazon-ratings-2018")) == [("b", "a", 1.0, 7)]
    with pytest.raises(CrossfedError, match=r"read as table\) has no column 'user' for user"):
        read(path)


def test_parquet(tmp_path):
    path = tmp_path / "f.parquet"
    times = pa.array([datetime(2014, 5, 21), datetime(2009, 9, 13)], pa.timestamp("us"))
    columns = {
        "who": ["A1", None],
        "what": [17850.0, 2.0],
        "stars": [4, None],
        "when": times,
        "more": [[1], [2]],
    }
    pq.write_table(pa.table(columns), path)
    table = read(path, columns=MAPPING)
    assert rows(table)[0] == ("A1", "17850", 4.0, 1400630400)
    assert rows(table)[1][:2] == (None, "2")
    assert np.isnan(table.numbers["rating"][1])


RETAIL = [
    (
        "536365",
        "85123A",
        "HANGING HEART",
        6,
        datetime(2010, 12, 1, 8, 26),
        2.55,
        17850,
        "United Kingdom",
    ),
    ("C536379", "D", "Discount, £", -1, datetime(2010, 12, 1, 9, 41), 27.5, None, "United Kingdom"),
    ("536381", "82567", None, 2, datetime(2011, 1, 13, 17, 5), 2.1, 15311, "EIRE"),
]
RETAIL_HEADER = [
    "InvoiceNo",
    "StockCode",
    "Description",
    "Quantity",
    "InvoiceDate",
    "UnitPrice",
    "CustomerID",
    "Country",
]


def write_retail(path: Path, layout: str) -> None:
    if layout == "xlsx":
        book = Workbook()
        book.active.append(RETAIL_HEADER)
        for row in RETAIL:
            # the workbook as published holds order and stock numbers as numbers where they are
            book.active.append([int(v) if isinstance(v, str) and v.isdigit() else v for v in row])
        book.save(path)
        return
    lines = [",".join(RETAIL_HEADER)]
    for order, stock, text, quantity, when, price, customer, country in RETAIL:
        text = f'"{text}"' if text and "," in text else text or ""
        if layout == "kaggle":
            date, who = f"{when.month}/{when.day}/{when.year} {when.hour}:{when:%M}", customer or ""
        else:
            date, who = f"{when:%Y-%m-%d %H:%M:%S}", f"{customer}.0" if customer else ""
        lines.append(f"{order},{stock},{text},{quantity},{date},{price},{who},{country}")
    path.write_bytes("\n".join(lines).encode("latin-1" if layout == "kaggle" else "utf-8-sig"))


@pytest.mark.parametrize("layout", ["kaggle", "utf8", "xlsx"])
def test_online_retail_is_the_same_in_all_layouts(tmp_path, layout):
    write_retail(tmp_path / "f", layout)
    table = read(tmp_path / "f", ("user", "item", "Description", "order"), ("quantity",))
    assert table.layout == "online-retail"
    assert rows(table) == [
        ("17850", "85123A", "HANGING HEART", "536365", 6.0, 1291191960),
        (None, "D", "Discount, £", "C536379", -1.0, 1291196460),
        ("15311", "82567", None, "536381", 2.0, 1294938300),
    ]


def test_recbole_items_with_tab_and_newline_in_quotes(tmp_path):
    path = tmp_path / "f.item"
    path.write_text(
        "item_id:token\ttitle:token\tcategories:token_seq\n"
        'i1\t"Two\twords\nand a ""quote"""\t\'Beauty\', \'Hair Care\'\n'
        'i2\tPlain\t"\'Beauty\', ""Women\'s"""\n'
    )
    items = read_items(path, Source(path="f"), ["title", "categories"], {"i1", "i2"})
    assert items.texts == {
        "i1": 'Two words and a "quote" Beauty Hair Care',
        "i2": "Plain Beauty Women's",
    }
    assert items.layout == "recbole"


META_2014 = (
    "{'asin': 'B1', 'title': \"Women's &amp; Men's\", 'related': {'also_bought': ['B3']}, "
    "'brand': 'X', "
    "'categories': [['Beauty', 'Hair'], ['Beauty', 'Skin']]}\n"
    "{'asin': 'B2', 'description': u'Caf\\xe9 \\% \\'s'}\n"
    "{'asin': 'B3', 'title': 'another'}\n"
)
META_2018 = (
    '{"category": ["Gift Cards", "Food"], "description": ["<b>One</b>", "two"], "title": '
    '"Card", "brand": "X", '
    '"feature": ["f"], "asin": "B1"}\n{"category": [], "description": [], "title": "", "asin": '
    '"B2"}\n'
)
META_2023 = (
    '{"main_category": "All", "title": "Card", "features": ["f"], "description": ["One", '
    '"two"], "store": "X", '
    '"categories": ["Gift Cards", "Food"], "parent_asin": "B1"}\n{"title": "", "parent_asin": '
    '"B2"}\n'
)
FIELDS = ["title", "brand", "categories", "features", "description"]


@pytest.mark.parametrize(
    ("text", "layout", "expected"),
    [
        (
            META_2014,
            "amazon-meta-2014",
            {"B1": "Women's & Men's X Beauty Hair Skin", "B2": "Café \\% 's"},
        ),
        (META_2018, "amazon-meta-2018", {"B1": "Card X Gift Cards Food f One two", "B2": ""}),
        (META_2023, "amazon-meta-2023", {"B1": "Card X Gift Cards Food f One two", "B2": ""}),
    ],
)
def test_item_layouts(tmp_path, text, layout, expected):
    path = tmp_path / "meta.gz"
    path.write_bytes(gzip.compress(text.encode()))
    items = read_items(path, Source(path="f"), FIELDS, {"B1", "B2"})
    assert items.layout == layout
    assert items.texts == expected
    assert items.with_field["title"] == 1


def test_first_item_row_counts(tmp_path):
    path = tmp_path / "meta"
    path.write_text(
        "{'asin': 'B1', 'title': 'one'}\n{'asin': 'B1', 'title': 'two'}\n{'asin': "
        "'B2', 'title': 'x'}\n"
    )
    items = read_items(path, Source(path="f"), ["title"], {"B1", "B9"})
    assert (items.texts, items.duplicates) == ({"B1": "one"}, 1)


def test_items_may_all_be_others(tmp_path):
    path = tmp_path / "meta"
    path.write_text(META_2014)
    assert read_items(path, Source(path="f"), ["title"], {"B9"}).texts == {}


def zipped() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("data.csv", "a,b\n")
    return buffer.getvalue()


def reviews(n: int, text: str = "x", broken: int = 0) -> bytes:
    review = {"reviewText": text, "overall": 5.0}
    lines = [
        json.dumps(
            {"reviewerID": f"A{i % 97}", "asin": f"B{i % 31}", "unixReviewTime": i, **review}
        )
        for i in range(n)
    ]
    for i in range(broken):
        lines[10 + i] = lines[10 + i][:-5]
    return ("\n".join(lines) + "\n").encode()


def test_broken_lines_are_counted(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(reviews(400, broken=4))
    table = read(path)
    assert table.progress.counts() == {"rows": 396, "broken_lines": 4, "first_broken_line": 11}
    assert table.times.whole[10] == 14


def test_too_many_broken_lines(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(reviews(400, broken=5))
    with pytest.raises(
        CrossfedError,
        match=r"f: 5 of 400 lines are broken, more than 1\.00%; "
        r"the first is line 11",
    ):
        read(path)
    assert read(path, max_broken=0.02).progress.broken == 5


def test_csv_rows_of_another_width_are_broken(tmp_path):
    path = tmp_path / "f"
    path.write_text(
        "who,what,stars,when\n" + "u,i,1,5\n" * 300 + "u,i,1\n" + '"u" x,i,1,5\n' + "\nu,i,1,6\n"
    )
    progress = read(path, columns=MAPPING).progress
    assert (progress.rows, progress.broken, progress.first_broken) == (301, 2, 302)


def test_memory_follows_the_columns_not_the_file(tmp_path):
    """10,000 reviews of 3 kB each: 30 MB of text of which nothing is asked for."""
    path = tmp_path / "f.gz"
    path.write_bytes(gzip.compress(reviews(10_000, text="word " * 600), compresslevel=1))
    read(path)  # imports and caches are not the file's
    tracemalloc.start()
    table = read(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert table.progress.rows == 10_000
    assert peak < 6e6


@pytest.mark.parametrize(
    ("content", "source", "words"),
    [
        (
            gzip.compress(reviews(3000), mtime=0)[:-3000],
            {},
            r"f: the compressed data are damaged or cut off after line \d+",
        ),
        (b"", {}, "f is empty"),
        (b"who,what,stars,when\n", {"columns": MAPPING}, "no rows below its header"),
        (
            b"who,what,stars\nu,i,1\n",
            {"columns": MAPPING},
            "has no column 'when' for time; it has who, what, stars",
        ),
        (b"user,item,rating\nu,i,1\n", {}, r"has no column for time; it has user, item, rating\."),
        (
            b"who,what,stars,when\nu,i,1,5\nu,i,1,soon\n",
            {"columns": MAPPING},
            "f, line 3: 'soon' in 'when' is no time",
        ),
        (
            b"who,what,stars,when\nu,i,1,5\nu,i,1,\n",
            {"columns": MAPPING},
            "f, line 3: '' in 'when' is no time",
        ),
        (
            b"who,what,stars,when\nu,i,1,5\nu,i,1,nan\n",
            {"columns": MAPPING},
            "f, line 3: 'nan' in 'when' is no time",
        ),
        (
            b"who,what,stars,when\nu,i,good,5\n",
            {"columns": MAPPING},
            "f, line 2: 'good' in 'stars' is no number",
        ),
        (
            b"who,what,stars,when\nu,i,1,1400630400123\n",
            {"columns": MAPPING},
            "line 2: .* set `time: milliseconds`",
        ),
        (
            b"who,what,stars,when\nu,i,1,5\nu,\xa3,1,5\n",
            {"columns": MAPPING},
            "f, line 3: byte 0xa3 is not utf-8",
        ),
        (b"wh\xa3,what\n", {"columns": MAPPING}, "f, line 1: byte 0xa3 is not utf-8"),
        (
            b'who,what,stars,when\nu,i,1,5\nu,"i,1,5\nu,i,1,5\n',
            {"columns": MAPPING},
            r"the first is line 3 \(a quotation mark",
        ),
        (b'{"reviewerID": "u", "asin": "i"\n', {}, "none of the first lines is a JSON object"),
        (
            b'{"who": ["u"], "what": "i", "stars": 1, "when": 1}\n',
            {"columns": MAPPING},
            "user holds a list",
        ),
        (b"PAR1 and no more", {}, "f cannot be read"),
        (b"PK\x03\x04 and no more", {}, "f cannot be read"),
        (gzip.compress(b"PAR1 and more", mtime=0), {}, "f is a compressed Parquet or Excel file"),
        (
            reviews(5),
            {"columns": {"rating": "stars"}},
            r"read as amazon-reviews\) has no "
            r"column 'stars' for rating",
        ),
        (
            RATINGS_2014.encode(),
            {"columns": {"user": 1}},
            "has no column 'item' for item; it has 4 columns",
        ),
        (
            b"a,b,c\n",
            {"columns": {"user": 1, "item": 2, "rating": 3, "time": 5}},
            "has no column 5 for time; it has 3",
        ),
        (zipped(), {}, "f is a ZIP archive, but no Excel workbook"),
    ],
)
def test_bad_files_are_told(tmp_path, content, source, words):
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(CrossfedError, match=words):
        read(tmp_path / "f", **source)


def test_missing_file_and_directory(tmp_path):
    with pytest.raises(CrossfedError, match="none does not exist"):
        read(tmp_path / "none")
    with pytest.raises(CrossfedError, match="is a directory"):
        read(tmp_path)


def test_encoding_separator_and_date_format_can_be_said(tmp_path):
    path = tmp_path / "f"
    path.write_bytes("who|what|stars|when\nü|a,b;c|1|31.12.2020\n".encode("latin-1"))
    table = read(path, columns=MAPPING, encoding="latin-1", separator="|", time="%d.%m.%Y")
    assert rows(table) == [("ü", "a,b;c", 1.0, 1609372800)]


@pytest.mark.parametrize(
    ("unit", "expected", "kind"),
    [
        ("seconds", [3, 86400], "seconds"),
        ("days", [3 * 86400, 86400**2], "seconds"),
        ("order", [3, 86400], "order"),
        ("row", [0, 1], "order"),
    ],
)
def test_units_of_time(tmp_path, unit, expected, kind):
    path = tmp_path / "f"
    path.write_text("who,what,stars,when\nu,i,1,3\nu,i,1,86400\n")
    table = read(path, columns=MAPPING, time=unit)
    assert (table.times.whole.tolist(), table.time_kind) == (expected, kind)
