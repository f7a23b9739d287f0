"""How the code is laid out, in numbers, read from the files of a checkout.

    python tests/contract/house.py [ROOT]

Prints modules per folder, import circles, imports between rooms that run up, long lines, long
modules, reads of results by string keys, and how often words are used that say nothing about what
they hold.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import connected_components

ROOMS = ("platform", "methods", "tuning")
FLOORS: tuple[frozenset[str], ...] = tuple(
    frozenset(f"crossfed.{name}" for name in names.split())
    for names in (
        "platform.errors",
        "platform.method",
        "platform.endings platform.layout platform.uris platform.yaml_text",
        "platform.registry platform.console",
        "platform.data platform.evaluation",
        "platform.config",
        "platform.checkpoint",
        "platform.cluster platform.tracking",
        "platform.doctor platform.tokeniser",
        "platform.federation",
        "platform.serving",
        "platform.report",
        "tuning",
        "results frames",
        "launch",
        "platform.cli",
    )
)
"""Who may import whom: a room imports from its own floor's rooms only itself, and from lower
floors. Lowest first.
"""

WORDS = ("told", "found", "own", "Desk", "Ask", "Judge", "Halt", "Book", "seam", "courses")
LONG_LINE, LONG_MODULE = 100, 400


def modules(root: Path) -> dict[str, Path]:
    """Dotted name -> file, of all code but the tests'."""
    files = [path for room in ROOMS for path in sorted((root / room).rglob("*.py"))]
    return {name_of(path.relative_to(root)): path for path in files}


def name_of(path: Path) -> str:
    """The dotted name of a file below the root."""
    parts = list(path.with_suffix("").parts)
    if parts[:2] == ["platform", "api"]:
        parts = parts[2:]
    return ".".join(["crossfed", *(part for part in parts if part != "__init__")])


def imports(path: Path, known: Mapping[str, Path]) -> Iterator[str]:
    """The modules of ours that a file imports, wherever in it, but not for type checking alone."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("crossfed"):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in known else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("crossfed"))


def graph(known: Mapping[str, Path]) -> set[tuple[str, str]]:
    """Every import of one module by another."""
    return {
        (name, other)
        for name, path in known.items()
        for other in imports(path, known)
        if other in known and other != name
    }


def circles(edges: set[tuple[str, str]]) -> list[tuple[str, ...]]:
    """Groups of modules each of which reaches all the others by imports."""
    names = sorted({name for edge in edges for name in edge})
    place = {name: number for number, name in enumerate(names)}
    rows = [place[a] for a, _ in edges]
    columns = [place[b] for _, b in edges]
    size = len(names)
    matrix = coo_matrix((np.ones(len(edges)), (rows, columns)), shape=(size, size))
    _, labels = connected_components(matrix, connection="strong")
    many = [label for label, count in Counter(labels.tolist()).items() if count > 1]
    return [tuple(name for name in names if labels[place[name]] == label) for label in many]


def floor(module: str) -> int | None:
    """The number of a module's floor; None for one that belongs to no room."""
    for number, rooms in enumerate(FLOORS):
        if any(module == room or module.startswith(f"{room}.") for room in rooms):
            return number
    return None


def room(module: str) -> str | None:
    """The room of a module."""
    for rooms in FLOORS:
        for name in rooms:
            if module == name or module.startswith(f"{name}."):
                return name
    return None


def running_up(edges: set[tuple[str, str]]) -> list[tuple[str, str]]:
    """Imports of a module on a higher floor, or of another room on the same."""
    wrong = []
    for module, other in sorted(edges):
        here, there = floor(module), floor(other)
        if here is None or there is None or room(module) == room(other):
            continue
        if there >= here:
            wrong.append((module, other))
    return wrong


def long_lines(root: Path) -> tuple[int, int]:
    """Lines of over 100 columns, and all lines, of code and tests."""
    lines = [
        line
        for part in (*ROOMS, "tests")
        for path in (root / part).rglob("*.py")
        for line in path.read_text(encoding="utf-8").splitlines()
    ]
    return sum(len(line) > LONG_LINE for line in lines), len(lines)


def assigned(known: Mapping[str, Path], word: str) -> int:
    """How often a variable, argument, function or class of that name is made."""
    made = 0
    for path in known.values():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                made += node.id == word
            elif isinstance(node, ast.arg):
                made += node.arg == word
            elif isinstance(node, ast.ClassDef | ast.FunctionDef):
                made += node.name == word
        made += path.stem == word
    return made


RESULT_READ = re.compile(r"""\bresult(?:\[|\.get\()\s*["']""")


def result_reads(known: Mapping[str, Path]) -> int:
    """Reads of a run's result by a string key."""
    return sum(
        len(RESULT_READ.findall(path.read_text(encoding="utf-8"))) for path in known.values()
    )


def measure(root: Path) -> dict[str, object]:
    """All of it."""
    known = modules(root)
    edges = graph(known)
    folders = Counter(str(path.parent.relative_to(root)) for path in known.values())
    long, lines = long_lines(root)
    lengths = {name: len(path.read_text().splitlines()) for name, path in known.items()}
    return {
        "modules": len(known),
        "modules per folder": dict(folders.most_common()),
        "circles": [" ".join(circle) for circle in circles(edges)],
        "imports that run up": [" -> ".join(edge) for edge in running_up(edges)],
        f"lines over {LONG_LINE} columns": f"{long} of {lines} ({long / lines:.1%})",
        f"modules over {LONG_MODULE} lines": {
            name: length for name, length in lengths.items() if length > LONG_MODULE
        },
        "reads of results by string keys": result_reads(known),
        "words": {word: assigned(known, word) for word in WORDS},
    }


def main() -> None:
    """Print the measures of a checkout."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[2]
    for name, value in measure(root).items():
        if isinstance(value, list):
            print(f"{name}: {len(value)}")
            for line in value:
                print(f"    {line}")
        elif isinstance(value, dict):
            print(
                f"{name}: {', '.join(f'{key} {number}' for key, number in value.items()) or 'none'}"
            )
        else:
            print(f"{name}: {value}")


if __name__ == "__main__":
    main()
