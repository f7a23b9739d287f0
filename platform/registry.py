"""Finds methods by name at run time: `crossfed.methods.<name>:METHOD`, or any
`package.module:ATTRIBUTE` a user brings.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.resources
import importlib.util
import pkgutil
import sys
import traceback
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from crossfed.platform.errors import CrossfedError
from crossfed.platform.method import Method, MethodConfig
from crossfed.platform.yaml_text import load_yaml

PACKAGE = "crossfed.methods"
_SLICE = f"{PACKAGE}#slice"
"""The module that a class has which `config_class` made."""


def nearest(word: str, allowed: Iterable[str]) -> str:
    """The tail of an error message that names the allowed words, the closest first: "; did you mean
    K? Allowed: …".
    """
    allowed = sorted(allowed)
    folded = {name.lower(): name for name in reversed(allowed)}
    begun = [name for name in allowed if name.lower().startswith(word.lower().rstrip("s"))]
    close = begun or [folded[name] for name in difflib.get_close_matches(word.lower(), folded, n=1)]
    hint = f"; did you mean {min(close, key=len)}?" if close and word else "."
    return f"{hint} Allowed: {', '.join(allowed) or 'nothing'}."


def nearest_few(word: str, allowed: Iterable[str], where: str, count: int = 5) -> str:
    """As `nearest`, where there are too many words to name them all: the few nearest, and where all
    are.

    A dotted word is set against the last parts of the allowed ones as well as against the whole.

    Args:
        where: what shows all of them, as in "`crossfed methods NAME` shows all".
    """

    def likeness(name: str) -> float:
        pairs = ((word, name), (word.rpartition(".")[2], name.rpartition(".")[2]))
        begun = name.lower().startswith(word.lower().rstrip("s"))
        return begun + max(
            difflib.SequenceMatcher(None, one.lower(), other.lower()).ratio()
            for one, other in pairs
        )

    first, *others = sorted(allowed, key=lambda name: (-likeness(name), len(name), name))[:count]
    alike = likeness(first) > (0.6 if len(word) < 4 else 0.7)
    hint = f"; did you mean {first}? Near it: " if alike else ". Nearest: "
    return f"{hint}{', '.join(others if alike else [first, *others])}; {where}."


def method_names() -> list[str]:
    """Names of the methods that come with the package: every module in `methods/` is one."""
    package = importlib.import_module(PACKAGE)
    return sorted(
        module.name for module in pkgutil.iter_modules(package.__path__) if not module.ispkg
    )


def find_method(name: str) -> Method:
    """The method called `name`, or the one at `package.module:ATTRIBUTE`.

    Raises:
        CrossfedError: there is none; the message names those that exist.
    """
    module, _, attribute = name.partition(":")
    if not attribute:
        if name not in method_names():
            own = name if Path(f"{name}.py").is_file() else "package.module"
            raise CrossfedError(
                f"There is no method {name!r}{nearest(name, method_names())} A method of your own "
                f"is named by its module: {own}:METHOD."
            )
        module, attribute = f"{PACKAGE}.{name}", "METHOD"
    if not all(module.split(".")):
        raise CrossfedError(
            f"Method {name!r} cannot be loaded: {module!r} is not a module as in "
            f"package.module:METHOD."
        )
    if ":" in name:
        _see_working_directory()
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError as error:
        where = at(error)
        if error.name and f"{module}.".startswith(f"{error.name}."):
            where = f"; it must be installed, or lie in the working directory ({Path.cwd()})"
        raise CrossfedError(f"Method {name!r} cannot be loaded: {error}{where}.") from error
    except Exception as error:  # a module of the user's own may raise anything
        words = f"{type(error).__name__}: {error}".rstrip(".")
        raise CrossfedError(f"Method {name!r} cannot be loaded: {words}{at(error)}.") from error
    if not hasattr(loaded, attribute):
        held = [word for word, value in vars(loaded).items() if isinstance(value, Method)]
        raise CrossfedError(
            f"Method {name!r} cannot be loaded: {module} holds no {attribute!r}"
            f"{nearest(attribute, held)}"
        )
    found = getattr(loaded, attribute)
    if not isinstance(found, Method):
        raise CrossfedError(
            f"{module}:{attribute} is a {type(found).__name__}, not a "
            f"crossfed.platform.method.Method."
        )
    for part, needed in _PARTS.items():
        value = getattr(found, part)
        if not callable(value) and (needed or value is not None):
            raise CrossfedError(
                f"{module}:{attribute}: {part} = {value!r} is not possible: it must be a function."
            )
    return found


_PARTS = dict.fromkeys(
    (
        "stages",
        "init_domain",
        "score",
        "state_dict",
        "load_state_dict",
        "export",
        "score_exported",
        "releases",
    ),
    True,
) | dict.fromkeys(("init_server", "observe"), False)
"""The functions of a method, and whether it can be without."""


def _see_working_directory() -> None:
    """Let modules in the working directory be found, as `python -m` does; a console script has its
    own folder there.

    Ray gives this path to the processes it starts.
    """
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)  # last, so that nothing here stands in for an installed module


def at(error: BaseException, files: Collection[str] = ()) -> str:
    """The file and line at which an exception left one of these files, or else any, for the middle
    of a sentence.

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

    One from outside keeps `package.module:ATTRIBUTE` where it has the name of one that ships, so
    that the two are never taken for one.
    """
    called = find_method(name).name
    return name if ":" in name and called in method_names() else called


def config_class(name: str) -> type[MethodConfig]:
    """The `Config` of a method, without importing torch where that can be spared.

    A mistake in a configuration should be told at once, and torch takes seconds to import. So of
    the file of a method that ships, only those statements are executed that its `Config` is made
    of. Where the method is imported already, or its `Config` cannot be had so, it is the method's.

    Raises:
        CrossfedError: there is no such method.
    """
    if name not in method_names() or f"{PACKAGE}.{name}" in sys.modules:
        return find_method(name).Config
    before, sys.modules[_SLICE] = sys.modules.get(_SLICE), ModuleType(_SLICE)
    try:
        made = _slice(f"{PACKAGE}.{name}", ["Config"])["Config"]
    except Exception:  # whatever is unusual about the file: its import has the last word
        return find_method(name).Config
    finally:
        if before is None:
            del sys.modules[_SLICE]
        else:
            sys.modules[_SLICE] = before
    return made if issubclass(made, MethodConfig) else find_method(name).Config


def _slice(module: str, names: Iterable[str]) -> dict[str, Any]:
    """What a module of `PACKAGE` binds to `names`, from those of its statements that they need."""
    spec = importlib.util.find_spec(module)
    path = Path(spec.origin or "") if spec else Path()
    body = ast.parse(path.read_text(encoding="utf-8"), str(path)).body
    waiting, needed, wanted = list(names), set[str](), list[ast.stmt]()
    while waiting:
        name = waiting.pop()
        if name in needed:
            continue
        needed.add(name)
        for statement in body:
            if statement not in wanted and name in _bound(statement):
                wanted.append(statement)
                if not isinstance(statement, ast.Import | ast.ImportFrom):
                    waiting += _names(statement, ast.Load)
    space: dict[str, Any] = {"__name__": _SLICE}
    for statement in sorted(wanted, key=body.index):
        if isinstance(statement, ast.ImportFrom):
            statement.names = [a for a in statement.names if (a.asname or a.name) in needed]
            if (origin := statement.module or "").startswith(f"{PACKAGE}."):
                modules = importlib.util.find_spec(origin)
                whole = modules is not None and modules.submodule_search_locations is not None
                for a in statement.names:
                    space[a.asname or a.name] = (
                        _Later(f"{origin}.{a.name}") if whole else _slice(origin, [a.name])[a.name]
                    )
                continue
        future = ast.parse("from __future__ import annotations").body
        vars(sys.modules[_SLICE]).update(space)  # where pydantic looks annotations up
        exec(compile(ast.Module([*future, statement], []), str(path), "exec"), space)
    return space


class _Later:
    """A module that is imported when something of it is asked for."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)


def _bound(statement: ast.stmt) -> Iterator[str]:
    """The names that a statement of a module binds."""
    match statement:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in names)
        case _:
            yield from _names(statement, ast.Store)


def _names(statement: ast.stmt, use: type[ast.Load | ast.Store]) -> list[str]:
    """The names that are read, or bound, in a statement."""
    return [n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, use)]


def method_file(name: str) -> Mapping[str, Any]:
    """The method's YAML file (`config`, `presets`, `search`, `local`).

    That of a method from outside lies beside its module and is called as the method or as the
    module is; empty where there is none.

    Raises:
        CrossfedError: it cannot be read.
    """
    if ":" not in name:
        text = (
            importlib.resources.files(f"{PACKAGE}.configs")
            .joinpath(f"{name}.yaml")
            .read_text(encoding="utf-8")
        )
        return load_yaml(text) or {}
    found, module = find_method(name), sys.modules[name.partition(":")[0]]
    if getattr(module, "__file__", None) is None:
        return {}
    source = Path(str(module.__file__))
    path = next(
        (
            p
            for p in (source.with_name(f"{found.name}.yaml"), source.with_suffix(".yaml"))
            if p.is_file()
        ),
        None,
    )
    if path is None:
        return {}
    try:
        loaded = load_yaml(path.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise CrossfedError(
            f"{path}, of the method {name}, cannot be read: {' '.join(str(error).split())}."
        ) from error
    blocks = ("config", "presets", "search", "local", "pace")
    if not isinstance(loaded, dict) or not all(
        isinstance(value, dict) for value in loaded.values()
    ):
        raise CrossfedError(
            f"{path}, of the method {name}, must map {', '.join(blocks)} to blocks of keys."
        )
    if unknown := [key for key in loaded if key not in blocks]:
        raise CrossfedError(f"{path}: unknown key {unknown[0]!r}{nearest(str(unknown[0]), blocks)}")
    return loaded
