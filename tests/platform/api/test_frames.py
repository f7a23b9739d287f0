"""Data frames are prepared by the same recipe as files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import crossfed
from crossfed.platform.data.prepare import prepare


def interactions(seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    return pd.DataFrame(
        {
            "user": [f"u{user}" for user in rng.integers(0, 20, 300)],
            "item": [f"i{item}" for item in rng.integers(0, 15, 300)],
            "time": rng.integers(10**9, 2 * 10**9, 300),
        }
    )


ITEMS = pd.DataFrame(
    {"item": [f"i{item}" for item in range(15)], "title": [f"title {item}" for item in range(15)]}
)
RECIPE = {"user_core": 2, "item_core": 2}


def test_frames_and_files_give_the_same_data(tmp_path: Path) -> None:
    frame = interactions()
    made = crossfed.prepare(
        {"books": (frame, ITEMS)},
        out=tmp_path / "a",
        text=("title",),
        recipe=RECIPE,
        report=lambda line: None,
    )
    frame.to_csv(tmp_path / "books.csv", index=False)
    ITEMS.to_csv(tmp_path / "items.csv", index=False)
    (tmp_path / "spec.yaml").write_text(
        "name: a\nrecipe: {user_core: 2, item_core: 2, text: [title]}\ndomains:\n  books:\n"
        "    interactions: {path: books.csv, columns: {user: user, item: item, time: time}}\n"
        "    items: [{path: items.csv, columns: {item: item}}]\n"
    )
    other = prepare(tmp_path / "spec.yaml", tmp_path / "b")
    for mine, theirs in zip(made.interactions("books"), other.interactions("books"), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert made.item_texts("books") == other.item_texts("books")
    assert made.item_texts("books")[0].startswith("title")


def test_arrow_tables_are_taken_too(tmp_path: Path) -> None:
    frame = pa.Table.from_pandas(interactions(), preserve_index=False)
    made = crossfed.prepare(
        {"books": frame}, out=tmp_path / "a", recipe=RECIPE, report=lambda line: None
    )
    assert made.sizes("books")[0] > 10


def test_a_missing_column_and_a_non_frame_are_refused(tmp_path: Path) -> None:
    with pytest.raises(crossfed.CrossfedError, match=r"books.*'when'.*user, item, time"):
        crossfed.prepare({"books": interactions()}, out=tmp_path / "a", time="when")
    with pytest.raises(crossfed.CrossfedError, match="books"):
        crossfed.prepare({"books": 3}, out=tmp_path / "a")
    assert not (tmp_path / "a").exists()
