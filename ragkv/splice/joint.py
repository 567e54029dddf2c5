"""Several prompts' caches in one pass, behind transformers' Cache interface.

They are given as objects, or by a table that a captured graph reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from ragkv_kernels import RowTable, write_rows
from transformers.cache_utils import Cache, CacheLayerMixin

from ragkv.splice.buffer import SplicedCache


class FreshRowsLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer of several caches, which returns the fresh rows: attention reads the caches."""

    is_compileable = False
    is_sliding = False
    is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: the caches exist from the start."""

    def get_seq_length(self) -> int:
        """Return 0: the caches differ in length, and rows have their positions."""
        return 0

    def get_max_length(self) -> int:
        """Return -1: the caches grow without limit."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return length and offset of the keys; the pass needs no masks."""
        return query_length, 0


class JointLayer(FreshRowsLayer):  # type: ignore[no-untyped-call]
    """One layer of some prompts' caches."""

    def __init__(self, caches: Sequence[SplicedCache], index: int) -> None:
        self._caches, self._index = caches, index

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write each prompt's fresh rows to its cache, and return the fresh rows.

        Attention reads the caches themselves. ``[1, kv_heads, rows, head_dim]`` each.
        """
        counts = [cache.rows_to_write for cache in self._caches]
        for cache, keys, values in zip(
            self._caches,
            torch.split(key_states, counts, dim=2),
            torch.split(value_states, counts, dim=2),
            strict=True,
        ):
            cache.update(keys, values, self._index, *args, **kwargs)
        return key_states, value_states


class JointCache(Cache):
    """The caches of several prompts, whose rows follow one another in a pass.

    Each cache has the slots of its own rows set (:meth:`SplicedCache.write_at`).
    """

    def __init__(self, caches: Sequence[SplicedCache]) -> None:
        layers = range(len(caches[0].layers))
        super().__init__(layers=[JointLayer(caches, index) for index in layers])


class TableLayer(FreshRowsLayer):  # type: ignore[no-untyped-call]
    """One layer of the caches of a table."""

    is_compileable = True

    def __init__(self, table: RowTable, index: int) -> None:
        self._table, self._index = table, index

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write each row to its cache, and return the rows, ``[1, kv_heads, rows, head_dim]``."""
        del args, kwargs
        write_rows(key_states[0], value_states[0], self._table, self._index)
        return key_states, value_states


class TableCache(Cache):
    """The caches of a table, behind transformers' interface.

    Attributes
    ----------
    written
        Number of layers written since it was set to 0.
    before_write
        Called with a layer and its fresh rows before they are written, or None.
    """

    def __init__(self, table: RowTable, layers: int) -> None:
        super().__init__(layers=[TableLayer(table, index) for index in range(layers)])
        self.written = 0
        self.before_write: Callable[[int, torch.Tensor, torch.Tensor], None] | None = None

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a layer's fresh rows, see :class:`TableLayer`."""
        self.written += 1
        if self.before_write is not None:
            self.before_write(layer_idx, key_states, value_states)
        updated: tuple[torch.Tensor, torch.Tensor] = super().update(
            key_states, value_states, layer_idx, *args, **kwargs
        )
        return updated
