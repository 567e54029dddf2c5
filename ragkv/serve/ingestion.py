"""Precomputations for clients, one at a time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from ragkv.engine.engine import RagKV
from ragkv.report.account import PrecomputeReport
from ragkv.serve.refusal import RefusedError, draining

JOBS = 16
"""Maximum number of waiting and running precomputations."""
AT_ONCE = 32
"""Chunks per call of the engine: a stopping server waits for one call."""


class Ingestion:
    """Precomputes chunks in one thread, request after request.

    Parameters
    ----------
    timeout
        Seconds until a client gets no answer any more.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._works = set[Future[PrecomputeReport]]()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ragkv-ingest")
        self._stopping = threading.Event()

    async def run(
        self, engine: RagKV, texts: Sequence[str], document: dict[str, Any], **given: Any
    ) -> PrecomputeReport:
        """Precompute chunks after the requests before.

        Parameters
        ----------
        document
            The arguments ``document`` and ``revision``; empty for chunks without one.
        **given
            More arguments of :meth:`ragkv.RagKV.precompute`.

        Raises
        ------
        RefusedError
            503: too many requests wait, or the server stops. 504: the time is over; the chunks are
            still stored.
        """
        if len(self._works) >= JOBS:
            raise RefusedError(
                503,
                "Too many precomputations are waiting: try again later.",
                code="queue_full",
                headers={"Retry-After": "5"},
            )
        work = self._thread.submit(self._encode, engine, texts, document, given)
        self._works.add(work)
        work.add_done_callback(self._works.discard)
        ended = asyncio.wrap_future(work)
        await asyncio.wait({ended}, timeout=self._timeout)
        if not ended.done():
            message = "The precomputation goes on: repeat the request later."
            raise RefusedError(504, message, code="timeout")
        return ended.result()

    def _encode(
        self, engine: RagKV, texts: Sequence[str], document: dict[str, Any], given: dict[str, Any]
    ) -> PrecomputeReport:
        total = PrecomputeReport()
        for at in range(0, len(texts), AT_ONCE):
            if self._stopping.is_set():
                raise draining()
            total += engine.precompute(texts[at : at + AT_ONCE], **given)
        if document:  # all chunks are stored: assign them to it
            last = engine.precompute(texts, **{**given, **document, "neighbours": False})
            total += PrecomputeReport(seconds=last.seconds, removed=last.removed)
        return total

    def close(self) -> None:
        """End the running precomputation after its current chunks; waiting ones fail."""
        self._stopping.set()
        self._thread.shutdown(wait=True)
