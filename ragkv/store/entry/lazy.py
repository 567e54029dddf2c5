"""An entry whose layers arrive one by one, each verified before it is used."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Protocol

import torch

from ragkv.chunk.kv import ChunkKV, CodedLayers, LayeredKV
from ragkv.model.memory import pinned, uninitialised
from ragkv.prompt.tokens import IntArray
from ragkv.store.entry.codecs.base import Codec
from ragkv.store.entry.header import RefusedEntryError

_ALIGNMENT = 16  # bytes, for a device that reads a layer in whole words


class CorruptEntryError(Exception):
    """A layer did not arrive; ``reason`` as in :class:`ragkv.store.base.Lookup`."""

    def __init__(self, text: str, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.text = text
        self.reason = reason


class LayerSource(Protocol):
    """An entry's bytes, of which each call verifies what it reads.

    Attributes
    ----------
    shape
        ``[layers, 2, kv_heads, tokens, head_dim]``.
    dtype
        Of the decoded numbers.
    codec
        The codec, without compression.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    codec: Codec

    def room(self) -> torch.Tensor:
        """Return memory for all decoded layers, of ``shape``; undefined."""
        ...

    def take(self, layer: int, out: torch.Tensor) -> None:
        """Verify a layer and decode it into its place in :meth:`room`'s tensor.

        Raises
        ------
        RefusedEntryError
            It does not hold.
        """
        ...

    def stage(self, layer: int, out: torch.Tensor) -> None:
        """Verify a layer and copy it, decompressed, to ``[bytes]`` uint8; raises as above."""
        ...


class LazyKV:
    """A chunk's cache that is verified layer by layer, by whoever comes first.

    Several threads may ask for layers; each is read once, and nobody waits for another layer
    than the one asked for. Layers are decoded here, or stay as their codec keeps them for a
    device that decodes them itself.

    Parameters
    ----------
    text
        The chunk's text.
    tokens
        ``token_ids`` and ``offsets`` as in :class:`ragkv.chunk.kv.ChunkKV`.
    source
        Where the layers come from.
    threads
        That :meth:`whole` may use.
    """

    def __init__(
        self,
        text: str,
        tokens: tuple[IntArray, IntArray],
        source: LayerSource,
        *,
        threads: int = 1,
    ) -> None:
        self.text = text
        self.token_ids, self.offsets = tokens
        self.depth = source.shape[0]
        """Number of layers."""
        self._source = source
        self._threads = threads
        self._decoded = _LoadedLayers(self.depth, source.room)
        self._coded = _LoadedLayers(self.depth, partial(_staging, source))
        self._lock = threading.Lock()
        self._taking = [threading.Lock() for _ in range(self.depth)]
        self._missing = self.depth
        self._seconds = 0.0
        self._lost: tuple[str, str] | None = None  # no exception: its frames would keep this
        self._when_whole: Callable[[LayeredKV, float], None] | None = None
        self._when_lost: Callable[[RefusedEntryError], None] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, decoded."""
        return math.prod(self._source.shape) * self._source.dtype.itemsize

    def then(
        self,
        *,
        whole: Callable[[LayeredKV, float], None] | None = None,
        lost: Callable[[RefusedEntryError], None] | None = None,
    ) -> None:
        """Say what is to be done when the last layer has arrived, or the first is lost.

        To be called before any layer is asked for. ``whole`` is given this entry, and the
        seconds that reading took.
        """
        self._when_whole = whole or self._when_whole
        self._when_lost = lost or self._when_lost

    def layers(self, which: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Return layers' keys and values, ``[layers, kv_heads, tokens, head_dim]`` each.

        Raises
        ------
        CorruptEntryError
            One of them, or any that was asked for before, cannot be trusted or read.
        """
        for index in range(self.depth)[which]:
            self.arrive(index)
        both = self._decoded.memory()[which]
        return both[:, 0], both[:, 1]

    def coded(self, which: slice) -> CodedLayers | None:
        """Return layers as their codec keeps them; raises as :meth:`layers`.

        None where one of them was decoded at once.
        """
        wanted = range(self.depth)[which]
        if any(self._decoded.there[index] and not self._coded.there[index] for index in wanted):
            return None
        for index in wanted:
            self.arrive(index, decoded=False)
        size, codec = _size(self._source), self._source.codec
        return CodedLayers(self._coded.memory()[which], size, codec.name)

    def arrive(self, index: int, *, decoded: bool = True) -> None:
        """Read a layer unless it is there; raises as :meth:`layers`."""
        form = self._decoded if decoded else self._coded
        if form.there[index]:
            return
        with self._taking[index]:
            if form.there[index]:
                return
            if self._lost is not None:
                raise CorruptEntryError(self.text, *self._lost)
            began = time.perf_counter()
            known = self._decoded.there[index] or self._coded.there[index]
            out = form.memory()[index]
            try:
                if not decoded:
                    self._source.stage(index, out)
                elif self._coded.there[index]:
                    coded = self._coded.memory()[index, : _size(self._source)]
                    self._source.codec.decode(coded.numpy().data, out)
                else:
                    self._source.take(index, out)
            except RefusedEntryError as refused:
                self._lose(refused)
                raise CorruptEntryError(self.text, refused.reason, str(refused)) from refused
            form.there[index] = True
        if not known:
            self._count(time.perf_counter() - began)

    def whole(self) -> ChunkKV:
        """Return the entry with all its layers decoded; raises as :meth:`layers`."""
        layers = range(self.depth)
        if self._threads == 1:
            for layer in layers:
                self.arrive(layer)
        else:
            with ThreadPoolExecutor(self._threads) as pool:
                list(pool.map(self.arrive, layers))
        keys, values = self._decoded.memory().unbind(1)
        return ChunkKV(self.text, self.token_ids, self.offsets, keys=keys, values=values)

    def _count(self, seconds: float) -> None:
        with self._lock:
            self._missing -= 1
            self._seconds += seconds
            whole = not self._missing
        if whole and self._when_whole is not None:
            self._when_whole(self, self._seconds)

    def _lose(self, refused: RefusedEntryError) -> None:
        with self._lock:
            first, self._lost = self._lost is None, (refused.reason, str(refused))
        if first and self._when_lost is not None:
            self._when_lost(refused)


class _LoadedLayers:
    """Memory for layers, made when the first of them comes; and which of them are there."""

    def __init__(self, depth: int, make: Callable[[], torch.Tensor]) -> None:
        self.there = [False] * depth
        self._make = make
        self._lock = threading.Lock()
        self._memory: torch.Tensor | None = None

    def memory(self) -> torch.Tensor:
        with self._lock:
            if self._memory is None:
                self._memory = self._make()
            return self._memory


def _size(source: LayerSource) -> int:
    return source.codec.size(source.shape[1:], source.dtype)


def _staging(source: LayerSource) -> torch.Tensor:
    shape = source.shape[0], -(-_size(source) // _ALIGNMENT) * _ALIGNMENT
    pages = pinned(shape, torch.uint8) if torch.cuda.is_available() else None
    return uninitialised(shape, torch.uint8) if pages is None else pages


class ReadAhead:
    """A thread in which entries of one model arrive, the first layer of each first.

    Parameters
    ----------
    decoded
        Decode the layers, too; False leaves that to a device.
    """

    def __init__(self, entries: Sequence[LazyKV], *, decoded: bool = True) -> None:
        self._entries = entries
        self._decoded = decoded
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="ragkv-read-ahead", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Return when nothing is read any more: after the layer at hand."""
        self._stopped = True
        self._thread.join()

    def _run(self) -> None:
        for layer in range(self._entries[0].depth):
            for entry in self._entries:
                if self._stopped:
                    return
                with suppress(CorruptEntryError):  # whoever wants the layer is told
                    entry.arrive(layer, decoded=self._decoded)
