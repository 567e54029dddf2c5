"""The lock around the model, and the threads that it ends."""

import threading

import pytest
from fresh import output_of
from served import until

from ragkv.model import lock as module
from ragkv.model.lock import ModelLock

GNU = hasattr(module._pause(), "argtypes")

COUNTING = """
import threading, time, torch
from pathlib import Path
from ragkv.model.lock import ModelLock, end_openmp_threads

def threads():
    return len(list(Path("/proc/self/task").iterdir()))

def there_are(expected):
    until = time.monotonic() + 10
    while threads() != expected and time.monotonic() < until:
        time.sleep(0.01)  # a thread that has ended may be listed a moment longer
    return threads() == expected

def compute():
    return torch.ones(1 << 22).mul_(2).sum().item()

torch.set_num_threads(3)
alone = threads()
assert compute() == 1 << 23
assert there_are(alone + 2), "nothing to end"
end_openmp_threads()
assert there_are(alone)
lock = ModelLock()
with lock:
    with lock:
        assert compute() == 1 << 23
    assert there_are(alone + 2)  # still in use
assert there_are(alone)

def work():
    with lock:
        compute()
    found.append(there_are(alone + 1))  # the worker itself

found = []
worker = threading.Thread(target=work)
worker.start()
worker.join()
assert found == [True]
"""


def test_the_model_is_used_by_one_thread_at_a_time():
    lock, held = ModelLock(), threading.Event()
    order: list[str] = []

    def second():
        held.set()
        with lock:
            order.append("second")

    thread = threading.Thread(target=second, daemon=True)
    with lock, lock:
        thread.start()
        assert held.wait(10)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def test_long_work_lets_those_who_wait_go_first():
    lock = ModelLock()
    order: list[str] = []

    def ask():
        with lock:
            order.append("request")

    thread = threading.Thread(target=ask, daemon=True)
    for step in range(200):
        with lock:
            order.append("step")
            if step == 100:
                thread.start()
                until(lock.is_wanted)
    thread.join()
    assert order.index("request") == 101


def test_long_work_inside_a_request_waits_for_nobody():
    lock = ModelLock()
    thread = threading.Thread(target=lock.acquire, daemon=True)
    with lock:
        thread.start()
        until(lock.is_wanted)
        with lock:
            pass
    thread.join(10)
    assert not thread.is_alive()


def test_an_error_leaves_the_lock_open():
    lock = ModelLock()
    with pytest.raises(ZeroDivisionError), lock, lock:
        raise ZeroDivisionError
    with ModelLock():
        assert lock._depth == 0
    thread = threading.Thread(target=lock.acquire, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()


def test_threads_end_when_the_outermost_leaves(monkeypatch):
    ended: list[int] = []
    monkeypatch.setattr(module, "end_openmp_threads", lambda: ended.append(1))
    lock = ModelLock()
    with lock:
        with lock:
            pass
        assert not ended
    assert len(ended) == 1


def test_without_gnu_openmp_nothing_is_ended(monkeypatch):
    def missing(*_, **__):
        raise OSError

    monkeypatch.setattr(module.ctypes, "CDLL", missing)
    module._pause.cache_clear()
    try:
        module.end_openmp_threads()
    finally:
        module._pause.cache_clear()


@pytest.mark.skipif(not GNU, reason="torch computes with another OpenMP")
def test_no_pool_outlives_the_models_use():
    output_of(COUNTING)
