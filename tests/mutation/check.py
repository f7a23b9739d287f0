"""The mutation check: break methods, evaluation, privacy and tuning in small ways, and see whether
a test notices.

    python tests/mutation/check.py                           all modules; hours on two cores
    python tests/mutation/check.py --only fedcrf ranking     some modules
    python tests/mutation/check.py --per-function 5          a sample of each function's mutants

Each module is examined in a process of its own, forked from one that has torch imported. It
collects the module's tests once, runs them once to learn which test calls which function and how
long it takes, and then forks once per mutant: the child puts the mutated code into the functions
that are in memory and runs the tests that call them, the quickest first, until one fails. See
README.md beside this file.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import os
import random
import re
import select
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import pytest
from mutate import Mutant, mutants, mutated

ROOT = Path(__file__).resolve().parents[2]
EQUIVALENT = Path(__file__).with_name("equivalent.yaml")
PATTERNS = (
    "methods/**/*.py",
    "platform/evaluation/**/*.py",
    "platform/**/privacy.py",
    "tuning/**/*.py",
)
DRAWN = ("figures", "report", "tables")
"""Modules left out unless they are named: how a page looks is not a number."""

EXTRA = {
    "privacy": ("test_payloads",),
    "facts": ("test_report",),
    "figures": ("test_report",),
    "slots": ("test_search",),
}
"""Modules whose tests have another name than `test_<module>.py`, or are in several files."""

UNAPPLIED = {"by": "nothing: the fault could not be put into memory"}

Function = tuple[str, int]  # qualified name, first line


def targets(only: list[str]) -> list[Path]:
    """The modules to mutate; by name without `.py` where some are asked for."""
    files = sorted(
        {file for pattern in PATTERNS for file in ROOT.glob(pattern) if file.name != "__init__.py"}
    )
    return [file for file in files if (file.stem in only if only else file.stem not in DRAWN)]


def tests_of(module: Path) -> list[Path]:
    """The test files of a module, found by name wherever they are."""
    names = (f"test_{module.stem}", *EXTRA.get(module.stem, ()))
    return sorted(file for name in names for file in (ROOT / "tests").glob(f"**/{name}.py"))


def module_name(file: Path) -> str:
    """`crossfed.…` of a file in one of the three folders."""
    return ".".join(("crossfed", *file.relative_to(ROOT).with_suffix("").parts))


def function_of(code: CodeType) -> Function:
    """What names a function in a module, as `mutate.Mutant` does."""
    return code.co_qualname, code.co_firstlineno


def codes(code: CodeType) -> Iterator[CodeType]:
    """A code object and all that lie within."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from codes(inner)


@dataclass
class Baseline:
    """What a run without any fault has shown: functions and seconds by test."""

    calls: dict[str, set[Function]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def tests(self, function: Function, longest: float) -> list[str]:
        """Tests that call a function, the quickest first."""
        found = [
            test
            for test, calls in self.calls.items()
            if function in calls and self.seconds[test] <= longest
        ]
        return sorted(found, key=lambda test: self.seconds[test])

    def within(self, tests: list[str], budget: float) -> list[str]:
        """The first tests, as many as take no longer than the budget together; one at least."""
        spent, kept = 0.0, []
        for test in tests:
            spent += self.seconds[test]
            if kept and spent > budget:
                break
            kept.append(test)
        return kept


class Check:
    """A pytest plugin that runs the mutants of a module in place of its tests."""

    def __init__(self, module: Path, options: argparse.Namespace) -> None:
        self.module, self.options = module, options
        self.source = module.read_text(encoding="utf-8")
        self.rows: list[dict[str, Any]] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Examine the module; no test is run in this process itself."""
        items = {item.nodeid: item for item in session.items}
        loaded: ModuleType = importlib.import_module(module_name(self.module))
        assert Path(loaded.__file__ or "").resolve() == self.module, (
            f"{loaded.__file__} is not {self.module}"
        )
        done, told = in_child(lambda: self.baseline(items), 1200)
        if not done or told is None:
            self.rows.append(
                {"module": self.module.stem, "status": "broken", "name": "the tests do not end"}
            )
            return True
        baseline = Baseline(
            {test: {(name, line) for name, line in calls} for test, calls in told["calls"].items()},
            told["seconds"],
            told["failed"],
        )
        quick = sorted(baseline.calls, key=lambda test: baseline.seconds[test])
        quick = [test for test in quick if baseline.seconds[test] <= self.options.longest]
        _, alone = in_child(lambda: [test for test in quick if not run(items[test], None)], 1200)
        for test in alone or ():  # it needs those before it
            del baseline.calls[test]
            baseline.failed.append(test)
        if baseline.failed:
            print(f"left out, since they fail without a fault: {', '.join(baseline.failed)}")
        live: dict[Function, list[FunctionType]] = {}
        for thing in gc.get_objects():
            if isinstance(thing, FunctionType) and thing.__code__.co_filename == str(self.module):
                live.setdefault(function_of(thing.__code__), []).append(thing)
        for mutant in self.chosen():
            self.rows.append(self.examine(mutant, baseline, items, live))
        return True

    def chosen(self) -> list[Mutant]:
        """The mutants to examine: all, or a sample that is always the same."""
        every = mutants(self.source)
        if self.options.match:
            every = [mutant for mutant in every if re.search(self.options.match, mutant.name)]
        if not self.options.per_function:
            return every
        by_function: dict[Function, list[Mutant]] = {}
        for mutant in every:
            by_function.setdefault((mutant.function, mutant.line), []).append(mutant)
        kept = []
        for (name, _), group in by_function.items():
            count = min(self.options.per_function, len(group))
            kept += random.Random(name).sample(group, count)
        return sorted(kept, key=lambda mutant: mutant.index)

    def baseline(self, items: dict[str, pytest.Item]) -> dict[str, Any]:
        """Run all tests once and note which functions of the module each calls, and for how long it
        runs.
        """
        file, called = str(self.module), set[Function]()

        def trace(frame: FrameType, event: str, _: Any) -> None:
            if frame.f_code.co_filename == file:
                called.add(function_of(frame.f_code))

        calls: dict[str, set[Function]] = {}
        seconds: dict[str, float] = {}
        failed, shared = [], dict[str, set[Function]]()
        order = list(items.values())
        for number, item in enumerate(order):
            called.clear()
            began = time.monotonic()
            threading.settrace(trace)  # type: ignore[arg-type]
            sys.settrace(trace)  # type: ignore[arg-type]
            passed = run(item, order[number + 1] if number + 1 < len(order) else None)
            sys.settrace(None)
            seconds[item.nodeid] = time.monotonic() - began
            if not passed:
                failed.append(item.nodeid)
                continue
            calls[item.nodeid] = set(called)
            if wide(item):  # a fixture that several tests share runs for the first of them only
                shared.setdefault(str(item.path), set()).update(called)
        for item in order:
            if item.nodeid in calls and wide(item):
                calls[item.nodeid] |= shared[str(item.path)]
        return {
            "calls": {test: sorted(found) for test, found in calls.items()},
            "seconds": seconds,
            "failed": failed,
        }

    def examine(
        self,
        mutant: Mutant,
        baseline: Baseline,
        items: dict[str, pytest.Item],
        live: dict[Function, list[FunctionType]],
    ) -> dict[str, Any]:
        """Run the tests of one mutant in a child and say what became of it."""
        row = {"module": self.module.stem, "name": mutant.name, "line": mutant.at}
        tests = baseline.tests((mutant.function, mutant.line), self.options.longest)
        if not tests:
            slow = baseline.tests((mutant.function, mutant.line), float("inf"))
            return row | {"status": "slow" if slow else "uncovered", "tests": len(slow)}
        tests = baseline.within(tests, self.options.budget)
        limit = 20 + 5 * sum(baseline.seconds[test] for test in tests)
        began = time.monotonic()

        def attempt() -> dict[str, Any]:
            put_in(mutated(self.source, mutant.index), str(self.module), live)
            for number, test in enumerate(tests):
                following = items[tests[number + 1]] if number + 1 < len(tests) else None
                if not run(items[test], following):
                    return {"by": test}
            return {"by": None}

        done, told = in_child(attempt, limit)
        if told == UNAPPLIED:
            return row | {"status": "unapplied"}
        status = "killed" if not done or told is None or told["by"] else "survived"
        by = told["by"] if told else ("the time limit" if not done else "the interpreter's end")
        print(f"{status:9} {self.module.stem}:{mutant.at} {mutant.name}", flush=True)
        seconds = round(time.monotonic() - began, 2)
        return row | {"status": status, "by": by, "tests": len(tests), "seconds": seconds}


def wide(item: pytest.Item) -> bool:
    """Whether a test uses fixtures of this repository that it shares with others."""
    info = getattr(item, "_fixtureinfo", None)
    defined = [one for many in (info.name2fixturedefs if info else {}).values() for one in many]
    return any(one.scope != "function" and one.baseid for one in defined)


def run(item: pytest.Item, following: pytest.Item | None) -> bool:
    """Whether a test passes (or is skipped)."""
    from _pytest.runner import runtestprotocol

    reports = runtestprotocol(item, log=False, nextitem=following)
    return not any(report.failed for report in reports)


def put_in(tree: Any, file: str, live: dict[Function, list[FunctionType]]) -> None:
    """Give the functions in memory the code of a changed module.

    Raises:
        LookupError: no function in memory has changed code.
    """
    changed = False
    for code in codes(compile(tree, file, "exec", dont_inherit=True)):
        for function in live.get(function_of(code), ()):
            if function.__code__ != code:
                if function.__code__.co_freevars != code.co_freevars:
                    raise LookupError("the changed function closes over other variables")
                function.__code__ = code
                changed = True
    if not changed:
        raise LookupError("the changed function is not in memory")


def in_child(work: Any, limit: float) -> tuple[bool, Any]:
    """What `work` returns in a forked process (None when it dies), and whether it ended within
    `limit` seconds.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        os.close(reading)
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        try:
            text = json.dumps(work())
        except LookupError:
            text = json.dumps(UNAPPLIED)
        except BaseException:
            os._exit(1)
        with os.fdopen(writing, "w") as stream:
            stream.write(text)
        os._exit(0)
    os.close(writing)
    end, parts = time.monotonic() + limit, []
    with os.fdopen(reading, "rb", buffering=0) as stream:
        done = False
        while (left := end - time.monotonic()) > 0:
            if not select.select([stream], [], [], left)[0]:
                break
            if not (part := stream.read(1 << 16)):
                done = True
                break
            parts.append(part)
    with contextlib.suppress(ProcessLookupError):  # it has ended by itself
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return done, json.loads(b"".join(parts)) if done and parts else None


def known() -> dict[str, dict[str, str]]:
    """Equivalent mutants by module: name -> why no test can notice."""
    import yaml

    return (
        yaml.safe_load(EQUIVALENT.read_text(encoding="utf-8")) or {} if EQUIVALENT.is_file() else {}
    )


def report(rows: list[dict[str, Any]]) -> int:
    """Print what survived and a table of counts; 1 when a survivor is not listed as equivalent."""
    equivalent, open_ = known(), 0
    counts: dict[str, Counter[str]] = {}
    for row in rows:
        if row["status"] == "survived" and row["name"] in equivalent.get(row["module"], {}):
            row["status"] = "equivalent"
        counts.setdefault(row["module"], Counter())[row["status"]] += 1
        if row["status"] not in ("killed", "equivalent"):
            open_ += row["status"] == "survived"
            print(f"{row['status']:10} {row['module']}:{row.get('line', '')} {row['name']}")
    statuses = ("killed", "equivalent", "survived", "slow", "uncovered", "unapplied", "broken")
    print("\n" + "module".ljust(18) + "".join(name.rjust(12) for name in statuses))
    for module, count in counts.items():
        print(module.ljust(18) + "".join(str(count[name]).rjust(12) for name in statuses))
    total = sum(counts.values(), Counter())
    print("all".ljust(18) + "".join(str(total[name]).rjust(12) for name in statuses))
    return int(open_ > 0)


def examine(module: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """All rows of one module, from a process of its own."""
    files = tests_of(module)
    if not files:
        every = mutants(module.read_text(encoding="utf-8"))
        return [
            {"module": module.stem, "name": m.name, "line": m.at, "status": "uncovered"}
            for m in every
        ]
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        check = Check(module, options)
        arguments = [
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            "--timeout=0",
            "-o",
            "addopts=",
        ]
        arguments += ["-k", options.keyword] if options.keyword else []
        arguments += [
            "--import-mode=importlib",
            "-m",
            "not slow",
            "--rootdir",
            str(ROOT),
            *map(str, files),
        ]
        pytest.main(arguments, plugins=[check])
        with os.fdopen(writing, "w") as stream:
            stream.write("".join(json.dumps(row) + "\n" for row in check.rows))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as stream:
        rows = [json.loads(line) for line in stream]
    os.waitpid(child, 0)
    return rows


def main() -> int:
    """Examine the modules that were asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="MODULE", help="modules by name, such as fedcrf"
    )
    parser.add_argument("--match", help="mutants whose name this regular expression finds")
    parser.add_argument("--per-function", type=int, help="so many mutants of each function at most")
    parser.add_argument(
        "-k", dest="keyword", help="tests to use, as pytest takes it: leave slow ones out"
    )
    parser.add_argument(
        "--longest", type=float, default=20.0, help="seconds of a test beyond which it is left out"
    )
    parser.add_argument(
        "--budget", type=float, default=60.0, help="seconds of tests per mutant at most"
    )
    parser.add_argument("--out", type=Path, help="JSON lines to append all rows to")
    options = parser.parse_args()
    import torch

    torch.set_num_threads(1)  # no pool of threads that a fork would leave behind
    os.chdir(ROOT)
    every: list[dict[str, Any]] = []
    for module in targets(options.only):
        rows = examine(module, options)
        every += rows
        if options.out:
            with options.out.open("a", encoding="utf-8") as stream:
                stream.write("".join(json.dumps(row) + "\n" for row in rows))
    return report(every)


if __name__ == "__main__":
    sys.exit(main())
