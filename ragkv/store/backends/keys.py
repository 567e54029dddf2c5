"""The keys of an encrypted store: one from the environment, from which all others come.

The master key gives each namespace a root by HKDF-SHA256 (RFC 5869). The root gives one
key for names and, with the salt of a value and its name, a fresh key for each value.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import secrets
from typing import Any

from ragkv.errors import ConfigError, MissingDependencyError, install_command

KEY_VARIABLE = "RAGKV_STORE_KEY"
"""Environment variable of the master key: 32 bytes in base64."""

_FORMAT = b"ragkv encrypted store 1"
_DIGEST = re.compile(r"(?<![0-9A-Za-z])(?:[0-9a-f]{2}){16,}(?![0-9A-Za-z])")
_HIDDEN = re.compile(r"(?<![0-9A-Za-z])x(?:[0-9a-f]{2}){32,}(?![0-9A-Za-z])")


class Keys:
    """The keys of one namespace, under which values are sealed and names hidden.

    Parameters
    ----------
    master
        32 secret bytes.
    namespace
        Any text.

    Raises
    ------
    ConfigError
        The master key is not 32 bytes.
    MissingDependencyError
        The package cryptography is not installed.
    """

    def __init__(self, master: bytes, namespace: str) -> None:
        try:
            from cryptography.hazmat.primitives.ciphers.aead import AESSIV
        except ImportError as error:
            raise MissingDependencyError(
                f"an encrypted store needs cryptography: {install_command('crypt')}"
            ) from error
        if len(master) != 32:
            raise ConfigError(f"the store's key must be 32 bytes, not {len(master)}")
        self._root = _derive(
            master, b"", b"namespace " + namespace.encode("utf-8", "surrogatepass")
        )
        self._names = AESSIV(_derive(self._root, b"", b"names", 64))

    def value(self, name: str, salt: bytes) -> Any:
        """Return the AESGCM of one value."""
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        return AESGCM(_derive(self._root, salt, b"value " + name.encode()))

    def hide(self, name: str) -> str:
        """Return the name under which a value lies in the backend below."""
        return _DIGEST.sub(self._hide, name)

    def show(self, name: str) -> str | None:
        """Return the name that :meth:`hide` was given, or None if it made no such name."""
        from cryptography.exceptions import InvalidTag

        try:
            shown = _HIDDEN.sub(self._show, name)
        except InvalidTag:
            return None
        return None if has_digest(name) else shown

    def _hide(self, part: re.Match[str]) -> str:
        return f"x{self._names.encrypt(bytes.fromhex(part[0]), [_FORMAT]).hex()}"

    def _show(self, part: re.Match[str]) -> str:
        digest: bytes = self._names.decrypt(bytes.fromhex(part[0][1:]), [_FORMAT])
        return digest.hex()


def has_digest(name: str) -> bool:
    """Whether a part of a name is a digest, and so to be hidden."""
    return _DIGEST.search(name) is not None


def key_from_environment() -> bytes:
    """Return the master key.

    Raises
    ------
    ConfigError
        The variable is not set, or is not 32 bytes in base64.
    """
    text = os.environ.get(KEY_VARIABLE, "")
    if not text:
        raise ConfigError(
            f"an encrypted store needs its key in {KEY_VARIABLE}: `ragkv store key` makes one"
        )
    try:
        key = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if len(key) != 32:
        raise ConfigError(
            f"{KEY_VARIABLE} is not 32 bytes in base64: `ragkv store key` makes such a key"
        )
    return key


def new_key() -> str:
    """Return a new random master key as it goes into the environment."""
    return base64.b64encode(secrets.token_bytes(32)).decode()


def _derive(secret: bytes, salt: bytes, info: bytes, length: int = 32) -> bytes:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    derived: bytes = HKDF(SHA256(), length, salt, _FORMAT + b" " + info).derive(secret)
    return derived
