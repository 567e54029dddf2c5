"""The header of an entry's file: that of safetensors, with a checksum over all of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import torch
from blake3 import blake3
from xxhash import xxh3_128

from ragkv.errors import StoreError
from ragkv.model.fingerprint import Fingerprint, hash_threads
from ragkv.store.backends.backend import Blob
from ragkv.store.entry.codecs import Part, codec_of

FORMAT_VERSION = 2
"""The version that is written, and the only one that is read."""

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
"""Dtypes of keys and values by safetensors' name."""

_ALIGNMENT = 64
_MANY_BYTES = 1 << 18  # below this, starting hash threads costs more than they gain


class RefusedEntryError(Exception):
    """The bytes are no usable entry; ``reason`` as in :class:`ragkv.store.types.Found`."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


NO_VERSION = "[]"
"""The field ``version`` of a chunk's own entry."""


@dataclass(frozen=True, slots=True)
class Header:
    """Everything about an entry except its tensors.

    Attributes
    ----------
    text
        The chunk's text.
    fingerprint
        Everything else that the entry depends on, codec included.
    dtype
        safetensors' name of the dtype of keys and values: BF16, F16, F32 or F64.
    shape
        ``(layers, 2, kv_heads, tokens, head_dim)``.
    token_checksum
        blake3 of the bytes of ``token_ids`` and ``offsets``.
    layer_sizes
        Bytes of each encoded layer.
    layer_checksums
        xxh3_128 of each layer's bytes.
    version
        A contextual version's fields as canonical JSON, see :mod:`ragkv.store.stored_versions`;
        ``NO_VERSION`` for a chunk's own entry.
    """

    text: str
    fingerprint: Fingerprint
    dtype: str
    shape: tuple[int, ...]
    token_checksum: str
    layer_sizes: tuple[int, ...]
    layer_checksums: tuple[str, ...]
    version: str = NO_VERSION

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return self.shape[3]

    @property
    def kv_bytes(self) -> int:
        """Bytes of all layers."""
        return sum(self.layer_sizes)

    @property
    def data_bytes(self) -> int:
        """Bytes of the data area: the layers, ``token_ids`` and ``offsets``."""
        return self.kv_bytes + 12 * self.tokens

    @property
    def spans(self) -> list[slice]:
        """Each layer's bytes in the data area."""
        ends = accumulate(self.layer_sizes, initial=0)
        return [slice(start, end) for start, end in pairwise(ends)]

    def table(self) -> dict[str, Any]:
        """Return safetensors' header without ``checksum``."""
        ids, offsets = self.kv_bytes, self.kv_bytes + 4 * self.tokens
        table = {
            "__metadata__": {
                "ragkv": str(FORMAT_VERSION),
                "fingerprint": canonical(asdict(self.fingerprint)),
                # unlike UTF-8 and JSON, this preserves lone surrogates, even two in a row
                "text": self.text.encode("unicode_escape").decode("ascii"),
                "dtype": self.dtype,
                "shape": canonical(self.shape),
                "token_checksum": self.token_checksum,
                "layer_checksums": canonical(self.layer_checksums),
                "versions": self.version,
            },
            "token_ids": _tensor("I32", (self.tokens,), ids, offsets),
            "offsets": _tensor("I32", (self.tokens, 2), offsets, self.data_bytes),
        }
        dtype, shape = self.dtype, self.shape[1:]
        for layer, (size, span) in enumerate(zip(self.layer_sizes, self.spans, strict=True)):
            if self.fingerprint.codec != "raw":
                dtype, shape = "U8", (size,)
            table[layer_name(layer)] = _tensor(dtype, shape, span.start, span.stop)
        return table

    def to_bytes(self) -> bytes:
        """Return the file's first bytes, padded to align the data area."""
        return sealed(self.table())


def layer_name(layer: int) -> str:
    """Return the name of a layer's tensor."""
    return f"layer.{layer}"


def sealed(table: dict[str, Any]) -> bytes:
    """Return safetensors' header of a table with its checksum, padded for alignment."""
    table["__metadata__"]["checksum"] = checksum_of(canonical(table).encode())
    header = json.dumps(table, separators=(",", ":")).encode()
    header += b" " * (-(len(header) + 8) % _ALIGNMENT)
    return len(header).to_bytes(8, "little") + header


def unsealed(head: bytes) -> dict[str, Any]:
    """Parse a file's first bytes, up to the data area, and verify their checksum.

    Returns
    -------
    dict
        safetensors' header without ``checksum``.

    Raises
    ------
    RefusedEntryError
        The header is torn, of another version or format, or its checksum fails.
    """
    try:
        table = json.loads(head[8:].decode())
    except (ValueError, RecursionError) as error:
        raise RefusedEntryError("unreadable", "no safetensors header") from error
    if not isinstance(table, dict):
        raise RefusedEntryError("unreadable", "no safetensors header")
    metadata = table.get("__metadata__")
    if not isinstance(metadata, dict) or "ragkv" not in metadata:
        raise RefusedEntryError("format", "a safetensors file, but no ragkv entry")
    if metadata["ragkv"] != str(FORMAT_VERSION):
        raise RefusedEntryError(
            "format", f"entry format {metadata['ragkv']!r}; this ragkv reads {FORMAT_VERSION}"
        )
    if metadata.pop("checksum", None) != checksum_of(canonical(table).encode()):
        raise RefusedEntryError("checksum", "the header's checksum does not hold")
    return table


def read_header(blob: Blob) -> tuple[Header, int]:
    """Parse and verify an entry's header; return it and where the data area starts.

    Raises
    ------
    RefusedEntryError
        The entry is torn, of another format, or the header's checksum fails.
    """
    view = memoryview(blob).cast("B")
    start = int.from_bytes(view[:8], "little") + 8
    if start > len(view):
        raise RefusedEntryError("unreadable", "no safetensors header, or a file cut short")
    header = _header(bytes(view[:start]))
    if len(view) != start + header.data_bytes:
        raise RefusedEntryError("unreadable", "the file's length differs from its header")
    return header, start


_WRONG_FIELDS = (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)


@lru_cache(maxsize=256)
def _header(head: bytes) -> Header:
    """Parse and verify the bytes before the data area; cached, since headers are read often."""
    table = unsealed(head)
    try:
        metadata = table["__metadata__"]
        shape = tuple(json.loads(metadata["shape"]))
        spans = [table[layer_name(layer)]["data_offsets"] for layer in range(shape[0])]
        header = Header(
            text=metadata["text"].encode("ascii").decode("unicode_escape"),
            fingerprint=Fingerprint(**json.loads(metadata["fingerprint"])),
            dtype=metadata["dtype"],
            shape=shape,
            token_checksum=metadata["token_checksum"],
            layer_sizes=tuple(end - start for start, end in spans),
            layer_checksums=tuple(json.loads(metadata["layer_checksums"])),
            version=metadata["versions"],
        )
        fits = _is_laid_out(header) and header.table() == table
    except StoreError as error:  # an unknown codec
        raise RefusedEntryError("format", str(error)) from error
    except (*_WRONG_FIELDS, Warning) as error:
        # Warning: how Python reports a bad escape in the text where warnings are errors
        raise RefusedEntryError("format", f"header fields: {error!r}") from error
    if not fits:
        raise RefusedEntryError("format", "the tensors are not laid out as they should be")
    return header


def checksum_of(data: bytes | memoryview) -> str:
    """Return 32 hexadecimal digits of blake3."""
    threads = hash_threads() if len(data) >= _MANY_BYTES else 1
    return blake3(data, max_threads=threads).hexdigest(length=16)


def layer_checksum(parts: Sequence[Part]) -> str:
    """Return 32 hexadecimal digits of xxh3_128 over a layer's bytes."""
    state = xxh3_128()
    for part in parts:
        state.update(part)
    return state.hexdigest()


def canonical(value: object) -> str:
    """Return the canonical JSON of a value."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _is_laid_out(header: Header) -> bool:
    """Whether shape and sizes are possible and fit the codec."""
    codec = codec_of(header.fingerprint.codec)
    return (
        len(header.shape) == 5
        and all(type(size) is int and size > 0 for size in header.shape)
        and header.shape[1] == 2
        and len(header.layer_checksums) == header.shape[0]
        and all(type(size) is int and size > 0 for size in header.layer_sizes)
        and set(header.layer_sizes) == {codec.size(header.shape[1:], DTYPES[header.dtype])}
    )


def _tensor(dtype: str, shape: tuple[int, ...], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
