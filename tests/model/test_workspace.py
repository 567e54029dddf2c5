"""The memory that requests use in turn."""

import gc
import weakref

import pytest
import torch
from threads import each_in_a_thread
from tiny import tiny_model, tiny_tokenizer

from ragkv import RagKV, StoreConfig
from ragkv.chunk.sinks import SINKS_KEPT
from ragkv.config import MEMORY
from ragkv.model import memory
from ragkv.model.calls import cache_argument
from ragkv.model.workspace import Workspace, uninitialised

A, B = "The tower was built in 1889. ", "The bridge is older than the tower. "
PROMPT = f"Answer from this:\n{A}\n{B}\nWhen was it built?"
SHAPE = (2, 3, 50, 8)


def test_memory_is_used_again_when_it_is_free():
    workspace = Workspace()
    first = workspace.uninitialised(SHAPE, torch.float32)
    where = first.data_ptr()
    assert first.shape == SHAPE
    del first
    for shape, dtype in ((SHAPE, torch.float32), ((60, 40), torch.bfloat16)):
        tensor = workspace.uninitialised(shape, dtype)
        assert (tensor.shape, tensor.dtype, tensor.data_ptr()) == (shape, dtype, where)
        del tensor


def test_a_containers_limit_is_the_memory(monkeypatch, tmp_path):
    machines = memory.total_bytes(torch.device("cpu"))
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(memory, "_CONTAINER_LIMITS", (tmp_path / "none", limit))
    for text, total in (("max\n", machines), ("1073741824\n", 1 << 30), (f"{1 << 60}", machines)):
        limit.write_text(text)
        assert memory.total_bytes(torch.device("cpu")) == total
        assert memory.budget_of(None) == total // 8


def test_tensors_may_be_empty():
    assert uninitialised((2, 0, 3), torch.float32).shape == (2, 0, 3)


@pytest.mark.parametrize("part", ["itself", "view", "numpy", "storage"])
def test_memory_that_is_held_is_nobody_elses(part):
    workspace = Workspace()
    tensor = workspace.uninitialised(SHAPE, torch.float32).fill_(1)
    held = {
        "itself": tensor,
        "view": tensor[1, :, 3:5],
        "numpy": tensor.numpy(),
        "storage": tensor.untyped_storage(),
    }[part]
    del tensor
    others = [workspace.uninitialised(SHAPE, torch.float32).fill_(2) for _ in range(3)]
    assert len({other.data_ptr() for other in others}) == 3
    bits = bytes(held) if part == "storage" else None
    if bits is None:
        assert (torch.as_tensor(held) == 1).all()
    else:
        assert torch.frombuffer(bytearray(bits), dtype=torch.float32).eq(1).all()


def test_little_is_not_kept_in_much():
    workspace = Workspace()
    large = workspace.uninitialised((1 << 20,), torch.uint8)
    where = large.data_ptr()
    del large
    assert workspace.uninitialised((1 << 18,), torch.uint8).data_ptr() == where
    small = workspace.uninitialised((1 << 16,), torch.uint8)
    assert workspace.nbytes < 1 << 17
    workspace.release()
    assert workspace.nbytes == 0
    small.fill_(1)  # still its own


def test_as_many_pieces_are_kept_as_are_used_at_once():
    workspace = Workspace()
    held = [workspace.uninitialised(SHAPE, torch.float32) for _ in range(3)]
    places = {tensor.data_ptr() for tensor in held}
    held.clear()
    held = [workspace.uninitialised(SHAPE, torch.float32) for _ in range(3)]
    assert {tensor.data_ptr() for tensor in held} == places
    held.clear()
    for _ in range(65):  # one at a time from now on
        workspace.uninitialised(SHAPE, torch.float32)
    assert len(workspace._pieces) == 1


def test_threads_never_share_memory():
    workspace, wrong = Workspace(), []

    def use(number):
        for _ in range(200):
            tensor = workspace.uninitialised(SHAPE, torch.int64).fill_(number)
            if not bool((tensor == number).all()):
                wrong.append(number)

    each_in_a_thread(use, range(4))
    assert wrong == []


def test_what_is_left_of_another_prompt_is_never_seen(make_engine, monkeypatch):
    monkeypatch.setattr("ragkv.splice.buffer._MOST_SPARE_ROWS", 20)
    kv = make_engine(store=StoreConfig(MEMORY, history_bytes=0))
    kv.precompute([A, B])
    overrides = {"method": "query", "recompute_ratio": 0.2}
    expected = kv.prefill(PROMPT, **overrides).logits
    answer = kv.generate(PROMPT, max_new_tokens=40, **overrides).token_ids  # the buffer grows
    workspace = kv.loaded.workspace
    (piece,) = workspace._pieces
    for _ in range(2):
        piece.flat[:] = 0xFF  # NaN everywhere
        assert torch.equal(kv.prefill(PROMPT, **overrides).logits, expected)
        piece.flat[:] = 0xFF
        assert kv.generate(PROMPT, max_new_tokens=40, **overrides).token_ids == answer
    assert workspace._pieces == [piece]  # it was used


@pytest.mark.parametrize("method", ["query", "reuse"])
def test_a_prefilled_prompt_keeps_its_cache(make_engine, method):
    kv = make_engine()
    kv.precompute([A, B])
    prefilled = kv.prefill(PROMPT, method=method, recompute_ratio=0.2)
    layers = [(layer.keys.clone(), layer.values.clone()) for layer in prefilled.cache.layers]
    for text in (A, B, PROMPT):
        kv.generate(f"{text}{PROMPT}", max_new_tokens=2)
    for layer, (keys, values) in zip(prefilled.cache.layers, layers, strict=True):
        length = prefilled.cache.get_seq_length()
        assert torch.equal(layer.keys[:, :, :length], keys[:, :, :length])
        assert torch.equal(layer.values[:, :, :length], values[:, :, :length])


def test_a_closed_engine_keeps_no_memory(make_engine):
    kv = make_engine()
    kv.precompute([A])
    kv.generate(PROMPT, max_new_tokens=2)
    assert kv.loaded.workspace.nbytes > 0
    kv.close()
    assert kv.loaded.workspace.nbytes == 0


def test_a_long_answer_keeps_one_buffer(make_engine):
    kv = make_engine()
    kv.precompute([A, B])
    out = kv.prefill(PROMPT, method="query", recompute_ratio=0.2)
    before = [out.cache.layer(index) for index in range(len(out.cache.layers))]
    length, capacity = out.cache.get_seq_length(), out.cache.keys.shape[2]
    fresh = torch.tensor([[5] * (capacity - length + 1)])
    with torch.no_grad():
        kv.loaded.model(fresh, **cache_argument(kv.loaded.model, out.cache), use_cache=True)
    assert out.cache.get_seq_length() == capacity + 1
    assert out.cache.keys.shape[2] >= capacity + 256
    for index, (keys, values) in enumerate(before):
        layer, now = out.cache.layers[index], out.cache.layer(index)
        assert layer.keys.data_ptr() == now[0].data_ptr() == out.cache.keys[index].data_ptr()
        assert layer.values.data_ptr() == now[1].data_ptr() == out.cache.values[index].data_ptr()
        assert torch.equal(now[0][:, :length], keys[:, :length])
        assert torch.equal(now[1][:, :length], values[:, :length])


def test_the_sinks_last_used_stay(make_engine):
    kv = make_engine()
    first = kv._reuse.corpus.sinks.of("First of all")
    for number in range(SINKS_KEPT - 1):
        kv._reuse.corpus.sinks.of(f"For reader {number}")
    assert kv._reuse.corpus.sinks.of("First of all") is first
    kv._reuse.corpus.sinks.of("One more")
    assert len(kv._reuse.corpus.sinks._kept) == SINKS_KEPT
    assert kv._reuse.corpus.sinks.of("First of all") is first
    assert "For reader 0" not in kv._reuse.corpus.sinks._kept


def test_a_closed_engine_lets_go_of_its_model():
    """At once: on a GPU the weights would stay until the garbage collector comes by."""
    kv = RagKV(tiny_model(), tiny_tokenizer(), store=":memory:")
    kv.precompute([A, B])
    kv.generate(PROMPT, max_new_tokens=2, method="query")
    kv.prefill(PROMPT, method="cacheblend")
    model = weakref.ref(kv.loaded.model)
    gc.collect()
    gc.disable()
    try:
        kv.close()
        del kv
        assert model() is None
    finally:
        gc.enable()
