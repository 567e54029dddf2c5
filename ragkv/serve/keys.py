"""API keys: their file, and the namespace of a request."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from pathlib import Path

from ragkv.errors import ConfigError


def read_keys(path: Path) -> dict[str, str]:
    """Read ``NAMESPACE=KEY`` lines; blank lines and comments with # are skipped.

    A namespace can have several keys.

    Returns
    -------
    dict
        Namespaces by key.

    Raises
    ------
    ConfigError
        The file cannot be read or has no key, a line is malformed, or two namespaces share a key.
        No message contains a key.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the keys in {path} cannot be read as UTF-8 text: {error}") from error
    keys: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        namespace, _, key = (part.strip() for part in line.partition("="))
        visible = (namespace + key).isprintable() and not any(map(str.isspace, key))
        if not namespace or not key or not key.isascii() or not visible:
            raise ConfigError(
                f"line {number} of {path} must be NAMESPACE=KEY without invisible characters, and "
                "the key must be ASCII: save the file as UTF-8"
            )
        if keys.setdefault(key, namespace) != namespace:
            raise ConfigError(f"line {number} of {path}: a different namespace has this key")
    if not keys:
        raise ConfigError(f"{path} has no key: write one NAMESPACE=KEY per line")
    return keys


def namespace_of(authorization: str, keys: Mapping[str, str]) -> str | None:
    """Return the namespace of an ``Authorization`` header; None for a wrong key.

    The comparison takes constant time.
    """
    scheme, _, given = authorization.partition(" ")
    found = None
    for key, namespace in keys.items():
        if hmac.compare_digest(key.encode(), given.strip().encode("utf-8", "replace")):
            found = namespace
    return found if scheme.lower() == "bearer" else None
