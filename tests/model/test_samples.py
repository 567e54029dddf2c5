"""Weights that are written through ``.data``, which torch does not count: adapters merged, files loaded."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import some_chunks, tiny_model
from torch.testing._internal.two_tensor import TwoTensor

from ragkv.model.fingerprint import state_of
from ragkv.model.samples import checksum_of

CHUNKS = some_chunks(3)
PROMPT = [{"role": "user", "content": "\n\n".join(CHUNKS) + "\n\nWhat does it say?"}]


def merge(weight: torch.Tensor) -> None:
    """Add a low rank, as adapters are merged; a vector is scaled."""
    if weight.ndim < 2:
        weight.data.mul_(1.01)
        return
    generator = torch.Generator().manual_seed(1)
    shape = [(weight.shape[0], 2), (2, weight.shape[1])]
    down, up = (torch.randn(each, generator=generator) for each in shape)
    weight.data.add_((down @ up).to(weight.dtype) * 0.01)


CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "merge": merge,
    "copy": lambda weight: weight.data.copy_(torch.randn(weight.shape)),
    "scale": lambda weight: weight.data.mul_(1.5),
    "numpy": lambda weight: weight.detach().float().numpy().__imul__(2),
    "view": lambda weight: weight.data.view(-1)[:].neg_(),
    "first row": lambda weight: weight.data[0].add_(1),
    "last row": lambda weight: weight.data[-1].add_(1),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("part", ["embed_tokens", "k_proj", "norm", "down_proj", "lm_head"])
def test_each_weight_and_each_way(part, change):
    model = tiny_model()
    weight = [weight for name, weight in model.named_parameters() if part in name][-1]
    before = state_of(model)
    assert state_of(model) == before
    CHANGES[change](weight)
    assert state_of(model) != before


@pytest.mark.parametrize("kept", ["bfloat16", "transposed", "apart", "inference", "wrapped"])
def test_however_it_is_kept(kept):
    model = torch.nn.Linear(300, 200)
    weight: torch.Tensor = model.weight.data
    if kept == "bfloat16":
        weight = weight.bfloat16()
    elif kept == "transposed":
        weight = weight.t()
    elif kept == "apart":
        weight = torch.zeros(400, 600)[::2, ::3]
    elif kept == "inference":
        with torch.inference_mode():
            weight = torch.zeros(200, 300)
    elif kept == "wrapped":
        weight = TwoTensor(weight.clone(), weight.clone())
    owner: Any = tiny_model()
    found = [checksum_of(owner, [weight], kept) for _ in range(2)]
    with torch.inference_mode():
        (weight.b if kept == "wrapped" else weight).add_(1)
    found.append(checksum_of(owner, [weight], kept))
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize("method", ["query", "cachecraft"])
@pytest.mark.parametrize("part", ["k_proj", "up_proj", "embed_tokens"])
def test_nothing_of_the_old_weights_is_used(make_engine, part, method):
    kv = make_engine()
    kv.precompute(CHUNKS)
    settings: dict[str, Any] = {"method": method, "max_new_tokens": 4}
    for _ in range(2):
        kv.generate(PROMPT, **settings)
        kv.wait()
    weight = next(weight for name, weight in kv.loaded.model.named_parameters() if part in name)
    merge(weight)
    answer = kv.generate(PROMPT, on_miss="skip", **settings)
    report = answer.report
    assert report.tokens.cached == report.tokens.sink
    assert {miss.reason for miss in answer.report.misses} == {"fingerprint"}
    assert answer.token_ids == kv.generate(PROMPT, method="full", max_new_tokens=4).token_ids
    assert kv.precompute(CHUNKS).new == len(CHUNKS)
    report = kv.generate(f"{CHUNKS[1]} And?", **settings).report
    assert report.tokens.cached > report.tokens.sink


def test_replaced_weights_are_let_go_of():
    model = tiny_model()
    state_of(model)
    old = weakref.ref(model.lm_head.weight.untyped_storage())
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.data + 1)
    state_of(model)
    gc.collect()
    assert old() is None
