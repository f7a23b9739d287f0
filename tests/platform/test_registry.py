"""Methods by name: those that ship, and one of the user's own where the command is called."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from crossfed.platform.cli.main import main
from crossfed.platform.config.settings import build
from crossfed.platform.errors import CrossfedError
from crossfed.platform.federation.final import test_once as final_test
from crossfed.platform.federation.run import run_name
from crossfed.platform.registry import (
    find_method,
    method_file,
    method_name,
    method_names,
    nearest,
    nearest_few,
)
from crossfed.platform.report.recording import run_recorded

MODULE = """
from dataclasses import replace
from crossfed.methods.lightgcn import METHOD as BASE
METHOD = replace(BASE, name="mine", title="Mine")
TWIN = replace(BASE, name="lightgcn")
BROKEN = replace(BASE, name="broken", score=None)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with a method in it, which is not on the path."""
    (tmp_path / "my_module_of_test.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != ""])
    yield tmp_path
    sys.modules.pop("my_module_of_test", None)


def test_a_module_in_the_working_directory_is_found(folder: Path) -> None:
    assert find_method("my_module_of_test:METHOD").name == "mine"
    assert sys.path[-1] == str(folder), "last, so that it stands in for nothing that is installed"


def test_a_method_from_outside_is_called_by_its_name(folder: Path, shops: Path) -> None:
    config = build(
        "my_module_of_test:METHOD",
        sets=["dim=4", "epochs=1"],
        values={"data": shops, "out": folder / "runs"},
    )
    assert run_name(config).startswith("mine-s0-") and config.method == "my_module_of_test:METHOD"
    done = run_recorded(config.model_copy(update={"backend": "inprocess"}), finish=final_test)
    assert (done.result["method"], done.result["method_from"]) == (
        "mine",
        "my_module_of_test:METHOD",
    )
    from crossfed.platform.report.finished import gather

    with gather([str(done.run_dir)], folder / "runs") as finished:
        assert finished[0].label == "mine"


def test_one_that_has_the_name_of_a_shipped_method_is_not_taken_for_it(folder: Path) -> None:
    assert method_name("my_module_of_test:TWIN") == "my_module_of_test:TWIN"
    assert method_name("lightgcn") == "lightgcn"


@pytest.mark.parametrize("name", ["mine.yaml", "my_module_of_test.yaml"])
def test_its_yaml_lies_beside_its_file(name: str, folder: Path) -> None:
    assert method_file("my_module_of_test:METHOD") == {}
    (folder / name).write_text(
        "config: {dim: 16}\npresets: {wide: {dim: 32}}\nsearch: {dim: [8, 16]}\n"
    )
    assert build("my_module_of_test:METHOD").config["dim"] == 16
    assert build("my_module_of_test:METHOD", preset="wide").config["dim"] == 32
    from crossfed.tuning.space import space

    assert list(space("my_module_of_test:METHOD")) == ["dim"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("config: [1]", "must map config, presets"),
        ("a: {b", "cannot be read"),
        ("konfig: {dim: 2}", "unknown key 'konfig'; did"),
    ],
)
def test_a_yaml_that_is_none_is_one_sentence(text: str, words: str, folder: Path) -> None:
    (folder / "mine.yaml").write_text(text)
    with pytest.raises(CrossfedError, match=rf"mine\.yaml.*{words}"):
        build("my_module_of_test:METHOD")


def test_a_method_without_a_function_is_one_sentence(folder: Path) -> None:
    with pytest.raises(
        CrossfedError,
        match=r"my_module_of_test:BROKEN: score = None is not possible: it must "
        r"be a fun",
    ):
        find_method("my_module_of_test:BROKEN")


def test_a_module_that_cannot_be_imported_names_its_line(folder: Path) -> None:
    (folder / "my_module_of_test.py").write_text("x = 1\ny = x / 0\n")
    with pytest.raises(
        CrossfedError,
        match=r"ZeroDivisionError: division by zero "
        r"\(.*my_module_of_test\.py, line 2\)",
    ):
        find_method("my_module_of_test:METHOD")
    (folder / "my_module_of_test.py").write_text("x = 1\nif\n")
    with pytest.raises(CrossfedError, match=r"SyntaxError: .*my_module_of_test\.py, line 2"):
        find_method("my_module_of_test:METHOD")


def test_every_module_of_methods_is_one_and_is_found_by_its_name() -> None:
    names = method_names()
    assert {"fedcrf", "lightgcn", "pop"} <= set(names) and "parts" not in names
    assert names == sorted(names) and find_method("pop").name == "pop"


def test_an_unknown_method_names_the_nearest() -> None:
    with pytest.raises(
        CrossfedError, match=r"no method 'fedcrv'; did you mean fedcrf\? Allowed: .*lightgcn"
    ):
        find_method("fedcrv")


def test_the_nearest_word_is_the_one_that_begins_alike() -> None:
    assert nearest("epoch", ["rounds", "epochs"]) == (
        "; did you mean epochs? Allowed: epochs, rounds."
    )
    assert nearest("zzz", ["b", "a"]) == ". Allowed: a, b."
    assert nearest("x", []) == ". Allowed: nothing."


def test_of_many_words_the_nearest_few_are_named() -> None:
    """A dotted word is also set against the last part of the allowed ones."""
    allowed = [
        "resources.threads",
        "resources.device",
        "seed",
        "backend",
        "preset",
        "method",
        "out",
    ]
    told = nearest_few("thread", allowed, "`crossfed methods` shows all", count=3)
    assert told.startswith("; did you mean resources.threads? Near it: ")
    assert told.endswith("; `crossfed methods` shows all.") and told.count(",") == 1


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("my_module_of_test", r"named by its module: my_module_of_test:METHOD\.$"),
        ("my_modul", r"named by its module: package\.module:METHOD\.$"),
        (
            "my_module_of_test:METHODE",
            r"no 'METHODE'; did you mean METHOD\? Allowed: BASE, BROKEN, ",
        ),
        ("my_modul:METHOD", r"No module named 'my_modul'; it must be installed, or lie in the wor"),
        ("needs_another:METHOD", r"No module named 'absent' \(.*needs_another\.py, line 2\)\.$"),
    ],
)
def test_a_wrong_name_says_what_to_write(name: str, words: str, folder: Path) -> None:
    (folder / "needs_another.py").write_text("x = 1\nimport absent\n")
    with pytest.raises(CrossfedError, match=words):
        find_method(name)


def test_what_its_yaml_searches_is_listed_or_refused_in_a_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def listed(search: str) -> tuple[int, str, str]:
        (folder / "mine.yaml").write_text(f"search: {search}\n")
        monkeypatch.setattr(sys, "argv", ["crossfed", "methods", "my_module_of_test:METHOD"])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), *capsys.readouterr()

    code, out, _ = listed("{dim: [8, 16], lr: {low: 0.001, high: 0.1, log: true}}")
    assert code == 0 and "searched: dim {8, 16}; lr 0.001 … 0.1 log" in out
    for search, words in (
        ("{dim: 8}", "dim: 8 is neither {values: […]} nor {low: …, high: …"),
        ("{dims: [8]}", "dims"),
    ):
        code, _, err = listed(search)
        assert code == 2 and words in err and "Traceback" not in err
