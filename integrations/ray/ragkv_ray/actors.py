"""Actors of Ray that store the chunks of a Ray Data dataset."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.data import ActorPoolStrategy, DataContext, Dataset, from_items

from ragkv import RagKV
from ragkv.config import StoreConfig
from ragkv.errors import RagKVError
from ragkv.ingest.documents import Document
from ragkv.store.names import digest_of_text
from ragkv.workers.worker import IngestWorker, Row, for_workers, largest_first, row_of


def precompute_dataset(
    ds: Dataset,
    model: str | Path | None = None,
    *,
    store: str | Path | StoreConfig,
    text: str = "text",
    document: str | None = None,
    revision: str | None = None,
    expires_in: float | None = None,
    workers: int = 2,
    batch_size: int = 64,
    num_gpus: float | None = None,
    **engine: Any,
) -> Dataset:
    """Store a dataset's chunks by several actors; return status rows when all are stored.

    A status row is a :data:`ragkv.workers.worker.Row` with the ``digest`` of its stored texts.
    Stored chunks are not encoded again: a second call stores missing ones. If an actor or a node
    dies, another one stores its batches.

    Parameters
    ----------
    model, store, **engine
        Arguments of :class:`ragkv.RagKV`. Every node must reach the store: a server, a bucket, or
        a folder that all nodes mount under this path.
    text
        The column of chunks; a row can have a list of them.
    document, revision
        The columns of the documents' names and revisions, as in :meth:`ragkv.RagKV.precompute`.
        Without a revision, a row must have all chunks of its document.
    expires_in
        Seconds until the chunks expire; None is never.
    workers, batch_size
        Number of actors, and of rows in a batch.
    num_gpus
        GPUs of an actor, with ``device="cuda"``. Without GPUs an actor reserves half a CPU, because
        Ray hangs when actors hold all CPUs, and computes with its share of the cluster's CPUs.
    """
    at = for_workers(store if isinstance(store, StoreConfig) else StoreConfig(store))
    make = partial(IngestWorker, partial(RagKV, model, store=at, **engine), expires_in=expires_in)
    named = partial(_document, text=text, document=document, revision=revision)
    return _rows(ds, make, named, workers, batch_size=batch_size, num_gpus=num_gpus).materialize()


def store_on_ray(
    make: Callable[..., IngestWorker],
    documents: Sequence[Document],
    workers: int,
    *,
    address: str,
    num_gpus: float | None = None,
) -> Iterator[list[Row]]:
    """Store documents in the cluster at ``address``, for ``ray.init``; yield their status rows."""
    ray.init(address, include_dashboard=False, logging_level="WARNING", log_to_driver=False)
    try:
        DataContext.get_current().enable_progress_bars = False
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        size = min(64, -(-len(documents) // (8 * workers)))  # busy to the end
        blocks = -(-len(documents) // size)
        ds = from_items(list(map(asdict, largest_first(documents))), override_num_blocks=blocks)
        rows = _rows(ds, make, _document, workers, batch_size=size, num_gpus=num_gpus)
        yield from ([row] for row in rows.iter_rows())
    finally:
        ray.shutdown()


def _rows(
    ds: Dataset,
    make: Callable[..., IngestWorker],
    of: Callable[[Row], Document],
    workers: int,
    *,
    batch_size: int,
    num_gpus: float | None,
) -> Dataset:
    """Return the status rows, computed when they are read; ``of`` makes a row a document."""
    threads = max(1, int(ray.cluster_resources().get("CPU", 1)) // workers)
    return ds.map_batches(
        _Actor,
        fn_constructor_args=(partial(make, threads=threads), of),
        batch_format="pyarrow",
        compute=ActorPoolStrategy(size=workers, max_tasks_in_flight_per_actor=1),
        batch_size=batch_size,
        num_cpus=None if num_gpus else 0.5,
        num_gpus=num_gpus,
    )


class _Actor:
    """A worker, made at its first batch: Ray would restart a failing constructor endlessly."""

    def __init__(self, make: Callable[[], IngestWorker], of: Callable[[Row], Document]) -> None:
        self._make = make
        self._of = of
        self._worker: IngestWorker | None = None

    def __call__(self, batch: Any) -> dict[str, list[Any]]:
        documents = list(map(self._of, batch.to_pylist()))
        try:
            self._worker = self._worker or self._make()
            rows = self._worker.store(documents)
        except RagKVError as error:  # Ray would keep only the text of its traceback
            rows = [row_of(each, "failed", str(error)) for each in documents]
        for row, document in zip(rows, documents, strict=True):
            row["digest"] = digest_of_text("".join(document.texts).strip())
        return {name: [row[name] for row in rows] for name in rows[0]}


def _document(
    row: Row, text: str = "texts", document: str | None = "name", revision: str | None = "revision"
) -> Document:
    texts = row[text]
    listed = [texts] if isinstance(texts, str) else texts or []
    return Document(listed, _text_in(row, document), _text_in(row, revision))


def _text_in(row: Row, column: str | None) -> str | None:
    value = row[column] if column else None
    return None if value is None else str(value)
