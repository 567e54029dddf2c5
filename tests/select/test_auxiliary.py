"""The auxiliary model's scores of many chunks, against a pass of transformers for each."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny import some_chunks

from ragkv import RagKV
from ragkv.model.loaded import require_reusable
from ragkv.select import auxiliary
from ragkv.select.auxiliary import Auxiliary

CHUNKS = [some_chunks(5, words)[index] for index, words in enumerate((40, 12, 60, 25, 33))]
QUERY = " What is the answer?"


def scorer(engine: RagKV) -> Auxiliary:
    config = engine.reuse.override(auxiliary_model=engine.info.name)
    return engine._reuse.auxiliaries.scorer(config)


def plain_scores(engine: RagKV, chunk: str) -> np.ndarray:
    """Eager attention of an ordinary forward pass over sink ++ chunk ++ query."""
    tokenizer = engine.tokenizer
    head = tokenizer(engine.sink_from([{"role": "user", "content": "{x}"}]))["input_ids"]
    body, tail = tokenizer(chunk)["input_ids"], tokenizer(QUERY)["input_ids"]
    with torch.no_grad():
        out = engine.loaded.model(torch.tensor([head + body + tail]), output_attentions=True)
    weights = out.attentions[-1][0, :, -len(tail) :, len(head) : len(head) + len(body)]
    return weights.mean(dim=(0, 1)).numpy()


def calls_of(engine: RagKV) -> list[int]:
    """The rows of each call of the model from now on."""
    rows: list[int] = []

    def count(_: object, __: object, given: dict[str, torch.Tensor]) -> None:
        rows.append(given["input_ids"].shape[1])

    engine.loaded.model.register_forward_pre_hook(count, with_kwargs=True)
    return rows


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral-window", "gemma3", "phi3"])
def test_all_chunks_are_scored_in_one_pass(make_engine, family):
    engine = make_engine(family, attention="eager")
    engine.precompute(CHUNKS)
    expected = [plain_scores(engine, chunk) for chunk in CHUNKS]
    rows = calls_of(engine)
    found = scorer(engine).score(CHUNKS, QUERY)
    assert rows == [len(CHUNKS) * len(engine.tokenizer(QUERY)["input_ids"])]
    for (scores, offsets), wanted in zip(found, expected, strict=True):
        assert len(offsets) == len(scores) == len(wanted)
        np.testing.assert_allclose(scores, wanted, atol=1e-5)


def test_more_chunks_than_fit_in_memory_are_scored_in_turn(make_engine, monkeypatch):
    engine = make_engine()
    engine.precompute(CHUNKS)
    together = scorer(engine).score(CHUNKS, QUERY)
    for most in (1, 200):
        monkeypatch.setattr(auxiliary, "_TOKENS_AT_ONCE", most)
        rows = calls_of(engine)
        apart = scorer(engine).score(CHUNKS, QUERY)
        assert 1 < len(rows) <= len(CHUNKS)
        for (one, _), (other, _) in zip(together, apart, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-6)


def test_chunks_beyond_the_position_limit_have_a_pass_of_their_own(make_engine):
    """There the model's rotary tables are others; a call has one."""
    engine = make_engine()
    engine.precompute(CHUNKS)
    whole = scorer(engine)
    loaded = require_reusable(engine.loaded)
    sizes = sorted(len(scores) for scores, _ in whole.score(CHUNKS, QUERY))
    architecture = replace(loaded.architecture, position_limit=sizes[2] + 40)
    limited = Auxiliary(replace(loaded, architecture=architecture), whole._sink, whole._entry_of)
    rows = calls_of(engine)
    found = limited.score(CHUNKS, QUERY)
    assert len(rows) == 2
    for (one, _), (other, _) in zip(found, whole.score(CHUNKS, QUERY), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
