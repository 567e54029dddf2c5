"""ChunkKV: one chunk's keys and values for all layers, encoded behind the sink."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch


@dataclass(frozen=True, eq=False, slots=True)
class ChunkKV:
    """A chunk's cache, without the sink's rows.

    Attributes
    ----------
    text
        The chunk's text, stripped of outer whitespace.
    token_ids
        ``[tokens]``, int32: the tokens that the rows belong to.
    offsets
        ``[tokens, 2]``, int32: first character and end of each token in ``text``.
    keys
        ``[layers, kv_heads, tokens, head_dim]`` in the model's dtype, *not rotated*
        (Cache-Craft, section 4): they are rotated once, at their place.
    values
        ``[layers, kv_heads, tokens, head_dim]`` in the model's dtype.
    """

    text: str
    token_ids: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int32]
    keys: torch.Tensor
    values: torch.Tensor

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return self.keys.nbytes + self.values.nbytes
