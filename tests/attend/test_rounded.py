"""Attention in bfloat16 beside quantised products, on processors with such matrices (AMX)."""

from functools import partial

import numpy as np
import pytest
import torch
from grids import quantised_model
from threads import each_in_a_thread
from tiny import some_chunks, tiny_model, tiny_tokenizer
from transformers import PreTrainedModel

from ragkv import RagKV
from ragkv.attend import attention
from ragkv.attend.forward import SubsetPass, subset_forward
from ragkv.model import implementation
from ragkv.model.implementation import (
    allow_rounded_attention,
    has_quantised_products,
    implementation_for,
)
from ragkv.model.linear import in_float32
from ragkv.model.load import load_model
from ragkv.model.loaded import LoadedModel, ReusableModel
from ragkv.splice.buffer import SplicedCache

needs_products = pytest.mark.skipif(
    not has_quantised_products(), reason="this CPU has no such products"
)


@pytest.fixture(autouse=True)
def tiles(monkeypatch):
    """The processor has bfloat16 tiles; tests remove them with ``tiles(False)``."""
    monkeypatch.setattr(implementation, "has_bfloat16_tiles", lambda: True)
    return lambda has: monkeypatch.setattr(implementation, "has_bfloat16_tiles", lambda: has)


@pytest.fixture
def dtypes(monkeypatch):
    """The dtypes of the layers' attention, whichever operation of torch computes it."""
    found = []
    own = attention.attend

    def record(query, key, value, *given):
        found.append({query.dtype, key.dtype, value.dtype})
        return own(query, key, value, *given)

    monkeypatch.setattr(attention, "attend", record)
    return found


def reusable(model: PreTrainedModel) -> ReusableModel:
    loaded: LoadedModel = load_model(model, tiny_tokenizer())
    assert isinstance(loaded, ReusableModel)
    return loaded


def logits(loaded: ReusableModel, count: int) -> torch.Tensor:
    """The logits behind a pass over the last ``count`` of 200 tokens."""
    ids = np.arange(200, dtype=np.int32) % 90
    cache = SplicedCache(loaded, 0, spare=200)
    with in_float32(loaded.model):
        subset_forward(loaded, SubsetPass(ids[:-count], np.arange(200 - count), cache))
    return subset_forward(loaded, SubsetPass(ids, np.arange(200 - count, 200), cache))


@needs_products
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "gemma3"])
def test_passes_over_quantised_weights_round_attention(family, dtypes, tiles):
    loaded = reusable(quantised_model(family))
    found = logits(loaded, 100)
    assert {torch.bfloat16} in dtypes
    assert dtypes[-1] == {torch.float32}, "the last layer's only row"
    tiles(False)
    dtypes.clear()
    exact = logits(loaded, 100)
    assert {torch.bfloat16} not in dtypes
    assert found.dtype == torch.float32
    assert 0 < (found - exact).abs().max() < 0.1 * exact.std()


@needs_products
def test_few_rows_are_not_rounded(dtypes):
    loaded = reusable(quantised_model())
    dtypes.clear()
    logits(loaded, 15)
    assert {torch.bfloat16} not in dtypes


def test_other_weights_and_float32_are_not_rounded(dtypes):
    ordinary, exact = reusable(tiny_model("llama")), reusable(quantised_model())
    logits(ordinary, 100)
    with in_float32(exact.model):
        logits(exact, 100)
    assert {torch.bfloat16} not in dtypes


def test_a_thread_rounds_only_in_its_own_block():
    rows = torch.randn(1, 4, 32, 16)

    def chosen() -> str:
        with torch.no_grad():
            return implementation_for("attention", rows)

    found = []

    def elsewhere(_: object) -> None:
        found.append(chosen())

    with allow_rounded_attention():
        with allow_rounded_attention():
            pass
        assert chosen() == "rounded"
        each_in_a_thread(elsewhere, [None])
    assert len(found) == 1
    assert found[0] != "rounded"
    assert chosen() != "rounded"


@needs_products
@pytest.mark.parametrize("method", ["query", "epic", "cacheblend"])
def test_with_all_recomputed_it_is_a_full_prefill(method):
    chunks = some_chunks()
    prompt = "\n\n".join(chunks) + "\n\nWhat does it say?"
    with RagKV(quantised_model(), tiny_tokenizer(), store=":memory:") as kv:
        kv.precompute(chunks)
        prefill = partial(kv.prefill, prompt, history=False)
        full, repaired = prefill(method="full"), prefill(method=method, recompute_ratio=1)
        assert repaired.report.tokens.recomputed > 50
        assert (full.logits - repaired.logits).abs().max() < 0.1 * full.logits.std()
        for ratio in (0, 0.3):
            assert prefill(method=method, recompute_ratio=ratio).logits.isfinite().all()
