"""A stand-in for llama.cpp over a tiny model, with a writer and reader of blobs of its own."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from llamacpp_ragkv.library import LlamaCppError, Part
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from ragkv.model.calls import cache_argument

MAGIC = 0xAF143CD8
TYPES = {"f4": 0, "f2": 1}


@dataclass
class Dialect:
    """How a build of llama.cpp writes a blob."""

    version: int = 4
    transposed: bool = False
    dtype: str = "f4"
    streams: int = 1
    stream: int = 0
    kind: int | None = None
    rotation: tuple[int, int] = (0, 0)

    def of(self, sequences: int, sequence: int) -> Dialect:
        """Return how a sequence is written that has a stream of its own."""
        return replace(self, streams=sequences, stream=sequence)

    def write(self, begin: int, keys: Any, values: Any) -> bytes:
        """Write rows ``[layers, tokens, width]``."""
        tokens = keys.shape[1]
        out = struct.pack("<IiI", MAGIC, self.stream, self.streams)
        for stream in range(self.streams):
            if stream != self.stream:
                out += struct.pack("<I", 0)
                continue
            out += struct.pack("<I", tokens)
            for at in range(tokens):
                out += struct.pack("<iIi", begin + at, 1, self.stream)
            out += struct.pack("<II", self.transposed, len(keys))
            if self.version == 4:
                out += struct.pack("<II", *self.rotation)
            kind = TYPES[self.dtype] if self.kind is None else self.kind
            size = int(self.dtype[1])
            for layer in keys.astype("<" + self.dtype):
                out += struct.pack("<iQ", kind, layer.shape[1] * size) + layer.tobytes()
            for layer in values.astype("<" + self.dtype):
                if self.transposed:
                    out += struct.pack("<iII", kind, size, layer.shape[1])
                    out += layer.T.copy().tobytes()
                else:
                    out += struct.pack("<iQ", kind, layer.shape[1] * size) + layer.tobytes()
        return out

    def read(self, blob: bytes) -> tuple[int, Any, Any]:
        """Return the first position, keys and values of a blob in this dialect."""
        if struct.unpack_from("<IiI", blob) != (MAGIC, self.stream, self.streams):
            raise LlamaCppError("this is no blob of the sequence")
        at = 12 + 4 * self.stream
        (tokens,) = struct.unpack_from("<I", blob, at)
        (begin,) = struct.unpack_from("<i", blob, at + 4)
        at += 4 + 12 * tokens
        _, layers = struct.unpack_from("<II", blob, at)
        at += 16 if self.version == 4 else 8
        size, rows = int(self.dtype[1]), []
        for matrix in range(2 * layers):
            columns = self.transposed and matrix >= layers
            head = struct.unpack_from("<iII" if columns else "<iQ", blob, at)
            width = head[2] if columns else head[1] // size
            at += 12
            found = np.frombuffer(blob, "<" + self.dtype, tokens * width, at)
            rows.append(found.reshape(width, tokens).T if columns else found.reshape(tokens, width))
            at += tokens * width * size
        if at + 4 * (self.streams - self.stream - 1) != len(blob):
            raise LlamaCppError("this is no blob")
        return begin, np.stack(rows[:layers]), np.stack(rows[layers:])


@dataclass
class StandIn:
    """A library over a transformers model.

    Attributes
    ----------
    pairs
        Whether keys are in pairs, as in Llama's files.
    opened, decoded
        Rooms and sequences of the contexts, and numbers of tokens by part of each call.
    fails
        Number of later calls with several parts that fail.
    """

    model: PreTrainedModel
    architecture: str = "llama"
    dialect: Dialect = field(default_factory=Dialect)
    pairs: bool = True
    opened: list[tuple[int, int]] = field(default_factory=list)
    decoded: list[list[int]] = field(default_factory=list)
    fails: int = 0
    open_contexts: int = 0
    spoiled: int = 0
    """Number of later blobs that are refused."""

    def open(self, room: int, sequences: int = 1) -> StandInContext:
        self.opened.append((room, sequences))
        self.open_contexts += 1
        return StandInContext(self, room, sequences)

    def close(self) -> None:
        assert not self.open_contexts


class StandInContext:
    """Rows of several sequences."""

    def __init__(self, library: StandIn, room: int, sequences: int) -> None:
        self.library, self.room, self.sequences = library, room, sequences
        dialects = [library.dialect.of(sequences, each) for each in range(sequences)]
        self.held = [StandInSequence(library, room, each) for each in dialects]

    def decode(self, parts: Sequence[Part]) -> Any:
        self.library.decoded.append([len(part.tokens) for part in parts])
        if len(parts) > 1 and self.library.fails:
            self.library.fails -= 1
            raise LlamaCppError("no memory for this many")
        return [self.held[part.sequence].decode(part.tokens, part.begin) for part in parts]

    def state(self, sequence: int) -> bytes:
        return self.held[sequence].state()

    def restore(self, sequence: int, blob: bytes) -> None:
        self.held[sequence].restore(blob)

    def remove(self, sequence: int, begin: int) -> None:
        self.held[sequence].remove(begin)

    def close(self) -> None:
        self.library.open_contexts -= 1


class StandInSequence:
    """Rows of one sequence, in transformers' order."""

    def __init__(self, library: StandIn, room: int, dialect: Dialect) -> None:
        self.library, self.room, self.dialect = library, room, dialect
        self.begin, self.rows = 0, []

    @property
    def heads(self) -> int:
        return self.library.model.config.num_key_value_heads

    @torch.no_grad()
    def decode(self, tokens: Sequence[int], begin: int) -> Any:
        cache = DynamicCache(config=self.library.model.config)
        for layer, (keys, values) in enumerate(self.rows):
            cache.update(keys, values, layer)
        held = cache.get_seq_length()
        self.begin = self.begin if held else begin
        assert held + len(tokens) <= self.room
        assert self.begin + held == begin
        out = self.library.model(
            input_ids=torch.tensor([list(tokens)]),
            position_ids=torch.arange(begin, begin + len(tokens))[None],
            **cache_argument(self.library.model, cache),
        )
        self.rows = [(layer.keys, layer.values) for layer in cache.layers]
        return out.logits[0].float().numpy()

    def state(self) -> bytes:
        keys, values = (
            np.stack([self.flat(pair[part], pairs=not part) for pair in self.rows])
            for part in (0, 1)
        )
        return self.dialect.write(self.begin, keys, values)

    def restore(self, blob: bytes) -> None:
        if self.library.spoiled:
            self.library.spoiled -= 1
            blob = blob[:-1]
        self.rows = []
        try:
            self.begin, keys, values = self.dialect.read(blob)
        except ValueError as error:
            raise LlamaCppError(f"this is no blob: {error}") from error
        for layer in range(len(keys)):
            self.rows.append((self.split(keys[layer], pairs=True), self.split(values[layer])))

    def remove(self, begin: int) -> None:
        kept = max(0, begin - self.begin)
        self.rows = [(k[:, :, :kept], v[:, :, :kept]) for k, v in self.rows] if kept else []

    def flat(self, rows: torch.Tensor, *, pairs: bool) -> Any:
        """Return ``[tokens, width]``: dimension i + h d/2 of a key becomes 2i + h."""
        _, heads, tokens, dim = rows.shape
        out = np.empty((tokens, heads, dim), np.float32)
        for at in range(dim):
            half, low = divmod(at, dim // 2)
            to = 2 * low + half if pairs and self.library.pairs else at
            out[:, :, to] = rows[0, :, :, at].T
        return out.reshape(tokens, -1)

    def split(self, rows: Any, *, pairs: bool = False) -> torch.Tensor:
        tokens = len(rows)
        rows = rows.reshape(tokens, self.heads, -1).astype(np.float32)
        dim = rows.shape[-1]
        out = torch.empty(1, self.heads, tokens, dim)
        for at in range(dim):
            half, low = divmod(at, dim // 2)
            to = 2 * low + half if pairs and self.library.pairs else at
            out[0, :, :, at] = torch.from_numpy(rows[:, :, to].T.copy())
        return out
