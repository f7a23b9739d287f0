"""How a command is ended from outside: SIGTERM ends it as Ctrl-C does, told in one sentence, within
seconds.

A batch system signals all processes of a job at once. Ray's own may be gone before this process has
heard of it, and what waits for them then waits for half a minute.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

PATIENCE = 7.0
"""Seconds that a command has from the first SIGTERM on to end in order."""

_program = False
_current: terminable | None = None


def own_process() -> None:
    """Say that this process runs a command and nothing else, and may be ended with it."""
    global _program
    _program = True


def give_up_later() -> None:
    """End this program `PATIENCE` seconds from now, whatever it waits for then.

    For who handles SIGTERM in place of the `terminable` around it.
    """
    if _current is not None:
        _current.give_up_later()


class terminable:
    """Let SIGTERM end a command the way Ctrl-C does, so that actors and the tracker are closed.

    In a program (`own_process`) what is not over after `PATIENCE` seconds is left: commits are
    complete or are none, and Ray's processes end with the one that started them.

    Args:
        hint: how to go on, in words.
    """

    def __init__(self, hint: Callable[[], str]):
        self._hint, self._once, self._said = hint, threading.Lock(), False

    def __enter__(self) -> None:
        def interrupt(_signal: int, _frame: FrameType | None) -> None:
            self.give_up_later()
            raise KeyboardInterrupt

        global _current
        _current, self._before = self, signal.signal(signal.SIGTERM, interrupt)

    def __exit__(self, *_: Any) -> None:
        signal.signal(signal.SIGTERM, self._before)

    def tell(self) -> None:
        """Say that the command was interrupted, and how to go on; once."""
        with self._once:
            if not self._said:
                self._said = True
                sys.stderr.write(f"Interrupted. {self._hint()}".rstrip() + "\n")
                sys.stderr.flush()

    def give_up_later(self) -> None:
        """End this process in `PATIENCE` seconds, whatever it waits for then."""
        if _program:
            timer = threading.Timer(PATIENCE, self._give_up)
            timer.daemon = True
            timer.start()

    def _give_up(self) -> None:
        try:
            self.tell()
        finally:
            os._exit(130)
