"""Drift: what neighbouring tokens have in common when their chunk comes into a prompt.

A token's key and value in the real prompt differ from the cached ones, because it now sees
the chunks before its own. A good part of that difference is the same for all tokens of one
chunk, and more for those of one passage. The recomputed tokens show it, layer by layer and
at no cost; the tokens that are not recomputed are moved by it. With nothing left to move,
or nothing recomputed, nothing changes: ratio 1 stays a full prefill and ratio 0 plain reuse.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from ragkv.model.load import LoadedModel
from ragkv.model.rotary import rotate, unrotate
from ragkv.splice.layout import Layout

PASSAGE_TOKENS = 16
"""Tokens of a chunk that stand together and drift together."""

PASSAGE_PRIOR = 2
"""A passage's mean counts so many tokens that moved like the chunk."""

CHUNK_PRIOR = 5
"""A chunk's mean counts so many tokens that did not move."""


class Drift:
    """Moves a layer's unrepaired rows just before its recomputed rows are written.

    A row moves by ``(sum_p + 2 m) / (n_p + 2)``, where ``sum_p`` is over what the ``n_p``
    recomputed tokens of its passage moved by, and ``m = sum_c / (n_c + 5)`` likewise over
    its chunk: few recomputed tokens say little. Keys are compared and moved unrotated.

    Parameters
    ----------
    layout
        The prompt's plan; rows that are exact already are neither looked at nor moved.
    rows
        ``[rows]`` sorted positions that the pass computes.
    """

    def __init__(self, layout: Layout, rows: npt.NDArray[np.int64], loaded: LoadedModel) -> None:
        architecture, rotary, device = loaded.architecture, loaded.rotary, loaded.device
        if architecture is None or rotary is None:
            raise ValueError("drift needs a supported model")
        self._kinds = architecture.rope_kinds
        passage, chunk = _passages(layout)
        seen = np.flatnonzero(rows < len(passage))
        seen = seen[passage[rows[seen]] > 0]
        here = rows[seen]
        self._tables = rotary.tables(self._kinds, torch.arange(len(passage), device=device))
        self._seen, self._here = (torch.from_numpy(part).to(device) for part in (seen, here))
        self._passage = torch.from_numpy(passage).to(device)
        self._chunk = torch.from_numpy(chunk).to(device)
        self._in_passage = self._passage[self._here]
        self._in_chunk = self._chunk[self._in_passage]
        self._passage_counts = torch.bincount(self._in_passage, minlength=len(chunk))[:, None]
        self._chunk_counts = torch.bincount(self._in_chunk, minlength=len(chunk))[:, None]

    def __call__(
        self,
        layer: int,
        rows: tuple[torch.Tensor, torch.Tensor],
        fresh: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """Move the chunks' rows in place; see :class:`ragkv.splice.buffer.BeforeWrite`."""
        keys, values = (part[:, : len(self._passage)] for part in rows)
        table = self._tables[self._kinds[layer]]
        here = table[0][self._here], table[1][self._here]
        # rotation is linear: the means are taken of unrotated keys, and turned to each place
        keys += rotate(self._mean(unrotate(self._moved(keys, fresh[0]), here)), table)
        values += self._mean(self._moved(values, fresh[1]))

    def _moved(self, rows: torch.Tensor, fresh: torch.Tensor) -> torch.Tensor:
        before, after = rows.index_select(1, self._here), fresh.index_select(1, self._seen)
        return after.float() - before.float()

    def _mean(self, moved: torch.Tensor) -> torch.Tensor:
        """Return by what each position moves, ``[kv_heads, tokens, head_dim]``."""
        heads, _, width = moved.shape
        chunks = moved.new_zeros(heads, len(self._chunk), width)
        passages = torch.zeros_like(chunks)
        chunks.index_add_(1, self._in_chunk, moved)
        passages.index_add_(1, self._in_passage, moved)
        chunks /= self._chunk_counts + CHUNK_PRIOR
        passages += PASSAGE_PRIOR * chunks.index_select(1, self._chunk)
        passages /= self._passage_counts + PASSAGE_PRIOR
        return passages.index_select(1, self._passage)


def _passages(layout: Layout) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return each position's passage, and each passage's chunk.

    The first is ``[tokens up to the last chunk's end]``. Passage 0, of chunk 0, is for
    positions that neither move nor tell; the chunks are numbered from 1.
    """
    passage = np.zeros(layout.query_start, dtype=np.int64)
    chunk = [np.zeros(1, dtype=np.int64)]
    count = 1
    for number, piece in enumerate(layout.placed, start=1):
        slots = piece.slots[piece.slots >= layout.exact]
        within = (slots - piece.start) // PASSAGE_TOKENS
        passage[slots] = count + within
        found = int(within.max(initial=-1)) + 1
        chunk.append(np.full(found, number))
        count += found
    return passage, np.concatenate(chunk)
