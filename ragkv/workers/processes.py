"""Workers in processes of this machine."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from functools import partial
from multiprocessing import get_context, parent_process
from threading import Thread

from ragkv.ingest.documents import Document
from ragkv.workers.worker import IngestWorker, Row, largest_first, row_of

_log = logging.getLogger(__name__)
_opened: list[IngestWorker] = []  # this process's own


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
