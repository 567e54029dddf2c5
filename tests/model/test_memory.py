"""How many bytes keys and values may take, and which errors say that memory ran out."""

import gc
import weakref
from contextlib import closing
from types import SimpleNamespace

import pytest
import torch
from tiny import tiny_model, tiny_tokenizer

from ragkv import RagKV, StoreConfig
from ragkv.config import MEMORY
from ragkv.errors import ConfigError, OutOfMemoryError, UnsupportedModelError
from ragkv.model import memory
from ragkv.model.memory import free_bytes, pass_bytes, room_for_kv, typed_memory_errors
from ragkv.store import open_store

GB = 10**9
CUDA = torch.device("cuda")


@pytest.fixture(scope="module")
def kv():
    with RagKV(tiny_model(), tiny_tokenizer(), store=":memory:") as engine:
        yield engine


def a_gpu(patch: pytest.MonkeyPatch, **numbers: float) -> None:
    """Let CUDA say this of a device's memory."""
    said = {"free": 60 * GB, "total": 80 * GB, "reserved": 20 * GB, "allocated": 15 * GB} | numbers
    patch.setattr(torch.cuda, "mem_get_info", lambda _: (said["free"], said["total"]))
    patch.setattr(torch.cuda, "memory_reserved", lambda _: said["reserved"])
    patch.setattr(torch.cuda, "memory_allocated", lambda _: said["allocated"])
    fraction = said.get("fraction")
    if fraction is None:
        patch.delattr(torch.cuda, "get_per_process_memory_fraction", raising=False)
    else:
        patch.setattr(
            torch.cuda, "get_per_process_memory_fraction", lambda _: fraction, raising=False
        )


@pytest.mark.parametrize(
    ("numbers", "free"),
    [
        ({}, 65),  # what nobody has, and what torch's allocator keeps
        ({"free": 2 * GB}, 7),  # another process has most of it
        ({"fraction": 0.5}, 25),  # torch's limit of 40 GB
        ({"fraction": 1.0}, 65),
        ({"fraction": 0.2}, 5),  # the limit is less than what is reserved
    ],
)
def test_what_is_free_on_a_gpu(monkeypatch, numbers, free):
    a_gpu(monkeypatch, **numbers)
    assert free_bytes(CUDA) == free * GB


def test_what_weights_tiers_and_a_pass_leave(kv, monkeypatch):
    loaded = kv.loaded
    taken = pass_bytes(loaded, 1000)
    monkeypatch.setattr(memory, "total_bytes", lambda _: 20 * GB)
    weights = sum(weight.nbytes for weight in kv.loaded.model.parameters())
    left = room_for_kv(loaded, 1000, running=GB, tiers=3 * GB)
    assert left == (17 * GB - weights - taken) // 2  # the others' part of the machine is theirs
    a_gpu(monkeypatch)
    there = SimpleNamespace(device=CUDA, model=kv.loaded.model, dtype=loaded.dtype)
    there.architecture = loaded.architecture
    assert room_for_kv(there, 1000, running=5 * GB, tiers=3 * GB) == 67 * GB - pass_bytes(
        there, 1000
    )


def test_a_pass_takes_more_with_more_tokens(kv):
    sizes = [pass_bytes(kv.loaded, tokens) for tokens in (10, 100, 1000, 10_000, 100_000)]
    assert sizes == sorted(sizes)
    assert sizes[0] >= 10 * 64 * 4 * 9


def test_a_request_waits_where_the_default_has_no_room(kv, monkeypatch):
    requests, seen = kv._requests, []
    assert requests.kv_bytes is None
    assert requests.tiers == 2 * memory.budget_of(None)

    def none(loaded, tokens, *, running, tiers):
        seen.append((tokens, running, tiers))
        return running

    monkeypatch.setattr("ragkv.schedule.requests.room_for_kv", none)
    row = kv.loaded.architecture.values_per_token * 4
    with requests.turn(kv.loaded, tokens=70) as first:
        first.prefilled()
        later = iter([False, False, True])
        with (
            pytest.raises(Exception, match=r"^$"),
            requests.turn(kv.loaded, tokens=50, cancelled=lambda: next(later)),
        ):
            pass
    assert set(seen) == {(50, 70 * row, requests.tiers)}
    with requests.turn(kv.loaded, tokens=10**9):  # alone, whatever its size
        pass


def test_tiers_count_while_their_engines_are_open(kv):
    before = kv._requests.tiers
    store = StoreConfig(MEMORY, memory_bytes=100, history_bytes=11)
    with RagKV(kv.loaded, store=store, namespace="other"):
        assert kv._requests.tiers == before + 111
    assert kv._requests.tiers == before


def test_tiers_of_a_device_are_those_that_lie_on_it():
    from ragkv.engine.settings import tier_bytes

    device = torch.device("meta")
    settings = StoreConfig(MEMORY, device_bytes=123)
    with closing(open_store(settings, device=device)) as store:
        assert tier_bytes(settings, store.tiers, device) == 123


@pytest.mark.parametrize(
    ("error", "lacks"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (OutOfMemoryError("typed"), True),
        (RuntimeError("shape mismatch"), False),
        (ConfigError("out of memory"), False),
        (UnsupportedModelError("none, but RuntimeError: out of memory"), False),
        (OSError("out of memory"), False),
    ],
    ids=repr,
)
def test_which_errors_say_that_memory_ran_out(error, lacks):
    assert memory.is_out_of_memory(error) is lacks


def test_the_message_says_what_is_needed_what_there_is_and_what_to_set(kv, monkeypatch):
    monkeypatch.setattr(memory, "total_bytes", lambda _: 20 * GB)
    text = str(memory.lack_of_memory(kv.loaded, 1_000_000, others=3))
    assert "1000000 tokens" in text
    assert "need 1.02 GB for keys and values" in text
    assert "the machine has 20 GB" in text
    assert "3 other requests run" in text
    assert all(name in text for name in ("kv_bytes", "max_running", "max_new_tokens"))


@pytest.mark.parametrize("chained", [False, True])
def test_a_typed_error_keeps_nothing(*, chained):
    """Neither local variables nor what functions have around them, of errors before it, too."""

    class Large:
        pass

    made = []

    @typed_memory_errors
    def fails():
        around, local = Large(), Large()
        made.extend(map(weakref.ref, (around, local)))

        def inner():
            assert around
            if chained:
                fails_first()
            raise MemoryError("9 GiB")

        def fails_first():
            try:
                int("none")
            except ValueError:
                raise MemoryError("9 GiB") from None

        inner()

    gc.disable()
    try:
        with pytest.raises(OutOfMemoryError, match="9 GiB") as caught:
            fails()
        assert [each() for each in made] == [None, None]
    finally:
        gc.enable()
    assert "in inner" in caught.value.__notes__[0]


def test_other_errors_stay_as_they_are():
    with pytest.raises(ZeroDivisionError):
        typed_memory_errors(lambda: 1 / 0)()
