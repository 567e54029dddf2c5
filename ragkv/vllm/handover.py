"""Hand-overs: files with the keys and values of a prompt's first tokens, which vLLM loads.

:mod:`ragkv.vllm.connector` reads them inside of vLLM. A request names one by an id that opens it
for a prompt that begins with the same tokens, and for no other.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import secrets
import stat
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from ragkv.errors import ConfigError
from ragkv.prompt.tokens import IntArray

FORMAT = 1
_SUFFIX, _NEW = ".safetensors", ".new"
_SECRET_BYTES = 32


def default_folder() -> Path:
    """Return the user's folder in shared memory, or in the folder of temporary files."""
    shared = Path("/dev/shm")  # noqa: S108  the folder in it is the user's alone
    return (shared if shared.is_dir() else Path("/tmp")) / f"ragkv-{os.getuid()}"  # noqa: S108


@dataclass(frozen=True, slots=True)
class KVForm:
    """Keys and values as a running vLLM has them.

    Attributes
    ----------
    instance
        Identifies the running vLLM; another one after a restart.
    dtype
        ``float32``, ``bfloat16`` or ``float16``.
    """

    instance: str
    dtype: str
    layers: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class HandOverOutcome:
    """What vLLM did with a hand-over.

    Attributes
    ----------
    instance
        The running vLLM; empty if it said nothing.
    loaded
        Tokens that it loaded.
    reason
        Why it loaded none, such as ``expired`` or ``torn``; otherwise empty.
    """

    instance: str = ""
    loaded: int = 0
    reason: str = "unknown"


class HandOverFolder:
    """The files of hand-overs, bounded in bytes and in time.

    Parameters
    ----------
    path
        Made if it is missing. Only the user may enter it.
    most_bytes
        Of all files in it, those of other processes included.
    expires_in
        Seconds until a hand-over that was not loaded is deleted.

    Raises
    ------
    ConfigError
        Somebody else owns the folder, or may enter it.
    """

    def __init__(self, path: Path, *, most_bytes: int, expires_in: float = 120.0) -> None:
        self.path = path
        self._most_bytes = most_bytes
        self._expires_in = expires_in
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = path.lstat()
        if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o077:
            raise ConfigError(f"{path} must be a folder of this user alone: chmod 700, or another")
        self._secret = self._shared_secret()

    def salt(self, namespace: str) -> str:
        """Return what keeps a namespace's blocks in vLLM's prefix cache apart from others'."""
        return hmac.new(self._secret, b"namespace" + namespace.encode(), hashlib.sha256).hexdigest()

    def has_room(self, nbytes: int) -> bool:
        """Whether a file of so many bytes fits, once expired ones are deleted."""
        now, used = time.time(), 0
        for file in self.path.iterdir():
            with suppress(FileNotFoundError):  # loaded just now
                about = file.stat()
                # others have the time of their writing
                expires = about.st_mtime + self._expires_in * (file.suffix != _SUFFIX)
                if file.name != "secret" and expires < now:
                    file.unlink()
                else:
                    used += about.st_size
        return used + nbytes <= self._most_bytes

    def write(self, ids: IntArray, keys: torch.Tensor, values: torch.Tensor, form: KVForm) -> str:
        """Write a prompt's first rows; return the id that opens them.

        Parameters
        ----------
        ids
            ``[tokens]`` the prompt's first token ids.
        keys, values
            ``[layers, kv_heads, tokens or more, head_dim]``, keys rotated at their positions.

        Raises
        ------
        OSError
            There is no room.
        """
        tokens, dtype = len(ids), getattr(torch, form.dtype)
        tensors = {
            f"{name}.{layer}": part[:, :tokens].transpose(0, 1).to(dtype).contiguous().cpu()
            for name, rows in (("key", keys), ("value", values))
            for layer, part in enumerate(rows)
        }
        about = {
            "format": FORMAT,
            "instance": form.instance,
            "tokens": tokens,
            "layers": form.layers,
            "kv_heads": form.kv_heads,
            "head_dim": form.head_dim,
            "dtype": form.dtype,
            "checksum": {name: checksum(part) for name, part in tensors.items()},
        }
        name, expires = secrets.token_bytes(16), int(time.time() + self._expires_in)
        new, path = (self.path / f"{name.hex()}{end}" for end in (_NEW, _SUFFIX))
        try:
            new.touch(0o600)
            save_file(tensors, new, {"ragkv": json.dumps(about)})
            os.utime(new, (expires, expires))  # so any process can see which files have expired
            new.rename(path)
        except BaseException:
            new.unlink(missing_ok=True)
            raise
        told = name + expires.to_bytes(8, "big") + tokens.to_bytes(4, "big")
        digest = hashlib.sha256(np.asarray(ids, "<i4").tobytes()).digest()
        signature = hmac.new(self._secret, told + digest, hashlib.sha256).digest()[:16]
        return base64.urlsafe_b64encode(told + signature).decode().rstrip("=")

    def take_outcome(self, handover: str) -> HandOverOutcome:
        """Return what became of a hand-over whose request has ended, and delete what is left."""
        name = base64.urlsafe_b64decode(handover + "=" * (-len(handover) % 4))[:16].hex()
        (self.path / f"{name}{_SUFFIX}").unlink(missing_ok=True)
        told = self.path / f"{name}.json"
        try:
            found = json.loads(told.read_bytes())
            return HandOverOutcome(found["instance"], int(found["loaded"]), found["reason"])
        except (OSError, ValueError, KeyError, TypeError):
            return HandOverOutcome()
        finally:
            told.unlink(missing_ok=True)

    def _shared_secret(self) -> bytes:
        """Return the folder's secret, of whichever process makes it first."""
        path, new = self.path / "secret", self.path / f"{secrets.token_hex(16)}{_NEW}"
        if not path.exists():
            new.touch(0o600)
            new.write_bytes(secrets.token_bytes(_SECRET_BYTES))
            with suppress(FileExistsError):
                path.hardlink_to(new)
            new.unlink()
        return path.read_bytes()


def checksum(part: torch.Tensor) -> int:
    """Return the sum of a contiguous tensor's 8-byte words, modulo 2^64 and signed."""
    return int(part.view(torch.int64).sum())
