"""The method under test, and a cache of its own for every test."""

from __future__ import annotations

import sys

import pytest

from sid_toy import TOY


@pytest.fixture(autouse=True)
def _toy(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The method under test, as a user would bring it; a cache of its own for every test."""
    folder = tmp_path_factory.mktemp("toy")
    (folder / "sidtoy.py").write_text(TOY)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "sidtoy", raising=False)
    monkeypatch.setenv("CROSSFED_CACHE", str(folder / "cache"))
