"""The progress view: plain lines, the live view on a pseudo-terminal, and the terminal given back
whatever happens.
"""

from __future__ import annotations

import io
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from crossfed.platform.console import Progress, SummaryRow, make_progress, number, size, span

HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"


def tell(view: Progress) -> None:
    """A short run of two domains."""
    view.start("FedCRF on synthetic shops", ["seed 1", "protocol ratio-80-10-10"])
    for done in (0, 40, 100):
        view.encoding("Books", done, 100)
    view.stage("pretrain", 3)
    for round, value in enumerate((0.1, 0.3, 0.2), 1):
        metrics = {
            "val/Books/recall_at_20": value,
            "val/Books/ndcg_at_20": 0.5,
            "train/Books/loss": 1.0 / round,
        }
        metrics |= {"val/Art [& more]/recall_at_20": 2 * value}
        view.round("pretrain", round, 3, metrics, 2.0, 123_456, 65_432)
    view.note("stopped early")
    rows = [
        SummaryRow(
            name,
            {"recall_at_20": 0.123456, "recall_at_10": 0.1},
            {"recall_at_20": 0.1},
            "ratio-80-10-10",
            "full:9",
        )
        for name in ("Books", "Art [& more]")
    ]
    view.finish(rows)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.123456, "0.1235"),
        (0.0, "0.0000"),
        (1.0, "1.000"),
        (12.3456, "12.35"),
        (17.0, "17"),
        (1234.5, "1234"),
        (99999.6, "100000"),
        (1.2346e-7, "1.235e-07"),
        (2.5e9, "2.500e+09"),
        (-0.5, "-0.5000"),
        (float("nan"), "–"),
        (float("inf"), "∞"),
    ],
)
def test_number_has_four_digits(value: float, text: str) -> None:
    assert number(value) == text


def test_size_and_span_are_for_people() -> None:
    assert [size(n) for n in (0, 999, 1000, 123_456, 2_500_000, 7.1e13)] == [
        "0 B", "999 B", "1 kB", "123 kB", "2.5 MB", "71 TB"
    ]  # fmt: skip
    assert [span(s) for s in (0.001, 0.42, 12.4, 59.9, 185, 7384)] == [
        "0 s",
        "0.42 s",
        "12 s",
        "1:00",
        "3:05",
        "2:03:04",
    ]


def test_plain_is_one_line_per_round_without_control_characters() -> None:
    out = io.StringIO()
    with make_progress("plain", out) as view:
        tell(view)
    lines = out.getvalue().splitlines()
    assert "\x1b" not in out.getvalue()
    rounds = [line for line in lines if line.startswith("pretrain ")]
    assert rounds[1] == (
        "pretrain 2/3  recall_at_20: Books 0.3000, Art [& more] 0.6000  loss: Books 0.5000  "
        "up 123 kB down 65.4 kB  2 s  2 s left"
    )
    assert (
        "recall_at_20: Books 0.2000 (best 0.3000), Art [& more] 0.4000 (best 0.6000)" in rounds[2]
    )
    assert "left" not in rounds[2]
    assert len([line for line in lines if line.startswith("text of Books")]) == 2


def test_the_final_table_names_protocol_and_candidates_once_when_they_agree() -> None:
    out = io.StringIO()
    with make_progress("plain", out) as view:
        tell(view)
    assert out.getvalue().count("ratio-80-10-10; candidates: full:9") == 1
    text = re.sub(r" +", " ", out.getvalue())
    assert "│ Books │ validation │ 0.1235 │" in text
    assert "│ Art [& more] │ test │ 0.1000 │" in text
    assert "recall_at_10" not in text  # another cut-off than the first metric's

    other = io.StringIO()
    view = make_progress("plain", other)
    view.finish([SummaryRow(n, {"m_at_5": 1.0}, {}, "loo", f"sampled:{n}") for n in "AB"])
    assert "A: loo; candidates: sampled:A\nB: loo; candidates: sampled:B\n" in other.getvalue()
    assert "test" not in other.getvalue()


def test_a_new_stage_has_bests_of_its_own() -> None:
    out = io.StringIO()
    with make_progress("plain", out) as view:
        view.stage("a", 1)
        view.round("a", 1, 1, {"val/B/x": 0.9}, 1.0, 0, 0)
        view.stage("b", 2)
        view.round("b", 1, 2, {"val/B/x": float("nan")}, 1.0, 0, 0)
        view.round("b", 2, 2, {"val/B/x": 0.1}, 1.0, 0, 0)
    assert "b 1/2  x: B –  1 s" in out.getvalue()
    assert "b 2/2  x: B 0.1000  1 s" in out.getvalue()


def test_quiet_shows_the_table_and_warnings_only(capsys: pytest.CaptureFixture[str]) -> None:
    with make_progress("quiet") as view:
        view.warn("the server is away")
        tell(view)
    told = capsys.readouterr()
    assert told.err == "warning: the server is away\n"
    assert told.out.startswith("Result\n")


def test_auto_is_plain_without_a_terminal() -> None:
    out = io.StringIO()
    with make_progress("auto", out) as view:
        view.stage("a", 1)
    assert out.getvalue() == "stage a: up to 1 round\n"


def heed_interrupts() -> None:
    """What a shell starts in the background ignores Ctrl-C, and so would all that it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def run_in_terminal(
    body: str, tmp_path: Path, interrupt: bool = False, **env: str
) -> tuple[str, int]:
    """Run `body` after `tell` is defined, on a pseudo-terminal; returns what it showed, and its
    exit code.
    """
    script = tmp_path / "script.py"
    here = str(Path(__file__).parent)
    script.write_text(
        f"import sys, time\nsys.path.insert(0, {here!r})\nfrom test_console import *\n{body}"
    )
    main, side = pty.openpty()
    full = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "40", **env}
    if "CI" not in env:
        full.pop("CI", None)
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdin=side,
        stdout=side,
        stderr=side,
        env=full,
        preexec_fn=heed_interrupts,
    )
    os.close(side)
    shown = b""
    sent = False
    while True:
        try:
            chunk = os.read(main, 4096)
        except OSError:  # the other side is closed
            break
        if not chunk:
            break
        shown += chunk
        if interrupt and not sent and b"round 3/3" in shown:
            process.send_signal(signal.SIGINT)
            sent = True
    os.close(main)
    return shown.decode(), process.wait()


def test_live_in_a_terminal(tmp_path: Path) -> None:
    body = "with make_progress() as v:\n    tell(v)\n    print('after')\n"
    shown, code = run_in_terminal(body, tmp_path)
    assert code == 0
    assert HIDE in shown
    assert shown.rindex(SHOW) > shown.rindex(HIDE)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert "pretrain  round 3/3  6 s  up 370 kB  down 196 kB" in plain
    assert re.search(r"Art \[& more\] +0\.4000 +0\.6000", plain)
    assert plain.rstrip().endswith("after")


def test_live_shows_others_output_above_itself(tmp_path: Path) -> None:
    body = (
        "with make_progress() as v:\n    v.stage('a', 2)\n    v.round('a', 1, 2, {'val/B/x': "
        ".5}, 1., 0, 0)\n"
        "    print('a stray line')\n    time.sleep(.3)\n"
    )
    shown, _ = run_in_terminal(body, tmp_path)
    assert re.search(r"a stray line *\r?\n", shown)


def test_plain_in_a_terminal_of_continuous_integration(tmp_path: Path) -> None:
    shown, code = run_in_terminal("with make_progress() as v:\n    tell(v)\n", tmp_path, CI="true")
    assert code == 0
    assert HIDE not in shown


@pytest.mark.parametrize("how", ["exception", "interrupt"])
def test_the_terminal_is_given_back(tmp_path: Path, how: str) -> None:
    then = "raise RuntimeError('broken')" if how == "exception" else "time.sleep(120)"
    body = (
        "with make_progress() as v:\n    v.stage('a', 3)\n"
        "    for r in (1, 2):\n        v.round('a', r, 3, {'val/B/x': .5}, 1., 0, 0)\n"
        f"    {then}\n"
    )
    began = time.monotonic()
    shown, code = run_in_terminal(body, tmp_path, interrupt=how == "interrupt")
    assert time.monotonic() - began < 110
    assert code != 0
    assert shown.rindex(SHOW) > shown.rindex(HIDE)
    assert "round 2/3" in shown  # what was reached stays on the screen
    assert ("RuntimeError: broken" if how == "exception" else "KeyboardInterrupt") in shown
