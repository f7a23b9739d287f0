"""A page: escaped, its cells marked, the same content as Markdown."""

from __future__ import annotations

from pathlib import Path

from crossfed.platform.report.page import Page, Section, write
from crossfed.platform.report.tables import Cell, Column, Grid


def test_a_page_is_escaped_and_its_cells_are_marked(tmp_path: Path) -> None:
    columns = (Column("a", right=False), Column("b", "group"))
    grid = Grid(
        "T",
        columns,
        (("x<y", Cell("1", best=True, mark="†")), ("z", Cell("2", second=True))),
        "cap",
        foot=(("all", "3"),),
    )
    files = write(
        Page("A & b", ("see `x <y>` there",), (Section("S", ("t",), (grid,)),)), tmp_path / "page"
    )
    html = files[1].read_text()
    assert "<title>A &amp; b</title>" in html and "see <code>x &lt;y&gt;</code> there" in html
    assert (
        "<td>x&lt;y</td>" in html
        and '<td class="right"><b>1</b>†</td>' in html
        and '<td class="right"><u>2</u></td>' in html
    )
    assert '<th class="group" colspan="1">group</th>' in html and "<tfoot>" in html
    assert (
        files[0]
        .read_text()
        .startswith("# A & b\n\nsee `x <y>` there\n\n## S\n\nt\n\n### T\n\n| a | group b |")
    )
