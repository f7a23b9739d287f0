"""Finds methods by name at run time: `crossfed.methods.<name>:METHOD`, or any `package.module:ATTRIBUTE` a user brings."""

from __future__ import annotations

import difflib
import importlib
import importlib.resources
import pkgutil
from collections.abc import Iterable, Mapping
from typing import Any

from crossfed.platform.method import CrossfedError, Method
from crossfed.platform.yaml_text import load_yaml

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
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ModuleNotFoundError, AttributeError) as error:
        raise CrossfedError(f"Method {name!r} cannot be loaded: {error}.") from error
    if not isinstance(found, Method):
        raise CrossfedError(f"{module}:{attribute} is a {type(found).__name__}, not a crossfed.platform.method.Method.")
    return found


def method_file(name: str) -> Mapping[str, Any]:
    """The method's YAML file (`config`, `presets`, `search`, `local`); empty for a method brought from outside the package."""
    if ":" in name:
        return {}
    text = importlib.resources.files(f"{PACKAGE}.configs").joinpath(f"{name}.yaml").read_text(encoding="utf-8")
    return load_yaml(text) or {}
