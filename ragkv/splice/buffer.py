"""One preallocated KV buffer a request, behind transformers' Cache interface."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any, Protocol

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from ragkv.chunk.memory import uninitialised
from ragkv.model.architecture import Architecture


class BeforeWrite(Protocol):
    """Sees a layer's rows before fresh ones replace some of them, and may change the others."""

    def __call__(
        self,
        layer: int,
        rows: tuple[torch.Tensor, torch.Tensor],
        fresh: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """Take keys and values: all rows of the buffer, and the fresh ones about to come.

        ``rows`` are ``[kv_heads, tokens, head_dim]``, ``fresh`` ``[kv_heads, slots, head_dim]``.
        """
        ...


class SplicedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer of the buffer: ``keys`` and ``values`` ``[1, kv_heads, capacity, head_dim]``.

    ``update`` writes at ``slots`` while a subset pass runs, and appends otherwise.
    Sliding-window layers keep every row too: their mask limits what is seen.
    """

    keys: torch.Tensor
    values: torch.Tensor
    is_compileable = False
    is_sliding = False

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, length: int) -> None:
        self.keys = keys
        self.values = values
        self.length = length
        self.slots: torch.Tensor | None = None
        self.before_write: partial[None] | None = None
        self.is_initialized = True
        self.dtype, self.device = keys.dtype, keys.device

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the buffer is there from the start."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write fresh rows ``[1, kv_heads, rows, head_dim]`` and return all rows."""
        if self.slots is not None:
            if self.before_write is not None:
                self.before_write(
                    (self.keys[0, :, : self.length], self.values[0, :, : self.length]),
                    (key_states[0], value_states[0]),
                )
            self.keys.index_copy_(2, self.slots, key_states)
            self.values.index_copy_(2, self.slots, value_states)
        else:
            end = self.length + key_states.shape[2]
            if end > self.keys.shape[2]:
                self._grow(max(end, self.keys.shape[2] + 256))
            self.keys[:, :, self.length : end] = key_states
            self.values[:, :, self.length : end] = value_states
            self.length = end
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]

    def _grow(self, capacity: int) -> None:
        shape = (*self.keys.shape[:2], capacity, self.keys.shape[3])
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_empty(shape)
            new[:, :, : self.length] = old[:, :, : self.length]
            setattr(self, name, new)

    def get_seq_length(self) -> int:
        """Rows that are there."""
        return self.length

    def get_max_length(self) -> int:
        """Unbounded: the buffer grows."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Forget rows at the end; their number is given below zero, as transformers does."""
        self.length += tokens_to_remove

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that the next ``query_length`` rows see."""
        return self.length + query_length, 0


class SplicedCache(Cache):
    """A transformers Cache over one preallocated buffer, undefined until rows are written.

    Parameters
    ----------
    architecture
        Gives the buffer's shape ``[layers, kv_heads, capacity, head_dim]``.
    length
        Prompt tokens.
    spare
        Rows for tokens to come; more are added when they run out.
    """

    layers: list[SplicedLayer]  # type: ignore[assignment]

    def __init__(
        self,
        architecture: Architecture,
        length: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        spare: int = 64,
    ) -> None:
        shape = (architecture.layers, architecture.kv_heads, length + spare, architecture.head_dim)
        self.keys = uninitialised(shape, dtype, device)
        self.values = uninitialised(shape, dtype, device)
        layers = [
            SplicedLayer(keys[None], values[None], length)
            for keys, values in zip(self.keys, self.values, strict=True)
        ]
        super().__init__(layers=list(layers))
        self._prompt = length

    def write_at(self, slots: torch.Tensor | None, before_write: BeforeWrite | None = None) -> None:
        """Make the next pass write at ``slots`` ``[rows]`` int64; None appends again.

        While slots are set, the whole prompt counts as there.
        """
        for index, layer in enumerate(self.layers):
            layer.slots = slots
            layer.before_write = None if before_write is None else partial(before_write, index)
            if slots is not None:
                layer.length = self._prompt

    def copy(self) -> SplicedCache:
        """Return a cache of its own with the same prompt rows."""
        other = copy.copy(self)
        other.keys, other.values = self.keys.clone(), self.values.clone()
        other.layers = [
            SplicedLayer(keys[None], values[None], self._prompt)
            for keys, values in zip(other.keys, other.values, strict=True)
        ]
        return other
