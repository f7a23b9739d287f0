"""The command that writes the audit, and runs the controls."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from crossfed.platform.cli.main import app
from crossfed.platform.config.settings import build
from crossfed.platform.errors import CrossfedError
from crossfed.platform.federation.final import test_once as final_test
from crossfed.platform.report import recording
from crossfed.platform.report.recording import run_recorded
from crossfed.platform.tracking import tracker
from toy_controls import twins


def run(method: str, data: Path, out: Path, *sets: str, **options: Any) -> Path:
    values = {"data": data, "out": out, "backend": "inprocess", "tracking.enabled": False}
    config = build(method, sets=["tracking.artifacts=false", *sets], values=values)
    return run_recorded(config, finish=final_test, **options).run_dir


ATTACK, ACCOUNT = "What an attacker infers from uploaded item vectors", "The privacy account"


class Sources(HTMLParser):
    """Whatever a browser would fetch, and the order of tags."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.found += [value for name, value in attrs if name in ("src", "href", "srcset", "data")]
        assert tag not in ("script", "link", "iframe")
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_command_writes_the_page_and_the_controls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[Path] = []
    monkeypatch.setattr(
        tracker, "add_artifact", lambda run_dir, path: logged.append(path) or "recorded"
    )
    run_dir = run(
        "toy_controls:COPIES", twins(tmp_path / "twins", n_users=30, n_items=300), tmp_path
    )
    command = [
        "audit",
        run_dir.name,
        "--out",
        str(tmp_path),
        "--controls",
        "--seeds",
        "1",
        "--progress",
        "quiet",
    ]
    done = CliRunner().invoke(
        app, [*command, "--local", "toy_controls:ALONE"], catch_exceptions=False
    )
    assert done.exit_code == 0 and "6 of 6: stale, seed 0: running" in done.output
    assert logged == [
        run_dir / name for name in ("controls.json", "controls.md", "audit.md", "audit.html")
    ]
    table = (run_dir / "controls.md").read_text()
    assert table in done.output and "| left | honest | what was sent | 1 | **1.0000** |" in table
    assert (
        "left: transfer (joint less solo) is +0." in done.output
        and ("| left | solo | nothing: a fed") in table
    )
    markdown, html = ((run_dir / f"audit.{kind}").read_text() for kind in ("md", "html"))
    for title in ("What left each domain", ATTACK, ACCOUNT, "Transfer controls"):
        assert f"## {title}\n" in markdown and f"<h2>{title}</h2>" in html
    assert "| stale | the first round&#39;s |" not in markdown and "the first round&#39;s" in html
    assert (
        re.findall(r"!\[\w+\]\((.*)\)", markdown) == ["figures/bytes.png"]
        and (run_dir / "figures/bytes.png").is_file()
    )
    sources = Sources()
    sources.feed(html)
    assert (
        not sources.open
        and all(source.startswith("data:image/png;base64,") for source in sources.found)
        and sources.found
    )
    assert "http" not in re.sub(r"data:image[^\"]*", "", html)
    # the controls stay on the page
    again = CliRunner().invoke(app, ["audit", str(run_dir)], catch_exceptions=False)
    assert again.exit_code == 0 and (run_dir / "audit.md").read_text() == markdown


def test_an_interrupt_says_how_to_go_on(
    shops: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    run_dir = run("toys:GOSSIP", shops, tmp_path)
    monkeypatch.setattr(recording, "run_recorded", interrupted)
    command = ["audit", str(run_dir), "--controls", "--local", "toy_controls:ALONE"]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert done.exit_code == 130 and "the same command goes on where it was" in done.output
    assert not (run_dir / "controls.json").exists()


def test_options_that_belong_to_the_controls(shops: Path, tmp_path: Path) -> None:
    run_dir = run("toy_controls:ALONE", shops, tmp_path)
    for wrong, told in (
        (["--metric", "ndcg@10"], "belong to --controls"),
        (["--controls", "--local-set", "a=1"], "--local-set belongs to --local METHOD"),
    ):
        with pytest.raises(CrossfedError, match=told):
            CliRunner().invoke(app, ["audit", str(run_dir), *wrong], catch_exceptions=False)
