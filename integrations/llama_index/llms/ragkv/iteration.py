"""Run a blocking iterator off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")
_END: Any = object()


async def iterate_in_thread(
    make: Callable[[], Generator[T, None, None]],
) -> AsyncGenerator[T, None]:
    """Yield what a generator yields; all of it runs in one thread of its own.

    One thread, because torch's gradient modes and the model's lock belong to a thread.
    Leaving early closes the generator, in that thread too.
    """
    loop = asyncio.get_running_loop()
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ragkv-stream")
    blocking: list[Generator[T, None, None]] = []

    def step() -> T:
        if not blocking:
            blocking.append(make())
        return next(blocking[0], _END)

    def stop() -> None:
        for generator in blocking:
            generator.close()

    try:
        while (item := await loop.run_in_executor(thread, step)) is not _END:
            yield item
    finally:
        thread.submit(stop)
        thread.shutdown(wait=False)
