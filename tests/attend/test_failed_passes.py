"""A pass that fails leaves the cache's rows, the model and other passes as they were."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from tiny import ask, some_chunks, tiny_model
from torch.nn import functional

from ragkv import RagKV
from ragkv.attend.forward import SubsetPass, joint_forward, ordinary_forward, subset_forward
from ragkv.model import linear
from ragkv.model.architecture import backbone_of
from ragkv.model.linear import fast_linear_layers

CHUNKS = some_chunks(2)
PROMPTS = [ask(CHUNKS, f"\n\nQuestion {at}?") for at in range(2)]
FORWARD: dict[str, Callable[[Any, list[SubsetPass]], object]] = {
    "ordinary": lambda loaded, passes: ordinary_forward(loaded, passes[0]),
    "subset": lambda loaded, passes: subset_forward(loaded, passes[0]),
    "joint": joint_forward,
}


@contextmanager
def failing(kv: RagKV, layer: int, part: str) -> Iterator[None]:
    """Let memory run out before a layer's attention or its feed-forward."""

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    hooked = getattr(backbone_of(kv.loaded.model).layers[layer], part)
    hook = hooked.register_forward_pre_hook(fail)
    try:
        yield
    finally:
        hook.remove()


def steps(kv: RagKV, count: int = 1) -> list[SubsetPass]:
    """Return a step of each prompt, behind its own rows."""
    out = []
    for prompt in PROMPTS:
        found = kv.prefill(prompt)
        ids = np.append(found.token_ids, np.arange(7, 7 + count)).astype(np.int32)
        rows = np.arange(len(ids) - count, len(ids))
        out.append(SubsetPass(ids, rows, found.cache, keep=count))
    return out


@pytest.mark.parametrize("kind", list(FORWARD))
@pytest.mark.parametrize(("layer", "part"), [(0, "self_attn"), (2, "mlp"), (3, "self_attn")])
@pytest.mark.parametrize("count", [1, 3])
def test_a_step_that_failed_can_be_computed_again(make_engine, kind, layer, part, count):
    kv = make_engine()
    kv.precompute(CHUNKS)
    forward, passes = FORWARD[kind], steps(kv, count)
    expected = forward(kv.loaded, passes)
    for one, again in zip(passes, steps(kv, count), strict=True):  # as before the step
        one.cache.truncate(again.cache.get_seq_length())
    with failing(kv, layer, part), pytest.raises(torch.OutOfMemoryError):
        forward(kv.loaded, passes)
    for one in passes:
        lengths = {each.get_seq_length() for each in one.cache.layers}
        assert lengths == {len(one.ids) - count}
        assert {each.slots for each in one.cache.layers} == {None}
    torch.testing.assert_close(forward(kv.loaded, passes), expected, atol=0, rtol=0)


@pytest.mark.parametrize("fails_at", [1, 2])
def test_a_buffer_that_cannot_grow_stays_as_it_is(make_engine, monkeypatch, fails_at):
    kv = make_engine()
    kv.precompute(CHUNKS)
    cache = kv.prefill(PROMPTS[0]).cache
    before = [part.clone() for part in (cache.keys, cache.values)]
    capacity, calls = before[0].shape[2], list[int]()
    pad = functional.pad

    def scarce(*given):
        calls.append(1)
        if len(calls) == fails_at:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return pad(*given)

    with monkeypatch.context() as patch:
        patch.setattr(functional, "pad", scarce)
        with pytest.raises(torch.OutOfMemoryError):
            cache.write_at(None, length=capacity + 1)
    for part, was in zip((cache.keys, cache.values), before, strict=True):
        assert part.shape == was.shape
        assert torch.equal(part, was)
    for layer in cache.layers:
        assert layer.keys.shape[2] == layer.values.shape[2] == capacity
    cache.write_at(None, length=capacity + 1)
    assert cache.keys.shape[2] == cache.values.shape[2] == cache.layers[1].values.shape[2]
    assert cache.keys.shape[2] > capacity


@pytest.mark.parametrize("name", ["state_of", "total_bytes"])
def test_layers_keep_their_forward_where_weights_cannot_be_looked_at(monkeypatch, name):
    model = tiny_model()

    def fail(_):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(linear, name, fail)
        with pytest.raises(MemoryError), fast_linear_layers(model):
            pass
    assert not [each for each in model.modules() if "forward" in vars(each)]
    with fast_linear_layers(model):
        assert "forward" in vars(model.model.layers[0].mlp.up_proj)
    assert not [each for each in model.modules() if "forward" in vars(each)]


@pytest.mark.parametrize("inner", [False, True])
def test_a_pass_within_an_ordinary_call_gives_the_layers_back(*, inner):
    model = tiny_model()
    with fast_linear_layers(model, ordinary=True):
        with fast_linear_layers(model, ordinary=inner):
            assert "forward" in vars(model.model.layers[0].mlp.up_proj)
        assert "forward" in vars(model.model.layers[0].mlp.up_proj)
    assert not [each for each in model.modules() if "forward" in vars(each)]
