"""Entries whose content follows from their text, so that any process can check them."""

import os
import zlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import children
import numpy as np
import pytest
import torch

from ragkv.chunk.kv import ChunkKV
from ragkv.model.fingerprint import Fingerprint
from ragkv.store import ChunkStore
from ragkv.store.backends import disk, index
from ragkv.store.tiers.tier import MemoryTier
from ragkv.store.types import Terms

FINGERPRINT = Fingerprint("weights", "tokenizer", "attention", "float32", sink="sink")
OTHER = replace(FINGERPRINT, weights="other weights")
INLINE_BYTES = 700
"""Above the texts of the tests, below their entries."""
DTYPES = ("float32", "float16", "bfloat16", "float64")


def make_entry(
    text: str, *, layers: int = 2, heads: int = 2, tokens: int = 3, dtype: str = "float32"
) -> ChunkKV:
    """Make the one entry of this text and shape."""
    draw = torch.Generator().manual_seed(zlib.crc32(text.encode("utf-8", "surrogatepass")))
    keys, values = torch.randn(2, layers, heads, tokens, 4, generator=draw).to(
        getattr(torch, dtype)
    )
    ids = np.arange(tokens, dtype=np.int32) + len(text)
    offsets = np.stack([ids, ids + 1], axis=1).astype(np.int32)
    return ChunkKV(text, ids, offsets, keys, values)


def put_texts(
    store: ChunkStore, texts: Iterable[str], terms: Terms = Terms(), *, tokens: int = 3
) -> None:
    """Put the entries of these texts, one after the other."""
    for text in texts:
        store.put(make_entry(text, tokens=tokens), FINGERPRINT, terms)


def texts_in(store: ChunkStore | MemoryTier) -> list[str]:
    return sorted(store.texts())


def same(found: ChunkKV | None, expected: ChunkKV) -> bool:
    """Whether two entries are equal to the last bit."""
    return (
        found is not None
        and found.text == expected.text
        and found.token_ids.dtype == found.offsets.dtype == np.int32
        and np.array_equal(found.token_ids, expected.token_ids)
        and np.array_equal(found.offsets, expected.offsets)
        and found.keys.dtype == expected.keys.dtype
        and torch.equal(found.keys, expected.keys)
        and torch.equal(found.values, expected.values)
    )


def files_of(store: ChunkStore) -> list[Path]:
    """All files of entries, temporary ones included."""
    return sorted(path for path in (store.backend.folder / "kv").rglob("*") if path.is_file())


def file_of(store: ChunkStore, text: str) -> Path:
    """The file of a text's only entry."""
    (path,) = [path for path in files_of(store) if text.encode() in path.read_bytes()]
    return path


def leave_out_syncs(patch: pytest.MonkeyPatch | None = None) -> None:
    """Leave out what only a loss of power would need, and give small entries files.

    Without ``patch``, for as long as this process lives.
    """
    patch = patch or pytest.MonkeyPatch()
    patch.setattr(disk, "INLINE_BYTES", INLINE_BYTES)
    patch.setattr(os, "fsync", lambda _: None)
    patch.setattr(index, "_SETTINGS", (*index._SETTINGS, "PRAGMA synchronous = OFF"))


@pytest.fixture
def without_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do so, in the children too."""
    leave_out_syncs(monkeypatch)
    monkeypatch.setattr(children, "prepare", (leave_out_syncs,))
