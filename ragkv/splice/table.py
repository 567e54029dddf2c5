"""Several prompts' caches in one pass, given by a table that a captured graph reads."""

from __future__ import annotations

from typing import Any

import torch
from ragkv_kernels import RowTable, write_rows
from transformers.cache_utils import Cache

from ragkv.splice.joint import FreshRowsLayer


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
        Layers that were written since it was set to 0.
    """

    def __init__(self, table: RowTable, layers: int) -> None:
        super().__init__(layers=[TableLayer(table, index) for index in range(layers)])
        self.written = 0

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
        updated: tuple[torch.Tensor, torch.Tensor] = super().update(
            key_states, value_states, layer_idx, *args, **kwargs
        )
        return updated
