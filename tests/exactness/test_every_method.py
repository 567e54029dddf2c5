"""What every method must keep, a new one in ``ragkv/select/rules/`` included."""

import numpy as np
import pytest
import torch
from exact import reference
from tiny import ask, some_chunks

from ragkv.select import get_method, method_names

CHUNKS = some_chunks(3)
PROMPT = ask(CHUNKS)


@pytest.mark.parametrize("name", method_names())
def test_ratio_one_is_full_prefill_and_the_account_adds_up(make_engine, auxiliary, name):
    engine = make_engine()
    settings = {"method": name, "auxiliary_model": auxiliary}
    engine.precompute(CHUNKS, **settings)
    for ratio in (0.0, 0.1, 0.35, 1.0):
        out = engine.prefill(PROMPT, recompute_ratio=ratio, **settings)
        report = out.report
        tokens = report.tokens
        parts = [tokens.sink, tokens.reused, tokens.recomputed, tokens.fresh]
        assert report.method == name
        assert np.bincount([*report.positions], minlength=4).tolist() == parts
        assert sum(parts) == report.tokens.prompt == len(out.token_ids) == len(report.positions)
        cached = report.tokens.reused + report.tokens.recomputed
        assert report.effective_ratio == pytest.approx(report.tokens.recomputed / max(1, cached))
        chooses = ratio == 1 or get_method(name).score is not None
        asked = round(ratio * cached) if chooses and name != "full" else 0
        assert report.tokens.recomputed <= asked
        if name != "cacheclip":  # whole windows may leave some of the budget
            assert report.tokens.recomputed == asked
        assert report.ttft_s == pytest.approx(sum(report.steps.values()))
        assert all(seconds >= 0 for seconds in report.steps.values())
        assert torch.isfinite(out.logits).all()
    full = reference(engine, out.token_ids)
    torch.testing.assert_close(out.logits, full, atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("name", method_names())
def test_a_prompt_may_end_with_its_chunk(make_engine, auxiliary, name):
    """What asks is the last token alone, then."""
    engine = make_engine()
    settings = {"method": name, "auxiliary_model": auxiliary}
    engine.precompute(CHUNKS, **settings)
    prompt = "What do these say?\n\n" + "\n\n".join(CHUNKS)
    for ratio in (0.3, 1.0):
        answer = engine.generate(prompt, max_new_tokens=3, recompute_ratio=ratio, **settings)
        reused = 0 if name in {"full", "prefix"} else len(CHUNKS)
        assert len(answer.report.chunks) == reused
    full = engine.generate(prompt, max_new_tokens=3, method="full")
    assert answer.token_ids == full.token_ids
