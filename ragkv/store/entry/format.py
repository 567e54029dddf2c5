"""The entry format: one chunk in one safetensors file with checksums.

See ``docs/store-format.md``. The data area begins with the layers, one tensor each, in the order of
a forward pass; a layer's keys and values are one range of bytes. Each layer has a checksum, so that
it can be read and verified on its own (:func:`open_entry`). The header's checksum covers these and
every other header field.
"""

from __future__ import annotations

import logging
import os
from itertools import chain

import numpy as np

from ragkv.chunk.kv import ChunkKV
from ragkv.errors import StoreError
from ragkv.model.fingerprint import Fingerprint
from ragkv.prompt.tokens import IntArray
from ragkv.store.backends.backend import Blob
from ragkv.store.entry.codecs import Part, codec_of
from ragkv.store.entry.header import (
    DTYPES,
    NO_VERSION,
    Header,
    RefusedEntryError,
    checksum_of,
    layer_checksum,
    read_header,
)
from ragkv.store.entry.lazy import CorruptEntryError, LayerReader, LazyKV
from ragkv.store.types import Found

logger = logging.getLogger(__name__)

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MANY_BYTES = 1 << 25  # from this size on, threads share the page faults of fresh memory
_THREADS = min(4, os.cpu_count() or 1)


def encode(entry: ChunkKV, fingerprint: Fingerprint, version: str = NO_VERSION) -> list[Part]:
    """Return the bytes of an entry's file, in the codec that the fingerprint names.

    They are parts, to write one after the other: raw tensors without a second copy. ``version`` is
    the header's field.

    Raises
    ------
    StoreError
        The fingerprint names an unknown codec or another dtype than the tensors', or the codec
        cannot store these numbers.
    ValueError
        The entry's arrays do not fit together.
    """
    codec = codec_of(fingerprint.codec)
    _check(entry, fingerprint)
    keys, values = entry.keys, entry.values
    if codec.lossless:  # copy all layers at once; quantised layers are copied as codes
        keys, values = keys.cpu(), values.cpu()
    layers = [codec.encode(*layer) for layer in zip(keys, values, strict=True)]
    token_bytes = (
        np.ascontiguousarray(entry.token_ids, dtype="<i4").tobytes()
        + np.ascontiguousarray(entry.offsets, dtype="<i4").tobytes()
    )
    header = Header(
        text=entry.text,
        fingerprint=fingerprint,
        dtype=_DTYPE_NAMES[entry.keys.dtype],
        shape=(len(layers), 2, *entry.keys.shape[1:]),
        token_checksum=checksum_of(token_bytes),
        layer_sizes=tuple(sum(map(len, parts)) for parts in layers),
        layer_checksums=tuple(map(layer_checksum, layers)),
        version=version,
    )
    return [header.to_bytes(), *chain.from_iterable(layers), token_bytes]


def decode(
    buffer: Blob,
    text: str,
    fingerprint: Fingerprint,
    version: str = NO_VERSION,
    *,
    copy: bool = False,
    place: object = "",
) -> Found[ChunkKV]:
    """Return the entry in ``buffer`` if it is whole and the required one, else the reason.

    Parameters
    ----------
    buffer
        The file's bytes. Writable unless ``copy``, such as a copy-on-write mapping.
    text, fingerprint, version
        The required ones; ``version`` is the header's field.
    copy
        False: raw tensors are views into ``buffer``, which they keep alive.
        True: they own their memory, whose copy was verified, so that later changes of ``buffer``
        do not matter. Tensors of other codecs always do.
    place
        Name of the bytes' place, for the log.
    """
    try:
        return Found(open_entry(buffer, text, fingerprint, version, copy=copy).whole())
    except (RefusedEntryError, CorruptEntryError) as refused:
        logger.warning("unusable chunk cache %s: %s (%s)", place, refused, refused.reason)
        return Found(None, refused.reason)


def open_entry(
    buffer: Blob,
    text: str,
    fingerprint: Fingerprint,
    version: str = NO_VERSION,
    *,
    copy: bool = False,
    trusted: bool = False,
) -> LazyKV:
    """Return the entry with unverified layers; arguments as in :func:`decode`.

    ``trusted``: nothing else can change ``buffer``, so raw layers in place need no verification.

    Raises
    ------
    RefusedEntryError
        The header, the tokens or the length are wrong, or it is another entry.
    """
    header, start = read_header(buffer)
    check_wanted(header, text, fingerprint, version)
    data = memoryview(buffer).cast("B")[start:]
    tokens = tokens_in(bytes(data[header.kv_bytes :]), header)
    many = header.kv_bytes >= _MANY_BYTES and fingerprint.codec == "raw"
    return LazyKV(
        header.text,
        tokens,
        LayerReader(data, header, copy=copy, trusted=trusted),
        threads=_THREADS if many and not trusted else 1,
    )


def tokens_in(data: bytes, header: Header) -> tuple[IntArray, IntArray]:
    """Verify the bytes after the layers; return ``token_ids`` and ``offsets``."""
    if checksum_of(data) != header.token_checksum:
        raise RefusedEntryError("checksum", "the tokens' checksum does not hold")
    integers = np.frombuffer(data, dtype="<i4").astype(np.int32)
    return integers[: header.tokens], integers[header.tokens :].reshape(header.tokens, 2)


def check_wanted(header: Header, text: str, fingerprint: Fingerprint, version: str) -> None:
    """Refuse an entry of another fingerprint, text or version."""
    if header.fingerprint != fingerprint:
        raise RefusedEntryError("fingerprint", "the entry belongs to another model")
    if header.text != text:
        raise RefusedEntryError("tokens", "the entry belongs to another text")
    if header.version != version:
        raise RefusedEntryError("format", "the entry is another version of its chunk")


def _check(entry: ChunkKV, fingerprint: Fingerprint) -> None:
    keys, values = entry.keys, entry.values
    if keys.dtype not in _DTYPE_NAMES or str(keys.dtype) != f"torch.{fingerprint.dtype}":
        raise StoreError(f"{keys.dtype} keys do not fit the fingerprint's {fingerprint.dtype}")
    if keys.ndim != 4 or keys.shape != values.shape or keys.dtype != values.dtype:
        raise ValueError(f"keys {tuple(keys.shape)} and values {tuple(values.shape)} differ")
    if keys.numel() == 0:
        raise ValueError("a chunk without tokens has nothing to store")
    if entry.token_ids.shape != keys.shape[2:3] or entry.offsets.shape != (keys.shape[2], 2):
        raise ValueError("token_ids and offsets need one row for each token of the keys")
