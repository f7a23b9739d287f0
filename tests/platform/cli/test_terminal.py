"""What commands show in a terminal of some width, in a pipe, in `--help`, and what the shell
completes.
"""

from __future__ import annotations

import io
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from crossfed.platform.cli.main import PANELS, app
from crossfed.platform.config.settings import run_keys
from crossfed.platform.console import Progress, SummaryRow
from crossfed.platform.report.tables import Cell, Column, Grid
from made_runs import make_run, users


def shown(*args: Any, width: int = 100, terminal: bool = True) -> str:
    """What a command prints in a terminal of that width; colours left out, bold and underlined
    kept.
    """
    env = {"COLUMNS": str(width)} | ({"FORCE_COLOR": "1", "TERM": "xterm"} if terminal else {})
    done = CliRunner().invoke(app, [str(arg) for arg in args], catch_exceptions=False, env=env)
    assert done.exit_code == 0, done.output
    return re.sub(r"\x1b\[(?![14]m)[\d;]*m", "", done.output)


def widest(text: str) -> int:
    return max(len(re.sub(r"\x1b\[\d+m", "", line)) for line in text.splitlines())


@pytest.fixture
def out(tmp_path: Path) -> Path:
    for name, method, dim in (("l", "lightgcn", 8), ("f", "fedcrf", 8), ("f16", "fedcrf", 16)):
        values = {
            domain: {
                "recall_at_20": users(dim, 0.3 + len(method) / 100),
                "ndcg_at_20": users(dim + 5, 0.2),
            }
            for domain in ("books", "games")
        }
        make_run(tmp_path / "runs" / name, method, 0, values, sets=(f"dim={dim}",))
    return tmp_path / "runs"


# -- comparisons -----------------------------------------------------------------------------------


def test_a_comparison_is_a_table_in_a_terminal_and_markdown_in_a_pipe(out: Path) -> None:
    seen = shown("compare", "l", "f", "--out", out, width=120)
    assert "<ins>" not in seen and "**" not in seen and "| ---" not in seen
    assert "┃" in seen and "\x1b[1m" in seen and "\x1b[4m" in seen and "books" in seen
    piped = shown("compare", "l", "f", "--out", out, terminal=False)
    assert piped.startswith("| method | seeds | books Recall@20") and "<ins>" in piped
    asked = shown("compare", "l", "f", "--out", out, "--format", "md")
    assert asked.startswith("| method"), "what is asked for is given, in a terminal too"


@pytest.mark.parametrize("width", [40, 60, 100])
def test_no_number_is_lost_in_a_narrow_terminal(width: int) -> None:
    """Eight columns of numbers; those that do not fit stand in further tables, beside the rows'
    names.
    """
    columns = (
        Column("method", right=False),
        *(Column("Recall@20", f"domain{i}") for i in range(8)),
    )
    rows = tuple(
        (name, *(Cell(f"0.{i}{place}", best=not place) for i in range(8)))
        for place, name in enumerate(("a", "b"))
    )
    from rich.console import Console

    console = Console(width=width, force_terminal=True, color_system=None)
    with console.capture() as capture:
        console.print(Grid("Test", columns, rows, "a caption").terminal(width))
    seen = capture.get()
    assert widest(seen) <= width
    for i in range(8):
        assert f"domain{i}" in seen and f"0.{i}0" in seen and f"0.{i}1" in seen
    assert (f"1 of {seen.count('┏')}" in seen) == (seen.count("┏") > 1)


def test_another_run_of_the_method_is_no_baseline(out: Path) -> None:
    seen = shown("compare", "f", "f16", "--out", out, terminal=False)
    assert "baseline" not in seen and "best over reference row" in seen
    assert "best over baseline" in shown("compare", "l", "f", "--out", out, terminal=False)


def test_one_run_has_no_best(out: Path) -> None:
    seen = shown("compare", "f", "--out", out, terminal=False)
    assert "**" not in seen and "<ins>" not in seen and "best in bold" not in seen


def test_a_folder_of_runs_stands_for_those_that_have_finished(out: Path) -> None:
    named = shown("compare", "f", "f16", "l", "--out", out, terminal=False)
    (out / "begun").mkdir()
    (out / "begun" / "config.yaml").write_text("method: lightgcn\n")
    shutil.copytree(out / "f", out / "again")  # the same run once more: the latest counts
    assert shown("compare", out, terminal=False) == named
    assert shown("compare", "runs", "--out", out.parent, terminal=False) == named
    for name in ("l", "f", "f16", "again"):
        (out / name / "result.json").unlink()
    with pytest.raises(Exception, match=r"None of the 5 runs in .* has finished"):
        shown("compare", out)


# -- recommendations -------------------------------------------------------------------------------


def test_metrics_that_do_not_fit_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    metrics = {"recall_at_20": 0.1, "ndcg_at_20": 0.2, "hit_rate_at_20": 0.3}
    stream = io.StringIO()
    with Progress("plain", stream) as view:
        view.finish([SummaryRow("books", metrics, metrics, "ratio-80-10-10", "full:30")])
    seen = stream.getvalue()
    assert "recall_at_20" in seen
    assert "more at over 40 characters: ndcg_at_20, hit_rate_at_20" in " ".join(seen.split())


# -- help and completion ---------------------------------------------------------------------------


def test_help_is_in_panels_and_begins_with_run() -> None:
    seen = shown("--help", width=120)
    places = [seen.index(f"─ {panel} ─") for panel in PANELS]
    assert places == sorted(places)
    assert re.search(r"─ Run and search ─+╮\n│[ \x1b\[1m]*run ", seen)
    listed = {command for names in PANELS.values() for command in names}
    known = {
        name or command.callback.__name__
        for command in app.registered_commands
        for name in [command.name]
    }
    known |= {group.name or group.typer_instance.info.name for group in app.registered_groups}
    assert listed == known, "every command has its panel"


def test_the_help_of_tune_shows_what_tuning_takes() -> None:
    seen = shown("tune", "--help", width=160)
    assert all(
        word in seen
        for word in ("resume", "extend", "--max-rounds", "--time-budget", "--search", "--sampler")
    )


@pytest.mark.parametrize(
    ("command", "default"),
    [
        ("run", "ray"),
        ("recommend", "10"),
        ("evaluate", "the run's"),
        ("compare", "the one that selects"),
        ("tune start", "runs"),
    ],
)
def test_a_default_in_words_is_no_markup(command: str, default: str) -> None:
    """Rich takes what stands in brackets for a style and leaves it out."""
    seen = shown(*command.split(), "--help", width=200, terminal=False)
    assert f"[default: {default}" in re.sub(r"\s+", " ", seen)


# -- keys ------------------------------------------------------------------------------------------


def test_all_keys_are_shown_where_a_wrong_one_says_so() -> None:
    seen = shown("methods", "lightgcn", "--all", width=200)
    assert all(key in seen for key in run_keys())
    assert "resources.threads" not in shown("methods", "lightgcn", width=200)


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("epohcs", r"did you mean epochs\?"),
        ("thread", r"did you mean resources.threads\?"),
        ("nonsense", r"unknown key 'nonsense'\. Nearest: "),
    ],
)
def test_an_unknown_key_names_five(key: str, words: str) -> None:
    done = CliRunner().invoke(app, ["run", "fedcrf", "--set", f"{key}=1"])
    told = str(done.exception)
    assert re.search(words, told) and told.endswith("`crossfed methods fedcrf --all` shows all.")
    names = {name for name in re.findall(r"[\w.]+\w", told) if name in run_keys()}
    assert 2 <= len(names) <= 5 and len(told) < 250
