"""The artifact store: hits, keys, damage, several writers, disks that refuse."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from crossfed.platform.data import artifacts
from crossfed.platform.data.artifacts import ArtifactStore, text_key
from crossfed.platform.errors import CrossfedError

TEXTS = ["soft blue towel", "", "cast iron pan"]


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "cache")


def test_second_time_is_a_hit_with_the_same_bytes(store: ArtifactStore) -> None:
    reports: list[tuple[int, int]] = []
    path, first, hit = store.ensure_text(
        TEXTS, "hashing:32", progress=lambda *now: reports.append(now)
    )
    assert not hit
    assert reports == [(2, 2)]
    assert path.is_relative_to(store.root)
    assert (first.shape, first.dtype) == ((3, 32), np.float32)
    assert isinstance(first, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        first[0] = 0.0
    again_path, again, hit = store.ensure_text(
        TEXTS, "hashing:32", progress=lambda *now: reports.append(now)
    )
    assert hit
    assert again_path == path
    assert len(reports) == 1
    np.testing.assert_array_equal(first, again)
    about = json.loads(path.with_suffix(".json").read_text())["about"]
    assert about == {"encoder": "hashing-32-v1", "missing": "zero", "without_text": 1, "items": 3}


def test_root_is_the_environments_or_the_users(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CROSSFED_CACHE", str(tmp_path / "mine"))
    assert ArtifactStore().root == tmp_path / "mine"
    monkeypatch.delenv("CROSSFED_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert ArtifactStore().root == tmp_path / ".cache" / "crossfed"


def test_key_depends_on_everything_that_matters() -> None:
    keys = [
        text_key("a", ["x", "y"], "zero"),
        text_key("b", ["x", "y"], "zero"),
        text_key("a", ["y", "x"], "zero"),
        text_key("a", ["xy", ""], "zero"),
        text_key("a", ["x", "y"], "mean"),
        text_key("a", ["x", "y", ""], "zero"),
        text_key("a", ["x", "\ud800"], "zero"),
    ]
    assert len(set(keys)) == len(keys)
    assert text_key("a", ("x", "y"), "zero") == keys[0]


def test_a_hit_loads_no_model(store: ArtifactStore) -> None:
    store.ensure_text(TEXTS, "minilm")
    program = (
        "import sys; from pathlib import Path; from crossfed.platform.data.artifacts import "
        "ArtifactStore\n"
        "_, vectors, hit = ArtifactStore(Path(sys.argv[1])).ensure_text(sys.argv[2:], 'minilm')\n"
        "assert hit and vectors.shape == (3, 384)\n"
        "print({'sentence_transformers', 'transformers', 'sklearn'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(store.root), *TEXTS], capture_output=True, text=True
    )
    assert done.stderr == ""
    assert done.stdout.strip() == "set()"


def test_stored_vectors_with_nan_are_refused(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(artifacts, "embed", lambda *_: np.full((1, 8), np.nan, np.float32))
    with pytest.raises(
        CrossfedError,
        match=r"text vectors of shop in .*\.npy hold NaN or "
        r"infinity; delete that file",
    ):
        store.ensure_text(["a lamp"], "hashing:8", domain="shop")


@pytest.mark.parametrize(
    "damage", ["truncate", "flip", "empty", "no description", "broken description", "no array"]
)
def test_damaged_artifact_is_computed_again(store: ArtifactStore, damage: str) -> None:
    path, vectors, _ = store.ensure_text(TEXTS, "hashing:32")
    expected = np.array(vectors)
    del vectors
    data, description = path.read_bytes(), path.with_suffix(".json")
    if damage == "truncate":
        path.write_bytes(data[:-5])
    elif damage == "flip":
        path.write_bytes(data[:-5] + bytes([data[-5] ^ 1]) + data[-4:])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "no description":
        description.unlink()
    elif damage == "broken description":
        description.write_text(description.read_text()[:-30])
    else:
        path.unlink()
    _, vectors, hit = store.ensure_text(TEXTS, "hashing:32")
    assert not hit
    np.testing.assert_array_equal(vectors, expected)
    assert store.ensure_text(TEXTS, "hashing:32")[2]


def _compute_slowly(root: str, start, calls) -> None:
    def compute() -> np.ndarray:
        with calls.get_lock():
            calls.value += 1
        import time

        time.sleep(0.3)
        return np.full((1000, 4), 7.0, np.float32)

    start.wait()
    _, array, _ = ArtifactStore(Path(root)).ensure("text", "ab" * 32, compute, {})
    assert array.shape == (1000, 4)
    assert (array == 7.0).all()


def test_of_several_writers_one_computes(store: ArtifactStore) -> None:
    context = multiprocessing.get_context("fork")
    start, calls = context.Barrier(4), context.Value("i", 0)
    writers = [
        context.Process(target=_compute_slowly, args=(str(store.root), start, calls))
        for _ in range(4)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(30)
    assert [writer.exitcode for writer in writers] == [0] * 4
    assert calls.value == 1
    left = sorted(
        path.suffix for path in store.root.rglob("*") if path.is_file() and path.suffix != ".lock"
    )
    assert left == [".json", ".npy"]


def test_full_disk_leaves_nothing_behind_and_says_so(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = store.ensure_text(TEXTS, "hashing:32")[0]

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(artifacts.os, "fsync", full)
    with pytest.raises(
        CrossfedError, match="No space left on device; make room there, or set CROSSFED_CACHE"
    ):
        store.ensure_text(["another"], "hashing:32")
    monkeypatch.undo()
    files = [path for path in store.root.rglob("*") if path.is_file() and path.suffix != ".lock"]
    assert sorted(files) == sorted([kept, kept.with_suffix(".json")])
    assert not store.ensure_text(["another"], "hashing:32")[2]


def test_cache_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CrossfedError, match=r"Cannot write the artifact cache .*file"):
        ArtifactStore(tmp_path / "file" / "cache").ensure_text(TEXTS, "hashing:32")


def test_fault_of_the_computation_is_not_taken_for_the_disks(store: ArtifactStore) -> None:
    def fail() -> np.ndarray:
        raise OSError("the model's own")

    with pytest.raises(OSError, match="the model's own"):
        store.ensure("text", "cd" * 32, fail, {})
    assert not store.ensure("text", "cd" * 32, lambda: np.zeros(3), {})[2]
