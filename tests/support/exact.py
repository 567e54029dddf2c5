"""What holds for every model whose caches can be moved."""

import torch
from tiny import ask, some_chunks

from ragkv import Completion, RagKV


def reference(engine: RagKV, ids: list[int]) -> torch.Tensor:
    """Return the logits after these tokens by the model itself, ``[vocab]`` float32."""
    with torch.no_grad():
        logits: torch.Tensor = engine.loaded.model(torch.tensor([ids])).logits[0, -1].float()
    return logits


def assert_exact(engine: RagKV, *, in_deviations: float | None = None) -> None:
    """Ratio 1, and one chunk behind the sink, are what the model itself gives; answers too.

    Logits are to within 5e-5, or to within this share of their standard deviation.
    """
    chunks = some_chunks(3)
    engine.precompute(chunks)
    for count, ratio in ((3, 1.0), (1, 0.0)):
        prompt = ask(chunks[:count])
        out = engine.prefill(prompt, recompute_ratio=ratio, history=False)
        counts = out.report.tokens.reused, out.report.tokens.recomputed
        assert max(counts) == counts[int(ratio)] > 80
        assert min(counts) == 0
        full = reference(engine, out.token_ids)
        limit = 5e-5 if in_deviations is None else in_deviations * float(full.std())
        assert float((out.logits - full).abs().max()) < limit
        ours, plain = (
            engine.generate(
                prompt, max_new_tokens=4, history=False, recompute_ratio=ratio, method=method
            )
            for method in ("query", "full")
        )
        assert ours.token_ids == plain.token_ids


def agree(found: Completion, alone: Completion) -> bool:
    """Whether two answers are the same, or part at a near-tie of the model's scores."""
    if found.token_ids == alone.token_ids:
        return True
    pairs = zip(found.token_ids, alone.token_ids, strict=False)
    at = next(at for at, (a, b) in enumerate(pairs) if a != b)
    a, b = found.logprobs[at], alone.logprobs[at]
    return abs(a.logprob - dict(b.top)[a.token_id]) < 1e-4
