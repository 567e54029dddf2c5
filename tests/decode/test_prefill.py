"""A long prompt is prefilled a piece at a time, with what a whole prefill computes."""

import numpy as np
import pytest
import torch
from tiny import FAMILIES

from ragkv import RagKV
from ragkv.decode import prefill
from ragkv.model.lock import lock_of
from ragkv.splice.buffer import SplicedCache


@pytest.fixture(autouse=True)
def rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Pieces of 16 tokens; the rows of each."""
    seen: list[int] = []
    run = prefill.subset_forward

    def counted(loaded: object, subset: prefill.SubsetPass) -> torch.Tensor:
        seen.append(len(subset.rows))
        return run(loaded, subset)

    monkeypatch.setattr(prefill, "PIECE_CPU", 16)
    monkeypatch.setattr(prefill, "subset_forward", counted)
    return seen


def prefilled(engine: RagKV, ids: np.ndarray) -> tuple[torch.Tensor, SplicedCache]:
    loaded = engine.loaded
    cache = SplicedCache(loaded, 0, spare=len(ids) + 8)
    with lock_of(loaded.model):
        return prefill.prefill_into(loaded, ids, cache), cache


@pytest.mark.parametrize("tokens", [16, 17, 57])
@pytest.mark.parametrize("family", FAMILIES)
def test_pieces_compute_what_the_model_does(make_engine, family, tokens, rows):
    engine = make_engine(family)
    ids = np.random.default_rng(0).integers(3, 500, tokens).astype(np.int32)
    found, cache = prefilled(engine, ids)
    with torch.no_grad():
        out = engine.loaded.model(torch.tensor(ids[None].astype(np.int64)), use_cache=True)
    torch.testing.assert_close(found, out.logits[0, -1].float(), rtol=1e-4, atol=5e-5)
    limit = engine.loaded.architecture.position_limit
    whole = tokens == 16 or (limit is not None and tokens > limit)
    assert rows == ([] if whole else [16] * (tokens // 16) + [tokens % 16])
    assert cache.get_seq_length() == tokens


def test_answers_are_the_models(make_engine, rows):
    engine = make_engine()
    prompt = "a word " * 40
    answer = engine.generate(prompt, method="full", max_new_tokens=12, ignore_eos=True)
    assert len(rows) > 2
    ids = torch.tensor([engine.tokenize(prompt)])
    with torch.no_grad():
        for token in answer.token_ids:
            assert int(engine.loaded.model(input_ids=ids).logits[0, -1].argmax()) == token
            ids = torch.cat([ids, torch.tensor([[token]])], dim=1)
