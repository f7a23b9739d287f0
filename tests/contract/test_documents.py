"""Documents hold what is true: their examples run word for word, their commands exist, their lines
fit.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.main import get_command

from crossfed.platform.cli.main import app

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(
    path
    for path in [*ROOT.glob("*.md"), *ROOT.glob(".github/*.md"), *ROOT.glob("[pmt]*/**/README.md")]
)


def blocks(path: Path, language: str) -> list[str]:
    """The fenced blocks of a language in a document."""
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(encoding="utf-8"), re.M | re.S)


def example(path: Path, name: str) -> str:
    """The Python block below the comment that names it."""
    found = re.search(
        rf"<!-- example: {re.escape(name)} -->\n```python\n(.*?)^```",
        path.read_text(encoding="utf-8"),
        re.M | re.S,
    )
    assert found, f"{path.name} holds no example {name}"
    return found[1]


def run(code: str, folder: Path, cache: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False,
        env={**os.environ, "CROSSFED_CACHE": str(cache), "COLUMNS": "100"},
    )  # fmt: skip


def test_readme_is_short() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 150


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_lines_fit(path: Path) -> None:
    """Tables and links cannot be broken; everything else can."""
    long = [
        line
        for line in path.read_text(encoding="utf-8").splitlines()
        if len(line) > 100 and not line.startswith(("|", "![")) and "http" not in line
    ]
    code = {
        line
        for language in ("bash", "yaml", "text", "python")
        for block in blocks(path, language)
        for line in block.splitlines()
    }
    assert [
        line
        for line in long
        if line not in code or (path.name == "README.md" and path.parent == ROOT)
    ] == []


def commands() -> list[tuple[str, list[str]]]:
    """Every `crossfed …` line of the documents' shell blocks."""
    found = []
    for path in DOCUMENTS:
        for block in blocks(path, "bash"):
            for line in block.replace("\\\n", " ").splitlines():
                for part in re.split(r"&&|;", re.split(r"(?:^| )#", line)[0]):
                    words = shlex.split(part.strip())
                    if words and Path(words[0]).name == "crossfed":
                        found.append((str(path.relative_to(ROOT)), words[1:]))
    return found


@pytest.mark.parametrize(
    ("path", "words"),
    commands(),
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_every_command_in_a_document_is_one(path: str, words: list[str]) -> None:
    """Its name and its options are the program's."""
    command: typer.core.TyperGroup | typer.core.TyperCommand = get_command(app)  # type: ignore[assignment]
    rest = list(words)
    while isinstance(command, typer.core.TyperGroup):
        if not rest or rest[0].startswith("-"):
            break
        known = command.commands
        if rest[0] not in known and "start" in known:  # tune METHOD stands for tune start METHOD
            command = known["start"]  # type: ignore[assignment]
            break
        assert rest[0] in known, f"{path}: crossfed has no command {rest[0]}"
        command = known[rest.pop(0)]  # type: ignore[assignment]
    if "--" in rest:
        rest = rest[: rest.index("--")]
    options = {
        name
        for parameter in command.params
        for name in (*parameter.opts, *parameter.secondary_opts)
    } | {"--help"}
    unknown = [
        word
        for word in rest
        if re.match(r"--?[a-z]", word) and word.partition("=")[0] not in options
    ]
    assert not unknown, f"{path}: {' '.join(words)}: no option {unknown[0]}"


def test_the_methods_example_runs_and_its_payloads_are_the_declared_ones(tmp_path: Path) -> None:
    (tmp_path / "fedmf.py").write_text(
        example(ROOT / ".github" / "CONTRIBUTING.md", "fedmf.py"), encoding="utf-8"
    )
    contributing = ROOT / ".github" / "CONTRIBUTING.md"
    (tmp_path / "test_fedmf.py").write_text(example(contributing, "test_fedmf.py"))
    (tmp_path / "fedmf.yaml").write_text(
        next(text for text in blocks(contributing, "yaml") if "search:" in text)
    )
    code = (
        "import pytest\n"
        "from crossfed.platform.registry import method_file\n"
        "from crossfed.platform.config.settings import build\n"
        "from crossfed.tuning.space import space\n"
        "assert build('fedmf:METHOD', preset='wide').config['dim'] == 64\n"
        "assert set(space('fedmf:METHOD')) == set(method_file('fedmf:METHOD')['search'])\n"
        "raise SystemExit(pytest.main(['-q', '-p', 'no:cacheprovider', 'test_fedmf.py']))\n"
    )
    done = run(code, tmp_path, tmp_path / "cache")
    assert done.returncode == 0, done.stdout + done.stderr


def test_readmes_example_runs_word_for_word(tmp_path: Path) -> None:
    done = run(example(ROOT / "README.md", "first"), tmp_path, tmp_path / "cache")
    assert done.returncode == 0, done.stderr
    assert "recall_at_20" in done.stdout and "fedsasrec" in done.stdout


def test_the_public_names_have_api_pages(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "pdoc", "-o", str(tmp_path), "crossfed", "crossfed.launch"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )
    assert "time_budget" in (tmp_path / "crossfed" / "launch.html").read_text(encoding="utf-8")
