"""Precomputations on behalf of clients, one after the other."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

from ragkv.engine.engine import RagKV
from ragkv.errors import ClosedError
from ragkv.report.account import PrecomputeReport
from ragkv.serve.refusal import RefusedError, refusal_of

JOBS_KEPT = 1024
"""Ended jobs whose status can be asked for: the last ones."""

AT_ONCE = 32
"""Chunks from one look at the progress to the next."""


@dataclass(slots=True, eq=False)
class IngestionJob:
    """One precomputation, in the namespace of its engine.

    Attributes
    ----------
    failure
        Why it failed.
    """

    engine: RagKV
    texts: Sequence[str]
    document: str | None
    revision: str | None
    expires_in: float | None
    overrides: dict[str, Any]
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    status: Literal["running", "done", "failed"] = "running"
    report: PrecomputeReport | None = None
    done: int = 0
    failure: RefusedError | None = None
    ended: threading.Event = field(default_factory=threading.Event)

    def to_dict(self) -> dict[str, Any]:
        """Return what clients see of it."""
        return {
            "id": self.id,
            "status": self.status,
            "report": None if self.report is None else self.report.to_dict(),
            "done": self.done,
            "total": len(self.texts),
            "error": None if self.failure is None else self.failure.message,
        }

    def run(self, stopping: threading.Event) -> None:
        """Encode the chunks; what goes wrong is kept in ``failure``."""
        try:
            self.report = self._encode(stopping)
            self.status = "done"
        except Exception as error:  # noqa: BLE001  told to the client
            self.fail(error)
        finally:
            self.ended.set()

    def _encode(self, stopping: threading.Event) -> PrecomputeReport:
        total = PrecomputeReport()
        for at in range(0, len(self.texts), AT_ONCE):
            if stopping.is_set():
                raise ClosedError("the server is stopping")
            part = self.texts[at : at + AT_ONCE]
            report = self.engine.precompute(part, expires_in=self.expires_in, **self.overrides)
            total += report
            self.done += len(part)
        if self.document is not None:  # all are there: what is left is to say whose they are
            last = self.engine.precompute(
                self.texts,
                document=self.document,
                revision=self.revision,
                expires_in=self.expires_in,
                **self.overrides,
            )
            total += PrecomputeReport(seconds=last.seconds, removed=last.removed)
        return total

    def fail(self, error: BaseException) -> None:
        """End it for that reason."""
        self.failure = refusal_of(error)
        self.status = "failed"
        self.ended.set()


class IngestionQueue:
    """Runs jobs in one thread, in order.

    Parameters
    ----------
    most
        Jobs that may wait or run.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._jobs: dict[str, IngestionJob] = {}  # the last at the end
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ragkv-ingest")
        self._stopping = threading.Event()

    def submit(self, job: IngestionJob) -> asyncio.Future[None]:
        """Begin a job as soon as those before it have ended.

        Raises
        ------
        RefusedError
            503: too many are waiting.
        """
        open_jobs = sum(not each.ended.is_set() for each in self._jobs.values())
        if open_jobs >= self._most or self._stopping.is_set():
            raise RefusedError(
                *(503, "Too many precomputations are waiting: try again later."),
                code="queue_full",
                headers={"Retry-After": "5"},
            )
        self._jobs[job.id] = job
        for old in list(self._jobs.values())[:-JOBS_KEPT]:
            if old.ended.is_set():
                del self._jobs[old.id]
        return asyncio.wrap_future(self._thread.submit(job.run, self._stopping))

    def find(self, job_id: str, engine: RagKV) -> IngestionJob:
        """Return a job of this namespace; raise RefusedError, 404, for others."""
        job = self._jobs.get(job_id)
        if job is None or job.engine is not engine:
            raise RefusedError(404, "There is no such precomputation.", code="not_found")
        return job

    def close(self) -> None:
        """End the running job after the chunks that it encodes now; the others fail."""
        self._stopping.set()
        self._thread.shutdown(wait=True)
