"""Memory that runs out at the n-th allocation, and what has to be as before then."""

import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ragkv import RagKV
from ragkv.attend import interface
from ragkv.decode.batch import batch_of
from ragkv.errors import OutOfMemoryError
from ragkv.model import workspace
from ragkv.model.linear import _patches_of
from ragkv.splice.buffer import SplicedCache

Buffers = list[weakref.ref[SplicedCache]]
KINDS: tuple[Callable[[], Exception], ...] = (
    lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    lambda: RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9"),
    lambda: MemoryError("Unable to allocate 9. GiB"),
)


class ScarceMemory:
    """Counts the allocations in its blocks, of all threads; one of them fails, or all from it on.

    Attributes
    ----------
    count
        Allocations so far.
    fails_at
        Number of the first that fails; None: none.
    lasts
        Whether those after it fail, too.
    """

    def __init__(self, fails_at: int | None = None, *, lasts: bool = False) -> None:
        self.count, self.fails_at, self.lasts = 0, fails_at, lasts
        self._numbers = itertools.count(1)

    def allocate(self) -> None:
        """Count one; raise if it is to fail."""
        self.count = number = next(self._numbers)
        if self.fails_at is not None and (
            number == self.fails_at or (self.lasts and number > self.fails_at)
        ):
            make = KINDS[self.fails_at % len(KINDS)]
            raise make()

    @contextmanager
    def in_this_thread(self) -> Iterator[None]:
        with _Counting(self):
            _here.append(self)
            try:
                yield
            finally:
                _here.remove(self)


_here: list[ScarceMemory] = []


class _Counting(TorchDispatchMode):
    """Sees each operator of its thread."""

    def __init__(self, scarce: ScarceMemory) -> None:
        super().__init__()
        self._scarce = scarce

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _allocates(func):
            self._scarce.allocate()
        return func(*args, **(kwargs or {}))


@cache
def _allocates(func: Any) -> bool:
    """Whether an operator returns a tensor that is none of its arguments, nor a view of one."""
    return any(out.alias_info is None and "Tensor" in str(out.type) for out in func._schema.returns)


@pytest.fixture
def counted_buffers(monkeypatch: pytest.MonkeyPatch) -> Buffers:
    """Count numpy's allocations of buffers, too; return the buffers that were made, weakly."""
    made: Buffers = []
    own = SplicedCache.__init__

    def noted(self: SplicedCache, *args: Any, **given: Any) -> None:
        made.append(weakref.ref(self))
        own(self, *args, **given)

    def empty(*args: Any, **given: Any) -> Any:
        for scarce in _here:
            scarce.allocate()
        return np.empty(*args, **given)

    monkeypatch.setattr(SplicedCache, "__init__", noted)
    monkeypatch.setattr(workspace, "np", SimpleNamespace(empty=empty, uint8=np.uint8))
    return made


def state_of(kv: RagKV) -> dict[str, object]:
    """Return what no failed call may change."""
    loaded, modules = kv.loaded, list(kv.loaded.model.modules())
    fast = _patches_of(kv.loaded.model)
    return {
        "attention": kv.loaded.model.config._attn_implementation,
        "passes": len(interface._running.passes),
        "hooks": sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in modules),
        "replaced": [type(m).__name__ for m in modules if "forward" in vars(m)],
        "threads": len(fast.threads),
        "queue": (kv.status().running, kv.status().waiting, kv._requests._prefilling),
        "answers": (batch_of(loaded).answers, batch_of(loaded).computes_steps),
        "lock": (kv._lock._owner, len(kv._lock._queue)),
        "lent": [piece.nbytes for piece in loaded.workspace._pieces if piece.is_lent],
    }


def outcome(call: Callable[[], Any]) -> Any:
    """Return what a call returns, or its error: nothing but OutOfMemoryError may come of it."""
    try:
        return call()
    except OutOfMemoryError as error:
        return error


def spread(count: int, points: int) -> range:
    """Return so many of the numbers from 1 to ``count``, or all."""
    return range(1, count + 1, max(1, count // points))


def allocations(call: Callable[[], object]) -> int:
    """Return how often a call allocates."""
    with (counting := ScarceMemory()).in_this_thread():
        call()
    return counting.count


@contextmanager
def nothing_left(kv: RagKV, made: Buffers, where: str) -> Iterator[None]:
    """Demand that the block changes nothing that no failed call may, and leaves no buffer.

    Not even to the garbage collector: a GPU's memory is not what makes it run.
    """
    state = state_of(kv)
    gc.collect()
    made.clear()
    gc.disable()
    try:
        yield
        assert {"at": where, **state_of(kv)} == {"at": where, **state}
        assert not [each for each in made if each() is not None], where
    finally:
        gc.enable()


def fail_at_each(
    kv: RagKV,
    way: Callable[[], Any],
    made: Buffers,
    *,
    points: int,
    lasts: bool = False,
    before: Callable[[], object] = lambda: None,
) -> tuple[int, int]:
    """Let memory run out at some allocations of a way, or at each; check what is left each time.

    Parameters
    ----------
    way
        Returns what it computes, the same each time.
    points
        At how many.
    before
        Called before each time.

    Returns
    -------
    tuple
        How often the way came to its end all the same, and how often it had an error.
    """
    for _ in range(2):  # passes are captured as graphs at their second use
        before()
        expected = way()
    before()
    count, ended, failed = allocations(way), 0, 0
    assert count > 20
    for number in spread(count, points):
        where = f"allocation {number} of {count}"
        before()
        with nothing_left(kv, made, where):
            scarce = ScarceMemory(number, lasts=lasts)
            with scarce.in_this_thread():
                found = outcome(way)
        assert scarce.count >= number, where
        if isinstance(found, OutOfMemoryError):
            failed += 1
            assert "max_running" in str(found), where
        else:
            ended += 1
            assert found == expected, where
        before()
        assert way() == expected, where
    return ended, failed
