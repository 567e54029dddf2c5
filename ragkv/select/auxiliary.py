"""The auxiliary model: a small model that scores chunk tokens by the query's attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from ragkv.attend.forward import SubsetPass, observed_forward
from ragkv.attend.observe import LayerCall, StopPass, attention_of_last_rows
from ragkv.chunk.kv import ChunkKV
from ragkv.model.loaded import ReusableModel
from ragkv.prompt.render import Rendered
from ragkv.prompt.tokens import IntArray, tokenize
from ragkv.splice.layout import Layout, Origin, Placed
from ragkv.splice.place import splice


class Auxiliary:
    """Scores chunks as CacheClip does: each chunk ++ query, last layer only.

    Parameters
    ----------
    loaded
        The auxiliary model.
    sink
        The rows that its chunks are encoded behind, or None.
    entry_of
        Returns a chunk's entry for this model, stored at ingestion or encoded now.
    """

    def __init__(
        self,
        loaded: ReusableModel,
        sink: ChunkKV | None,
        entry_of: Callable[[str], ChunkKV],
    ) -> None:
        self._loaded = loaded
        self._sink = sink
        self._entry_of = entry_of

    def score(
        self, texts: Sequence[str], query: str
    ) -> list[tuple[npt.NDArray[np.float32], IntArray]]:
        """Return per chunk its tokens' scores ``[tokens]`` and offsets ``[tokens, 2]``.

        A score is the attention weight from the query's tokens, mean over heads and
        query tokens (arXiv 2510.10129, section 3).
        """
        rendered = Rendered(query, add_special_tokens=False)
        ids = tokenize(rendered, self._loaded.tokenizer).ids
        return [self._score_one(self._entry_of(text), ids) for text in texts]

    def _score_one(
        self, entry: ChunkKV, query_ids: IntArray
    ) -> tuple[npt.NDArray[np.float32], IntArray]:
        layout = _sink_chunk_query(self._sink, entry, query_ids)
        cache = splice(layout, self._sink, self._loaded, spare=0)
        last = len(cache.layers) - 1
        seen: list[torch.Tensor] = []

        def observe(call: LayerCall) -> None:
            if call.layer == last:
                seen.append(attention_of_last_rows(call, len(query_ids)))
                raise StopPass

        subset = SubsetPass(layout.ids, layout.fresh, cache, observer=observe)
        observed_forward(self._loaded, subset)
        slots = layout.placed[0].slots
        return seen[0].cpu().numpy()[slots], entry.offsets


def _sink_chunk_query(sink: ChunkKV | None, entry: ChunkKV, query_ids: IntArray) -> Layout:
    """Lay out sink ++ chunk ++ query."""
    head = len(sink) if sink is not None else 0
    end = head + len(entry)
    parts = (
        [entry.token_ids, query_ids]
        if sink is None
        else [sink.token_ids, entry.token_ids, query_ids]
    )
    ids = np.concatenate(parts)
    origin = np.full(len(ids), Origin.FRESH, dtype=np.uint8)
    origin[:head] = Origin.SINK
    origin[head:end] = Origin.CACHED
    rows = np.arange(len(entry), dtype=np.int64)
    placed = Placed(entry, rows, rows + head, head, end)
    return Layout(ids, np.zeros((len(ids), 2), np.int32), head, (placed,), origin)
