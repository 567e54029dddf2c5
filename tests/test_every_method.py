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
