"""Steps between a prompt's layers, and a device whose memory runs out."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from tiny import ask, some_chunks

from ragkv import RagKV, StoreConfig
from ragkv.config import MEMORY
from ragkv.decode import batch

DEVICE = os.environ["RAGKV_SECOND_DEVICE"]
Make = Callable[..., RagKV]
CHUNKS = some_chunks(4)
PROMPTS = [ask(CHUNKS[at:] + CHUNKS[:at], f"\n\nQuestion {at}?") for at in range(4)]


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("method", ["query", "full"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_an_ordinary_step_between_layers_is_no_part_of_the_prompts_pass(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch, family: str, method: str, *, drafts: bool
) -> None:
    monkeypatch.setattr(batch, "MAX_WAIT_S", 0)
    kv = make_engine(family, device=DEVICE, store=StoreConfig(MEMORY, history_bytes=0))
    kv.model.generation_config.eos_token_id = None
    kv.precompute(CHUNKS)
    settings = {"max_new_tokens": 60, "drafts": drafts, "method": "full"}
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
    assert torch.equal(found.cpu(), expected.cpu())
    assert stream.completion.token_ids == alone
