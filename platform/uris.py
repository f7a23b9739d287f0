"""Places given as URIs: checked, and joined."""

from __future__ import annotations

import posixpath
from urllib.parse import parse_qsl, urlsplit, urlunsplit

from crossfed.platform.errors import CrossfedError

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
    if "@" in told.netloc or any(key not in _QUERY for key, _ in parse_qsl(told.query, keep_blank_values=True)):
        raise CrossfedError(
            f"A storage URI holds no credentials and no options but {', '.join(_QUERY)}; set AWS_ACCESS_KEY_ID and "
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
