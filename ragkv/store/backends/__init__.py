"""Backends: bytes by key in a folder, in memory, in Redis or in S3."""

from __future__ import annotations

import re
from pathlib import Path

from blake3 import blake3

from ragkv.config import MEMORY, StoreConfig
from ragkv.errors import ConfigError, StoreError
from ragkv.model.folders import cache_folder, expanded
from ragkv.store.backends.backend import Backend
from ragkv.store.backends.disk import DiskBackend

_URL = re.compile(r"([a-z][a-z0-9+.-]+)://", re.IGNORECASE)
_SCHEMES = ("redis", "rediss", "valkey", "valkeys", "s3")


def open_backend(config: StoreConfig, namespace: str) -> Backend:
    """Open a namespace's place; raises as :func:`ragkv.store.open_store`."""
    if config.path == MEMORY:
        raise ConfigError("a store in memory belongs to its process: give a folder or a URL")
    root = folder_of(config.path)
    if root is None:
        if config.disk_bytes is not None:
            raise ConfigError("disk_bytes bounds folders; set the limit of a server there")
        return _open_url(str(config.path), folder_name(namespace))
    folder = namespace_folder(root, namespace)
    if config.read_only and not folder.parent.is_dir():
        raise StoreError(f"there is no store at {folder.parent}")
    return DiskBackend(folder, budget=config.disk_bytes, read_only=config.read_only)


def folder_of(path: str | Path | None) -> Path | None:
    """Return the folder of a store; the user's cache folder for None, and None for a URL."""
    if is_url(path):
        return None
    if path is not None and not str(path):
        raise ConfigError("the store's folder has no name (an unset variable?)")
    return Path(path or cache_folder() / "store")


def namespace_folder(path: str | Path, namespace: str) -> Path:
    """Return a namespace's folder in a store's folder."""
    return expanded(path).absolute() / folder_name(namespace)


def folder_name(namespace: str) -> str:
    """Return the folder name of a namespace: readable, and unique by its hash."""
    digest = blake3(namespace.encode("utf-8", "surrogatepass")).hexdigest(length=16)
    return f"{re.sub('[^A-Za-z0-9]+', '-', namespace)[:32]}-{digest}"


def is_url(place: object) -> bool:
    """Whether a place is a URL and not a folder.

    Raises
    ------
    ConfigError
        It is a Path made of a URL.
    """
    if isinstance(place, Path) and place.parts[:1] in {(f"{scheme}:",) for scheme in _SCHEMES}:
        raise ConfigError(f"{place} is no folder: give the URL of a store as a string")
    return isinstance(place, str) and _URL.match(place) is not None


def _open_url(url: str, name: str) -> Backend:
    scheme = url.partition("://")[0].lower()
    if scheme == "s3":
        from ragkv.store.backends.s3 import open_s3

        return open_s3(url, name)
    if scheme in _SCHEMES:
        from ragkv.store.backends.redis import RedisBackend

        return RedisBackend(url, name)
    raise ConfigError(f"unknown store {scheme}://; known: {', '.join(_SCHEMES)}, or a folder")
