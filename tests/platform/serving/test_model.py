"""A domain's model: whom it knows, what others get, what is left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from crossfed.platform.errors import CrossfedError
from crossfed.platform.serving.model import DomainModel
from served import expected


def test_an_unknown_user_gets_what_ranks_high_for_most(run_dir: Path, films: Any) -> None:
    """Mean reciprocal rank over all 50 known users, the slow way."""
    worth = dict.fromkeys((f"films-i{i}" for i in range(25)), 0.0)
    for user in range(50):
        for rank, item in enumerate(expected(run_dir, "films", user, 25), 1):
            worth[item] += 1 / rank / 50
    answer = films.predict(pd.DataFrame({"user": ["somebody"], "k": [25]})).iloc[0]
    assert not answer["known"]
    assert answer["items"] == sorted(worth, key=lambda item: -worth[item])
    np.testing.assert_allclose(
        answer["scores"], [worth[item] for item in answer["items"]], rtol=1e-5
    )


def test_excluded_items_are_left_out(run_dir: Path, films: Any) -> None:
    first = expected(run_dir, "films", 2, 2)
    requests_ = pd.DataFrame({"user": ["films-u2"] * 2, "k": [4, 100], "exclude": [first, []]})
    answer = films.predict(requests_)
    assert answer.loc[0, "items"] == expected(run_dir, "films", 2, 6)[2:]
    # every item once, none twice
    assert sorted(answer.loc[1, "items"]) == sorted(f"films-i{i}" for i in range(25))


def test_a_model_without_its_index_says_so(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    for file in ("config.yaml", "model/books.safetensors"):
        (tmp_path / file).write_bytes((run_dir / file).read_bytes())
    with pytest.raises(
        CrossfedError, match="does not say who and what its model of books is about"
    ):
        DomainModel(tmp_path, "books")
