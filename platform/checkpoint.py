"""Checkpoints without pickle: nested state as safetensors (arrays) and JSON (structure and
scalars), committed by rename.

Layout of a run directory's `checkpoints/`:

    commit-000012/              one committed round; older ones are removed, the newest two stay
      manifest.json           written last: the SHA-256 of every other file here
      progress.json           where the run is: stage, round, bests
      <node>.json             structure of the node's state
      <node>.safetensors      its arrays
      <node>.best.*           the state of the best evaluated round of the current stage
      <node>.inbox.*          messages it has received and not yet read
      <node>.uploaded.*       what it last sent with one row per item, where the run ends with an audit
      <node>.first.*          what it received first, under the control "stale"
"""  # noqa: E501

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError, safe_open

from crossfed.platform.errors import CrossfedError

if TYPE_CHECKING:
    import torch

MANIFEST = "manifest.json"
PROGRESS = "progress.json"

Digests = Mapping[str, str]
"""SHA-256 in hex by file name."""


def digest(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _pack(value: Any, arrays: dict[str, torch.Tensor]) -> Any:
    """JSON structure of `value`; tensors and arrays are replaced by references into `arrays`."""
    import torch  # here, because who only reads or writes JSON needs none of it

    if isinstance(value, torch.Tensor | np.ndarray):
        tensor = torch.tensor(value) if isinstance(value, np.ndarray) else value.detach().cpu()
        name = f"{len(arrays):05d}"
        # a copy, since safetensors refuses two names for one storage
        arrays[name] = tensor.contiguous().clone()
        return {"kind": "array" if isinstance(value, np.ndarray) else "tensor", "name": name}
    if isinstance(value, Mapping):
        return {
            "kind": "map",
            "items": [[_pack(key, arrays), _pack(item, arrays)] for key, item in value.items()],
        }
    if isinstance(value, list | tuple):
        return {
            "kind": "list" if isinstance(value, list) else "tuple",
            "items": [_pack(item, arrays) for item in value],
        }
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return {"kind": "value", "value": value}
    raise TypeError(
        f"state holds a {type(value).__name__}; only tensors, arrays, mappings, lists and "
        f"scalars are saved"
    )


def _unpack(node: Mapping[str, Any], arrays: Mapping[str, torch.Tensor]) -> Any:
    match node["kind"]:
        case "tensor":
            return arrays[node["name"]]
        case "array":
            return arrays[node["name"]].numpy()
        case "map":
            return {_unpack(key, arrays): _unpack(item, arrays) for key, item in node["items"]}
        case "list":
            return [_unpack(item, arrays) for item in node["items"]]
        case "tuple":
            return tuple(_unpack(item, arrays) for item in node["items"])
    return node["value"]


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Tell a full or unwritable disk in one sentence, as a CrossfedError."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise CrossfedError(
            f"{path} cannot be written ({error}); the last committed round stays. Free the "
            f"disk and --resume."
        ) from error


def write_json(path: Path, content: Any) -> None:
    """Write JSON so that the file is either the old one or the whole new one, also after a crash.

    Raises:
        CrossfedError: the disk is full or cannot be written.
    """
    write_text(path, json.dumps(content, indent=1, sort_keys=False))


def write_text(path: Path, content: str) -> None:
    """Write a text so that the file is either the old one or the whole new one, also after a crash.

    Raises:
        CrossfedError: the disk is full or cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with writing(path), temporary.open("w", encoding="utf-8") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
        temporary.replace(path)


def read_json(path: Path) -> Any:
    """Read what `write_json` wrote.

    Raises:
        CrossfedError: the file is missing or damaged.
    """
    try:
        return _parse(path)
    except CrossfedError as error:
        raise CrossfedError(f"{error}; restore it or start a new run.") from error


def _parse(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CrossfedError(f"{path} is missing or damaged ({error})") from error


def save(path: Path, state: Any) -> dict[str, str]:
    """Write a nested state to `<path>.json` and `<path>.safetensors`; returns the SHA-256 of both
    by file name.

    Raises:
        CrossfedError: the disk is full or cannot be written; what was committed before is
            untouched.
        TypeError: the state holds something other than tensors, arrays, mappings, lists and
            scalars.
    """
    from safetensors.torch import save_file

    arrays: dict[str, torch.Tensor] = {}
    structure, stored = _pack(state, arrays), Path(f"{path}.safetensors")
    with writing(path):
        save_file(arrays, stored)
        _sync(stored)
        write_json(Path(f"{path}.json"), structure)
        return {file.name: digest(file) for file in (Path(f"{path}.json"), stored)}


def _sync(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def load(path: Path) -> Any:
    """Read what `save` wrote; tensors arrive on the CPU.

    Raises:
        CrossfedError: a file is missing or damaged.
    """
    try:
        structure = _parse(Path(f"{path}.json"))
        with safe_open(f"{path}.safetensors", framework="pt") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        return _unpack(structure, arrays)
    except (
        CrossfedError,
        OSError,
        ValueError,
        KeyError,
        TypeError,
        RecursionError,
        SafetensorError,
    ) as error:
        raise CrossfedError(f"The checkpoint {path} is missing or damaged ({error}).") from error


class Checkpoints:
    """The committed rounds of one run.

    Args:
        run_dir: the run's directory.
        parts: what every commit must hold the state of: the nodes' names.
        keep: how many commits stay; with two, a damaged one has another behind it.
    """

    def __init__(self, run_dir: Path, parts: Sequence[str], keep: int = 2):
        self.folder, self.parts, self.keep = run_dir / "checkpoints", tuple(parts), keep

    def open(self, number: int) -> Path:
        """A fresh folder for the nodes to write commit `number` into; nothing counts before
        `commit()`.

        Its name occurs once: a process of an earlier attempt that is still writing does not write
        into this one.
        """
        path = self.folder / f"commit-{number:06d}.{secrets.token_hex(4)}.partial"
        try:
            for left in self.folder.glob("*.partial"):
                shutil.rmtree(left, ignore_errors=True)
            path.mkdir(parents=True)
        except OSError as error:
            raise CrossfedError(
                f"The checkpoint folder {path} cannot be made: {error.strerror}."
            ) from error
        return path

    def commit(self, partial: Path, progress: Mapping[str, Any], files: Digests) -> Path:
        """Make what was written into a folder of `open()` the state to continue from, and drop the
        oldest commit.

        Args:
            partial: the folder.
            progress: where the run is, as JSON values.
            files: what every part has written, as `save` returned it.

        Raises:
            CrossfedError: the disk is full, or a part is not there.
        """
        final = final_folder(partial)
        try:
            _complete(partial, files, self.parts)
            write_json(partial / PROGRESS, progress)
            write_json(
                partial / MANIFEST, {"files": {**files, PROGRESS: digest(partial / PROGRESS)}}
            )
            _sync(partial)
            if final.exists():
                shutil.rmtree(final)
            partial.rename(final)
            _sync(self.folder)
        except OSError as error:
            raise CrossfedError(
                f"The checkpoint {final} cannot be committed: {error.strerror}."
            ) from error
        for old in self.committed()[: -self.keep]:
            shutil.rmtree(old, ignore_errors=True)
        return final

    def committed(self) -> list[Path]:
        """Committed rounds, oldest first; whether they are sound is for `latest` to say."""
        return sorted(
            path for path in self.folder.glob("commit-*") if path.is_dir() and not path.suffix
        )

    def peek(self) -> dict[str, Any] | None:
        """How far the newest commit says the run is; to be shown only, since nothing is compared
        with its hash.
        """
        found = self.committed()
        return read_json(found[-1] / PROGRESS) if found else None

    def check(self, commit: Path) -> dict[str, Any]:
        """The progress of a commit, after comparing every file with its hash.

        Raises:
            CrossfedError: what is wrong with it.
        """
        manifest = _parse(commit / MANIFEST)
        files = manifest.get("files") if isinstance(manifest, dict) else None
        if not isinstance(files, dict) or not all(isinstance(told, str) for told in files.values()):
            raise CrossfedError(f"{commit / MANIFEST} is damaged: it lists no hashes")
        _complete(commit, [*files, PROGRESS], self.parts)
        known = {*files, MANIFEST}
        if stray := sorted(
            path.name for path in commit.iterdir() if path.name not in known and path.name[0] != "."
        ):
            raise CrossfedError(f"{commit} holds {', '.join(stray)}, which was not committed")
        for name, told in files.items():
            if digest(commit / name) != told:
                raise CrossfedError(f"{commit / name} differs from what was written")
        return _parse(commit / PROGRESS)

    def latest(
        self,
        warn: Callable[[str], None] = lambda _: None,
        agree: Callable[[Mapping[str, Any]], None] = lambda _: None,
    ) -> tuple[Path, dict[str, Any]] | None:
        """The newest sound commit and its progress; None before the first.

        Args:
            warn: told of every damaged one that was passed over.
            agree: raises CrossfedError where a progress does not fit what else the run has written.

        Raises:
            CrossfedError: there are commits, and none is sound.
        """
        problems: list[str] = []
        for commit in reversed(self.committed()):
            try:
                progress = self.check(commit)
                agree(progress)
            except (CrossfedError, OSError) as error:
                problems.append(str(error).rstrip("."))
                continue
            for problem in problems:
                warn(f"{problem}; going back to {commit.name}, the commit before")
            return commit, progress
        if problems:
            raise CrossfedError(
                f"No commit in {self.folder} is sound ({'; '.join(problems)}); restore that "
                f"folder from a copy, or delete it to "
                "start from the beginning."
            )
        return None


def digests(commit: Path) -> dict[str, str]:
    """What a commit's manifest says of its files."""
    return dict(read_json(commit / MANIFEST)["files"])


def final_folder(partial: Path) -> Path:
    """The name that a folder of `Checkpoints.open` gets once it is committed."""
    return partial.with_name(partial.name.split(".")[0])


def _complete(folder: Path, files: Iterable[str], parts: Sequence[str]) -> None:
    """Raise CrossfedError unless a folder holds these files, and they hold the state of every
    part.
    """
    listed, needed = (
        set(files),
        {f"{part}{suffix}" for part in parts for suffix in (".json", ".safetensors")},
    )
    absent = {
        name for name in listed if Path(name).name != name or not (folder / name).is_file()
    } | needed - listed
    if absent:
        raise CrossfedError(f"{folder} is not complete: {', '.join(sorted(absent))} is missing")
