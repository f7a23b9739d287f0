"""Lines of delimited files: a quotation mark swallows no row, and separators and quoting are
recognised.
"""

from __future__ import annotations

import pytest

from crossfed.platform.data.delimited import BLANKS, Parser, sniff_quoting, sniff_separator
from crossfed.platform.data.readers import Source, read_table
from crossfed.platform.errors import CrossfedError


def read(path, *texts, **source):
    return read_table(path, Source(path=path.name, **source), ["user", "item", *texts])


def movies(n: int, marks: dict[int, str], separator: str = "\t") -> str:
    """A header and n rows, 40 users in turn; `marks` are the titles of some rows."""
    rows = [
        separator.join(
            [f"u{k % 40}", f"i{k % 23}", str(1_600_000_000 + k), marks.get(k, f"title {k}")]
        )
        for k in range(1, n + 1)
    ]
    return "\n".join([separator.join(["user", "item", "time", "title"]), *rows]) + "\n"


@pytest.mark.parametrize("separator", ["\t", ",", ";"])
@pytest.mark.parametrize(
    ("n", "marks"),
    [
        (400, {10: '"Weird Al live', 250: '"Heroes" album'}),
        (1000, {100: '"it begins', 199: 'it ends"', 300: 'so "they" say "', 398: 'and "end"'}),
        (1000, {100: '"it begins', 199: 'it ends"', 300: '"again', 398: 'and end"'}),
        (60, {10: '"opens', 12: 'closes"'}),
        (60, {60: '"opens and nothing follows'}),
    ],
)
def test_a_quotation_mark_swallows_no_row(tmp_path, separator, n, marks):
    """Whether the mark closes far away, near or never: every row is there, and its own title."""
    path = tmp_path / "f"
    path.write_text(movies(n, marks, separator))
    table = read(path, "title")
    assert (table.progress.rows, table.progress.broken) == (n, 0)
    assert table.times.whole.tolist() == list(range(1_600_000_001, 1_600_000_001 + n))
    assert len(set(table.texts["user"].values)) == 40
    titles = table.texts["title"]
    assert titles.values[titles.codes[-2]] == marks.get(n - 1, f"title {n - 1}")


def test_marks_late_in_a_file_are_no_trap_either(tmp_path):
    """The first lines decide on quoting; a mark that comes after them is met line by line."""
    path = tmp_path / "f"
    path.write_text(movies(9_000, {8_000: '"opens', 8_030: 'closes"'}))
    table = read(path)
    assert (table.progress.rows, table.progress.stray) == (9_000, 1)
    assert table.progress.counts()["stray_quotation_marks"] == 1


def test_fields_of_several_lines_stay_whole(tmp_path):
    path = tmp_path / "f"
    path.write_text('user,title,item,time\nu,"one\ntwo, and\n""three""",i,5\nv,plain,j,6\n')
    table = read(path, "title")
    assert table.texts["title"].values == ['one\ntwo, and\n"three"', "plain"]
    assert table.times.whole.tolist() == [5, 6]


def test_every_line_that_a_field_would_eat_is_counted(tmp_path):
    """A field of 60 lines that are no rows: the line it begins in and the 59 after it are broken,
    none in silence.
    """
    path = tmp_path / "f"
    text = (
        "\n".join(["user,title,item,time", 'u,"a', *["more"] * 58, 'end",i,5', *["u,t,i,6"] * 40])
        + "\n"
    )
    path.write_text(text)
    progress = read(path, max_broken=1).progress
    assert (progress.rows, progress.broken, progress.first_broken) == (40, 60, 2)
    with pytest.raises(
        CrossfedError,
        match=r"60 of 100 lines are broken.*first is line "
        r"2.*`quoting: none` or",
    ):
        read(path)
    assert read(path, max_lines=60).progress.counts() == {"rows": 41, "broken_lines": 0}


def test_an_id_with_a_stray_mark_is_broken(tmp_path):
    path = tmp_path / "f"
    path.write_text('user,item,time\nu,"i,5\n' + "u,i,6\n" * 5)
    progress = read(path, max_broken=0.5).progress
    assert (progress.rows, progress.broken, progress.first_broken) == (5, 1, 2)


def test_quoting_none_takes_marks_as_characters(tmp_path):
    path = tmp_path / "f"
    path.write_text('user,item,time,title\nu,i,5,"Heroes"\n')
    assert read(path, "title").texts["title"].values == ["Heroes"]
    assert read(path, "title", quoting="none").texts["title"].values == ['"Heroes"']


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["a\tb", '1\t"quoted"', '2\t"two ""marks"""'], True),
        (["a\tb", '1\t"Heroes" album', "2\tplain"], False),
        (["a\tb", '1\t5" screen', "2\tplain"], False),
        (["a\tb", '1\t"two\tfields"', '2\t"x'], True),
        (["a,b", '1,"Heroes" album'], True),  # only tabs part fields without quoting
    ],
)
def test_quoting_is_recognised(lines, expected):
    assert sniff_quoting(lines, sniff_separator(lines), 50) is expected


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (
            [
                "1::Toy Story (1995)::Animation|Children's|Comedy",
                "2::Jumanji, or so (1995)::Fantasy",
            ],
            "::",
        ),
        (["u i 5", "v j 6"], " "),
        (["u   i 5", "vv  j 6"], BLANKS),
        (["user,item,time", "u,i,2014-05-21 10:00:00"], ","),
        (["user id,item id", "u,i"], ","),
        (["a;b;c", "1;2,5;3"], ";"),
        (["a|b|c"], "|"),
        (["alone"], ","),
    ],
)
def test_separators_are_recognised(lines, expected):
    assert sniff_separator(lines) == expected


def test_a_row_is_not_read_beyond_the_lines_allowed():
    asked = []

    def peek(n):
        asked.append(n)
        return ["x"] * n

    assert Parser(",", True, 2, (), 5).parse('a,"b', peek)[1] == 1
    assert asked == [4]
