"""A faiss index searched in steps: its top-k is known, and mostly right, before the search ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from ragkv.errors import ConfigError, MissingDependencyError, install_command

Item = TypeVar("Item")


class Hit(NamedTuple, Generic[Item]):
    """An item that was found. The higher its score, the nearer: a distance is negated."""

    item: Item
    score: float


class StagedSearch(Generic[Item]):
    """Searches a faiss index in steps, and yields the top-k after each one.

    The last top-k is that of ``index.search`` with the index's own settings. An IVF index
    visits the clusters of its ``nprobe`` part by part: no vector is compared twice. HNSW is
    searched anew with growing ``efSearch``, which in all takes up to twice as long. Any other
    index is searched in one step.

    Parameters
    ----------
    index
        A faiss index: IVF or HNSW, with or without an IDMap around it.
    items
        What is found, by the index's ids: a sequence in the order of adding, or a mapping.
    embed
        Returns a query's vector, ``[dimensions]``.
    k
        Number of items.
    steps
        Number of steps.

    Raises
    ------
    MissingDependencyError
        faiss is not installed.
    ConfigError
        ``k`` or ``steps`` is below 1.
    """

    def __init__(
        self,
        index: Any,
        items: Sequence[Item] | Mapping[int, Item],
        embed: Callable[[str], Sequence[float]],
        *,
        k: int = 4,
        steps: int = 4,
    ) -> None:
        try:
            import faiss
        except ImportError as error:
            raise MissingDependencyError(
                f"StagedSearch needs faiss: {install_command('retrieval')}"
            ) from error
        if min(k, steps) < 1:
            raise ConfigError(f"k and steps must be 1 or more, not {k} and {steps}")
        self._faiss: Any = faiss
        self._index = index  # what is downcast does not keep it alive
        self._items, self._embed = items, embed
        self._k, self._steps = k, steps

    def __call__(self, query: str) -> Iterator[list[Hit[Item]]]:
        """Yield the items found so far, nearest first, after each step."""
        import numpy as np

        faiss = self._faiss
        index = faiss.downcast_index(self._index)
        vector = np.asarray(self._embed(query), dtype=np.float32)[None]
        sign = 1 if index.metric_type == faiss.METRIC_INNER_PRODUCT else -1
        ids_of = np.asarray
        if isinstance(index, faiss.IndexIDMap):  # IndexIDMap2 is one
            ids_of = faiss.vector_to_array(index.id_map).__getitem__
            index = faiss.downcast_index(index.index)
        for distances, labels in self._stages(index, vector):
            there = labels >= 0
            ids = ids_of(labels[there]).tolist()
            scores = (sign * distances[there]).tolist()
            yield [Hit(self._items[at], score) for at, score in zip(ids, scores, strict=True)]

    def _stages(self, index: Any, vector: Any) -> Iterator[tuple[Any, Any]]:
        """Yield distances and labels, ``[k]``, after each step."""
        faiss = self._faiss
        if isinstance(index, faiss.IndexIVF):
            yield from self._visit_clusters(index, vector)
            return
        if isinstance(index, faiss.IndexHNSW):
            efforts = {index.hnsw.efSearch >> left for left in range(1, self._steps)}
            for effort in sorted(each for each in efforts if each >= self._k):
                settings = faiss.SearchParametersHNSW(efSearch=effort)
                distances, labels = index.search(vector, self._k, params=settings)
                yield distances[0], labels[0]
        distances, labels = index.search(vector, self._k)
        yield distances[0], labels[0]

    def _visit_clusters(self, index: Any, vector: Any) -> Iterator[tuple[Any, Any]]:
        import numpy as np

        nearness, clusters = index.quantizer.search(vector, index.nprobe)
        worst = np.inf if index.metric_type != self._faiss.METRIC_INNER_PRODUCT else -np.inf
        found, labels = np.full(self._k, worst, np.float32), np.full(self._k, -1, np.int64)
        sign = 1 if worst > 0 else -1
        for part in np.array_split(np.arange(index.nprobe), min(self._steps, index.nprobe)):
            some = np.full_like(clusters, -1)  # the others are passed over
            some[:, part] = clusters[:, part]
            more, which = index.search_preassigned(vector, self._k, some, nearness)
            found, labels = np.append(found, more[0]), np.append(labels, which[0])
            nearest = np.lexsort((labels, sign * found))[: self._k]
            found, labels = found[nearest], labels[nearest]
            yield found, labels
