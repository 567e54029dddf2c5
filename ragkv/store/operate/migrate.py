"""Entries of older formats, carried over to the one that is written now."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import torch

from ragkv.chunk.kv import ChunkKV
from ragkv.model.fingerprint import Fingerprint
from ragkv.store.entry.format import encode
from ragkv.store.entry.header import (
    DTYPES,
    FORMAT_VERSION,
    RefusedEntryError,
    checksum_of,
    unsealed,
)


def migrate(data: bytes) -> bytes:
    """Return an entry of format 1 in format 2: the same numbers, the same fingerprint.

    An entry that is of format 2 already is returned as it is, unverified.

    Raises
    ------
    RefusedEntryError
        It is no entry of format 1, or its checksums do not hold; ``reason`` as in
        :class:`ragkv.store.base.Lookup`.
    """
    view = memoryview(data)
    try:
        table, start = unsealed(view, version=1)
    except RefusedEntryError:
        unsealed(view, FORMAT_VERSION)
        return data
    try:
        entry, fingerprint = _read_first(table, view[start:])
        return b"".join(encode(entry, fingerprint).parts())
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise RefusedEntryError("format", f"no entry of format 1: {error!r}") from error


def _read_first(table: dict[str, Any], data: memoryview) -> tuple[ChunkKV, Fingerprint]:
    """Read format 1: one tensor ``kv`` of all layers, a blake3 a layer."""
    metadata, kv = table["__metadata__"], table["kv"]
    dtype, shape = DTYPES[kv["dtype"]], kv["shape"]
    tokens, kv_bytes = shape[3], math.prod(shape) * dtype.itemsize
    if len(data) != kv_bytes + 12 * tokens:
        raise RefusedEntryError("unreadable", "the file is shorter or longer than it says")
    layer_bytes = kv_bytes // shape[0]
    layers = [data[start : start + layer_bytes] for start in range(0, kv_bytes, layer_bytes)]
    found = [checksum_of(part) for part in (*layers, data[kv_bytes:])]
    if found != [*json.loads(metadata["layer_checksums"]), metadata["token_checksum"]]:
        raise RefusedEntryError("checksum", "a layer's or the tokens' checksum does not hold")
    integers = np.frombuffer(data[kv_bytes:], dtype="<i4").astype(np.int32)
    tensor = torch.frombuffer(bytearray(data[:kv_bytes]), dtype=dtype).view(*shape)
    entry = ChunkKV(
        text=metadata["text"].encode("ascii").decode("unicode_escape"),
        token_ids=integers[:tokens],
        offsets=integers[tokens:].reshape(tokens, 2),
        keys=tensor[:, 0],
        values=tensor[:, 1],
    )
    return entry, Fingerprint(**json.loads(metadata["fingerprint"]))
