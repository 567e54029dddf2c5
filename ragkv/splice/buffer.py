"""One preallocated KV buffer for each request, behind transformers' Cache interface."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional
from transformers.cache_utils import Cache, CacheLayerMixin

from ragkv.model.loaded import ReusableModel

_SPARE_ROWS, _MOST_SPARE_ROWS = 256, 4096


def spare_rows(answer_tokens: int) -> int:
    """Return the rows to keep free for an answer, since growing the buffer copies the KV."""
    return min(max(answer_tokens, _SPARE_ROWS), _MOST_SPARE_ROWS)


KeysValues = tuple[torch.Tensor, torch.Tensor]
Place = Callable[[slice, KeysValues], None]
"""Writes cached rows of some layers into their keys and values."""


BeforeWrite = Callable[[int, KeysValues, KeysValues], None]
"""Callback before fresh rows replace some of a layer's rows; it can change the rest.

It receives the layer, keys and values of all its rows, ``[kv_heads, tokens, head_dim]``, and of the
fresh rows, ``[kv_heads, slots, head_dim]``.
"""


class Shift:
    """Differences of earlier prompts' rows from the entries' rows at the same positions.

    Attributes
    ----------
    positions
        ``[rows]`` sorted; empty if no stale row depends on them.
    """

    def __init__(self, positions: npt.NDArray[np.int64]) -> None:
        self.positions = positions
        self._layers: dict[int, KeysValues] = {}

    def add(self, layers: slice, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Add layers' differences, ``[layers, kv_heads, rows, head_dim]``."""
        numbers = range(layers.start, layers.start + len(keys))
        self._layers |= dict(zip(numbers, zip(keys, values, strict=True), strict=True))

    def of(self, layer: int) -> KeysValues:
        """Return a layer's differences, ``[kv_heads, rows, head_dim]``, keys rotated."""
        return self._layers[layer]


class SplicedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer of the buffer: ``keys`` and ``values`` ``[1, kv_heads, capacity, head_dim]``.

    ``update`` writes at ``slots`` during a subset pass, else appends; its first call loads
    lazy rows. Sliding-window layers keep every row too: their mask limits attention.
    """

    keys: torch.Tensor
    values: torch.Tensor
    is_compileable = False
    is_croppable = True
    is_sliding = False

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, length: int) -> None:
        self.keys = keys
        self.values = values
        self.length = length
        self.slots: torch.Tensor | None = None
        self.before_write: partial[None] | None = None
        self.awaited: Callable[[], None] | None = None
        self.is_initialized = True
        self.dtype, self.device = keys.dtype, keys.device

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the buffer exists from the start."""

    def load(self) -> None:
        """Load awaited rows, if any."""
        if self.awaited is not None:
            self.awaited()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> KeysValues:
        """Write fresh rows ``[1, kv_heads, rows, head_dim]`` and return all rows."""
        with torch.no_grad():  # a cache has no gradient, whatever the caller's mode
            self.load()
            self._write(key_states, value_states)
        return self.seen

    @property
    def seen(self) -> KeysValues:
        """Keys and values of the current rows, ``[1, kv_heads, length, head_dim]``."""
        return self.keys.narrow(2, 0, self.length), self.values.narrow(2, 0, self.length)

    def _write(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        if self.slots is None:
            begin = self.length
            self.length += keys.shape[2]
            self.keys[:, :, begin : self.length] = keys
            self.values[:, :, begin : self.length] = values
            return
        if self.before_write is not None:
            rows = self.keys[0, :, : self.length], self.values[0, :, : self.length]
            self.before_write(rows, (keys[0], values[0]))
        self.keys.index_copy_(2, self.slots, keys)
        self.values.index_copy_(2, self.slots, values)

    def get_seq_length(self) -> int:
        """Return the number of current rows."""
        return self.length

    def get_max_length(self) -> int:
        """Return -1: the cache grows without limit."""
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Remove rows at the end; their number is negative, as in transformers."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes minus the number of rows to forget: {tokens_to_remove}")
        self.length += tokens_to_remove

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return length and offset of the keys for the next ``query_length`` rows."""
        return self.length + query_length, 0


@contextmanager
def _ordinary() -> Iterator[None]:
    """Make tensors that can be written in any later mode."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _refuse_partial() -> NoReturn:
    raise RuntimeError("the rows of this cache could not be loaded")


class SplicedCache(Cache):
    """A transformers Cache over one preallocated buffer, undefined until rows are written.

    A layer's rows can be loaded at its first use: see :meth:`await_rows`.

    Parameters
    ----------
    loaded
        Determines the buffer's shape ``[layers, kv_heads, capacity, head_dim]``, dtype and device.
    length
        Number of prompt tokens.
    spare
        Free rows for tokens to come; the buffer grows when they run out.

    Attributes
    ----------
    written
        Number of layers written since the last :meth:`write_at`.
    shift
        Contains a layer once its rows are loaded.
    """

    layers: list[SplicedLayer]  # type: ignore[assignment]

    def __init__(self, loaded: ReusableModel, length: int, *, spare: int) -> None:
        of, device = loaded.architecture, loaded.device
        shape = 2, of.layers, of.kv_heads, length + spare, of.head_dim
        self.device = device
        self._keys: torch.Tensor
        self._values: torch.Tensor
        with _ordinary():
            self._keys, self._values = loaded.workspace.uninitialised(shape, loaded.dtype, device)
            layers = [
                SplicedLayer(keys[None], values[None], length)
                for keys, values in zip(self._keys, self._values, strict=True)
            ]
        super().__init__(layers=list(layers))
        self._prompt = length
        self.written = 0
        self.shift = Shift(np.zeros(0, np.int64))

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> KeysValues:
        """Write a layer's fresh rows and return all its rows, see :class:`SplicedLayer`."""
        layer = self.layers[layer_idx]
        self.written += 1
        if layer.slots is None:
            self._make_room(layer.length + key_states.shape[2])
        return layer.update(key_states, value_states)

    def extend(self, length: int, *, load: bool = True) -> None:
        """Set the length to ``length`` tokens, whose rows a captured graph writes."""
        if load:
            self._load()
        self._make_room(length)
        for layer in self.layers:
            layer.length = length

    def _make_room(self, length: int) -> None:
        """Grow the buffer if ``length`` rows do not fit, with some spare rows."""
        capacity = self._keys.shape[2]
        if length <= capacity:
            return
        more = max(length - capacity, 256, capacity // 8)
        with _ordinary():  # replace neither if memory runs out
            larger = [functional.pad(part, (0, 0, 0, more)) for part in (self.keys, self.values)]
            self._keys, self._values = larger
            for layer, keys, values in zip(self.layers, self._keys, self._values, strict=True):
                layer.keys, layer.values = keys[None], values[None]

    def write_at(
        self,
        slots: torch.Tensor | None,
        before_write: BeforeWrite | None = None,
        *,
        length: int | None = None,
    ) -> None:
        """Make the next pass write at ``slots`` ``[rows]`` int64; None appends again.

        While slots are set, the cache has ``length`` tokens; None is the whole prompt.
        """
        tokens = self._prompt if length is None else length
        self.written = 0
        self._make_room(tokens)
        for index, layer in enumerate(self.layers):
            layer.slots = slots
            layer.before_write = None if before_write is None else partial(before_write, index)
            if slots is not None:
                layer.length = tokens

    @contextmanager
    def unchanged_by_errors(self) -> Iterator[None]:
        """Restore the length if the pass in the block fails."""
        before = self.get_seq_length()
        try:
            yield
        except BaseException:
            self.truncate(before)
            raise

    def truncate(self, length: int) -> None:
        """Set the length of every layer to its first ``length`` rows."""
        for layer in self.layers:
            layer.length = length

    @property
    def rows_to_write(self) -> int:
        """Number of slots that the next pass writes; 0 where it appends."""
        slots = self.layers[0].slots
        return 0 if slots is None else len(slots)

    def await_rows(self, place: Place, at_once: int) -> None:
        """Set the callback that writes the cached rows of layers before their first use.

        It gets the layers, and their keys and values.

        Parameters
        ----------
        at_once
            Number of layers to place together.
        """
        this = weakref.ref(self)  # callbacks do not keep the memory alive

        def load(layers: slice) -> None:
            cache = this()
            if cache is None:
                _refuse_partial()
            try:
                place(layers, cache.rows(layers))
            except BaseException:
                for layer in cache.layers:  # unusable from now on; also releases ``place``
                    layer.awaited = _refuse_partial
                raise
            for layer in cache.layers[layers]:
                layer.awaited = None

        for index, layer in enumerate(self.layers):
            first = index - index % at_once
            layer.awaited = partial(load, slice(first, first + at_once))

    def rows(self, layers: slice) -> KeysValues:
        """Return keys and values of layers, loaded or not."""
        return self._keys[layers], self._values[layers]

    def layer(self, index: int) -> KeysValues:
        """Return a layer's keys and values, ``[kv_heads, capacity, head_dim]``, loaded."""
        self.layers[index].load()
        return self._keys[index], self._values[index]

    @property
    def keys(self) -> torch.Tensor:
        """``[layers, kv_heads, capacity, head_dim]``, all loaded."""
        self._load()
        return self._keys

    @property
    def values(self) -> torch.Tensor:
        """``[layers, kv_heads, capacity, head_dim]``, all loaded."""
        self._load()
        return self._values

    def _load(self) -> None:
        for layer in self.layers:
            layer.load()
