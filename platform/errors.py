"""What a user's mistake or a failed run raises: one sentence, which the command line prints."""

from __future__ import annotations


class CrossfedError(Exception):
    """A user's mistake or a failed run, told in one sentence; the command line prints it and exits
    with code 2.
    """


class LeakError(CrossfedError):
    """A payload that was not declared, or a message outside the stage's edges. Names the sender and
    the key.
    """
