"""A thread pool that accepts work after the main thread has ended."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

Given = ParamSpec("Given")
Done = TypeVar("Done")


class Pool(ThreadPoolExecutor):
    """A thread pool that runs work in the calling thread once the main thread has ended.

    Python then ends the threads of all pools, and its own pools refuse work, although other threads
    of the program can still run.
    """

    def __init__(self, threads: int, name: str = "") -> None:
        super().__init__(threads, thread_name_prefix=name)
        self._ended = False

    def submit(
        self, work: Callable[Given, Done], /, *args: Given.args, **kwargs: Given.kwargs
    ) -> Future[Done]:
        """Submit work; RuntimeError after :meth:`shutdown`."""
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
        """End the threads after their work."""
        self._ended = True
        super().shutdown(wait, cancel_futures=cancel_futures)
