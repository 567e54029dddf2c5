"""One thread at a time uses the model; its OpenMP threads end with its turn."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Self

import torch
from transformers import PreTrainedModel

from ragkv.errors import ModelInUseError
from ragkv.model.architecture import config_of

_SOFT = 1
"""OpenMP's ``omp_pause_soft``: keeps the program's settings."""


class ModelLock:
    """A reentrant lock around a model, whose release ends the thread's OpenMP pool.

    GNU OpenMP, in torch's wheels for Linux, keeps a pool of threads for every thread that
    ever computed. Once the pools have more threads than there are cores, threads sleep
    instead of spinning at each of a pass's thousands of barriers, and the time to first token
    is 1.25x as long on two cores. A framework that calls the model from a new thread each time
    gets there at once. A pool restarts within a millisecond.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self._owner: int | None = None
        self._turns = threading.Condition()
        self._users = 0
        self._asked = self._served = 0

    def acquire(self) -> None:
        """Wait until no other thread uses the model."""
        with self._turns:
            self._asked += 1
        try:
            self._lock.acquire()
        finally:
            with self._turns:
                self._served += 1
                self._turns.notify_all()
        self._depth += 1
        self._owner = threading.get_ident()

    def join(self) -> None:
        """Count one more engine over the model."""
        with self._turns:
            self._users += 1

    def leave(self) -> bool:
        """Count one engine less; return whether it was the last."""
        with self._turns:
            self._users -= 1
            return not self._users

    @property
    def is_mine(self) -> bool:
        """Whether the calling thread uses the model."""
        return self._owner == threading.get_ident()

    def refuse_reentry(self) -> None:
        """Raise ModelInUseError where the calling thread would wait for itself."""
        if self.is_mine:
            raise ModelInUseError(
                "This thread holds the model, for which others wait: call it outside of "
                "`with kv.turn():` and `with prefilled.decoding():`."
            )

    @contextmanager
    def after_waiters(self) -> Iterator[None]:
        """Hold the lock after all threads that wait for it now: for one step of long work.

        A thread that releases a lock and acquires it again mostly does so before any waiter.
        """
        if not self.is_mine:
            with self._turns:
                last = self._asked
                self._turns.wait_for(lambda: self._served >= last)
        with self:
            yield

    def release(self) -> None:
        """Let others use the model."""
        self._depth -= 1
        if not self._depth:
            self._owner = None
            end_openmp_threads()
        self._lock.release()

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


_locks: dict[int, ModelLock] = {}
_finding = threading.Lock()


def _reset_in_fork() -> None:
    """Drop, in a fork, the locks of threads that it does not have."""
    global _finding  # noqa: PLW0603  it may be held, too
    _locks.clear()
    _finding = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_in_fork)


def lock_of(model: PreTrainedModel) -> ModelLock:
    """Return the model's lock, the same for all its users.

    Its key is the configuration of the decoder stack, which is what a pass switches.
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
