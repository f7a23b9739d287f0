"""URIs of files and databases, made of paths in one place, and paths read from them.

A URI gives `%`, `?` and `#` a meaning that they do not have in a path: a database of a folder `50%`
or `what?` would otherwise lie elsewhere than its files.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote

SQLITE = "sqlite:///"
MEMORY = ":memory:"


def sqlite_uri(path: Path) -> str:
    """The URI by which SQLAlchemy, and so MLflow and Optuna, open the SQLite file at a path."""
    escaped = str(path.resolve()).replace("%", "%25").replace("?", "%3F").replace("#", "%23")
    return f"{SQLITE}{escaped}"


def sqlite_path(uri: str) -> Path | None:
    """The file of a `sqlite:///` URI; None for a database in memory."""
    text = uri.partition(":///")[2].partition("?")[0]
    return Path(unquote(text)) if text and text != MEMORY else None


def file_uri(path: Path) -> str:
    """The `file://` URI of a path, escaped."""
    return path.resolve().as_uri()


def home() -> Path | None:
    """The user's home; None where there is none, as for a container's uid without HOME."""
    try:
        return Path.home()
    except RuntimeError:
        return None
