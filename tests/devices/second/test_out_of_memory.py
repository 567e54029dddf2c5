"""Steps between a prompt's layers, and a device whose memory runs out."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from scarce_memory import Buffers, counted_buffers, fail_at_each
from tiny import ask, some_chunks

from ragkv import RagKV, StoreConfig
from ragkv.config import MEMORY
from ragkv.decode import batch

__all__ = ["counted_buffers"]
DEVICE = os.environ["RAGKV_SECOND_DEVICE"]
Make = Callable[..., RagKV]
CHUNKS = some_chunks(2)
PROMPTS = [ask(CHUNKS[at:] + CHUNKS[:at], f"\n\nQuestion {at}?") for at in range(2)]


@pytest.mark.parametrize(
    ("family", "method", "drafts"),
    [("llama", "query", False), ("llama", "full", True), ("gemma3", "query", True)],
)
def test_an_ordinary_step_between_layers_is_no_part_of_the_prompts_pass(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch, family: str, method: str, *, drafts: bool
) -> None:
    monkeypatch.setattr(batch, "MAX_WAIT_S", 0)
    kv = make_engine(family, device=DEVICE, store=StoreConfig(MEMORY, history_bytes=0))
    kv.loaded.model.generation_config.eos_token_id = None
    kv.precompute(CHUNKS)
    settings = {"max_new_tokens": 30, "drafts": drafts, "method": "full"}
    alone = kv.generate(PROMPTS[0], **settings).token_ids
    expected = kv.prefill(PROMPTS[1], method=method).logits
    compute, during = batch._compute, list[int]()

    def counting(*given: object) -> object:
        during.append(kv.status().running)
        return compute(*given)

    monkeypatch.setattr(batch, "_compute", counting)
    with kv.stream(PROMPTS[0], **settings) as stream:
        next(stream)
        found = kv.prefill(PROMPTS[1], method=method).logits
        list(stream)
    assert during.count(2) >= 3
    torch.testing.assert_close(found.cpu(), expected.cpu(), atol=1e-5, rtol=1e-5)
    assert stream.completion.token_ids == alone


@pytest.mark.parametrize("lasts", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize(
    "points", [pytest.param(10**6, marks=pytest.mark.slow, id="each"), pytest.param(5, id="some")]
)
@pytest.mark.parametrize("settings", [{"recompute_ratio": 0.3}, {"method": "full"}], ids=str)
def test_memory_that_runs_out_costs_the_request_alone(
    make_engine: Make,
    counted_buffers: Buffers,
    settings: dict[str, Any],
    points: int,
    *,
    lasts: bool,
) -> None:
    kv = make_engine(device=DEVICE, layers=2)
    kv.loaded.model.generation_config.eos_token_id = None
    kv.precompute(CHUNKS)

    def way() -> list[int]:
        return kv.generate(PROMPTS[0], max_new_tokens=5, **settings).token_ids

    ended, failed = fail_at_each(kv, way, counted_buffers, points=points, lasts=lasts)
    assert failed
    assert ended or lasts
