"""A store's folder as the first version of ragkv wrote it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import torch

from ragkv.chunk.kv import ChunkKV
from ragkv.model.fingerprint import Fingerprint
from ragkv.store.backends.index import Index
from ragkv.store.entry.header import canonical, checksum_of, sealed

_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def write_first_layout(folder: Path, entries: Iterable[ChunkKV], fingerprint: Fingerprint) -> None:
    """Write a namespace's folder: the index's own row, and one file an entry."""
    for number, entry in enumerate(entries):
        path = folder / "kv" / f"{number:02}" / f"{number:064x}.safetensors"
        path.parent.mkdir(parents=True)
        path.write_bytes(first_format(entry, fingerprint))
    with closing(Index(folder / "index")) as index, index.transaction() as rows:
        rows.set("store", json.dumps({"format": 1, "namespace": "default"}).encode())


def first_format(entry: ChunkKV, fingerprint: Fingerprint) -> bytes:
    """Return an entry in format 1."""
    kv = torch.stack([entry.keys, entry.values], dim=1)
    layers = [layer.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for layer in kv]
    tokens = entry.token_ids.astype("<i4").tobytes() + entry.offsets.astype("<i4").tobytes()
    sizes = [sum(map(len, layers)), 4 * len(entry), 8 * len(entry)]
    ends = [sum(sizes[: number + 1]) for number in range(3)]
    shapes = [list(kv.shape), [len(entry)], [len(entry), 2]]
    table = {
        name: {"dtype": dtype, "shape": shape, "data_offsets": [end - size, end]}
        for name, dtype, shape, size, end in zip(
            ("kv", "token_ids", "offsets"),
            (_DTYPES[kv.dtype], "I32", "I32"),
            shapes,
            sizes,
            ends,
            strict=True,
        )
    }
    metadata = {
        "ragkv": "1",
        "fingerprint": canonical(asdict(fingerprint)),
        "text": entry.text.encode("unicode_escape").decode("ascii"),
        "token_checksum": checksum_of(tokens),
        "layer_checksums": canonical([checksum_of(layer) for layer in layers]),
    }
    return b"".join([sealed({"__metadata__": metadata, **table}), *layers, tokens])
