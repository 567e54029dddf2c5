"""A model's lock: one thread uses the model at a time, and then ends its OpenMP threads."""

from __future__ import annotations

import ctypes
import os
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from transformers import PreTrainedModel

from ragkv.errors import ModelInUseError
from ragkv.model.architecture import config_of

Shared = TypeVar("Shared")
_SOFT = 1
"""OpenMP's ``omp_pause_soft``: keeps the program's settings."""
_POLL_S = 0.05
FORK_WAIT_S = 5.0
"""Most seconds that a fork waits for a thread to release a model."""


class Claim(ABC):
    """A place in a lock's queue."""

    @abstractmethod
    def thread(self) -> int | None:
        """Return the thread that gets the model now, or None if the claim is void."""

    @abstractmethod
    def wake(self) -> None:
        """Wake that thread, which now has the model."""


class _Waiter(Claim):
    """A waiting thread."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self.granted = threading.Event()

    def thread(self) -> int:
        return self._thread

    def wake(self) -> None:
        self.granted.set()


class ModelLock:
    """A reentrant, fair lock of a model.

    Its release ends the thread's OpenMP pool. GNU OpenMP, in torch's wheels for Linux, keeps a pool
    of threads for every thread that ever computed. Once the pools have more threads than there are
    cores, threads sleep instead of spinning at each of a pass's thousands of barriers, and the time
    to first token is 1.25x as long on two cores. This happens soon in a framework that calls the
    model from a new thread each time. A pool restarts within a millisecond.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._queue: deque[Claim] = deque()
        self._owner: int | None = None
        self._depth = 0
        self._users = 0
        self._shared: dict[object, Any] = {}

    def acquire(self, cancelled: Callable[[], bool] | None = None) -> bool:
        """Wait until no other thread uses the model.

        Parameters
        ----------
        cancelled
            Called repeatedly while waiting; True gives up.

        Returns
        -------
        bool
            Whether the calling thread has the model: always, unless cancelled.
        """
        if self.is_mine:
            self._depth += 1
            return True
        waiter = _Waiter()
        try:
            self.enqueue(waiter)
            while not waiter.granted.wait(None if cancelled is None else _POLL_S):
                if cancelled is not None and cancelled() and self.withdraw(waiter):
                    return False
        except BaseException:  # interrupted
            if not self.withdraw(waiter):
                self.release()
            raise
        return True

    def enqueue(self, claim: Claim) -> None:
        """Append a claim to the queue; it is granted immediately if the model is free."""
        with self._mutex:
            self._queue.append(claim)
            if self._owner is None:
                self._grant()

    def withdraw(self, claim: Claim) -> bool:
        """Remove a claim; return whether it was still in the queue."""
        with self._mutex:
            waits = claim in self._queue
            if waits:
                self._queue.remove(claim)
            return waits

    def is_wanted(self, but: Claim | None = None) -> bool:
        """Return whether a claim other than ``but`` waits."""
        with self._mutex:
            return any(claim is not but for claim in self._queue)

    def _grant(self) -> None:
        """Give the model to the first valid claim."""
        self._owner, self._depth = None, 0
        while self._queue:
            claim = self._queue.popleft()
            thread = claim.thread()
            if thread is not None:
                self._owner, self._depth = thread, 1
                claim.wake()
                return

    def shared(self, make: Callable[[ModelLock], Shared]) -> Shared:
        """Return the object that ``make`` makes once for all users of the model."""
        with self._mutex:
            if make not in self._shared:
                self._shared[make] = make(self)
            made: Shared = self._shared[make]
            return made

    def join(self) -> None:
        """Count one more engine over the model."""
        with self._mutex:
            self._users += 1

    def leave(self) -> bool:
        """Count one engine fewer; return whether it was the last."""
        with self._mutex:
            self._users -= 1
            return not self._users

    @property
    def is_mine(self) -> bool:
        """Whether the calling thread uses the model."""
        return self._owner == threading.get_ident()

    def refuse_reentry(self) -> None:
        """Raise ModelInUseError if the calling thread would wait for itself."""
        if self.is_mine:
            raise ModelInUseError(
                "This thread holds the model, for which this call waits: make the call outside of "
                "`with kv.turn():`."
            )

    def release(self) -> None:
        """Release the model once for each time it was acquired; then the next claim gets it."""
        if not self.is_mine:
            raise RuntimeError("another thread has the model, or none")
        if self._depth > 1:
            self._depth -= 1
            return
        end_openmp_threads()
        with self._mutex:
            self._grant()

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


_locks: dict[int, ModelLock] = {}
_finding = threading.Lock()
_forking = threading.local()
"""The locks that the calling thread holds while it forks."""


def _prepare_fork() -> None:
    """Acquire all models before a fork, and end the OpenMP pool, whose threads a fork lacks.

    A fork has only the calling thread: it would wait forever for the pool's other threads, or for
    the locks of others. The wait for each model's thread is limited.
    """
    end = time.monotonic() + FORK_WAIT_S
    with _finding:
        locks = list(_locks.values())
    _forking.held = [lock for lock in locks if lock.acquire(lambda: time.monotonic() > end)]
    end_openmp_threads()


def _release_after_fork() -> None:
    for lock in _forking.held:
        lock.release()


def _reset_in_fork() -> None:
    """Drop the locks of threads that a fork does not have."""
    global _finding  # noqa: PLW0603  it can be held, too
    _locks.clear()
    _finding = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_prepare_fork,
        after_in_parent=_release_after_fork,
        after_in_child=_reset_in_fork,
    )


def lock_of(model: PreTrainedModel) -> ModelLock:
    """Return the model's lock, the same for all users.

    The key is the decoder stack's configuration, which a pass changes.
    """
    config = config_of(model)
    with _finding:
        lock = _locks.get(id(config))
        if lock is None:
            lock = _locks[id(config)] = ModelLock()
            weakref.finalize(config, _locks.pop, id(config), None).atexit = False
        return lock


def end_openmp_threads() -> None:
    """End the calling thread's OpenMP threads until it computes again."""
    _pause()(_SOFT)


@cache
def _pause() -> Callable[[int], object]:
    """Return OpenMP 5.0's ``omp_pause_resource_all`` of torch's own GNU OpenMP."""
    home = Path(torch.__file__).parent
    bundled = [*home.glob("lib/libgomp*"), *home.parent.glob("torch.libs/libgomp*")]
    for library in (*map(str, bundled), "libgomp.so.1"):
        with suppress(OSError, AttributeError):  # not loaded, or too old
            loaded = ctypes.CDLL(library, mode=os.RTLD_NOW | os.RTLD_NOLOAD)
            pause: Callable[[int], object] = loaded.omp_pause_resource_all
            return pause
    return lambda _: None
