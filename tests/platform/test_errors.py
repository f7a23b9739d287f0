"""Whatever a user's mistake raises ends in its sentence and exit code 2, a leak too."""

from __future__ import annotations

import pytest

from crossfed.platform.cli import main as cli
from crossfed.platform.errors import CrossfedError, LeakError


@pytest.mark.parametrize("kind", [CrossfedError, LeakError])
def test_a_mistake_ends_in_its_sentence_and_exit_code_2(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise kind("books sends the key 'y', which is not declared.")

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    told = capsys.readouterr()
    assert (ended.value.code, told.out) == (2, "")
    assert told.err == "Error: books sends the key 'y', which is not declared.\n"


def test_any_other_error_is_not_taken_for_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of the program keeps its traceback."""

    def fail() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(ZeroDivisionError):
        cli.main()
