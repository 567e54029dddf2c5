"""An entry whose layers arrive one by one, each verified before it is used."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch

from ragkv.chunk.kv import ChunkKV
from ragkv.prompt.tokens import IntArray
from ragkv.store.header import RefusedEntryError


class LostEntryError(Exception):
    """A layer did not arrive; ``reason`` as in :class:`ragkv.store.base.Lookup`."""

    def __init__(self, text: str, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.text = text
        self.reason = reason


class ArrivingKV:
    """A chunk's cache that is verified and decoded layer by layer, by whoever comes first.

    Several threads may ask for layers; each is taken once, and nobody waits for another
    layer than the one asked for.

    Parameters
    ----------
    text
        The chunk's text.
    tokens
        ``token_ids`` and ``offsets`` as in :class:`ragkv.chunk.kv.ChunkKV`.
    layers
        ``[layers, 2, kv_heads, tokens, head_dim]``: keys and values, undefined before they
        were taken.
    take
        ``take(layer)`` verifies a layer and writes it to its place in ``layers``.
    threads
        That :meth:`whole` may use.
    """

    def __init__(
        self,
        text: str,
        tokens: tuple[IntArray, IntArray],
        layers: torch.Tensor,
        take: Callable[[int], None],
        *,
        threads: int = 1,
    ) -> None:
        self.text = text
        self.token_ids, self.offsets = tokens
        self._seconds = 0.0
        self._layers = layers
        self._take = take
        self._threads = threads
        self._lock = threading.Lock()
        self._taking = [threading.Lock() for _ in range(len(layers))]
        self._taken = [False] * len(layers)
        self._missing = len(layers)
        self._lost: tuple[str, str] | None = None  # no exception: its frames would keep this
        self._when_whole: Callable[[ChunkKV, float], None] | None = None
        self._when_lost: Callable[[RefusedEntryError], None] | None = None

    @property
    def depth(self) -> int:
        """Number of layers."""
        return len(self._taken)

    def then(
        self,
        *,
        whole: Callable[[ChunkKV, float], None] | None = None,
        lost: Callable[[RefusedEntryError], None] | None = None,
    ) -> None:
        """Say what is to be done when the last layer has arrived, or the first is lost.

        To be called before any layer is asked for. ``whole`` is given the seconds, too,
        that taking the layers took.
        """
        self._when_whole = whole or self._when_whole
        self._when_lost = lost or self._when_lost

    def layers(self, which: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Return layers' keys and values, ``[layers, kv_heads, tokens, head_dim]`` each.

        Raises
        ------
        LostEntryError
            One of them, or any that was asked for before, cannot be trusted or read.
        """
        for index in range(self.depth)[which]:
            self.arrive(index)
        return self._layers[which, 0], self._layers[which, 1]

    def arrive(self, index: int) -> None:
        """Take a layer unless it is there; raises as :meth:`layers`."""
        if self._taken[index]:
            return
        with self._taking[index]:
            if self._taken[index]:
                return
            if self._lost is not None:
                raise LostEntryError(self.text, *self._lost)
            began = time.perf_counter()
            try:
                self._take(index)
            except RefusedEntryError as refused:
                self._lose(refused)
                raise LostEntryError(self.text, refused.reason, str(refused)) from refused
            self._count(index, time.perf_counter() - began)

    def whole(self) -> ChunkKV:
        """Return the entry with all its layers; raises as :meth:`layers`."""
        layers = range(self.depth)
        if self._threads == 1:
            for layer in layers:
                self.arrive(layer)
        else:
            with ThreadPoolExecutor(self._threads) as pool:
                list(pool.map(self.arrive, layers))
        return self._whole()

    def _whole(self) -> ChunkKV:
        keys, values = self._layers[:, 0], self._layers[:, 1]
        return ChunkKV(self.text, self.token_ids, self.offsets, keys=keys, values=values)

    def _count(self, index: int, seconds: float) -> None:
        with self._lock:
            self._taken[index] = True
            self._missing -= 1
            self._seconds += seconds
            whole = not self._missing
        if whole and self._when_whole is not None:
            self._when_whole(self._whole(), self._seconds)

    def _lose(self, refused: RefusedEntryError) -> None:
        with self._lock:
            first, self._lost = self._lost is None, (refused.reason, str(refused))
        if first and self._when_lost is not None:
            self._when_lost(refused)


class ReadAhead:
    """A thread in which entries of one model arrive, the first layer of each first."""

    def __init__(self, entries: Sequence[ArrivingKV]) -> None:
        self._entries = entries
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
                with suppress(LostEntryError):  # whoever wants the layer is told
                    entry.arrive(layer)
