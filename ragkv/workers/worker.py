"""Workers of an ingestion: each opens an engine once, stores documents and returns status rows."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from multiprocessing import get_context, parent_process
from threading import Thread
from typing import Any

from ragkv.answer.engine import Engine
from ragkv.config import MEMORY, StoreConfig
from ragkv.errors import ConfigError, RagKVError
from ragkv.ingest.documents import Document, grouped, precompute_documents
from ragkv.report.account import PrecomputeReport

_log = logging.getLogger(__name__)
_opened: list[IngestWorker] = []  # this process's own
Row = dict[str, Any]
"""The status of a document: ``document`` (its name), ``status`` (``stored``; ``existing``: all of
it; ``skipped``: all too short, too long or with unknown tokens; ``failed``), its ``reason``. A
batch's first row has the fields of its PrecomputeReport."""


def row_of(
    document: Document, status: str, reason: str = "", report: PrecomputeReport | None = None
) -> Row:
    """Return a document's row; its batch's report is in one of the rows."""
    own = {"document": document.name or "", "status": status, "reason": reason}
    return own | (report or PrecomputeReport()).to_dict()


def total(rows: Sequence[Row], seconds: float) -> PrecomputeReport:
    """Return the sums over all rows, and the time that they took together."""
    sums = {each.name: sum(row[each.name] for row in rows) for each in fields(PrecomputeReport)}
    return PrecomputeReport(**sums | {"seconds": seconds})


def for_workers(store: StoreConfig) -> StoreConfig:
    """Return a store's settings for workers, which read nothing back; refuse one in memory."""
    if str(store.path) == MEMORY:
        raise ConfigError(f"a store in memory ends with the process: give a folder, not {MEMORY}")
    return replace(store, memory_bytes=0, device_bytes=0, history_bytes=0)


def largest_first(documents: Sequence[Document]) -> Sequence[Document]:
    """Return documents in the order that keeps all workers busy to the end."""
    return sorted(documents, key=lambda each: -sum(map(len, each.texts)))


class IngestWorker:
    """Stores documents with an engine of its own.

    ``open_engine`` loads the engine; ``cut`` divides a document's text into chunks, where its texts
    are not chunks. Both reach another process by pickle. ``threads`` are torch's; the other
    arguments are those of :meth:`ragkv.RagKV.precompute`.
    """

    def __init__(
        self,
        open_engine: Callable[[], Engine],
        cut: Callable[[Engine, Document], Document] = lambda _, document: document,
        *,
        threads: int,
        expires_in: float | None = None,
        neighbours: bool = False,
    ) -> None:
        import torch

        torch.set_num_threads(threads)
        self._kv, self._cut = open_engine(), cut
        self._given = {"expires_in": expires_in, "neighbours": neighbours}

    def store(self, documents: Sequence[Document]) -> list[Row]:
        """Store documents and return the row of each; one that fails keeps no other from it."""
        try:
            return self._store(documents)
        except RagKVError as error:
            if len(documents) > 1:
                return [row for each in documents for row in self.store([each])]
            return [row_of(documents[0], "failed", str(error))]

    def _store(self, documents: Sequence[Document]) -> list[Row]:
        has = self._kv.contains
        parts = [self._cut(self._kv, each) for each in documents]
        missing = [[text for text in part.texts if not has(text)] for part in parts]
        how: dict[str, Any] = {"show_progress": False, **self._given}
        report = precompute_documents(self._kv.precompute, grouped(parts), **how)
        rows = list[Row]()
        for document, part, new in zip(documents, parts, missing, strict=True):
            skipped = not any(map(has, new)) if new else not part.texts
            status = "skipped" if skipped else "stored" if new else "existing"
            rows.append(row_of(document, status, report=None if rows else report))
        return rows


def store_in_processes(
    make: Callable[..., IngestWorker], documents: Sequence[Document], workers: int
) -> Iterator[list[Row]]:
    """Store documents in worker processes; yield their rows, batch by batch.

    When a worker is killed, all start again with what is not acknowledged; the batches that were
    being stored come last. If no batch was done, each document of these gets a process of its own,
    and has failed if that is killed, too. ``make`` makes a worker; its errors are raised here.
    """
    import torch

    make = partial(make, threads=max(1, torch.get_num_threads() // workers))
    largest, count = largest_first(documents), max(8 * workers, -(-len(documents) // 64))
    waiting = [batch for first in range(count) if (batch := largest[first::count])]
    while waiting:
        lost = yield from _run(make, waiting, workers)
        running, rest = lost[:workers], lost[workers:]
        if len(lost) == len(waiting):
            for each in (document for batch in running for document in batch):
                if (yield from _run(make, [[each]], 1)):
                    yield [row_of(each, "failed", "its process was killed")]
            running = []
        waiting = rest + running


def _run(
    make: Callable[[], IngestWorker], batches: Sequence[Sequence[Document]], workers: int
) -> Generator[list[Row], None, list[Sequence[Document]]]:
    """Yield the rows of the batches that are done; return the others, in order."""
    pool = ProcessPoolExecutor(min(workers, len(batches)), get_context("spawn"), _begin)
    waiting = {pool.submit(_store, make, batch): batch for batch in batches}
    try:
        for future in as_completed(list(waiting)):
            with suppress(BrokenProcessPool):
                yield future.result()
                del waiting[future]
    finally:
        pool.shutdown(cancel_futures=True)
    if waiting:
        _log.warning("a worker process was killed: starting again, is there memory for all?")
    return list(waiting.values())


def _begin() -> None:
    """End with the parent, however that ends; on Ctrl-C finish the batch."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_end_with_the_parent, daemon=True).start()


def _end_with_the_parent() -> None:
    if (parent := parent_process()) is not None:
        parent.join()
        os._exit(1)


def _store(make: Callable[[], IngestWorker], batch: Sequence[Document]) -> list[Row]:
    if not _opened:  # not in _begin, whose errors would not reach the parent
        _opened.append(make())
    return _opened[0].store(batch)
