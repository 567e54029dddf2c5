"""Running a test's work in threads."""

import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

Value = TypeVar("Value")


def each_in_a_thread(work: Callable[[Value], object], values: Iterable[Value]) -> None:
    """Call ``work`` with every value, all at once, and wait for all calls."""
    threads = [threading.Thread(target=work, args=(value,), daemon=True) for value in values]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
