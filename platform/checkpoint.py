"""Checkpoints without pickle: nested state as safetensors (arrays) and JSON (structure and scalars), committed by rename.

Layout of a run directory's `checkpoints/`:

    commit-000012/              one committed round; older ones are removed, the newest two stay
      progress.json           where the run is: stage, round, bests
      <node>.json             structure of the node's state
      <node>.safetensors      its arrays
      <node>.best.*           the state of the best evaluated round of the current stage
      <node>.inbox.*          messages it has received and not yet read
      <node>.uploaded.*       what it last sent with one row per item, where the run ends with an audit
      <node>.first.*          what it received first, under the control "stale"
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from crossfed.platform.seam import CrossfedError


def _pack(value: Any, arrays: dict[str, torch.Tensor]) -> Any:
    """JSON structure of `value`; tensors and arrays are replaced by references into `arrays`."""
    if isinstance(value, torch.Tensor | np.ndarray):
        tensor = torch.tensor(value) if isinstance(value, np.ndarray) else value.detach().cpu()
        name = f"{len(arrays):05d}"
        # a copy, since safetensors refuses two names for one storage
        arrays[name] = tensor.contiguous().clone()
        return {"kind": "array" if isinstance(value, np.ndarray) else "tensor", "name": name}
    if isinstance(value, Mapping):
        return {"kind": "map", "items": [[_pack(key, arrays), _pack(item, arrays)] for key, item in value.items()]}
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
        f"state holds a {type(value).__name__}; only tensors, arrays, mappings, lists and scalars are saved"
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
            f"{path} cannot be written ({error}); the last committed round stays. Free the disk and --resume."
        ) from error


def write_json(path: Path, content: Any) -> None:
    """Write JSON so that the file is either the old one or the whole new one, also after a crash.

    Raises:
        CrossfedError: the disk is full or cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with writing(path), temporary.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=1, sort_keys=False)
        file.flush()
        os.fsync(file.fileno())
        temporary.replace(path)


def read_json(path: Path) -> Any:
    """Read what `write_json` wrote.

    Raises:
        CrossfedError: the file is missing or damaged.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CrossfedError(f"{path} is missing or damaged ({error}); restore it or start a new run.") from error


def save(path: Path, state: Any) -> None:
    """Write a nested state to `<path>.json` and `<path>.safetensors`.

    Raises:
        CrossfedError: the disk is full or cannot be written; what was committed before is untouched.
        TypeError: the state holds something other than tensors, arrays, mappings, lists and scalars.
    """
    arrays: dict[str, torch.Tensor] = {}
    structure = _pack(state, arrays)
    with writing(path):
        save_file(arrays, f"{path}.safetensors")
    write_json(Path(f"{path}.json"), structure)


def load(path: Path) -> Any:
    """Read what `save` wrote; tensors arrive on the CPU.

    Raises:
        CrossfedError: a file is missing or damaged.
    """
    try:
        structure = json.loads(Path(f"{path}.json").read_text(encoding="utf-8"))
        with safe_open(f"{path}.safetensors", framework="pt") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        return _unpack(structure, arrays)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise CrossfedError(f"The checkpoint {path} is missing or damaged ({error}).") from error


class Checkpoints:
    """The committed rounds of one run."""

    def __init__(self, run_dir: Path, keep: int = 2):
        self.folder, self.keep = run_dir / "checkpoints", keep

    def open(self, number: int) -> Path:
        """A fresh folder for the nodes to write commit `number` into; nothing counts before `commit()`."""
        path = self.folder / f"commit-{number:06d}.partial"
        try:
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir(parents=True)
        except OSError as error:
            raise CrossfedError(f"The checkpoint folder {path} cannot be made: {error.strerror}.") from error
        return path

    def commit(self, number: int, progress: Mapping[str, Any]) -> Path:
        """Make commit `number` the one a resumed run continues from, and drop the oldest."""
        partial = self.folder / f"commit-{number:06d}.partial"
        final = partial.with_suffix("")
        try:
            write_json(partial / "progress.json", progress)
            if final.exists():
                shutil.rmtree(final)
            partial.rename(final)
        except OSError as error:
            raise CrossfedError(f"The checkpoint {final} cannot be committed: {error.strerror}.") from error
        for old in self.committed()[: -self.keep]:
            shutil.rmtree(old, ignore_errors=True)
        return final

    def committed(self) -> list[Path]:
        """Committed rounds, oldest first."""
        return sorted(
            path for path in self.folder.glob("commit-*") if (path / "progress.json").is_file() and not path.suffix
        )

    def latest(self) -> tuple[Path, dict[str, Any]] | None:
        """The last committed round and its progress; None before the first."""
        found = self.committed()
        if not found:
            return None
        return found[-1], read_json(found[-1] / "progress.json")
