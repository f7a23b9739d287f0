"""The layout: no circle, nothing runs up, a folder is no corridor, and every module has its tests
at its mirror.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from pathlib import Path

import pytest

from house import circles, floor, graph, modules, running_up

ROOT = Path(__file__).resolve().parents[2]
KNOWN = modules(ROOT)
EDGES = graph(KNOWN)
MOST = 24
"""Modules in a folder at most."""


def test_every_module_belongs_to_a_room() -> None:
    loose = [
        name for name in KNOWN if floor(name) is None and not name.startswith("crossfed.methods")
    ]
    assert loose == ["crossfed", "crossfed.platform.pyfunc"]


def test_no_import_runs_up() -> None:
    assert running_up(EDGES) == []


def test_no_circle() -> None:
    assert circles(EDGES) == []


def test_an_import_that_runs_up_and_a_circle_are_seen() -> None:
    up = ("crossfed.platform.method", "crossfed.platform.config.settings")
    down = ("crossfed.platform.config.settings", "crossfed.platform.method")
    assert running_up({up, down}) == [up]
    assert circles({up, down}) == [tuple(sorted(up))]


def test_no_folder_is_a_corridor() -> None:
    folders = Counter(path.parent for path in KNOWN.values())
    assert {folder.name: count for folder, count in folders.items() if count > MOST} == {}


def test_contracts_name_every_room() -> None:
    """A new room that a contract does not name would be outside it."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
    layers = [
        part.strip()
        for line in contracts[0]["layers"]
        for part in line.replace("|", ":").split(":")
    ]
    rooms = {
        ".".join(name.split(".")[:3]) for name in KNOWN if name.startswith("crossfed.platform.")
    }
    rooms -= {"crossfed.platform.pyfunc"}
    assert rooms <= set(layers)
    seen_by_methods = {"crossfed.platform.method", "crossfed.platform.errors"}
    assert rooms - seen_by_methods <= set(contracts[1]["forbidden_modules"])


@pytest.mark.parametrize("name", sorted(KNOWN))
def test_every_module_has_tests_at_its_mirror(name: str) -> None:
    path = KNOWN[name].relative_to(ROOT)
    if path.name == "__init__.py":
        return
    assert (ROOT / "tests" / path.parent / f"test_{path.name}").is_file(), (
        f"{path} has no tests at its mirror"
    )
