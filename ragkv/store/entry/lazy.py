"""An entry whose layers are read lazily, each verified before it is used."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from xxhash import xxh3_128

from ragkv.chunk.kv import ChunkKV, CodedLayers, LayeredKV
from ragkv.model.pool import Pool
from ragkv.model.workspace import pinned, uninitialised
from ragkv.prompt.tokens import IntArray
from ragkv.store.entry.codecs import codec_of
from ragkv.store.entry.header import DTYPES, Header, RefusedEntryError, layer_checksum

_ALIGNMENT = 16  # bytes, for a device that reads a layer in whole words
_BLOCK = 1 << 21  # bytes that are still in the processor's cache when they are hashed


class CorruptEntryError(Exception):
    """A layer is corrupt or cannot be read; ``reason`` as in :class:`ragkv.store.types.Found`."""

    def __init__(self, text: str, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.text = text
        self.reason = reason


class LayerReader:
    """The layers of an entry in a buffer. Each call verifies the bytes that it reads.

    Parameters
    ----------
    data
        The entry's data area.
    copy
        Copy raw layers out of the buffer and verify the copy.
    trusted
        Nothing else can change the buffer: raw layers in place need no verification.

    Attributes
    ----------
    shape
        ``[layers, 2, kv_heads, tokens, head_dim]``.
    dtype
        The dtype of the decoded numbers.
    stays
        Whether :meth:`allocate` returns the stored numbers themselves, with nothing to verify.
    """

    def __init__(self, data: memoryview, header: Header, *, copy: bool, trusted: bool) -> None:
        self.shape = header.shape
        self.dtype = DTYPES[header.dtype]
        self.codec = codec_of(header.fingerprint.codec)
        self._data, self._header = data, header
        self._in_place = not copy and self.codec.name == "raw"
        self.stays = trusted and self._in_place

    def allocate(self) -> torch.Tensor:
        """Return memory of ``shape`` for all decoded layers: the buffer's, or undefined."""
        if not self._in_place:
            return uninitialised(self.shape, self.dtype)
        kv = np.frombuffer(self._data, dtype=np.uint8, count=self._header.kv_bytes)
        return torch.from_numpy(kv).view(self.dtype).view(self.shape)

    def read_layer(self, layer: int, out: torch.Tensor) -> None:
        """Verify a layer and decode it into its part of :meth:`allocate`'s tensor.

        Raises
        ------
        RefusedEntryError
            The layer is corrupt.
        """
        if self.stays:
            return
        if self._in_place:
            self._check(layer, layer_checksum([self._bytes(layer)]))
        elif self.codec.name == "raw":
            self._copy(layer, out.view(-1).view(torch.uint8).numpy())
        else:
            copied = np.empty(len(self._bytes(layer)), dtype=np.uint8)
            self._copy(layer, copied)
            self.codec.decode(copied.data, out)

    def read_raw(self, layer: int, out: torch.Tensor) -> None:
        """Verify a layer and copy its stored bytes to ``[bytes]`` uint8; raises as above."""
        self._copy(layer, out.numpy()[: len(self._bytes(layer))])

    def _bytes(self, layer: int) -> memoryview:
        return self._data[self._header.spans[layer]]

    def _copy(self, layer: int, out: npt.NDArray[np.uint8]) -> None:
        """Copy a layer's bytes block by block, and hash each block while it is cached."""
        source, state = np.frombuffer(self._bytes(layer), dtype=np.uint8), xxh3_128()
        for start in range(0, len(source), _BLOCK):
            block = out[start : start + _BLOCK]
            block[:] = source[start : start + _BLOCK]
            state.update(block.data)
        self._check(layer, state.hexdigest())

    def _check(self, layer: int, checksum: str) -> None:
        if checksum != self._header.layer_checksums[layer]:
            raise RefusedEntryError("checksum", f"layer {layer}'s checksum does not hold")


class LazyKV:
    """A chunk's cache that is read and verified layer by layer, on demand.

    Threads can share it: each layer is read once, and a thread waits only for the layer that it
    requests. Layers are decoded here, or stay encoded for a device that decodes them.

    Parameters
    ----------
    text
        The chunk's text.
    tokens
        ``token_ids`` and ``offsets`` as in :class:`ragkv.chunk.kv.ChunkKV`.
    source
        Reads the layers.
    threads
        Most threads of :meth:`whole`.
    """

    def __init__(
        self, text: str, tokens: tuple[IntArray, IntArray], source: LayerReader, *, threads: int = 1
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
        # not the exception: its frames would keep self alive
        self._corrupt: tuple[str, str] | None = None
        self._on_loaded: Callable[[LayeredKV, float], None] | None = None
        self._on_corrupt: Callable[[RefusedEntryError], None] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, decoded."""
        return math.prod(self._source.shape) * self._source.dtype.itemsize

    def on_loaded(self, callback: Callable[[LayeredKV, float], None]) -> None:
        """Set the callback for when all layers are loaded; it gets this entry and the seconds.

        Call this before any layer is requested.
        """
        self._on_loaded = callback

    def on_corrupt(self, callback: Callable[[RefusedEntryError], None]) -> None:
        """Set the callback for the first corrupt layer; call this before any layer is requested."""
        self._on_corrupt = callback

    def layers(self, which: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Return layers' keys and values, ``[layers, kv_heads, tokens, head_dim]`` each.

        Raises
        ------
        CorruptEntryError
            One of them, or any requested earlier, is corrupt or cannot be read.
        """
        for index in range(self.depth)[which]:
            self.load(index)
        both = self._decoded.memory()[which]
        return both[:, 0], both[:, 1]

    def coded(self, which: slice) -> CodedLayers | None:
        """Return layers as they are stored; raises as :meth:`layers`.

        None if one of them was decoded directly, or needs no decoding.
        """
        layers = range(self.depth)[which]
        if self._source.stays:
            return None
        if any(self._decoded.loaded[index] and not self._coded.loaded[index] for index in layers):
            return None
        for index in layers:
            self.load(index, decoded=False)
        size, codec = _size(self._source), self._source.codec
        return CodedLayers(self._coded.memory()[which], size, codec.name)

    def load(self, index: int, *, decoded: bool = True) -> None:
        """Read a layer unless it is loaded; raises as :meth:`layers`."""
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
    """Memory for layers, allocated on first use, and which layers are loaded."""

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


def _size(source: LayerReader) -> int:
    return source.codec.size(source.shape[1:], source.dtype)


def _staging(source: LayerReader) -> torch.Tensor:
    shape = source.shape[0], -(-_size(source) // _ALIGNMENT) * _ALIGNMENT
    pages = pinned(shape, torch.uint8) if torch.cuda.is_available() else None
    return uninitialised(shape, torch.uint8) if pages is None else pages


class ReadAhead:
    """A thread that loads entries of one model layer by layer, the first layer of all first.

    Parameters
    ----------
    decoded
        Decode the layers; False: a device decodes them.
    """

    def __init__(self, *, decoded: bool = True) -> None:
        self._decoded = decoded
        self._entries: Sequence[LazyKV] = []
        self._stopped = False
        self._thread: threading.Thread | None = None

    def start(self, entries: Sequence[LazyKV]) -> None:
        """Load these entries instead of the previous ones; a load in progress continues."""
        if entries == self._entries:
            return
        self.stop()
        self._entries, self._stopped = entries, False
        if entries:
            self._thread = threading.Thread(target=self._run, name="ragkv-read-ahead", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Stop after the current layer, and wait for the thread."""
        self._stopped = True
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        for layer in range(self._entries[0].depth):
            for entry in self._entries:
                if self._stopped:
                    return
                # the request that needs the layer raises the error again
                with suppress(CorruptEntryError, MemoryError):
                    entry.load(layer, decoded=self._decoded)
