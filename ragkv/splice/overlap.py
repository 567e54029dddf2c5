"""Chunks side by side: all begin at one position, and none sees another (APE).

APE (Adaptive Parallel Encoding), arXiv 2502.05431.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ragkv.errors import ConfigError
from ragkv.splice.buffer import SplicedCache
from ragkv.splice.layout import Layout

_CLOSED = (
    "The chunks of this cache overlap: run the model on it inside `with prefilled.decoding():`, "
    "or positions and attention would be wrong."
)


@dataclass(frozen=True, slots=True)
class Parallel:
    """How much attention parallel chunks get; 1 and 1 is an ordinary softmax.

    Parameters
    ----------
    temperature
        T: scores of chunk rows are divided by it before their softmax.
    scale
        S: the log-sum-exp of the chunk rows is multiplied by S and T.
    """

    temperature: float = 0.9
    scale: float = 0.9

    def __post_init__(self) -> None:
        if not (self.temperature > 0 and self.scale > 0):
            raise ConfigError(
                f"temperature and scale must be above 0, not {self.temperature!r} and "
                f"{self.scale!r}"
            )


@dataclass(frozen=True, slots=True, eq=False)
class Overlap:
    """Where the rows of a prompt stand when its chunks overlap, and what they see.

    A token's *index* is its place in the prompt, its *position* what its key is rotated
    by. Three parts follow one another in the prompt:

    - the head, up to the first chunk: ordinary.
    - contexts: a chunk and the text between it and the next one. All begin at the
      position where the head ends. A row sees the head and its own context. The paper
      has nothing between chunks; here that text belongs to the chunk before it, as if
      both were one context.
    - the query, all after the last chunk, and what is generated: begins where the
      longest context ends. A row sees everything before it, the contexts as ``parallel``
      says. The prompt's last token is of the query in any case.

    Attributes
    ----------
    first, query
        Index of the first context's and of the query's first token.
    positions
        ``[tokens]`` int64.
    begins
        ``[tokens]`` int64: index of the first token of a row's own context; ``first``
        for rows of the head and the query. A row sees no context row before it.
    parallel
        Temperature and scale of the query's attention to the contexts.
    """

    first: int
    query: int
    positions: torch.Tensor
    begins: torch.Tensor
    parallel: Parallel

    def at(self, indices: torch.Tensor) -> torch.Tensor:
        """Return positions; indices behind the prompt are those of generated tokens."""
        inside = indices.clamp(max=len(self.positions) - 1)
        return self.positions[inside] + (indices - inside)

    def hidden(self, rows: torch.Tensor, keys: int, window: int | None) -> torch.Tensor:
        """Return ``[rows, keys]``: True where a row does not see a key.

        Parameters
        ----------
        rows
            ``[rows]`` int64 indices.
        keys
            Keys of index 0 up to this number.
        window
            A row sees keys less than this many *positions* before its own; None is no
            limit. The paper is silent on sliding windows.
        """
        own, row = torch.arange(keys, device=rows.device), rows[:, None]
        begins = self.begins[row.clamp(max=len(self.begins) - 1)]
        hidden = (own > row) | ((own >= self.first) & (own < begins))
        if window is not None:
            hidden |= self.at(own) <= self.at(row) - window
        return hidden


def overlap_of(layout: Layout, parallel: Parallel, device: torch.device) -> Overlap:
    """Plan the overlap of a layout with at least one placed chunk."""
    starts = np.array([piece.start for piece in layout.placed])
    first, query = int(starts[0]), layout.query_start
    indices = np.arange(len(layout))
    begins = np.full(len(layout), first)
    begins[first:query] = starts[np.searchsorted(starts, indices[first:query], side="right") - 1]
    longest = int(np.diff(np.append(starts, query)).max())
    positions = indices.copy()
    positions[first:query] += first - begins[first:query]
    positions[query:] += first + longest - query
    return Overlap(
        first,
        query,
        torch.from_numpy(positions).to(device),
        torch.from_numpy(begins).to(device),
        parallel,
    )


class OverlappedCache(SplicedCache):
    """A spliced cache whose chunks overlap; only passes with its overlap may use it.

    Attributes
    ----------
    overlap
        How its rows stand. Row j is the token of *index* j.
    open
        Whether rows can be appended: the model attends as ``overlap`` says.
    """

    def __init__(self, *args: Any, overlap: Overlap, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.overlap = overlap
        self.open = False

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a layer's fresh rows, as :class:`SplicedCache` does.

        Raises
        ------
        RuntimeError
            An ordinary pass over this cache.
        """
        if not self.open and self.layers[layer_idx].slots is None:
            raise RuntimeError(_CLOSED)
        rows: tuple[torch.Tensor, torch.Tensor] = super().update(
            key_states, value_states, layer_idx, *args, **kwargs
        )
        return rows
