"""Toy averages for faults.

`SILENT_ONCE`: its first domain falls silent once, in its second round; the marker file remembers
that it has happened. `HELD`: every domain waits in its third round until the marker file is there.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from crossfed.platform.method import Context, Out, Phase, Stage
from toys import STAR, X_DOWN, X_UP, Toy, _method, adopt, average, upload


def _silent_once(state: Toy, inbox: Mapping, ctx: Context) -> Out:
    marker = Path(state.config.marker)
    if ctx.round == 2 and ctx.node < min(ctx.peers) and not marker.exists():
        marker.touch()
        if state.config.fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)  # alive, and no thread of it answers
        time.sleep(3600)  # a step that never ends, in a process that answers
    return upload(state, inbox, ctx)


SILENT_ONCE = _method(
    "silent_once",
    lambda c: (
        Stage(
            "mean",
            c.rounds,
            (Phase(_silent_once), Phase(average, "server"), Phase(adopt)),
            edges=STAR,
        ),
    ),
    (X_UP, X_DOWN),
)


def _held(state: Toy, inbox: Mapping, ctx: Context) -> Out:
    while ctx.round == 3 and not Path(state.config.marker).exists():
        time.sleep(0.1)
    return upload(state, inbox, ctx)


HELD = _method(
    "held",
    lambda c: (
        Stage("mean", c.rounds, (Phase(_held), Phase(average, "server"), Phase(adopt)), edges=STAR),
    ),
    (X_UP, X_DOWN),
)
