"""The mutation check checked: what it changes, and that it tells a tested function from an untested
one.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def mutate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutate", HERE / "mutate.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["mutate"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("expression", "changes"),
    [
        ("a + b", ["a - b"]),
        ("a < b", ["a <= b"]),
        ("a and b", ["a or b"]),
        ("not a", ["a"]),
        ("-a", ["a"]),
        ("a.mean(0)", ["a.sum(0)", "a.mean(1)"]),
        ("a.detach()", ["a"]),
        ("F.relu(a)", ["a"]),
        ("max(a, b)", ["min(a, b)"]),
        ("f(side='left')", ["f(side='right')"]),
        ("f(stable=True)", ["f(stable=False)"]),
        ("2.0", ["4.0"]),
        ("0.0", ["1.0"]),
        ("a if b else c", ["a if not b else c"]),
        ("'text'", []),
        ("zip(a, b, strict=True)", []),
        ("f'{a + b}'", []),
    ],
)
def test_what_is_changed(mutate: ModuleType, expression: str, changes: list[str]) -> None:
    source = f"def f(a, b):\n    return {expression}\n"
    bodies = [
        mutate.mutated(source, mutant.index).body[0].body[0] for mutant in mutate.mutants(source)
    ]
    assert [ast.unparse(body).removeprefix("return ") for body in bodies] == changes


def test_errors_annotations_and_what_is_outside_functions_stay(mutate: ModuleType) -> None:
    source = (
        "X = 1 + 2\n\ndef f(a: 'b' = 3) -> 'c':\n    assert a > 1\n    raise ValueError(a + 1)\n"
    )
    assert mutate.mutants(source) == []


def test_a_statement_is_left_out(mutate: ModuleType) -> None:
    source = "def f(a):\n    a.update({})\n    a += b\n"
    texts = [ast.unparse(mutate.mutated(source, mutant.index)) for mutant in mutate.mutants(source)]
    assert texts == [
        "def f(a):\n    pass\n    a += b",
        "def f(a):\n    a.update({})\n    a -= b",
        "def f(a):\n    a.update({})\n    pass",
    ]


def test_names_tell_equal_changes_apart_and_do_not_depend_on_lines(mutate: ModuleType) -> None:
    source = "class A:\n    def f(self):\n        return [1, 1]\n"
    names = [mutant.name for mutant in mutate.mutants(source)]
    assert names == ["A.f: 1 -> 2", "A.f: 1 -> 2 (2)"]
    assert names == [mutant.name for mutant in mutate.mutants("\n\n" + source)]


def test_the_first_line_is_that_of_the_decorator_as_python_counts(mutate: ModuleType) -> None:
    source = "@a\n@b\ndef f():\n    def g():\n        return 1\n    return g\n"
    (mutant,) = mutate.mutants(source)
    inner = compile(source, "f", "exec").co_consts[0].co_consts[1]
    assert (
        (mutant.function, mutant.line)
        == (inner.co_qualname, inner.co_firstlineno)
        == ("f.<locals>.g", 4)
    )
    source = "@a\ndef f():\n    return 1\n"
    (mutant,) = mutate.mutants(source)
    assert mutant.line == compile(source, "f", "exec").co_consts[0].co_firstlineno == 1


@pytest.mark.slow
def test_a_fault_in_a_tested_function_is_seen(tmp_path: Path) -> None:
    """BPR has two operators that mutants change, and tests that are quick."""
    out = tmp_path / "rows.jsonl"
    command = [
        sys.executable,
        str(HERE / "check.py"),
        "--only",
        "losses",
        "--match",
        "^bpr: ",
        "--out",
        str(out),
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=280)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 2 and {row["status"] for row in rows} == {"killed"}
    assert all(row["by"].startswith("tests/") for row in rows)
