"""The commands for clusters: templates and their check, the doctor."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from crossfed.platform.cli.main import app
from crossfed.platform.cluster.files import template


def test_the_command_says_that_there_is_no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    done = CliRunner().invoke(app, ["doctor", "--address", "127.0.0.1:1"])
    assert done.exit_code == 2
    assert (
        "cluster" in done.output
        and "refused" in done.output
        and ("No run can start: 1 error.") in done.output
    )


def test_commands(tmp_path: Path) -> None:
    runner = CliRunner()
    printed = runner.invoke(app, ["cluster", "template", "local"])
    assert printed.exit_code == 0 and printed.output == template("local")
    path = tmp_path / "mine.yaml"
    path.write_text(printed.output)
    fine = runner.invoke(app, ["cluster", "check", str(path)])
    assert fine.exit_code == 0 and fine.output.endswith("mine.yaml: no errors\n")
    path.write_text(printed.output.replace("upscaling_speed: 1.0", "upscaling_sped: 1.0"))
    wrong = runner.invoke(app, ["cluster", "check", str(path)])
    assert wrong.exit_code == 2
    assert re.search(
        r"error: .*mine.yaml, line \d+, upscaling_sped: unknown key; did you mean "
        r"upscaling_speed",
        wrong.output,
    )
