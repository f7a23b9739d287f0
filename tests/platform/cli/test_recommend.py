"""What is recommended to a user, in a terminal of some width, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from crossfed.platform.cli import recommend as cli_recommend
from crossfed.platform.cli.main import app
from crossfed.platform.config.settings import build
from crossfed.platform.data.store import PreparedData
from crossfed.platform.errors import CrossfedError
from crossfed.platform.report.recording import run_recorded
from crossfed.platform.serving import model
from served import expected


@pytest.fixture(scope="module")
def run_dir(shops: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    values = {"data": shops, "out": tmp_path_factory.mktemp("runs"), "backend": "inprocess"}
    sets = ["epochs=1", "tracking.enabled=false", "tracking.artifacts=false"]
    return run_recorded(build("lightgcn", sets=sets, values=values)).run_dir


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


@pytest.mark.parametrize("width", [40, 60, 100, 160])
def test_ranks_ids_and_scores_are_whole_at_every_width(
    width: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An id of 20 characters and a long title: only the title may be cut."""
    ids = [f"item-with-a-long-{i:03d}" for i in range(3)]
    answer = model.Answer("u1", True, tuple(ids), (0, 1, 2), (0.12345, 0.1, -1.234567))

    class Model:
        items = ids

        def __init__(self, *_: Any): ...

        def recommend(self, *_: Any) -> list[model.Answer]:
            return [answer]

    class Data:
        def item_texts(self, _: str) -> list[str]:
            return ["Begins with " + "many words " * 20] * 3

    monkeypatch.setattr(model, "DomainModel", Model)
    monkeypatch.setattr("crossfed.platform.federation.runs.find_run", lambda *_: tmp_path)
    monkeypatch.setattr("crossfed.platform.federation.runs.stored_config", lambda _: None)
    monkeypatch.setattr("crossfed.platform.federation.run.resolve_data", lambda _: tmp_path)
    monkeypatch.setattr(PreparedData, "open", lambda _: Data())
    seen = shown("recommend", "run", "--domain", "books", "--user", "u1", width=width)
    assert widest(seen) <= width
    for rank, (item, score) in enumerate(zip(ids, ("0.1235", "0.1", "-1.235"), strict=True), 1):
        line = next(line for line in seen.splitlines() if item in line)
        assert re.match(rf"│ +{rank} │ {item} ", line) and f" {score} │" in line
    assert seen.count("Begins") == 3


def test_the_default_of_k_is_the_models() -> None:
    assert f"[default: {model.K}]" in re.sub(
        r"\s+", " ", shown("recommend", "--help", width=200, terminal=False)
    )
    assert cli_recommend.longest(["a", "日本"]) == 4


def test_the_command_prints_titles_and_leaves_out_what_was_seen(run_dir: Path, shops: Path) -> None:
    common = ["recommend", str(run_dir), "--domain", "games", "--user", "games-u7", "-k", "35"]
    done = CliRunner().invoke(app, common, env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    rows = [line.split("│") for line in done.output.splitlines() if "games-i" in line]
    assert [row[2].strip() for row in rows] == expected(run_dir, "games", 7, 35)
    number = int(rows[0][2].strip().removeprefix("games-i"))
    assert rows[0][4].strip() == f"games product {number} of kind {number % 5}"
    unseen = CliRunner().invoke(app, [*common, "--exclude-seen"], env={"COLUMNS": "200"})
    users, items, _ = PreparedData.open(shops).interactions("games")
    shown = {line.split("│")[2].strip() for line in unseen.output.splitlines() if "games-i" in line}
    assert shown == {f"games-i{i}" for i in range(35)} - {f"games-i{i}" for i in items[users == 7]}


def test_the_command_names_what_is_wrong(run_dir: Path, tmp_path: Path) -> None:
    for args, message in (
        (
            [str(run_dir), "--domain", "toys", "--user", "x"],
            "no model of domain 'toys'; it has: books, films, games",
        ),
        ([str(tmp_path), "--domain", "books", "--user", "x"], str(tmp_path)),
    ):
        failed = CliRunner().invoke(app, ["recommend", *args])
        assert isinstance(failed.exception, CrossfedError) and message in str(failed.exception)
