"""crossfed: train and compare recommenders over domains that may not share their interactions.

    import crossfed

    run = crossfed.run("fedcrf", seed=0, K=20)
    run.metrics
    crossfed.compare([run, crossfed.run("lightgcn", seed=0)])

| name | what |
|---|---|
| `run` | one federated run from start to result: a `Run` |
| `tune` | a search over whole federated runs: a `Study` |
| `compare` | finished runs in one table, with the tests of their differences |
| `load` | a run or a study that is there already |
| `prepare` | data frames into a prepared data directory |
| `CrossfedError` | what a mistake raises: one sentence |

The command line calls the same functions: what `crossfed run` accepts, refuses and writes is what
`run` does.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from crossfed.frames import prepare
    from crossfed.launch import run, tune
    from crossfed.platform.errors import CrossfedError
    from crossfed.results import Comparison, Run, Study, compare, load

    __version__: str

__all__ = [
    "Comparison",
    "CrossfedError",
    "Run",
    "Study",
    "__version__",
    "compare",
    "load",
    "prepare",
    "run",
    "tune",
]

_ROOT = Path(__file__).resolve().parents[2]
if (_ROOT / "pyproject.toml").is_file():  # an editable install: the other rooms lie beside this one
    __path__.append(str(_ROOT))

_HOMES = {
    "run": "crossfed.launch",
    "tune": "crossfed.launch",
    "Comparison": "crossfed.results",
    "Run": "crossfed.results",
    "Study": "crossfed.results",
    "compare": "crossfed.results",
    "load": "crossfed.results",
    "prepare": "crossfed.frames",
    "CrossfedError": "crossfed.platform.errors",
}


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used: importing this package loads neither torch nor
    MLflow.
    """
    if name == "__version__":
        from importlib.metadata import version

        return version("crossfed")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
