"""The hundred lines of the documents compute what ragkv computes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from tiny import some_chunks, tiny_model, tiny_tokenizer

from ragkv import RagKV
from ragkv.engine import planner

PATH = Path(__file__).parents[2] / "docs" / "ragkv_in_100_lines.py"
HEAD, QUESTION = "<|im_start|>user\n", "\n\nWhat is a target?<|im_end|>\n"


@pytest.fixture
def lines():
    spec = importlib.util.spec_from_file_location(PATH.stem, PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_are_at_most_100():
    assert len(PATH.read_text(encoding="utf-8").splitlines()) <= 100


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral"])
@pytest.mark.parametrize("ratio", [0.0, 0.2, 1.0])
@torch.no_grad()
def test_logits_are_ragkvs(lines, monkeypatch, family, ratio):
    model, tokenizer, chunks = tiny_model(family), tiny_tokenizer(), some_chunks(3)
    slots, run = [], planner.repair_forward

    def noted(loaded, subset):
        slots.append(torch.from_numpy(subset.rows))
        return run(loaded, subset)

    monkeypatch.setattr(planner, "repair_forward", noted)
    prompt = HEAD + "\n\n".join(chunks) + QUESTION
    with RagKV(model, tokenizer, store=":memory:") as kv:
        kv.precompute(chunks, sink=HEAD)
        method = {"recompute_ratio": ratio, "method": "epic", "sink": HEAD, "history": False}
        theirs = kv.prefill(prompt, **method)
    sink = lines.encode(model, tokenizer, HEAD)
    others = [lines.encode(model, tokenizer, chunk, sink[1].input_ids) for chunk in chunks]
    read = tokenizer(prompt, return_offsets_mapping=True)
    assert read.input_ids == theirs.token_ids
    keys, values, _ = lines.splice(model, prompt, read, [sink, *others])
    ours = lines.recompute(model, torch.tensor(read.input_ids), slots[-1], keys, values)
    assert theirs.report.tokens.recomputed > 0 or ratio == 0
    torch.testing.assert_close(ours, theirs.logits, rtol=1e-4, atol=1e-4)


def test_everything_recomputed_is_the_models_own_answer(lines):
    model, tokenizer, chunks = tiny_model("llama"), tiny_tokenizer(), some_chunks(3)
    asked = tokenizer(HEAD + "\n\n".join(chunks) + QUESTION, return_tensors="pt").input_ids
    whole = model.generate(asked, attention_mask=torch.ones_like(asked), max_new_tokens=8)
    own = tokenizer.decode(whole[0, asked.shape[1] :], skip_special_tokens=True)
    assert lines.answer(model, tokenizer, HEAD, chunks, QUESTION, ratio=9.0, most=8) == own
