"""What looks odd is told, and never changed."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
import yaml

from crossfed.platform.data.columns import Texts, Times
from crossfed.platform.data.plausibility import dates, ids
from crossfed.platform.data.prepare import prepare
from crossfed.platform.data.readers import Table
from crossfed.platform.data.source_file import Progress
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


def test_shared_users_that_are_shared_numbers_are_told(tmp_path):
    for name in ("f", "g"):
        (tmp_path / name).write_text(
            "user,item,time\n" + "".join(f"{k},i{k % 3},{k}\n" for k in range(40))
        )
    told: list[str] = []
    (tmp_path / "spec.yaml").write_text(
        "name: x\nrecipe: {user_core: 0, item_core: 0}\ndomains:\n"
        "  a: {interactions: {path: f}}\n  b: {interactions: {path: g}}\n"
    )
    prepare(tmp_path / "spec.yaml", tmp_path / "out", report=told.append)
    assert (
        "the users of a and of b are both numbered without gaps, so that the 40 shared ones"
    ) in told[-1]


def test_ids_that_cannot_be_told_apart(tmp_path):
    (tmp_path / "f").write_text('{"user": 9007199254740993.0, "item": "i", "time": 1}\n')
    with pytest.raises(
        CrossfedError,
        match=r"'user' .* is a floating-point number too large "
        r"to be exact",
    ):
        made(tmp_path, {"path": "f"})
    (tmp_path / "f").write_text("user,item,time\ncaf\u00e9,i,1\ncafe\u0301,j,2\nv\0,j,3\n")
    told: list[str] = []
    made(tmp_path, {"path": "f"}, report=told.append)
    assert (
        "a: note: 1 ids of user look like another one but are other characters (Unicode NFC "
        "and NFD)"
    ) in told
    assert "a: note: 1 ids of user hold control characters, e.g. 'v\\x00'" in told


def times(*whole, kind="seconds", missing=None):
    column = Times(np.array(whole, np.int64), None, missing)
    return Table({}, {}, column, kind, "table", Progress())


def test_times_out_of_reach_are_told_with_one_of_them():
    """2020 is well; 1970-01-01 and 2030 seen from 2026 are not; next year's last second is."""
    now = datetime(2026, 6, 1, tzinfo=UTC)
    last = int(datetime(2027, 12, 31, 23, 59, 59, tzinfo=UTC).timestamp())
    assert dates(times(1_577_836_800, 86_400, last), now) == []
    (note,) = dates(times(5, 1_577_836_800, last + 1), now)
    assert note.startswith("2 of 3 times are before 1970-01-02 or after next year, e.g. 1970-01-01")
    assert dates(times(5, kind="order"), now) == []
    assert dates(times(5, 86_400, missing=np.array([True, False])), now) == []


def test_words_for_none_are_told_with_their_rows():
    """A dash is a word for none that files use on purpose."""
    users = Texts(np.array([0, 1, 0, -1], np.int32), ["NULL", "al"])
    (note,) = ids({"user": users, "item": Texts(np.array([0, 0, 0, 0], np.int32), ["-"])})
    assert note.startswith("user is 'NULL' (2 rows), which looks like none; name it in `keep`")
