"""The auxiliary model: a small model that scores chunk tokens by the query's attention.

Its tokens differ from the primary model's: scores are mapped over character offsets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

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

_TOKENS_AT_ONCE = 8192
"""Most tokens of the chunks in one pass, whose caches are all in memory."""


class Auxiliary:
    """Scores chunks as CacheClip does: each chunk ++ query, last layer only.

    One pass computes the query behind each of the chunks: linear layers over all rows together,
    attention over each chunk's own cache.

    Parameters
    ----------
    loaded
        The auxiliary model.
    sink
        The sink's rows, or None.
    entry_of
        Returns a chunk's entry for this model, stored or encoded now.
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
        """Return each chunk's scores ``[tokens]`` and offsets ``[tokens, 2]``.

        A score is the attention weight from the query's tokens, mean over heads and
        query tokens (arXiv 2510.10129, section 3).
        """
        rendered = Rendered(query, add_special_tokens=False)
        ids = tokenize(rendered, self._loaded.tokenizer).ids
        self._loaded.require_embedded(ids, "the question")
        layouts = [_sink_chunk_query(self._sink, self._entry_of(text), ids) for text in texts]
        seen: dict[int, npt.NDArray[np.float32]] = {}
        for batch in self._batches(layouts):
            weights = self._look([layouts[index] for index in batch], len(ids))
            seen.update(zip(batch, weights, strict=True))
        placed = [layout.placed[0] for layout in layouts]
        return [(seen[index][one.slots], one.entry.offsets) for index, one in enumerate(placed)]

    def _batches(self, layouts: Sequence[Layout]) -> Iterator[list[int]]:
        """Yield the indices of layouts for one pass, on one side of the position limit."""

        def is_beyond(index: int) -> bool:
            return self._loaded.architecture.is_beyond(len(layouts[index]))

        batch: list[int] = []
        tokens = 0
        for index in sorted(range(len(layouts)), key=is_beyond):
            tokens += len(layouts[index])
            if batch and (tokens > _TOKENS_AT_ONCE or is_beyond(index) != is_beyond(batch[0])):
                yield batch
                batch, tokens = [], len(layouts[index])
            batch.append(index)
        if batch:
            yield batch

    def _look(self, layouts: Sequence[Layout], count: int) -> list[npt.NDArray[np.float32]]:
        """Return the attention ``[tokens]`` of each layout's last ``count`` rows."""
        last = self._loaded.architecture.layers - 1
        seen: list[torch.Tensor] = []

        def observe(call: LayerCall) -> None:
            if call.layer == last:
                seen.append(attention_of_last_rows(call, count))
                if len(seen) == len(layouts):
                    raise StopPass

        passes = []
        for layout in layouts:
            cache = splice(layout, self._sink, self._loaded, spare=0)
            passes.append(SubsetPass(layout.ids, layout.fresh, cache, observer=observe))
        observed_forward(self._loaded, *passes)
        weights = torch.cat(seen).cpu().numpy()  # one wait for a device
        return np.split(weights, np.cumsum([len(layout) for layout in layouts])[:-1])


def _sink_chunk_query(sink: ChunkKV | None, entry: ChunkKV, query_ids: IntArray) -> Layout:
    """Lay out sink ++ chunk ++ query."""
    head = len(sink) if sink is not None else 0
    end = head + len(entry)
    parts = [] if sink is None else [sink.token_ids]
    ids = np.concatenate([*parts, entry.token_ids, query_ids])
    origin = np.full(len(ids), Origin.FRESH, dtype=np.uint8)
    origin[:head] = Origin.SINK
    origin[head:end] = Origin.CACHED
    rows = np.arange(len(entry), dtype=np.int64)
    placed = Placed(entry, rows, rows + head, head, end)
    return Layout(ids, np.zeros((len(ids), 2), np.int32), head, (placed,), origin)


def map_scores(
    scores: npt.NDArray[np.float32],
    source: npt.NDArray[np.int32],
    target: npt.NDArray[np.int32],
) -> npt.NDArray[np.float32]:
    """Return a score for each target token: the mean over its characters.

    Parameters
    ----------
    scores
        ``[source tokens]``.
    source, target
        ``[tokens, 2]`` first character and end, in one text. Characters that several
        source tokens cover (the bytes of an emoji) get the sum of their scores;
        characters that none covers get 0.

    Returns
    -------
    numpy.ndarray
        ``[target tokens]`` float32.
    """
    length = int(max(source[:, 1].max(initial=0), target[:, 1].max(initial=0)))
    change = np.zeros(length + 1, dtype=np.float64)
    width = np.maximum(source[:, 1] - source[:, 0], 0)
    covering = width > 0
    np.add.at(change, source[covering, 0], scores[covering])
    np.add.at(change, source[covering, 1], -scores[covering])
    sums = np.concatenate([[0.0], np.cumsum(np.cumsum(change))])
    spans = np.maximum(target[:, 1] - target[:, 0], 1)
    means: npt.NDArray[np.float32] = (
        (sums[target[:, 0] + spans] - sums[target[:, 0]]) / spans
    ).astype(np.float32)
    return means
