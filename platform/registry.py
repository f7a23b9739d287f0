"""Finds methods by name at run time: `crossfed.methods.<name>:METHOD`, or any `package.module:ATTRIBUTE` a user brings."""

from __future__ import annotations

import difflib
import importlib
import importlib.resources
import pkgutil
import sys
import traceback
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from crossfed.platform.method import CrossfedError, Method

PACKAGE = "crossfed.methods"


def nearest(word: str, allowed: Iterable[str]) -> str:
    """The tail of an error message that names the allowed words, the closest first: "; did you mean K? Allowed: …"."""
    allowed = sorted(allowed)
    folded = {name.lower(): name for name in reversed(allowed)}
    begun = [name for name in allowed if name.lower().startswith(word.lower().rstrip("s"))]
    close = begun or [folded[name] for name in difflib.get_close_matches(word.lower(), folded, n=1)]
    hint = f"; did you mean {min(close, key=len)}?" if close and word else "."
    return f"{hint} Allowed: {', '.join(allowed) or 'nothing'}."


def method_names() -> list[str]:
    """Names of the methods that come with the package: every module in `methods/` is one."""
    package = importlib.import_module(PACKAGE)
    return sorted(module.name for module in pkgutil.iter_modules(package.__path__) if not module.ispkg)


def find_method(name: str) -> Method:
    """The method called `name`, or the one at `package.module:ATTRIBUTE`.

    Raises:
        CrossfedError: there is none; the message names those that exist.
    """
    module, _, attribute = name.partition(":")
    if not attribute:
        if name not in method_names():
            raise CrossfedError(f"There is no method {name!r}{nearest(name, method_names())}")
        module, attribute = f"{PACKAGE}.{name}", "METHOD"
    if not all(module.split(".")):
        raise CrossfedError(
            f"Method {name!r} cannot be loaded: {module!r} is not a module as in package.module:METHOD."
        )
    if ":" in name:
        _see_working_directory()
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ModuleNotFoundError, AttributeError) as error:
        raise CrossfedError(f"Method {name!r} cannot be loaded: {error}.") from error
    except Exception as error:  # a module of the user's own may raise anything
        words = f"{type(error).__name__}: {error}".rstrip(".")
        raise CrossfedError(f"Method {name!r} cannot be loaded: {words}{at(error)}.") from error
    if not isinstance(found, Method):
        raise CrossfedError(f"{module}:{attribute} is a {type(found).__name__}, not a crossfed.platform.method.Method.")
    for part, needed in _PARTS.items():
        value = getattr(found, part)
        if not callable(value) and (needed or value is not None):
            raise CrossfedError(f"{module}:{attribute}: {part} = {value!r} is not possible: it must be a function.")
    return found


_PARTS = dict.fromkeys(
    ("stages", "init_domain", "score", "state_dict", "load_state_dict", "export", "score_exported", "releases"), True
) | dict.fromkeys(("init_server", "observe"), False)
"""The functions of a method, and whether it can be without."""


def _see_working_directory() -> None:
    """Let modules in the working directory be found, as `python -m` does; a console script has its own folder there.

    Ray gives this path to the processes it starts.
    """
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)  # last, so that nothing here stands in for an installed module


def at(error: BaseException, files: Collection[str] = ()) -> str:
    """The file and line at which an exception left one of these files, or else any, for the middle of a sentence.

    Args:
        files: of the method's own; the last line in one of them is named.
    """
    if isinstance(error, SyntaxError):
        return f" ({error.filename}, line {error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1] if frames else None
    frame = next((one for one in reversed(frames) if one.filename in files), last)
    return f" ({frame.filename}, line {frame.lineno})" if frame else ""


def method_name(name: str) -> str:
    """What a method is called in tables, charts and names of runs: `METHOD.name`.

    One from outside keeps `package.module:ATTRIBUTE` where it has the name of one that ships, so that the two are
    never taken for one.
    """
    called = find_method(name).name
    return name if ":" in name and called in method_names() else called


def method_file(name: str) -> Mapping[str, Any]:
    """The method's YAML file (`config`, `presets`, `search`, `local`).

    That of a method from outside lies beside its module and is called as the method or as the module is; empty where
    there is none.

    Raises:
        CrossfedError: it cannot be read.
    """
    if ":" not in name:
        text = importlib.resources.files(f"{PACKAGE}.configs").joinpath(f"{name}.yaml").read_text(encoding="utf-8")
        return yaml.safe_load(text) or {}
    found, module = find_method(name), sys.modules[name.partition(":")[0]]
    if getattr(module, "__file__", None) is None:
        return {}
    source = Path(str(module.__file__))
    path = next((p for p in (source.with_name(f"{found.name}.yaml"), source.with_suffix(".yaml")) if p.is_file()), None)
    if path is None:
        return {}
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise CrossfedError(f"{path}, of the method {name}, cannot be read: {' '.join(str(error).split())}.") from error
    blocks = ("config", "presets", "search", "local", "pace")
    if not isinstance(loaded, dict) or not all(isinstance(value, dict) for value in loaded.values()):
        raise CrossfedError(f"{path}, of the method {name}, must map {', '.join(blocks)} to blocks of keys.")
    if unknown := [key for key in loaded if key not in blocks]:
        raise CrossfedError(f"{path}: unknown key {unknown[0]!r}{nearest(str(unknown[0]), blocks)}")
    return loaded
