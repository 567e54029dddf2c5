"""What every method must keep, a new one in ``ragkv/select/rules/`` included."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny import some_chunks, tiny_model, tiny_tokenizer

from ragkv import RagKV
from ragkv.select import method_names

Make = Callable[..., RagKV]
CHUNKS = some_chunks(3)
PROMPT = [{"role": "user", "content": "\n\n".join(CHUNKS) + "\n\nWhat does it say?"}]


@pytest.fixture(scope="module")
def auxiliary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("auxiliary")
    tiny_model("qwen2", seed=5).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", method_names())
def test_ratio_one_is_full_prefill_and_the_account_adds_up(
    make_engine: Make, auxiliary: Path, name: str
) -> None:
    engine = make_engine()
    settings = {"method": name, "auxiliary_model": str(auxiliary)}
    engine.precompute(CHUNKS, **settings)
    for ratio in (0.0, 0.3, 1.0):
        out = engine.prefill(PROMPT, recompute_ratio=ratio, **settings)
        report = out.report
        assert report.method == name
        assert report.prompt_tokens == len(out.token_ids) == len(report.positions)
        assert report.prompt_tokens == (
            report.sink_tokens
            + report.reused_tokens
            + report.recomputed_tokens
            + report.fresh_tokens
        )
        assert report.effective_ratio <= max(ratio, 0.45)
        assert torch.isfinite(out.logits).all()
    with torch.no_grad():
        full = engine.model(torch.tensor([out.token_ids])).logits[0, -1]
    torch.testing.assert_close(out.logits, full, atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("name", method_names())
def test_a_prompt_may_end_with_its_chunk(make_engine: Make, auxiliary: Path, name: str) -> None:
    """What asks is the last token alone, then."""
    engine = make_engine()
    settings = {"method": name, "auxiliary_model": str(auxiliary)}
    engine.precompute(CHUNKS, **settings)
    prompt = "What do these say?\n\n" + "\n\n".join(CHUNKS)
    for ratio in (0.3, 1.0):
        answer = engine.generate(prompt, max_new_tokens=3, recompute_ratio=ratio, **settings)
        reused = 0 if name in {"full", "prefix"} else len(CHUNKS)
        assert len(answer.report.chunks) == reused
    full = engine.generate(prompt, max_new_tokens=3, method="full")
    assert answer.token_ids == full.token_ids
