"""Hand-overs: files with the keys and values of a prompt's first tokens.

:mod:`vllm_ragkv.connector` reads them in vLLM. A request names one by an id, which opens it only
for prompts that begin with the same tokens.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import shutil
import time
from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import save_file

from ragkv.errors import ConfigError
from ragkv.prompt.tokens import IntArray
from vllm_ragkv.files import FORMAT, SUFFIX, make_id, name_of, shared_secret


class HandOverFolder:
    """The files of hand-overs, bounded in bytes and in time.

    Parameters
    ----------
    path
        Made if it is missing.
    most_bytes
        Limit for all files in it, of all processes; None: half of the free space.
    expires_in
        Seconds until a pending hand-over is deleted.

    Raises
    ------
    ConfigError
        Other users can enter the folder, or it is a link.
    """

    def __init__(
        self, path: Path, *, most_bytes: int | None = None, expires_in: float = 120.0
    ) -> None:
        self.path = path
        self.expires_in = expires_in
        try:
            self._secret = shared_secret(path)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        self._most_bytes = most_bytes or shutil.disk_usage(path).free // 2

    def salt(self, namespace: str) -> str:
        """Return the ``cache_salt`` of a namespace in vLLM's prefix cache."""
        return hmac.digest(self._secret, b"namespace" + namespace.encode(), "sha256").hex()

    def has_room(self, nbytes: int) -> bool:
        """Delete expired files; return whether a file of ``nbytes`` fits."""
        now, used = time.time(), 0
        for file in self.path.iterdir():
            with suppress(FileNotFoundError):  # loaded just now
                about = file.stat()
                expires = about.st_mtime
                if file.suffix != SUFFIX:  # its time is that of its writing
                    expires += self.expires_in
                if file.name != "secret" and expires < now:
                    file.unlink()
                else:
                    used += about.st_size
        return used + nbytes <= self._most_bytes

    def write(
        self, ids: IntArray, keys: torch.Tensor, values: torch.Tensor, dtype: str, instance: str
    ) -> str:
        """Write a prompt's first rows and return the id that opens them.

        Parameters
        ----------
        ids
            ``[tokens]`` the prompt's first token ids.
        keys, values
            ``[layers, kv_heads, tokens or more, head_dim]``, keys rotated at their positions.
        dtype, instance
            ``float32``, ``bfloat16`` or ``float16``, and the vLLM process that is to load them.

        Raises
        ------
        OSError
            The disk is full.
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
        path = self.path / f"{name.hex()}{SUFFIX}"
        new = path.with_suffix(".new")
        try:
            new.touch(0o600)
            save_file(tensors, new, {"ragkv": json.dumps(about)})
            os.utime(new, (expires, expires))  # any process can see that it has expired
            new.rename(path)
        finally:
            new.unlink(missing_ok=True)
        return make_id(self._secret, name, expires, ids.tolist())

    def take_outcome(self, handover: str) -> str:
        """Delete a hand-over's files; return why vLLM did not load it, empty if it did."""
        path = self.path / f"{name_of(handover)}{SUFFIX}"
        path.unlink(missing_ok=True)
        outcome = path.with_suffix(".json")
        try:
            return str(json.loads(outcome.read_bytes())["reason"])
        except (OSError, ValueError, LookupError, TypeError):
            return "unknown"
        finally:
            outcome.unlink(missing_ok=True)
