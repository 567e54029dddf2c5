"""The queue of requests: one prompt is computed at a time, beside the steps of other answers."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field

from ragkv.model.loaded import LoadedModel, ReusableModel
from ragkv.model.lock import ModelLock
from ragkv.model.memory import room_for_kv

_MAX_OVERTAKEN = 2
"""How often better cached requests can overtake a request (RAGCache, section 5.3)."""
_POLL_S = 0.05
_QUIET_S = 0.1
"""Time without a request before idle work begins, longer than the gap between most calls."""


class Cancelled(Exception):  # noqa: N818  internal
    """The request was cancelled before its turn."""


class GaveWay(Exception):  # noqa: N818  internal
    """Ends idle work when a request needs the model."""


@dataclass(slots=True, eq=False)
class Turn:
    """A request's place.

    Attributes
    ----------
    cached_share
        Ratio of cached tokens to tokens to compute; the request with the highest begins first.
    tokens, nbytes
        Number of rows of its keys and values, and their bytes.
    overtaken
        Number of later requests that began earlier.
    give_way
        Called while a request waits for the end of this idle work; None for a request.
    """

    requests: RequestQueue
    cached_share: float
    tokens: int
    nbytes: int
    overtaken: int = 0
    give_way: Callable[[], object] | None = None
    has_model: bool = False
    _prefill: ExitStack = field(default_factory=ExitStack)

    @property
    def is_request(self) -> bool:
        """False for idle work."""
        return self.give_way is None

    def until_prefilled(self, context: AbstractContextManager[object]) -> None:
        """Enter a context that ends with :meth:`prefilled`."""
        self._prefill.enter_context(context)

    def prefilled(self) -> None:
        """Release the model for the next prompt; the answer's steps follow."""
        self._prefill.close()
        if self.has_model:
            self.has_model = False
            self.requests.lock.release()
        self.requests.end_prefill(self)


class RequestQueue:
    """The requests of one model: waiting, computing their prompt (at most one), and running.

    Idle work begins after a moment without requests, and ends for the next request.
    """

    def __init__(self, lock: ModelLock) -> None:
        self.lock = lock
        self._changed = threading.Condition()
        self.max_running = 16
        self.kv_bytes: int | None = None
        self.tiers = 0
        """Budgets of the engines' tiers where keys and values are, in bytes."""
        self._waiting: list[Turn] = []
        self._running = set[Turn]()
        self._prefilling: Turn | None = None
        self._quiet_since = -math.inf

    def configure(
        self, max_running: int | None = None, kv_bytes: int | None = None, *, tiers: int = 0
    ) -> None:
        """Set limits; None keeps the current one. ``tiers`` bytes are added to the sum."""
        with self._changed:
            self.tiers += tiers
            self.max_running = max_running or self.max_running
            self.kv_bytes = kv_bytes or self.kv_bytes
            self._changed.notify_all()

    @property
    def running(self) -> int:
        """Number of requests that have begun and not ended."""
        with self._changed:
            return len(self._running)

    @property
    def waiting(self) -> int:
        """Number of requests that have not begun."""
        with self._changed:
            return sum(turn.is_request for turn in self._waiting)

    @contextmanager
    def turn(
        self,
        loaded: LoadedModel,
        *,
        cached_share: float = 0.0,
        tokens: int = 0,
        cancelled: Callable[[], bool] | None = None,
        give_way: Callable[[], object] | None = None,
    ) -> Iterator[Turn]:
        """Wait for a request's turn. In the block it holds the model until it is prefilled.

        A thread that already holds the model does not wait.

        Parameters
        ----------
        tokens
            Number of rows of its cache, including the answer's.
        cancelled
            Called repeatedly while waiting.
        give_way
            As in :class:`Turn`.

        Raises
        ------
        Cancelled
            ``cancelled`` returned True before the turn came.
        """
        turn = Turn(self, cached_share, tokens, _bytes(loaded, tokens), give_way=give_way)
        self._enter(turn, loaded, cancelled)
        try:
            if not self.lock.acquire(cancelled):
                raise Cancelled
            turn.has_model = True
            if cancelled is not None and cancelled():
                raise Cancelled
            yield turn
        finally:
            turn.prefilled()
            with self._changed:
                self._running.discard(turn)
                if turn.is_request:
                    self._quiet_since = time.perf_counter()
                self._changed.notify_all()

    def let_pass(self) -> float:
        """Yield the model to a waiting request; return the seconds until it is back.

        The calling thread holds the model.
        """
        began, first = time.perf_counter(), self._prefilling
        if first is not None and first.is_request:
            with self._without_model():
                pass
        return time.perf_counter() - began

    def has_others(self, turn: Turn) -> bool:
        """Whether other answers run, and can end while this turn waits.

        They cannot end if the turn's thread held the model before.
        """
        with self._changed:
            return self._prefilling is turn and len(self._running) > 1

    def wait_for_others(self, cancelled: Callable[[], bool] | None) -> None:
        """Wait until the other answers have ended; the calling thread holds the model.

        Raises
        ------
        Cancelled
            ``cancelled`` returned True meanwhile.
        """
        with self._without_model(), self._changed:
            while len(self._running) > 1:
                self._changed.wait(None if cancelled is None else _POLL_S)
                if cancelled is not None and cancelled():
                    raise Cancelled

    @contextmanager
    def _without_model(self) -> Iterator[None]:
        """Release the model to other threads in the block."""
        self.lock.release()
        try:
            yield
        finally:
            try:
                self.lock.acquire()
            except BaseException:  # interrupted; the caller releases the model
                self.lock.acquire()
                raise

    def end_prefill(self, turn: Turn) -> None:
        """Let the next request begin beside this one's answer."""
        with self._changed:
            if self._prefilling is turn:
                self._prefilling = None
                self._changed.notify_all()

    def _enter(self, turn: Turn, loaded: LoadedModel, cancelled: Callable[[], bool] | None) -> None:
        with self._changed:
            if self.lock.is_mine:  # all others wait for this thread
                self._running.add(turn)
                return
            self._waiting.append(turn)
            try:
                self._wait(turn, loaded, cancelled)
            except BaseException:
                self._waiting.remove(turn)
                self._changed.notify_all()
                raise
            place = self._waiting.index(turn)
            for earlier in self._waiting[:place]:
                earlier.overtaken += earlier.is_request
            del self._waiting[place]
            self._prefilling = turn
            if turn.is_request:
                self._running.add(turn)

    def _wait(self, turn: Turn, loaded: LoadedModel, cancelled: Callable[[], bool] | None) -> None:
        while not self._may_begin(turn, loaded):
            first = self._prefilling
            if turn.is_request and first is not None and first.give_way is not None:
                first.give_way()
            self._changed.wait(None if cancelled is None else _POLL_S)
            if cancelled is not None and cancelled():
                raise Cancelled

    def _may_begin(self, turn: Turn, loaded: LoadedModel) -> bool:
        if self._prefilling is not None or self._first() is not turn:
            return False
        if not self._running:  # of any size
            return turn.is_request or time.perf_counter() - self._quiet_since >= _QUIET_S
        if not turn.is_request or len(self._running) >= self.max_running:
            return False
        return self._running_bytes + turn.nbytes <= self._room(turn, loaded)

    @property
    def _running_bytes(self) -> int:
        return sum(each.nbytes for each in self._running)

    def _room(self, turn: Turn, loaded: LoadedModel) -> int:
        """Return the bytes for keys and values while a turn's prompt is computed."""
        if self.kv_bytes is not None or not isinstance(loaded, ReusableModel):
            return self.kv_bytes or 0
        held = {"running": self._running_bytes, "tiers": self.tiers}
        return room_for_kv(loaded, turn.tokens, **held)

    def _first(self) -> Turn:
        """Return the next turn: one that was overtaken too often, or else the best cached."""
        for turn in self._waiting:
            if turn.overtaken >= _MAX_OVERTAKEN:
                return turn
        return max(self._waiting, key=lambda turn: (turn.is_request, turn.cached_share))


def _bytes(loaded: LoadedModel, tokens: int) -> int:
    if not isinstance(loaded, ReusableModel):
        return 0
    return tokens * loaded.architecture.values_per_token * loaded.dtype.itemsize
