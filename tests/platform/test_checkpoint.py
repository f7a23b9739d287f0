"""Committed rounds: what a damaged one does to a run, on toy methods whose answer is known, and
that nothing is unpickled.
"""

from __future__ import annotations

import ast
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crossfed.platform import checkpoint
from crossfed.platform.checkpoint import Checkpoints
from crossfed.platform.config.settings import build
from crossfed.platform.console import Progress
from crossfed.platform.errors import CrossfedError
from crossfed.platform.federation.node import InProcess, Plan
from crossfed.platform.federation.rounds import Round
from crossfed.platform.federation.runs import stored_config
from crossfed.platform.report.recording import run_recorded

ROOT = Path(__file__).resolve().parents[2]
NODES = ("server", "books", "films", "games")


class Stop(Exception):
    """Raised after a chosen round, in place of a crash."""


def values(shops: Path, out: Path) -> dict[str, Any]:
    tracking = {"tracking.enabled": False, "tracking.artifacts": False}
    return {"data": shops, "out": out, "backend": "inprocess", **tracking}


def start(shops: Path, out: Path, after: int | None) -> Path:
    """A run of five rounds, interrupted before round `after` is committed."""
    started: list[Path] = []

    def stop(row: Round) -> None:
        if row.step == after:
            raise Stop

    config = build("toys:AVERAGE", sets=["rounds=5"], values=values(shops, out))
    try:
        run_recorded(config, on_round=stop, started=started.append)
    except Stop:
        assert after is not None
    return started[0]


class Heard(Progress):
    """Keeps what a run says of itself."""

    def __init__(self) -> None:
        super().__init__("quiet", io.StringIO())
        self.told: list[str] = []

    def note(self, text: str) -> None:
        self.told.append(text)

    warn = note


def resume(run_dir: Path) -> list[str]:
    """Go on with a run; returns what it said."""
    heard = Heard()
    run_recorded(stored_config(run_dir), resume=run_dir, view=heard)
    return heard.told


def outcome(run_dir: Path) -> dict[str, Any]:
    """What must not depend on what happened on the way."""
    result = json.loads((run_dir / "result.json").read_text())
    history = [json.loads(line) for line in (run_dir / "history.jsonl").read_text().splitlines()]
    return {
        "history": [row | {"seconds": 0} for row in history],
        **{key: result[key] for key in ("domains", "bytes")},
    }


@pytest.fixture(scope="module")
def straight(shops: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return outcome(start(shops, tmp_path_factory.mktemp("straight"), None))


@pytest.fixture(scope="module")
def interrupted(shops: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Commits 2 and 3 of five rounds are there; round 4 was run and not committed."""
    run_dir = start(shops, tmp_path_factory.mktemp("interrupted"), 4)
    assert [path.name for path in Checkpoints(run_dir, NODES).committed()] == [
        "commit-000002",
        "commit-000003",
    ]
    return run_dir


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


DAMAGE: dict[str, Callable[[Path], None]] = {
    "flipped": flip,
    "truncated": cut,
    "emptied": lambda path: path.write_bytes(b""),
    "gone": Path.unlink,
}


@pytest.mark.parametrize(
    ("damage", "file"),
    [
        ("flipped", "books.safetensors"), ("truncated", "server.json"), ("emptied", "films.inbox.json"),  # noqa: E501
        ("flipped", "games.best.safetensors"), ("gone", "games.best.json"), ("truncated", "server.safetensors"),  # noqa: E501
        ("flipped", "progress.json"), ("emptied", "progress.json"), ("flipped", "manifest.json"), ("gone", "manifest.json"),  # noqa: E501
    ],
)  # fmt: skip
def test_a_damaged_commit_is_passed_over(
    damage: str, file: str, interrupted: Path, straight: dict[str, Any], tmp_path: Path
) -> None:
    run_dir = shutil.copytree(interrupted, tmp_path / "run")
    DAMAGE[damage](run_dir / "checkpoints" / "commit-000003" / file)
    told = resume(run_dir)
    assert outcome(run_dir) == straight
    assert [
        line for line in told if line.endswith("; going back to commit-000002, the commit before")
    ]
    assert any("continuing after round 2" in line for line in told)


def test_a_sound_commit_is_the_one_that_is_used(
    interrupted: Path, straight: dict[str, Any], tmp_path: Path
) -> None:
    run_dir = shutil.copytree(interrupted, tmp_path / "run")
    told = " ".join(resume(run_dir))
    assert (
        outcome(run_dir) == straight
        and "continuing after round 3" in told
        and "going back" not in told
    )


def test_what_was_not_committed_is_not_read(interrupted: Path, tmp_path: Path) -> None:
    """A best state laid beside the committed files would otherwise be taken for one."""
    run_dir = shutil.copytree(interrupted, tmp_path / "run")
    folder = run_dir / "checkpoints" / "commit-000003"
    checkpoint.save(folder / "books.uploaded", {"x": np.zeros(3)})
    with pytest.raises(
        CrossfedError,
        match=r"books\.uploaded\.json, "
        r"books\.uploaded\.safetensors, which was not",
    ):
        Checkpoints(run_dir, NODES).check(folder)


@pytest.mark.parametrize("resumed", [False, True])
def test_a_best_state_that_rots_after_it_was_written_is_found_out(
    resumed: bool, shops: Path, tmp_path: Path
) -> None:
    """It is linked from commit to commit; its hash is that of the bytes that were written, not of
    those that are there.
    """
    (tmp_path / "config.yaml").touch()
    plan = Plan(
        build("toys:AVERAGE", values=values(shops, tmp_path)),
        shops,
        NODES[1:],
        tmp_path,
        tmp_path / "cache",
    )
    nodes, kept = InProcess(), Checkpoints(tmp_path, NODES)
    nodes.start(plan, {})
    nodes.each("keep", dict.fromkeys(NODES, ()))

    def commit(number: int) -> Path:
        folder = kept.open(number)
        return kept.commit(folder, {}, nodes.save(folder, {}))

    first = commit(1)
    if resumed:
        nodes.load_state(first)
    assert kept.check(commit(2)) == {}
    flip(first / "games.best.safetensors")
    with pytest.raises(
        CrossfedError,
        match=r"games\.best\.safetensors differs from what was "
        r"written",
    ):
        kept.check(commit(3))
    nodes.stop()


def test_where_no_commit_is_sound_the_run_stops_in_one_sentence(
    interrupted: Path, tmp_path: Path
) -> None:
    run_dir = shutil.copytree(interrupted, tmp_path / "run")
    for number in (2, 3):
        flip(run_dir / "checkpoints" / f"commit-00000{number}" / "games.safetensors")
    with pytest.raises(
        CrossfedError,
        match=r"No commit in .* is sound \(.*games\.safetensors differs.*\); .* "
        r"delete it",
    ):
        resume(run_dir)
    shutil.rmtree(run_dir / "checkpoints")
    assert "continuing" not in " ".join(resume(run_dir)), (
        "as the sentence says, the run starts from the beginning"
    )


@pytest.mark.parametrize("log", ["history.jsonl", "ledger.jsonl"])
def test_a_log_that_lost_its_end_goes_back_with_the_commit(
    log: str, interrupted: Path, straight: dict[str, Any], tmp_path: Path
) -> None:
    run_dir = shutil.copytree(interrupted, tmp_path / "run")
    committed = json.loads(
        (run_dir / "checkpoints" / "commit-000003" / "progress.json").read_text()
    )["logs"]
    file = run_dir / log
    file.write_bytes(file.read_bytes()[: committed[log.split(".")[0]]["bytes"] - 1])
    resume(run_dir)
    assert outcome(run_dir) == straight
    flip(file)  # a run whose end is there, but not what it came from, is not taken for finished
    with pytest.raises(
        CrossfedError,
        match=rf"No commit .* is sound \(the first .* bytes of "
        rf".*{log} differ",
    ):
        resume(run_dir)


def test_nothing_is_committed_before_every_part_is_there(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path, ("books", "films"))
    partial = kept.open(1)
    files = checkpoint.save(partial / "books", {"x": 1})
    with pytest.raises(
        CrossfedError,
        match=r"is not complete: films\.json, films\.safetensors "
        r"is missing",
    ):
        kept.commit(partial, {}, files)
    told = checkpoint.save(partial / "films", {"x": 2})
    (partial / "films.safetensors").unlink()
    with pytest.raises(CrossfedError, match=r"films\.safetensors is missing"):
        kept.commit(partial, {}, files | told)
    assert kept.committed() == [] and kept.latest() is None


def test_a_late_writer_of_an_earlier_attempt_does_not_reach_the_commit(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path, ("books",))
    earlier, now = kept.open(1), kept.open(1)
    files = checkpoint.save(now / "books", {"x": 1})
    with pytest.raises(CrossfedError, match="cannot be written"):
        checkpoint.save(earlier / "books", {"x": 2})
    commit = kept.commit(now, {"round": 1}, files)
    assert commit.name == "commit-000001" and kept.latest() == (commit, {"round": 1})
    assert checkpoint.load(commit / "books") == {"x": 1}


def test_two_commits_stay(tmp_path: Path) -> None:
    kept = Checkpoints(tmp_path, ("books",))
    for number in (1, 2, 3):
        partial = kept.open(number)
        kept.commit(partial, {"round": number}, checkpoint.save(partial / "books", {"x": number}))
    assert [path.name for path in kept.committed()] == ["commit-000002", "commit-000003"]
    assert kept.peek() == {"round": 3}


SAFE = "_Loader"
"""PyYAML's safe loader, made stricter (`yaml_text`)."""
FORBIDDEN = ("pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve")


def _unsafe(tree: ast.AST) -> list[str]:
    """Ways to read what can hold code."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            found += [name for name in names if name.split(".")[0] in FORBIDDEN]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            call = ast.unparse(node.func)
            given = {word.arg: ast.unparse(word.value) for word in node.keywords}
            if call == "yaml.load" and given.get("Loader") == SAFE:
                continue
            if call in (
                "torch.load",
                "yaml.load",
                "yaml.unsafe_load",
                "yaml.full_load",
                "pd.read_pickle",
            ):
                found.append(call)
            if (
                call in ("np.load", "numpy.load", "np.save", "numpy.save")
                and given.get("allow_pickle") != "False"
            ):
                found.append(f"{call} without allow_pickle=False")
    return found


def test_nothing_that_is_read_can_hold_code() -> None:
    sources = [
        path for room in ("platform", "methods", "tuning") for path in (ROOT / room).rglob("*.py")
    ]
    assert len(sources) > 40
    unsafe = {
        str(path.relative_to(ROOT)): found
        for path in sources
        if (found := _unsafe(ast.parse(path.read_text())))
    }
    assert unsafe == {}
    for line in (
        "import pickle",
        "from torch import x; torch.load(f)",
        "np.load(f)",
        "np.load(f, allow_pickle=True)",
    ):
        assert _unsafe(ast.parse(line)), line
