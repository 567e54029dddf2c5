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
import shutil
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from ragkv.errors import ConfigError
from ragkv.prompt.tokens import IntArray

FORMAT = 1
_SUFFIX, _NEW = ".safetensors", ".new"


def default_folder() -> Path:
    """Return the user's folder in shared memory, or in the folder of temporary files."""
    shared = Path("/dev/shm")  # noqa: S108  the folder in it is the user's alone
    home = shared if shared.is_dir() else Path(tempfile.gettempdir())
    return home / f"ragkv-{os.getuid()}"


class HandOverFolder:
    """The files of hand-overs, bounded in bytes and in time.

    Parameters
    ----------
    path
        Made if it is missing. Only the user may enter it: ConfigError for another folder.
    most_bytes
        Of all files in it, those of other processes included; None: half of what is free there.
    expires_in
        Seconds until a hand-over that was not loaded is deleted.
    """

    def __init__(
        self, path: Path, *, most_bytes: int | None = None, expires_in: float = 120.0
    ) -> None:
        self.path = path
        self.expires_in = expires_in
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = path.lstat()
        if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o077:
            raise ConfigError(f"{path} must be a folder of this user alone: chmod 700, or another")
        self._most_bytes = most_bytes or shutil.disk_usage(path).free // 2
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
                expires = about.st_mtime + self.expires_in * (file.suffix != _SUFFIX)
                if file.name != "secret" and expires < now:
                    file.unlink()
                else:
                    used += about.st_size
        return used + nbytes <= self._most_bytes

    def write(
        self, ids: IntArray, keys: torch.Tensor, values: torch.Tensor, dtype: str, instance: str
    ) -> str:
        """Write a prompt's first rows; return the id that opens them. OSError: there is no room.

        Parameters
        ----------
        ids
            ``[tokens]`` the prompt's first token ids.
        keys, values
            ``[layers, kv_heads, tokens or more, head_dim]``, keys rotated at their positions.
        dtype, instance
            ``float32``, ``bfloat16`` or ``float16``, and which vLLM it is for: one that was
            restarted is another.
        """
        tokens, (layers, kv_heads, _, head_dim) = len(ids), keys.shape
        to = getattr(torch, dtype)
        tensors = {
            f"{name}.{layer}": part[:, :tokens].transpose(0, 1).to(to).contiguous().cpu()
            for name, rows in (("key", keys), ("value", values))
            for layer, part in enumerate(rows)
        }
        about = {
            "format": FORMAT,
            "instance": instance,
            "tokens": tokens,
            "layers": layers,
            "kv_heads": kv_heads,
            "head_dim": head_dim,
            "dtype": dtype,
            # of each the sum of its 8-byte words, modulo 2^64 and signed
            "checksum": {name: int(part.view(torch.int64).sum()) for name, part in tensors.items()},
        }
        name, expires = secrets.token_bytes(16), int(time.time() + self.expires_in)
        new, path = (self.path / f"{name.hex()}{end}" for end in (_NEW, _SUFFIX))
        try:
            new.touch(0o600)
            save_file(tensors, new, {"ragkv": json.dumps(about)})
            os.utime(new, (expires, expires))  # so any process can see which files have expired
            new.rename(path)
        finally:
            new.unlink(missing_ok=True)
        told = name + expires.to_bytes(8, "big") + tokens.to_bytes(4, "big")
        digest = hashlib.sha256(np.asarray(ids, "<i4").tobytes()).digest()
        signature = hmac.new(self._secret, told + digest, hashlib.sha256).digest()[:16]
        return base64.urlsafe_b64encode(told + signature).decode().rstrip("=")

    def take_outcome(self, handover: str) -> str:
        """Delete what is left of a hand-over; return why vLLM did not load it, or nothing."""
        name = base64.urlsafe_b64decode(handover + "=" * (-len(handover) % 4))[:16].hex()
        (self.path / f"{name}{_SUFFIX}").unlink(missing_ok=True)
        told = self.path / f"{name}.json"
        try:
            return str(json.loads(told.read_bytes())["reason"])
        except (OSError, ValueError, LookupError, TypeError):
            return "unknown"
        finally:
            told.unlink(missing_ok=True)

    def _shared_secret(self) -> bytes:
        """Return the folder's secret, of whichever process makes it first."""
        path, new = self.path / "secret", self.path / f"{secrets.token_hex(16)}{_NEW}"
        if not path.exists():
            new.touch(0o600)
            new.write_bytes(secrets.token_bytes(32))
            with suppress(FileExistsError):
                path.hardlink_to(new)
            new.unlink()
        return path.read_bytes()
