"""The table of a data set, with numbers worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from crossfed.platform.data.stats import DomainRow, OverlapRow, overlaps, table
from crossfed.platform.data.store import PreparedData, Writer


@pytest.fixture
def data(tmp_path: Path) -> PreparedData:
    """Two users who saw three of two items; two who saw two of two; one who saw one of one.
    `both` is in all three domains, `one` in the first alone, `other` in the second alone.
    """
    with Writer(tmp_path / "data", {}) as writer:
        writer.add_domain(
            "a", [0, 0, 1], [0, 1, 0], [0, 1, 2], ["both", "one"], ["x", "y"], ["text", ""]
        )
        writer.add_domain("b", [0, 1], [0, 1], [0, 1], ["both", "other"], ["x", "y"], ["", ""])
        writer.add_domain("c", [0], [0], [0], ["both"], ["z"], ["text"])
    return PreparedData.open(tmp_path / "data")


def test_a_row_per_domain(data: PreparedData) -> None:
    assert table(data) == [
        DomainRow("a", 2, 2, 3, 3 / 2, 3 / 4, 1),
        DomainRow("b", 2, 2, 2, 1.0, 2 / 4, 2),
        DomainRow("c", 1, 1, 1, 1.0, 1.0, 0),
    ]


def test_a_row_per_pair_and_one_for_all(data: PreparedData) -> None:
    """Of three users in a or b one is in both; of two in a or c one; of three in any one."""
    assert overlaps(data) == [
        OverlapRow(("a", "b"), 1, 1 / 3),
        OverlapRow(("a", "c"), 1, 1 / 2),
        OverlapRow(("b", "c"), 1, 1 / 2),
        OverlapRow(("a", "b", "c"), 1, 1 / 3),
    ]
