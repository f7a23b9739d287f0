"""What a run directory keeps of its MLflow record: the run it continues, and the entries that wait
for the store.
"""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from crossfed.platform.errors import CrossfedError
from crossfed.platform.layout import RUN_ID

SPOOL = "tracking-spool.jsonl"
"""Entries that wait for the store, one JSON object a line."""
REFUSED = "tracking-refused.jsonl"
"""Entries that the store answered and refused for good, with its reason."""
STATE = "tracking.json"


@dataclass(slots=True)
class State:
    """What the run directory remembers of its MLflow run, so that a resumed run continues it."""

    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    uri: str = ""
    run_id: str | None = None
    experiment_id: str | None = None
    last: dict[str, int] = field(default_factory=dict)  # metric -> its last recorded step

    @classmethod
    def read(cls, run_dir: Path) -> State | None:
        path = run_dir / STATE
        if not path.is_file():
            return None
        try:
            told = json.loads(path.read_text("utf-8"))
            for name in ("model_id", "stage", "best"):  # of earlier versions
                told.pop(name, None)
            return cls(**told)
        except (ValueError, TypeError, AttributeError) as error:
            raise CrossfedError(
                f"{path} is damaged ({error}): delete it to record the run anew"
            ) from error

    def write(self, run_dir: Path) -> None:
        write_atomically(run_dir / STATE, json.dumps(asdict(self), indent=1) + "\n")
        if self.run_id is not None:
            write_atomically(run_dir / RUN_ID, self.run_id + "\n")


class Spool:
    """Entries in order, on disk; in memory while the disk refuses them."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / SPOOL
        self._memory: list[dict[str, Any]] = []

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        from filelock import FileLock

        with FileLock(self.path.with_suffix(".lock"), timeout=5):  # its Timeout is an OSError
            yield

    @property
    def waiting(self) -> bool:
        return self.path.is_file() or bool(self._memory)

    def count(self) -> int:
        return len(self.read())

    def append(self, entry: dict[str, Any]) -> None:
        """Add an entry; raises OSError when the disk refuses it, which is then kept in memory."""
        self._memory.append(entry)
        with self.locked():
            torn = self.path.is_file() and not self.path.read_bytes().endswith(b"\n")
            with self.path.open("a", encoding="utf-8") as file:
                file.write("\n" * torn + "".join(json.dumps(e) + "\n" for e in self._memory))
        self._memory.clear()

    def read(self) -> list[dict[str, Any]]:
        """All entries; a last line torn by a kill is left out."""
        entries = []
        if self.path.is_file():
            for line in self.path.read_text("utf-8").splitlines():
                with contextlib.suppress(json.JSONDecodeError):
                    entries.append(json.loads(line))
        return entries + self._memory

    def keep(self, entries: Sequence[dict[str, Any]]) -> None:
        """Replace what is stored by these entries."""
        if entries:
            write_atomically(self.path, "".join(json.dumps(e) + "\n" for e in entries))
        else:
            self.path.unlink(missing_ok=True)
        self._memory.clear()

    def set_aside(self) -> None:
        """Move a spool out of the way that belongs to another run."""
        if self.path.is_file():
            self.path.replace(self.path.with_name(f"tracking-spool-{now()}.jsonl"))


def now() -> int:
    return time.time_ns() // 1_000_000


def write_atomically(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(text, "utf-8")
    part.replace(path)
