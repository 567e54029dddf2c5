"""Precomputations for clients, one at a time."""

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

JOBS = 16
"""Maximum number of waiting and running precomputations."""
JOBS_KEPT = 1024
"""Ended jobs whose status is kept, the latest ones."""
AT_ONCE = 32
"""Chunks per call of the engine; the progress is updated after each call."""


@dataclass(slots=True, eq=False)
class IngestionJob:
    """A precomputation in its engine's namespace.

    Attributes
    ----------
    failure
        Reason of the status ``failed``.
    """

    engine: RagKV
    texts: Sequence[str]
    document: str | None
    revision: str | None
    expires_in: float | None
    neighbours: bool
    overrides: dict[str, Any]
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    status: Literal["running", "done", "failed"] = "running"
    report: PrecomputeReport | None = None
    done: int = 0
    failure: RefusedError | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the client's view."""
        return {
            "id": self.id,
            "status": self.status,
            "report": None if self.report is None else self.report.to_dict(),
            "done": self.done,
            "total": len(self.texts),
            "error": None if self.failure is None else self.failure.message,
        }

    def run(self, stopping: threading.Event) -> None:
        """Encode the chunks; an error becomes the ``failure``."""
        try:
            self.report = self._encode(stopping)
            self.status = "done"
        except Exception as error:  # noqa: BLE001  sent to the client
            self.failure = refusal_of(error)
            self.status = "failed"

    def _encode(self, stopping: threading.Event) -> PrecomputeReport:
        total = PrecomputeReport()
        given = {"expires_in": self.expires_in, **self.overrides}
        for at in range(0, len(self.texts), AT_ONCE):
            if stopping.is_set():
                raise ClosedError("the server is stopping")
            part = self.texts[at : at + AT_ONCE]
            total += self.engine.precompute(part, neighbours=self.neighbours, **given)
            self.done += len(part)
        if self.document is not None:  # all chunks are stored: assign them to the document
            last = self.engine.precompute(
                self.texts, document=self.document, revision=self.revision, **given
            )
            total += PrecomputeReport(seconds=last.seconds, removed=last.removed)
        return total


class IngestionQueue:
    """Runs jobs in one thread, in order."""

    def __init__(self) -> None:
        self._jobs: dict[str, IngestionJob] = {}  # the newest at the end
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ragkv-ingest")
        self._stopping = threading.Event()

    def submit(self, job: IngestionJob) -> asyncio.Future[None]:
        """Run a job after those before it.

        Raises
        ------
        RefusedError
            503: too many jobs wait.
        """
        unfinished = sum(each.status == "running" for each in self._jobs.values())
        if unfinished >= JOBS or self._stopping.is_set():
            raise RefusedError(
                503,
                "Too many precomputations are waiting: try again later.",
                code="queue_full",
                headers={"Retry-After": "5"},
            )
        self._jobs[job.id] = job
        for old in list(self._jobs.values())[:-JOBS_KEPT]:
            if old.status != "running":
                del self._jobs[old.id]
        return asyncio.wrap_future(self._thread.submit(job.run, self._stopping))

    def find(self, job_id: str, engine: RagKV) -> IngestionJob:
        """Return a job of the engine's namespace; RefusedError, 404, without one."""
        job = self._jobs.get(job_id)
        if job is None or job.engine is not engine:
            raise RefusedError(404, "There is no such precomputation.", code="not_found")
        return job

    def close(self) -> None:
        """Stop the running job after its current chunks; the waiting ones fail."""
        self._stopping.set()
        self._thread.shutdown(wait=True)
