"""The files of hand-overs, for both sides: their folder, its secret, signed ids.

Imports only the standard library: vLLM's environment does not need ragkv.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import secrets
import stat
import struct
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

FORMAT = 1
SUFFIX = ".safetensors"
_HEAD = struct.Struct(">16sQI")  # name, expiry in unix seconds, tokens; a signature follows
_SIGNATURE_BYTES = 16


def default_folder() -> Path:
    """Return the user's folder in shared memory, or in the folder of temporary files."""
    shared = Path("/dev/shm")  # noqa: S108  only the user can enter the folder in it
    home = shared if shared.is_dir() else Path(tempfile.gettempdir())
    return home / f"ragkv-{os.getuid()}"


def shared_secret(folder: Path) -> bytes:
    """Return the secret of a folder. The first process makes both.

    Raises
    ------
    ValueError
        Other users can enter the folder, or it is a link.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ValueError(f"{folder} must belong to this user only: chmod 700, or choose another")
    secret = folder / "secret"
    if not secret.exists():
        draft = folder / f"{secrets.token_hex(16)}.new"
        draft.touch(0o600)
        draft.write_bytes(secrets.token_bytes(32))
        with suppress(FileExistsError):
            secret.hardlink_to(draft)
        draft.unlink()
    return secret.read_bytes()


def make_id(secret: bytes, name: bytes, expires: int, ids: Sequence[int]) -> str:
    """Return the signed id of a hand-over: its 16-byte name, unix time of expiry, token ids."""
    head = _HEAD.pack(name, expires, len(ids))
    return base64.urlsafe_b64encode(head + _signature(secret, head, ids)).decode().rstrip("=")


def read_id(secret: bytes, identity: str, prompt: Sequence[int]) -> tuple[str, int, int]:
    """Return the name of an id's file, its expiry and its number of tokens.

    Raises
    ------
    ValueError, struct.error
        The id is not signed for the first tokens of this prompt.
    """
    raw = _decoded(identity)
    head, signature = raw[: _HEAD.size], raw[_HEAD.size :]
    name, expires, tokens = _HEAD.unpack(head)
    if not hmac.compare_digest(signature, _signature(secret, head, prompt[:tokens])):
        raise ValueError("the signature is another prompt's")
    return name.hex(), expires, tokens


def name_of(identity: str) -> str:
    """Return the name of an id's file, without its suffix."""
    return _decoded(identity)[:16].hex()


def _decoded(identity: str) -> bytes:
    return base64.urlsafe_b64decode(identity + "=" * (-len(identity) % 4))


def _signature(secret: bytes, head: bytes, ids: Sequence[int]) -> bytes:
    digest = hashlib.sha256(struct.pack(f"<{len(ids)}i", *ids)).digest()
    return hmac.digest(secret, head + digest, "sha256")[:_SIGNATURE_BYTES]
