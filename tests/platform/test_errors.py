"""Whatever a user's mistake raises ends in its sentence and exit code 2, a leak too."""

from __future__ import annotations

import sys

import pytest

from crossfed.platform.cli import main as cli
from crossfed.platform.errors import CrossfedError, LeakError


@pytest.mark.parametrize("kind", [CrossfedError, LeakError])
def test_a_mistake_ends_in_its_sentence_and_exit_code_2(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise kind("books sends the key 'y', which is not declared.")

    monkeypatch.setattr("crossfed.platform.federation.runs.find_run", fail)
    monkeypatch.setattr(sys, "argv", ["crossfed", "audit", "some-run"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    told = " ".join(capsys.readouterr().err.split())
    assert ended.value.code == 2 and "books sends the key 'y', which is not declared." in told
    assert "Traceback" not in told


def test_any_other_error_is_not_taken_for_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of the program keeps its traceback."""

    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("crossfed.platform.federation.runs.find_run", fail)
    monkeypatch.setattr(sys, "argv", ["crossfed", "audit", "some-run"])
    with pytest.raises(ZeroDivisionError):
        cli.main()
