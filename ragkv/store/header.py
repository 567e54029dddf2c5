"""The header of an entry's file: safetensors' own, with a checksum over all of it."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from blake3 import blake3

from ragkv.model.fingerprint import Fingerprint

FORMAT_VERSION = 1
"""Version that is written, and the only one that is read."""

DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
}
"""Dtypes of ``kv`` by safetensors' name."""

_ALIGNMENT = 64
_MANY_BYTES = 1 << 18  # below this, starting hash threads costs more than they gain


class RefusedEntryError(Exception):
    """The bytes are no entry that may be used; ``reason`` as in :class:`Lookup`."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Header:
    """All that is known of an entry before its tensors are read.

    Attributes
    ----------
    text
        The chunk's text.
    fingerprint
        Everything else that the entry depends on.
    dtype
        safetensors' name of the dtype of ``kv``: BF16, F16, F32 or F64.
    shape
        ``(layers, 2, kv_heads, tokens, head_dim)``.
    token_checksum
        Digest of the bytes of ``token_ids`` and ``offsets``.
    layer_checksums
        Digest of each layer's bytes in ``kv``.
    version
        Format version.
    """

    text: str
    fingerprint: Fingerprint
    dtype: str
    shape: tuple[int, ...]
    token_checksum: str
    layer_checksums: tuple[str, ...]
    version: int = FORMAT_VERSION

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return self.shape[3]

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's keys and values."""
        return math.prod(self.shape[1:]) * DTYPES[self.dtype].itemsize

    @property
    def kv_bytes(self) -> int:
        """Bytes of ``kv``."""
        return self.shape[0] * self.layer_bytes

    @property
    def data_bytes(self) -> int:
        """Bytes of the data area: ``kv``, ``token_ids`` and ``offsets``."""
        return self.kv_bytes + 12 * self.tokens

    def table(self) -> dict[str, Any]:
        """Return safetensors' header without ``checksum``; the layout follows from the shape."""
        ids, offsets, end = self.kv_bytes, self.kv_bytes + 4 * self.tokens, self.data_bytes
        return {
            "__metadata__": {
                "ragkv": str(self.version),
                "fingerprint": _canonical(asdict(self.fingerprint)),
                # unlike UTF-8 and JSON, this keeps lone surrogates, even two in a row
                "text": self.text.encode("unicode_escape").decode("ascii"),
                "token_checksum": self.token_checksum,
                "layer_checksums": _canonical(self.layer_checksums),
            },
            "kv": _tensor(self.dtype, self.shape, 0, ids),
            "token_ids": _tensor("I32", (self.tokens,), ids, offsets),
            "offsets": _tensor("I32", (self.tokens, 2), offsets, end),
        }

    def to_bytes(self) -> bytes:
        """Return the file's first bytes, up to the data area, which they align."""
        table = self.table()
        table["__metadata__"]["checksum"] = checksum_of(_canonical(table).encode())
        header = json.dumps(table, separators=(",", ":")).encode()
        header += b" " * (-(len(header) + 8) % _ALIGNMENT)
        return len(header).to_bytes(8, "little") + header


def read_header(view: memoryview) -> tuple[Header, int]:
    """Parse and verify a file's header; return it and where the data area starts.

    Raises
    ------
    RefusedEntryError
        The file is torn, of another format, or the header's checksum fails.
    """
    table, start = _parse(view)
    metadata = table.get("__metadata__")
    if not isinstance(metadata, dict) or "ragkv" not in metadata:
        raise RefusedEntryError("format", "a safetensors file, but no ragkv entry")
    if metadata["ragkv"] != str(FORMAT_VERSION):
        raise RefusedEntryError(
            "format", f"entry format {metadata['ragkv']!r}; this ragkv reads {FORMAT_VERSION}"
        )
    checksum = metadata.pop("checksum", None)
    if checksum != checksum_of(_canonical(table).encode()):
        raise RefusedEntryError("checksum", "the header's checksum does not hold")
    try:
        header = Header(
            text=metadata["text"].encode("ascii").decode("unicode_escape"),
            fingerprint=Fingerprint(**json.loads(metadata["fingerprint"])),
            dtype=table["kv"]["dtype"],
            shape=tuple(table["kv"]["shape"]),
            token_checksum=metadata["token_checksum"],
            layer_checksums=tuple(json.loads(metadata["layer_checksums"])),
        )
        fits = (
            all(type(size) is int and size > 0 for size in header.shape)
            and header.shape[1] == 2
            and len(header.layer_checksums) == header.shape[0]
            and header.table() == table
        )
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, Warning) as error:
        # Warning: how Python reports a bad escape in the text where warnings are errors
        raise RefusedEntryError("format", f"header fields: {error!r}") from error
    if not fits:
        raise RefusedEntryError("format", "the tensors are not laid out as they should be")
    if len(view) != start + header.data_bytes:
        raise RefusedEntryError("unreadable", "the file is shorter or longer than it says")
    return header, start


def threads_for(nbytes: int) -> int:
    """Return blake3's ``max_threads`` for so many bytes."""
    return blake3.AUTO if nbytes >= _MANY_BYTES else 1


def checksum_of(data: bytes | memoryview) -> str:
    """Return 32 hexadecimal digits of blake3."""
    return blake3(data, max_threads=threads_for(len(data))).hexdigest(length=16)


def _parse(view: memoryview) -> tuple[dict[str, Any], int]:
    start = int.from_bytes(view[:8], "little") + 8
    if start > len(view):
        raise RefusedEntryError("unreadable", "no safetensors header, or a file cut short")
    try:
        table = json.loads(bytes(view[8:start]).decode())
    except (ValueError, RecursionError) as error:
        raise RefusedEntryError("unreadable", "no safetensors header") from error
    if not isinstance(table, dict):
        raise RefusedEntryError("unreadable", "no safetensors header")
    return table, start


def _tensor(dtype: str, shape: tuple[int, ...], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
