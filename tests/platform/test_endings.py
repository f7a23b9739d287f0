"""SIGTERM ends a command as Ctrl-C does: once, in one sentence, within seconds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from crossfed.platform.endings import terminable


def test_sigterm_raises_what_ctrl_c_raises_and_the_handler_before_comes_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), terminable(lambda: "Go on."):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    assert signal.getsignal(signal.SIGTERM) is before


def test_how_to_go_on_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    ending = terminable(lambda: "The same command goes on.")
    ending.tell()
    ending.tell()
    assert capsys.readouterr().err == "Interrupted. The same command goes on.\n"
    terminable(lambda: "").tell()
    assert capsys.readouterr().err == "Interrupted.\n"


PROGRAM = """
import os, signal, sys, time
from crossfed.platform import endings
endings.PATIENCE = 0.3
if sys.argv[1] == "program":
    endings.own_process()
try:
    with endings.terminable(lambda: "Go on."):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
except KeyboardInterrupt:
    time.sleep(2)  # what waits for processes that are gone already
    print("waited")
"""


@pytest.mark.parametrize(
    ("kind", "code", "out", "err"),
    [("program", 130, "", "Interrupted. Go on.\n"), ("library", 0, "waited\n", "")],
)
def test_a_program_that_still_waits_is_left_and_a_library_ends_nobody(
    kind: str, code: int, out: str, err: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, kind],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, out, err)
