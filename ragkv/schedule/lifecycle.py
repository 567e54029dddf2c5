"""The running calls of an engine, and its closing."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import ParamSpec, Self, TypeVar

from ragkv.errors import ClosedError

Given = ParamSpec("Given")
Done = TypeVar("Done")
T = TypeVar("T")


class Lifecycle:
    """Counts the running calls; each call is a ``with`` block."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._under_way = 0
        self._closed = False
        self._process = os.getpid()

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of the engine's, without its threads."""
        return self._process != os.getpid()

    def __enter__(self) -> Self:
        if self.forked:  # the fork can have copied a locked condition
            raise ClosedError(
                "this RagKV was made before a fork: make one in each process, after the fork. The "
                "model can be loaded before it: RagKV(kv.loaded, store=...)"
            )
        with self._changed:
            if self._closed:
                raise ClosedError("this RagKV is closed: make another one")
            self._under_way += 1
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._under_way -= 1
            self._changed.notify_all()

    def run_in_thread(
        self, run: Callable[Given, Done], start: Callable[[Callable[Given, Done]], T]
    ) -> T:
        """Begin a call that ``start`` runs in a separate thread; it ends when ``run`` returns."""

        def run_and_end(*args: Given.args, **kwargs: Given.kwargs) -> Done:
            try:
                return run(*args, **kwargs)
            finally:
                self.__exit__()

        self.__enter__()
        try:
            return start(run_and_end)
        except BaseException:  # the thread could not be started
            self.__exit__()
            raise

    def close(self) -> bool:
        """Refuse new calls and wait for the running ones; return whether the engine was open."""
        with self._changed:
            was_open, self._closed = not self._closed, True
            self._changed.wait_for(lambda: not self._under_way)
        return was_open
