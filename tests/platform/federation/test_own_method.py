"""A method of the user's own: found where the command is called, named by itself, and its faults
told in a sentence.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import toys
from crossfed.platform.config.settings import build
from crossfed.platform.errors import CrossfedError
from crossfed.platform.report.recording import run_recorded

# -- faults in its steps ---------------------------------------------------------------------------


def fragile(shops: Path, out: Path, backend: str = "inprocess", fault: str = "raise") -> Any:
    values = {"data": shops, "out": out, "backend": backend, "tracking.enabled": False}
    return build("toys:FRAGILE", sets=[f"fault={fault}"], values=values)


def line_of(text: str) -> int:
    """Where the toys have a line."""
    lines = Path(str(toys.__file__)).read_text(encoding="utf-8").splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


def test_an_exception_in_a_step_says_where(shops: Path, tmp_path: Path) -> None:
    with pytest.raises(CrossfedError) as caught:
        run_recorded(fragile(shops, tmp_path))
    (run_dir,) = (path.parent for path in tmp_path.glob("*/config.yaml"))
    line = line_of('raise RuntimeError("the toy breaks")')
    assert str(caught.value) == (
        f"books, stage walk, each, phase 1, round 2: _fail raised RuntimeError: the toy breaks "
        f"({toys.__file__}, line {line}); "
        f"the traceback is in {run_dir / 'error-books.txt'}."
    )
    assert "Traceback" in (run_dir / "error-books.txt").read_text()


def test_an_exception_in_a_step_of_an_actor_says_the_same(
    ray_cluster: None, shops: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        CrossfedError,
        match=r"^books, stage walk, each, phase 1, round 2: _fail raised "
        r"RuntimeError: the toy",
    ):
        run_recorded(fragile(shops, tmp_path, "ray"))


def test_the_line_is_the_methods_own_where_a_library_raised(
    shops: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    """A step calls torch, which raises deep inside itself."""

    def step(state: Any, inbox: Any, ctx: Any) -> Any:
        import torch

        return torch.nn.functional.cross_entropy(torch.zeros(2, 3), torch.zeros(5))

    method = replace(toys.FRAGILE, stages=lambda c: (toys.Stage("walk", 1, (toys.Phase(step),)),))
    monkeypatch.setattr(toys, "FRAGILE", method)
    with pytest.raises(
        CrossfedError,
        match=rf"step raised ValueError: .* \({__file__}, line "
        rf"{step.__code__.co_firstlineno + 3}\)",
    ):
        run_recorded(fragile(shops, tmp_path))


@pytest.mark.parametrize(
    ("score", "words"),
    [
        (
            lambda state, users: None,
            r"<lambda> returned a NoneType, not a tensor \[users, items\] "
            r"\(.*test_own_method\.py, line",
        ),
        (lambda state, users: [[0.0]], "returned a list, not a tensor"),
        (
            lambda state, users: state.nothing,
            "AttributeError: 'Toy' object has no attribute 'nothing' .*line",
        ),
    ],
)
def test_a_score_that_is_none_is_one_sentence(
    score: Any, words: str, shops: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toys, "FRAGILE", replace(toys.FRAGILE, score=score))
    with pytest.raises(CrossfedError, match=rf"^Domain books, validation: .*{words}") as caught:
        run_recorded(fragile(shops, tmp_path, fault="none"))
    assert str(caught.value).count("books, ") == 1 and not str(caught.value).endswith("..")
