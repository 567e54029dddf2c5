"""Compute chunks' caches with the model's own forward pass, behind a shared sink."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import torch
from transformers.cache_utils import DynamicCache

from ragkv.chunk.kv import ChunkKV
from ragkv.model.calls import cache_argument, require_used
from ragkv.model.linear import fast_linear_layers
from ragkv.model.loaded import ReusableModel
from ragkv.model.rotary import Table, rotate, unrotate
from ragkv.prompt.tokens import Tokens

Done = TypeVar("Done")

BATCH_TOKENS = 4096
"""Most tokens of a batch, padding included; longer chunks are encoded in pieces."""

BATCH_TOKENS_CPU = 1024
"""The same on a CPU, where more is no faster and requests wait for each layer."""


class Passes(Protocol):
    """Runs passes of one model while no other thread uses it."""

    def run(self, compute: Callable[[], Done]) -> tuple[Done, float]:
        """Return the result of passes, and their seconds without those of waiting for requests.

        Decoding steps of answers and other prompts run before and between the layers.
        """
        ...


def encode_sink(text: str, tokens: Tokens, loaded: ReusableModel) -> ChunkKV:
    """Encode the shared sink from position 0."""
    return _encode_batch([(text, tokens)], None, loaded)[0]


def encode_chunks(
    chunks: Sequence[tuple[str, Tokens]], sink: ChunkKV | None, loaded: ReusableModel
) -> Iterator[list[ChunkKV]]:
    """Encode chunks, each directly behind the sink, and yield them batch by batch.

    Chunks of similar length share a batch, padded on the right, where padding cannot change a row
    under a causal mask. Without a sink they start at position 0.

    Parameters
    ----------
    chunks
        Text and tokens of each; none may be empty.
    sink
        Rows of :func:`encode_sink`, computed once and shared by the batch.
    """
    for batch in in_batches(chunks, loaded.device):
        yield _encode_batch(batch, sink, loaded)


def in_batches(
    chunks: Sequence[tuple[str, Tokens]], device: torch.device
) -> Iterator[list[tuple[str, Tokens]]]:
    """Yield batches of chunks of similar length, the longest first."""
    tokens = _together(device)
    by_length = sorted(chunks, key=lambda chunk: len(chunk[1]), reverse=True)
    while by_length:
        size = max(1, tokens // len(by_length[0][1]))
        yield by_length[:size]
        del by_length[:size]


def _together(device: torch.device) -> int:
    return BATCH_TOKENS_CPU if device.type == "cpu" else BATCH_TOKENS


def padded_ids(batch: Sequence[tuple[str, Tokens]], device: torch.device) -> torch.Tensor:
    """Return the token ids of a batch, ``[chunks, longest]`` int64, zeros on the right."""
    longest = max(len(tokens) for _, tokens in batch)
    ids = torch.zeros((len(batch), longest), dtype=torch.long, device="cpu")
    for row, (_, tokens) in zip(ids, batch, strict=True):
        row[: len(tokens)] = torch.from_numpy(tokens.ids)
    return ids.to(device)


@torch.no_grad()
def _encode_batch(
    chunks: Sequence[tuple[str, Tokens]], sink: ChunkKV | None, loaded: ReusableModel
) -> list[ChunkKV]:
    device = loaded.device
    ids = padded_ids(chunks, device)
    cache = DynamicCache()
    first = 0
    if sink is not None:
        first = len(sink)
        _fill(cache, sink, len(chunks), loaded)
    positions = torch.arange(first, first + ids.shape[1], device=device)
    whole = loaded.architecture.is_beyond(first + ids.shape[1])  # one rotary table for all
    size = ids.shape[1] if whole else _together(device)
    with loaded.without_autocast(), fast_linear_layers(loaded.model):
        for piece, places in zip(
            torch.split(ids, size, dim=1), torch.split(positions, size), strict=True
        ):
            loaded.model(
                input_ids=piece,
                position_ids=places[None],
                use_cache=True,
                logits_to_keep=1,
                **cache_argument(loaded.model, cache),
            )
    require_used(cache.get_seq_length(), first + ids.shape[1], "rows in the cache")
    keys, values = _read(cache, first, positions, loaded)
    return [
        ChunkKV(
            text,
            tokens.ids,
            tokens.offsets,
            keys[:, index, :, : len(tokens)].contiguous(),
            values[:, index, :, : len(tokens)].contiguous(),
        )
        for index, (text, tokens) in enumerate(chunks)
    ]


def unrotated(chunk: ChunkKV, first: int, loaded: ReusableModel) -> ChunkKV:
    """Return a chunk with unrotated keys; they are rotated to positions from ``first`` on."""
    kinds, keys = loaded.architecture.rope_kinds, chunk.keys
    positions = torch.arange(first, first + len(chunk), device=loaded.device)
    tables = {
        kind: Table(table.cos.to(keys.device), table.sin.to(keys.device), table.adjacent)
        for kind, table in loaded.rotary.tables(kinds, positions).items()
    }
    turned = [unrotate(each, tables[kind]) for each, kind in zip(keys, kinds, strict=True)]
    return replace(chunk, keys=torch.stack(turned))


def _fill(cache: DynamicCache, sink: ChunkKV, batch: int, loaded: ReusableModel) -> None:
    """Write the sink's rows, rotated from position 0 on, before every chunk of the batch."""
    architecture, rotary = loaded.architecture, loaded.rotary
    positions = torch.arange(len(sink), device=loaded.device)
    tables = rotary.tables(architecture.rope_kinds, positions)
    for layer, kind in enumerate(architecture.rope_kinds):
        keys = rotate(sink.keys[layer].to(loaded.device), tables[kind])
        values = sink.values[layer].to(loaded.device)
        cache.update(keys.expand(batch, -1, -1, -1), values.expand(batch, -1, -1, -1), layer)


def _read(
    cache: DynamicCache, first: int, positions: torch.Tensor, loaded: ReusableModel
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the chunks' unrotated keys and values on the model's device.

    Both are ``[layers, batch, kv_heads, tokens, head_dim]``.
    """
    architecture, rotary = loaded.architecture, loaded.rotary
    tables = rotary.tables(architecture.rope_kinds, positions)
    keys, values = [], []
    layers: list[Any] = cache.layers  # DynamicCache() has full-length layers only
    for layer, kind in zip(layers, architecture.rope_kinds, strict=True):
        keys.append(unrotate(layer.keys[:, :, first:], tables[kind]))
        values.append(layer.values[:, :, first:])
    return torch.stack(keys), torch.stack(values)
