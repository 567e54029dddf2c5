"""Where bytes lie: one file a backend, all behind one contract."""

from __future__ import annotations

import re
from pathlib import Path

from ragkv.errors import ConfigError
from ragkv.store.backends.base import Backend

_URL = re.compile(r"([a-z][a-z0-9+.-]+)://", re.IGNORECASE)
_SCHEMES = ("redis", "rediss", "valkey", "valkeys", "s3")


def is_url(place: object) -> bool:
    """Whether a place is named by a URL, and not a folder.

    Raises
    ------
    ConfigError
        It was a URL before it was made a Path.
    """
    if isinstance(place, Path) and place.parts[:1] in {(f"{scheme}:",) for scheme in _SCHEMES}:
        raise ConfigError(f"{place} is no folder: give the URL of a store as a string")
    return isinstance(place, str) and _URL.match(place) is not None


def open_url(url: str, name: str) -> Backend:
    """Open what a URL names.

    Parameters
    ----------
    url
        ``redis://host:port/db``, ``valkey://…`` or ``s3://bucket/prefix``.
    name
        Folder name of the namespace.

    Raises
    ------
    ConfigError
        The URL's scheme is unknown.
    MissingDependencyError
        A package is not installed.
    StoreError
        The place cannot be reached.
    """
    scheme = url.partition("://")[0].lower()
    if scheme == "s3":
        from ragkv.store.backends.s3 import open_s3

        return open_s3(url, name)
    if scheme in _SCHEMES:
        from ragkv.store.backends.redis import RedisBackend

        return RedisBackend(url, name)
    raise ConfigError(f"unknown store {scheme}://; known: {', '.join(_SCHEMES)}, or a folder")
