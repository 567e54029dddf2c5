"""Threads that work can still be given to after the main thread has ended."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

Given = ParamSpec("Given")
Done = TypeVar("Done")


class Pool(ThreadPoolExecutor):
    """A thread pool that runs work in the calling thread once the main thread has ended.

    Python ends the threads of all pools then, and its own pools refuse work, while other threads
    of the program go on.
    """

    def __init__(self, threads: int, name: str = "") -> None:
        super().__init__(threads, thread_name_prefix=name)
        self._ended = False

    def submit(
        self, work: Callable[Given, Done], /, *args: Given.args, **kwargs: Given.kwargs
    ) -> Future[Done]:
        """Begin work; RuntimeError after :meth:`shutdown`."""
        try:
            return super().submit(work, *args, **kwargs)
        except RuntimeError:
            if self._ended:
                raise
        done: Future[Any] = Future()
        try:
            done.set_result(work(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001  the future's
            done.set_exception(error)
        return done

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: FBT001, FBT002
        """End the threads when their work is done."""
        self._ended = True
        super().shutdown(wait, cancel_futures=cancel_futures)
