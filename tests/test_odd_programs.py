"""What the program around does with torch and with the model, before and between calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from tiny import some_chunks

from ragkv import RagKV
from ragkv.select import method_names

Make = Callable[..., RagKV]
CHUNKS = some_chunks(3)
PROMPT = [{"role": "user", "content": "\n\n".join(CHUNKS) + "\n\nWhat does the text say?"}]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def drawn(engine: RagKV, method: str) -> list[int]:
    engine.precompute(CHUNKS, method=method)
    return engine.generate(PROMPT, method=method, recompute_ratio=0.2, max_new_tokens=8).token_ids


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("method", [name for name in method_names() if "clip" not in name])
def test_torchs_default_dtype_changes_nothing(
    make_engine: Make, method: str, dtype: torch.dtype
) -> None:
    expected = drawn(make_engine(), method)
    engine = make_engine()
    with default_dtype(dtype):
        assert drawn(engine, method) == expected


def test_autocast_changes_nothing(make_engine: Make) -> None:
    expected = drawn(make_engine(), "query")
    engine = make_engine()
    with torch.autocast("cpu", torch.bfloat16):
        assert drawn(engine, "query") == expected
        assert torch.is_autocast_enabled("cpu")
        pieces = engine.stream(PROMPT, recompute_ratio=0.2, max_new_tokens=8)
        list(pieces)
        assert pieces.completion.token_ids == expected
        inside = engine.prefill(PROMPT, recompute_ratio=0.0)
    outside = make_engine()
    outside.precompute(CHUNKS)
    assert torch.equal(inside.logits, outside.prefill(PROMPT, recompute_ratio=0.0).logits)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cache_implementation", "static"),
        ("cache_implementation", "dynamic"),
        ("num_return_sequences", 2),
        ("prompt_lookup_num_tokens", 3),
    ],
)
def test_what_the_models_generation_config_says_of_the_work(
    make_engine: Make, name: str, value: object
) -> None:
    """It has no part in what is drawn, and would not do with a repaired cache."""
    expected = drawn(make_engine(), "query")
    engine = make_engine()
    setattr(engine.model.generation_config, name, value)
    assert drawn(engine, "query") == expected
    assert drawn(engine, "full") == drawn(make_engine(), "full")
