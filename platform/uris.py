"""URIs of files, databases and stores: made of paths in one place, paths read from them, checked
and joined.

A URI gives `%`, `?` and `#` a meaning that they do not have in a path: a database of a folder `50%`
or `what?` would otherwise lie elsewhere than its files.
"""

from __future__ import annotations

import posixpath
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit, urlunsplit

from crossfed.platform.errors import CrossfedError

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


_QUERY = ("region", "scheme", "endpoint_override")


def is_uri(text: str) -> bool:
    """Whether a place is given as a URI rather than as a path."""
    return "://" in text


def checked(uri: str) -> str:
    """A URI without a trailing slash.

    Raises:
        CrossfedError: it names no place, or holds credentials (which are not repeated).
    """
    try:
        told = urlsplit(uri)
    except ValueError as error:
        raise CrossfedError(f"A storage URI looks like s3://bucket/prefix: {error}.") from error
    if "@" in told.netloc or any(
        key not in _QUERY for key, _ in parse_qsl(told.query, keep_blank_values=True)
    ):
        raise CrossfedError(
            f"A storage URI holds no credentials and no options but {', '.join(_QUERY)}; set "
            f"AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, or use ~/.aws."
        )
    if not told.scheme or not (told.netloc or told.path.strip("/")):
        raise CrossfedError(f"{uri!r} is no storage URI such as s3://bucket/prefix.")
    return told._replace(path=told.path.rstrip("/")).geturl()


def join(uri: str, name: str) -> str:
    """The URI of something below a URI."""
    told = urlsplit(uri)
    return told._replace(path=posixpath.join(told.path or "/", name)).geturl()


def redact(uri: str) -> str:
    """The URI without user name and password."""
    parts = urlsplit(uri)
    if "@" not in parts.netloc:
        return uri
    return urlunsplit(parts._replace(netloc="***@" + parts.netloc.rpartition("@")[2]))
