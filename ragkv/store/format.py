"""The entry format: one chunk in one safetensors file that proves its own bytes.

See ``docs/store-format.md``. The data area begins with one tensor ``kv`` of shape
``[layers, 2, kv_heads, tokens, head_dim]``: a layer's keys and values are one range of
bytes, and reading the file from front to back delivers the layers in the order in
which a forward pass wants them. A checksum per layer lets one layer be read and
trusted alone; the header's own checksum covers those and every other header field.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from blake3 import blake3

from ragkv.chunk.kv import ChunkKV
from ragkv.errors import StoreError
from ragkv.model.fingerprint import Fingerprint
from ragkv.store.base import Lookup
from ragkv.store.header import (
    DTYPES,
    Header,
    RefusedEntryError,
    checksum_of,
    read_header,
    threads_for,
)

logger = logging.getLogger(__name__)

CODECS = ("raw",)
"""Codecs that this module writes and reads: how ``kv`` holds keys and values."""

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, eq=False, slots=True)
class Encoded:
    """An entry ready to be written: :meth:`parts` one after the other, ``nbytes`` in all."""

    header: bytes
    keys: torch.Tensor
    values: torch.Tensor
    tokens: bytes
    nbytes: int

    def parts(self) -> Iterator[bytes | memoryview]:
        """Yield the file's bytes in order, without a second copy of the tensors."""
        yield self.header
        yield from _halves(self.keys, self.values)
        yield self.tokens


def encode(entry: ChunkKV, fingerprint: Fingerprint) -> Encoded:
    """Prepare an entry for writing.

    Raises
    ------
    StoreError
        The fingerprint names an unknown codec, or another dtype than the tensors have.
    ValueError
        The entry's arrays do not fit together.
    """
    _check(entry, fingerprint)
    keys, values = entry.keys.detach().cpu(), entry.values.detach().cpu()
    layers, heads, tokens, width = keys.shape
    token_bytes = (
        np.ascontiguousarray(entry.token_ids, dtype="<i4").tobytes()
        + np.ascontiguousarray(entry.offsets, dtype="<i4").tobytes()
    )
    threads = threads_for(heads * tokens * width)
    checksums = [blake3(max_threads=threads) for _ in range(layers)]
    for index, half in enumerate(_halves(keys, values)):
        checksums[index // 2].update(half)
    header = Header(
        text=entry.text,
        fingerprint=fingerprint,
        dtype=_DTYPE_NAMES[keys.dtype],
        shape=(layers, 2, heads, tokens, width),
        token_checksum=checksum_of(token_bytes),
        layer_checksums=tuple(checksum.hexdigest(length=16) for checksum in checksums),
    )
    head = header.to_bytes()
    return Encoded(head, keys, values, token_bytes, len(head) + header.data_bytes)


def decode(
    buffer: bytes | bytearray | mmap.mmap,
    text: str,
    fingerprint: Fingerprint,
    *,
    copy: bool = False,
    place: object = "",
) -> Lookup:
    """Return the entry in ``buffer`` if every byte of it holds and it is the wanted one.

    Parameters
    ----------
    buffer
        The file's bytes. Writable unless ``copy``, such as a copy-on-write mapping.
    text, fingerprint
        What the entry must be of.
    copy
        False: the tensors are views into ``buffer``, which they keep alive. True: they
        own their memory, and it is the copy that was verified, so that nothing that
        happens to ``buffer`` later can matter.
    place
        Where the bytes come from, for the log.
    """
    try:
        view = memoryview(buffer).cast("B")
        header, start = read_header(view)
        _check_wanted(header, text, fingerprint)
        return Lookup(_read(view[start:], header, copy=copy))
    except RefusedEntryError as refused:
        logger.warning("unusable chunk cache %s: %s (%s)", place, refused, refused.reason)
        return Lookup(None, refused.reason)


def _read(data: memoryview, header: Header, *, copy: bool) -> ChunkKV:
    """Verify the data area and return the tensors in it."""
    source = np.frombuffer(data, dtype=np.uint8, count=header.kv_bytes)
    # numpy asks for huge pages where torch does not: filling fresh memory is 3x faster
    kv = np.empty_like(source) if copy else source
    for layer, expected in enumerate(header.layer_checksums):
        span = slice(layer * header.layer_bytes, (layer + 1) * header.layer_bytes)
        if copy:
            kv[span] = source[span]
        if checksum_of(kv[span].data) != expected:
            raise RefusedEntryError("checksum", f"layer {layer}'s checksum does not hold")
    token_bytes = bytes(data[header.kv_bytes :])
    if checksum_of(token_bytes) != header.token_checksum:
        raise RefusedEntryError("checksum", "the tokens' checksum does not hold")
    integers = np.frombuffer(token_bytes, dtype="<i4").astype(np.int32)
    tensor = torch.from_numpy(kv).view(DTYPES[header.dtype]).view(header.shape)
    return ChunkKV(
        text=header.text,
        token_ids=integers[: header.tokens],
        offsets=integers[header.tokens :].reshape(header.tokens, 2),
        keys=tensor[:, 0],
        values=tensor[:, 1],
    )


def _check(entry: ChunkKV, fingerprint: Fingerprint) -> None:
    keys, values = entry.keys, entry.values
    if fingerprint.codec not in CODECS:
        raise StoreError(f"unknown codec {fingerprint.codec!r}; known: {', '.join(CODECS)}")
    if keys.dtype not in _DTYPE_NAMES or str(keys.dtype) != f"torch.{fingerprint.dtype}":
        raise StoreError(f"{keys.dtype} keys do not fit the fingerprint's {fingerprint.dtype}")
    if keys.ndim != 4 or keys.shape != values.shape or keys.dtype != values.dtype:
        raise ValueError(f"keys {tuple(keys.shape)} and values {tuple(values.shape)} differ")
    if keys.numel() == 0:
        raise ValueError("a chunk without tokens has nothing to store")
    if entry.token_ids.shape != keys.shape[2:3] or entry.offsets.shape != (keys.shape[2], 2):
        raise ValueError("token_ids and offsets need one row for each token of the keys")


def _check_wanted(header: Header, text: str, fingerprint: Fingerprint) -> None:
    if header.fingerprint != fingerprint:
        raise RefusedEntryError("fingerprint", "the entry belongs to another model")
    if header.text != text:
        raise RefusedEntryError("tokens", "the entry belongs to another text")


def _halves(keys: torch.Tensor, values: torch.Tensor) -> Iterator[memoryview]:
    """Yield each layer's keys, then its values, as bytes."""
    for layer in range(len(keys)):
        for half in (keys[layer], values[layer]):
            yield half.contiguous().view(-1).view(torch.uint8).numpy().data
