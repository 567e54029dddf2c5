"""Speculations: prompts that are computed before they are asked, while retrieval goes on.

RAGCache's speculative pipelining (arXiv 2404.12457, section 5.4). What was computed is used by a
request of the same prompt and settings alone, which goes on from it as if it had computed it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from ragkv.config import ReuseConfig
from ragkv.decode.batch import StepBatch
from ragkv.engine.full import FullPrefill, Prepared
from ragkv.engine.request import Request
from ragkv.engine.requests import Cancelled, GaveWay
from ragkv.model.fingerprint import Fingerprint
from ragkv.prompt.render import Rendered
from ragkv.report.clock import Clock
from ragkv.report.speculations import SpeculationReport
from ragkv.select import Method

_log = logging.getLogger(__name__)
_POLL_S = 0.05
State = Literal["waiting", "running", "finished", "used", "cancelled", "failed"]


@dataclass(frozen=True, slots=True)
class PromptKey:
    """What has to be equal for a request to use a speculation: text, settings, weights."""

    rendered: Rendered
    config: ReuseConfig
    method: Method
    fingerprint: Fingerprint | None


class Tally:
    """Counts what became of an engine's speculations, in any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._report = SpeculationReport()

    @property
    def report(self) -> SpeculationReport:
        """The counts now."""
        with self._lock:
            return self._report

    def add(self, name: str, amount: float = 1) -> None:
        """Add to a field of the report."""
        with self._lock:
            now = getattr(self._report, name) + amount
            self._report = replace(self._report, **{name: now})


class Speculation:
    """A prompt that is computed in the background, because it may be asked soon.

    It is computed while no request waits or runs, and gives way to the next one within a layer.
    The request that asks the prompt, with the same reuse settings, goes on from it, and waits for
    one that is being computed. Made by :meth:`ragkv.RagKV.speculate`.
    """

    def __init__(
        self,
        key: PromptKey,
        pipeline: FullPrefill,
        tally: Tally,
        when_over: Callable[[Speculation], object],
    ) -> None:
        self.key = key
        self.is_wanted = False
        self._pipeline, self._requests = pipeline, pipeline.requests
        self._tally, self._when_over = tally, when_over
        self._batch = pipeline.requests.lock.shared(StepBatch)
        self._mutex = threading.Lock()
        self._thread_ended = threading.Event()
        self._state: State = "waiting"
        self._gives_way = False
        self._began_at: float | None = None  # of the attempt that runs, or was the last
        self._ended_at = 0.0
        self._prepared: Prepared | None = None

    # ---- for its owner

    @property
    def state(self) -> State:
        """``waiting`` for an idle model, ``running``, ``finished``; or how it ended.

        That is ``used``, ``cancelled`` or ``failed``.
        """
        return self._state

    @property
    def is_over(self) -> bool:
        """Whether nothing of it is left for a request."""
        return self._state in {"used", "cancelled", "failed"}

    def cancel(self) -> None:
        """Free what was computed, and return at once; one that runs ends before its next layer."""
        self._end("cancelled")

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until its thread has ended; return whether it has, within ``timeout`` seconds."""
        return self._thread_ended.wait(timeout)

    # ---- for the request that asks the prompt

    def adopt(self, asked_at: float, cancelled: Callable[[], bool] | None) -> Prepared | None:
        """Return what was computed, once it is; None where the request has to compute it.

        Parameters
        ----------
        asked_at
            The clock when the request began.
        cancelled
            Asked now and then while waiting.

        Raises
        ------
        Cancelled
            ``cancelled`` returned True.
        """
        with self._mutex:
            self.is_wanted = self._state == "running"
        while self.is_wanted and not self._thread_ended.wait(cancelled and _POLL_S):
            if cancelled is not None and cancelled():
                self.is_wanted = False
                self.cancel()
                raise Cancelled
        prepared = self._end("used")
        if prepared is None:
            self.cancel()
            return None
        seconds = max(0.0, min(asked_at, self._ended_at) - (self._began_at or asked_at))
        self._tally.add("overlap_s", seconds)
        return replace(prepared, plan=replace(prepared.plan, ahead_s=seconds))

    # ---- for the queue of requests

    def give_way(self) -> None:
        """End before the next layer, and begin anew later; drop what is computed already."""
        with self._mutex:
            self._gives_way = True
            is_kept = self._state == "finished"
        if is_kept:
            self.cancel()

    def check(self) -> None:
        """Raise Cancelled or GaveWay where it is to end; the calling thread has the model."""
        with self._mutex:
            if self._state == "cancelled":
                raise Cancelled
            if self.is_wanted:
                return
            if self._gives_way or self._requests.lock.is_wanted(but=self._batch):
                self._state = "waiting"
                raise GaveWay
            if self._state == "waiting":
                self._state, self._began_at = "running", time.perf_counter()

    # ---- its thread

    def work(self, request: Request) -> None:
        """Compute the prompt, in as many attempts as it takes."""
        try:
            while self._state == "waiting":
                self._attempt(replace(request, clock=Clock(), speculation=self))
        except Exception:  # noqa: BLE001  no request fails by it
            _log.exception("a speculation failed: the request will compute its prompt itself")
            self._waste()
            self._end("failed")
        finally:
            self._thread_ended.set()

    def _attempt(self, request: Request) -> None:
        """Compute the prompt, unless it is cancelled or gives way meanwhile."""
        with self._mutex:
            self._gives_way = False
        try:
            prepared = self._pipeline.prepare(request, self._is_to_end)
        except (Cancelled, GaveWay):
            self._tally.add("interrupted", not self.is_over)
            self._waste()
            return
        with self._mutex:
            self._ended_at = time.perf_counter()
            is_kept = self._state == "running"
            if is_kept:
                self._state, self._prepared = "finished", prepared
        if is_kept:
            self._tally.add("finished")
        else:
            self._waste()
            self._requests.drop(prepared.turn)

    def _is_to_end(self) -> bool:
        return self._gives_way or self.is_over

    def _waste(self) -> None:
        """Count the seconds of an attempt that came to nothing."""
        with self._mutex:
            began_at, self._began_at = self._began_at, None
        if began_at is not None:
            self._tally.add("wasted_s", time.perf_counter() - began_at)

    def _end(self, state: State) -> Prepared | None:
        """End it, unless it is over; let go of what was computed, and return it.

        It is used only if it was computed.
        """
        with self._mutex:
            prepared = self._prepared
            if self.is_over or (state == "used" and prepared is None):
                return None
            self._state, self._prepared = state, None
        self._tally.add(state)
        if prepared is not None:
            self._requests.drop(prepared.turn)
            if state != "used" and self._began_at is not None:
                self._tally.add("wasted_s", self._ended_at - self._began_at)
        self._when_over(self)
        return prepared
