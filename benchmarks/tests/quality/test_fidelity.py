"""KL and agreement: zero where the method is exact, and equal to a plain reference."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tiny import some_chunks

from ragkv.errors import ConfigError
from ragkv.model.calls import cache_argument
from ragkv_bench.quality.fidelity import Reference, compared, fidelity, reference

FAMILIES = ["llama", "llama-yarn", "qwen3", "mistral-window", "gemma3", "phi3"]
CHUNKS = some_chunks(3)
PROMPT = [{"role": "user", "content": "Read:\n\n" + "\n\n".join(CHUNKS) + "\n\nWhat is it?"}]


@torch.inference_mode()
def _plain(kv, ids):
    """Greedy answer by whole forward passes: no cache, no mask, nothing of ours."""
    ids, answer, rows = list(ids), [], []
    for _ in range(16):
        rows.append(kv.loaded.model(torch.tensor([ids])).logits[0, -1].double().log_softmax(-1))
        answer.append(int(rows[-1].argmax()))
        ids.append(answer[-1])
        if answer[-1] == kv.tokenizer.eos_token_id:
            break
    return tuple(answer), torch.stack(rows)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_full_and_ratio_1_are_exact_and_reuse_is_not(make_engine, family, attention):
    kv = make_engine(family, attention)
    kv.precompute(CHUNKS)
    full = kv.prefill(PROMPT, method="full")
    against = reference(kv, full)
    answer, log_probs = _plain(kv, full.token_ids)
    assert against.token_ids == answer
    assert against.log_probs.dtype == torch.float64
    assert torch.allclose(against.log_probs, log_probs, atol=1e-4)

    again = fidelity(kv, kv.prefill(PROMPT, method="full"), against)
    assert again.kl < 1e-6
    assert again.agreement == 1
    repaired = kv.prefill(PROMPT, method="query", recompute_ratio=1.0)
    exact = fidelity(kv, repaired, against)
    assert exact.kl < 1e-6
    assert exact.agreement == 1
    reused = kv.prefill(PROMPT, method="reuse")
    assert reused.report.tokens.reused > 50
    assert fidelity(kv, reused, against).kl > 1e-4


def test_kl_and_agreement_are_those_of_their_definition(make_engine):
    kv = make_engine()
    kv.precompute(CHUNKS)
    against = reference(kv, kv.prefill(PROMPT, method="full"), tokens=5)
    assert len(against.token_ids) == 5
    reused = kv.prefill(PROMPT, method="reuse")
    rows, model = [reused.logits], kv.loaded.model
    with torch.inference_mode():  # one token at a time, through the cache alone
        for token in against.token_ids[:-1]:
            over = cache_argument(model, reused.cache)
            out = model(torch.tensor([[token]]), **over, use_cache=True)
            rows.append(out.logits[0, -1])
    q = torch.stack(rows).double().softmax(-1)
    p = against.log_probs.exp()
    kl = (p * (p.log() - q.log())).sum(-1).mean()
    near = fidelity(kv, kv.prefill(PROMPT, method="reuse"), against)
    assert near.kl == pytest.approx(float(kl), rel=1e-4)
    hits = [int(row.argmax()) == t for row, t in zip(rows, against.token_ids, strict=True)]
    assert near.agreement == pytest.approx(sum(hits) / 5)


def test_logits_that_are_no_numbers_are_not_taken_for_agreement(make_engine):
    rows = torch.zeros(2, 4).log_softmax(-1)
    none = compared(Reference((0, 1), rows * torch.nan), Reference((0, 1), rows))
    assert math.isnan(none.kl)
    never = torch.tensor([[0.0, 0.0, 0.0, -torch.inf]]).log_softmax(-1)
    assert compared(Reference((0,), never), Reference((0,), never)).kl == 0
    kv = make_engine()
    full = replace(kv.prefill(PROMPT, method="full"), logits=torch.full((600,), torch.nan))
    with pytest.raises(ConfigError, match=r"not numbers in torch\.float32"):
        reference(kv, full, tokens=1)


def test_the_reference_ends_with_the_end_of_text(make_engine, monkeypatch):
    kv = make_engine()
    tokens = reference(kv, kv.prefill(PROMPT, method="full")).token_ids
    assert len(tokens) == 16
    for ends in (tokens[2], [599, tokens[2]]):
        monkeypatch.setattr(kv.loaded.model.generation_config, "eos_token_id", ends)
        short = reference(kv, kv.prefill(PROMPT, method="full"))
        assert short.token_ids == tokens[: tokens.index(tokens[2]) + 1]
        assert len(short.log_probs) == len(short.token_ids)
        assert fidelity(kv, kv.prefill(PROMPT, method="full"), short).agreement == 1


def test_one_token_needs_no_cache(make_engine):
    kv = make_engine()
    against = reference(kv, kv.prefill(PROMPT, method="full"), tokens=1)
    near = fidelity(kv, kv.prefill(PROMPT, method="full"), against)
    assert (len(against.token_ids), near.agreement) == (1, 1)
    assert near.kl < 1e-9
