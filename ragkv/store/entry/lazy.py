"""An entry whose layers are read lazily, each verified before it is used."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol

import torch

from ragkv.chunk.kv import ChunkKV, CodedLayers, LayeredKV
from ragkv.model.memory import pinned, uninitialised
from ragkv.model.pool import Pool
from ragkv.prompt.tokens import IntArray
from ragkv.store.entry.codecs.base import Codec
from ragkv.store.entry.header import RefusedEntryError

_ALIGNMENT = 16  # bytes, for a device that reads a layer in whole words


class CorruptEntryError(Exception):
    """A layer is corrupt or cannot be read; ``reason`` as in :class:`ragkv.store.base.Found`."""

    def __init__(self, text: str, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.text = text
        self.reason = reason


class LayerSource(Protocol):
    """An entry's stored layers; each call verifies what it reads.

    Attributes
    ----------
    shape
        ``[layers, 2, kv_heads, tokens, head_dim]``.
    dtype
        Of the decoded numbers.
    codec
        The stored layers' codec.
    stays
        Whether :meth:`allocate` returns the stored numbers themselves, with nothing to verify.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    codec: Codec
    stays: bool

    def allocate(self) -> torch.Tensor:
        """Return memory for all decoded layers, of ``shape``; undefined."""
        ...

    def read_layer(self, layer: int, out: torch.Tensor) -> None:
        """Verify a layer and decode it into its part of :meth:`allocate`'s tensor.

        Raises
        ------
        RefusedEntryError
            It is corrupt.
        """
        ...

    def read_raw(self, layer: int, out: torch.Tensor) -> None:
        """Verify a layer and copy its stored bytes to ``[bytes]`` uint8; raises as above."""
        ...


class LazyKV:
    """A chunk's cache that is read and verified layer by layer, on demand.

    Several threads may request layers; each layer is read once, and nobody waits for another
    layer than the requested one. Layers are decoded here, or stay encoded for a device that
    decodes them itself.

    Parameters
    ----------
    text
        The chunk's text.
    tokens
        ``token_ids`` and ``offsets`` as in :class:`ragkv.chunk.kv.ChunkKV`.
    source
        Reads the layers.
    threads
        Number of threads that :meth:`whole` may use.
    """

    def __init__(
        self, text: str, tokens: tuple[IntArray, IntArray], source: LayerSource, *, threads: int = 1
    ) -> None:
        self.text = text
        self.token_ids, self.offsets = tokens
        self.depth = source.shape[0]
        """Number of layers."""
        self._source = source
        self._threads = threads
        self._decoded = _LoadedLayers(self.depth, source.allocate)
        self._coded = _LoadedLayers(self.depth, partial(_staging, source))
        self._lock = threading.Lock()
        self._layer_locks = [threading.Lock() for _ in range(self.depth)]
        self._missing = self.depth
        self._seconds = 0.0
        self._corrupt: tuple[str, str] | None = (
            None  # not the exception: its frames would keep self alive
        )
        self._on_loaded: Callable[[LayeredKV, float], None] | None = None
        self._on_corrupt: Callable[[RefusedEntryError], None] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, decoded."""
        return math.prod(self._source.shape) * self._source.dtype.itemsize

    def on_loaded(self, callback: Callable[[LayeredKV, float], None]) -> None:
        """Call back once all layers are loaded, with this entry and the seconds of reading.

        To be called before any layer is requested.
        """
        self._on_loaded = callback

    def on_corrupt(self, callback: Callable[[RefusedEntryError], None]) -> None:
        """Call back for the first corrupt layer; to be called before any layer is requested."""
        self._on_corrupt = callback

    def layers(self, which: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Return layers' keys and values, ``[layers, kv_heads, tokens, head_dim]`` each.

        Raises
        ------
        CorruptEntryError
            One of them, or any that was requested before, is corrupt or cannot be read.
        """
        for index in range(self.depth)[which]:
            self.load(index)
        both = self._decoded.memory()[which]
        return both[:, 0], both[:, 1]

    def coded(self, which: slice) -> CodedLayers | None:
        """Return layers encoded as they are stored; raises as :meth:`layers`.

        None where one of them was decoded directly, or lies in memory as it is.
        """
        wanted = range(self.depth)[which]
        if self._source.stays:
            return None
        if any(self._decoded.loaded[index] and not self._coded.loaded[index] for index in wanted):
            return None
        for index in wanted:
            self.load(index, decoded=False)
        size, codec = _size(self._source), self._source.codec
        return CodedLayers(self._coded.memory()[which], size, codec.name)

    def load(self, index: int, *, decoded: bool = True) -> None:
        """Read a layer unless it is there; raises as :meth:`layers`."""
        decoded = decoded or self._source.stays
        form = self._decoded if decoded else self._coded
        if form.loaded[index]:
            return
        with self._layer_locks[index]:
            if form.loaded[index]:
                return
            if self._corrupt is not None:
                raise CorruptEntryError(self.text, *self._corrupt)
            began = time.perf_counter()
            known = self._decoded.loaded[index] or self._coded.loaded[index]
            out = form.memory()[index]
            try:
                if not decoded:
                    self._source.read_raw(index, out)
                elif self._coded.loaded[index]:
                    coded = self._coded.memory()[index, : _size(self._source)]
                    self._source.codec.decode(coded.numpy().data, out)
                else:
                    self._source.read_layer(index, out)
            except RefusedEntryError as refused:
                self._refuse(refused)
                raise CorruptEntryError(self.text, refused.reason, str(refused)) from refused
            form.loaded[index] = True
        if not known:
            self._count(time.perf_counter() - began)

    def whole(self) -> ChunkKV:
        """Return the entry with all its layers decoded; raises as :meth:`layers`."""
        layers = range(self.depth)
        if self._threads == 1:
            for layer in layers:
                self.load(layer)
        else:
            with Pool(self._threads) as pool:
                list(pool.map(self.load, layers))
        keys, values = self._decoded.memory().unbind(1)
        return ChunkKV(self.text, self.token_ids, self.offsets, keys=keys, values=values)

    def _count(self, seconds: float) -> None:
        with self._lock:
            self._missing -= 1
            self._seconds += seconds
            complete = not self._missing
        if complete and self._on_loaded is not None:
            self._on_loaded(self, self._seconds)

    def _refuse(self, refused: RefusedEntryError) -> None:
        with self._lock:
            first, self._corrupt = self._corrupt is None, (refused.reason, str(refused))
        if first and self._on_corrupt is not None:
            self._on_corrupt(refused)


class _LoadedLayers:
    """Memory for layers, allocated for the first of them, and which of them are loaded."""

    def __init__(self, depth: int, make: Callable[[], torch.Tensor]) -> None:
        self.loaded = [False] * depth
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
    """A thread that loads entries of one model, the first layer of each first, once it is started.

    Parameters
    ----------
    decoded
        Decode the layers, too; False: a device decodes them.
    """

    def __init__(self, entries: Sequence[LazyKV], *, decoded: bool = True) -> None:
        self._entries = entries
        self._decoded = decoded
        self._stopped = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin, unless it has begun or there is nothing to load."""
        if self._thread is None and self._entries:
            self._thread = threading.Thread(target=self._run, name="ragkv-read-ahead", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stop after the current layer; return when the thread has ended."""
        self._stopped = True
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        for layer in range(self._entries[0].depth):
            for entry in self._entries:
                if self._stopped:
                    return
                with suppress(
                    CorruptEntryError, MemoryError
                ):  # raised again for whoever requests the layer
                    entry.load(layer, decoded=self._decoded)
