"""What an engine remembers of the chunks that were named."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from threads import each_in_a_thread
from tiny import some_chunks

from ragkv import RagKV, ReuseConfig
from ragkv.chunk.encode import encode_chunks
from ragkv.retrieve.named import MOST_MISSING

Make = Callable[..., RagKV]


def test_what_the_store_has_needs_no_remembering(make_engine):
    engine, chunks = make_engine(), some_chunks(3)
    engine.precompute(chunks[:2])
    engine.prefetch(chunks)
    engine.wait()
    assert engine._named.missing == [chunks[2]]
    engine.generate("\n\n".join(chunks), max_new_tokens=1)
    engine.wait()
    assert engine._named.missing == []
    assert engine.contains(chunks[2])


def test_the_last_named_are_remembered(make_engine):
    engine = make_engine()
    first, *others = [f"A text that no prompt has, number {i}." for i in range(MOST_MISSING + 20)]

    def name(texts):
        engine.prefetch(texts)

    engine.prefetch([first])
    each_in_a_thread(name, [others[at::10] for at in range(10)])
    assert len(engine._named.missing) == MOST_MISSING
    assert first not in engine._named.missing
    engine.prefetch(["fresh"])
    again = engine._named.missing[0]
    engine.prefetch([again])
    assert engine._named.missing[-2:] == ["fresh", again]


def test_what_fails_there_is_said(make_engine, monkeypatch, caplog):
    engine, chunks = make_engine(), some_chunks(3)
    engine.precompute(chunks[:2])

    def fail(*_, **__):
        raise RuntimeError("no memory left")

    engine.prefetch(chunks)
    engine.wait()
    monkeypatch.setattr("ragkv.engine.background.encode_missing", fail)
    assert engine.generate("\n\n".join(chunks), max_new_tokens=1).token_ids
    engine.wait()
    assert "no memory left" in caplog.text


CUT, OTHER = some_chunks(2, words=60)
FIRST = f"{CUT} End."


@pytest.mark.parametrize(
    ("prompt", "missed", "history", "encoded"),
    [
        (f"{FIRST}\n\nWhat now?", [FIRST], True, []),
        (f"{FIRST}\n\n{OTHER}\n\nWhat now?", [FIRST, OTHER], True, [OTHER]),
        (f"{FIRST}\n\nWhat now?", [FIRST], False, [FIRST]),
        (f"{OTHER}\n\n{FIRST}", [FIRST], True, [FIRST]),  # behind other text
        (f"{CUT} statements?", [f"{CUT} statem"], True, [f"{CUT} statem"]),  # within a token
    ],
)
@pytest.mark.parametrize("family", ["llama", "llama-yarn", "phi3"])
def test_a_missed_chunk_that_the_prompt_computed_is_not_computed_again(
    make_engine, monkeypatch, family, prompt, missed, history, encoded
):
    engine, plain = make_engine(family, reuse=ReuseConfig(history=history)), make_engine(family)
    sink = engine._reuse.corpus.sinks.configured(engine.reuse)
    passes = list[list[str]]()

    def counted(chunks, *given):
        passes.append([text for text, _ in chunks])
        return encode_chunks(chunks, *given)

    monkeypatch.setattr("ragkv.ingest.encode.encode_chunks", counted)
    ran = 0

    def note(*_):
        nonlocal ran
        ran += 1

    message = [{"role": "user", "content": prompt}]
    engine.generate(message, max_new_tokens=2, retrieved=missed)
    with engine.loaded.model.model.layers[0].register_forward_pre_hook(note):
        engine.wait()
    assert [text for each in passes for text in each] == encoded
    assert ran == len(encoded)
    plain.precompute(missed)
    for text in missed:
        found, expected = (kv._store.get(text, sink.fingerprint).entry for kv in (engine, plain))
        assert found is not None
        assert expected is not None
        assert np.array_equal(found.token_ids, expected.token_ids)
        assert np.array_equal(found.offsets, expected.offsets)
        torch.testing.assert_close(found.keys, expected.keys, atol=5e-5, rtol=1e-4)
        torch.testing.assert_close(found.values, expected.values, atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("stored", [True, False])
def test_chunks_that_a_pipeline_rewrites_are_noticed(make_engine, caplog, stored):
    """Other metadata, or texts as a list: the words are there, and nothing is reused."""
    engine = make_engine()
    chunks = [f"page: {at}\n{text}\nthe end" for at, text in enumerate(some_chunks(3))]
    if stored:
        engine.precompute(chunks)
    for prompt in ("\n\n".join(some_chunks(3)), str(chunks)):
        engine.prefetch(chunks)
        report = engine.generate(prompt, max_new_tokens=1).report
        assert report.tokens.reused == 0
        assert "retrieved chunks, " in report.warnings[0]
        engine.prefetch(chunks)
        assert engine.generate(prompt + "!", max_new_tokens=1).report.misses == report.misses
    assert caplog.text.count("Of the 3 retrieved chunks, ") == 2  # once for each of the two reasons


def test_prompts_that_hold_what_was_named_or_nothing_of_it_warn_of_nothing(make_engine):
    engine, chunks = make_engine(), some_chunks(3)
    engine.precompute(chunks)
    for prompt in (
        chunks[1] + chunks[0][: len(chunks[0]) // 2],  # the others left out, one cut
        "Make one question of this talk.",
        "",
    ):
        engine.prefetch([*chunks, "", "short"])
        if prompt:
            assert not any("form" in said for said in engine.prefill(prompt).report.warnings)
    assert not any("form" in said for said in engine.prefill("Words " * 40).report.warnings)


@pytest.mark.parametrize("method", ["query", "prefix", "full"])
def test_a_chunk_that_was_cut_or_not_looked_for_warns_of_nothing(make_engine, method):
    engine = make_engine()
    chunk = "page 1\n" + "The longest line is not cut. " * 12 + "\n" + some_chunks(1)[0]
    engine.precompute([chunk])
    engine.prefetch([chunk])
    report = engine.generate(chunk[:-80], max_new_tokens=1, method=method).report
    assert bool(report.tokens.reused) == (method == "query")
    assert not any("1 chunk was not reused" in said for said in report.warnings)
    engine.prefetch([chunk])
    report = engine.generate(repr(chunk), max_new_tokens=1, method=method).report
    assert any("1 chunk was not reused" in said for said in report.warnings) == (method != "full")
