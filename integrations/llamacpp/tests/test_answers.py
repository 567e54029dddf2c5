"""Answers by a stand-in for llama.cpp are ragkv's own."""

import threading

import pytest
import torch
from exact import agree, reference
from llama_stand_in import Dialect, StandIn
from llamacpp_ragkv import decoder
from llamacpp_ragkv.library import LlamaCppError
from threads import each_in_a_thread
from tiny import ask, some_chunks, tiny_model

from ragkv import ReuseConfig
from ragkv.decode.draft import Drafts

PROMPT = ask(some_chunks())
OPTIONS = {
    "greedy": {"max_new_tokens": 24},
    "no drafts": {"max_new_tokens": 24, "drafts": False},
    "seed": {"max_new_tokens": 24, "temperature": 1.0, "seed": 5},
    "one token": {"max_new_tokens": 1},
    "schema": {"max_new_tokens": 24, "json_schema": {"type": "object"}},
    "stop": {"max_new_tokens": 24, "stop": ["e"]},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("ratio", [0.2, 1.0])
def test_answers_are_ragkvs(kv, plain, ratio, name):
    given = {"method": "epic", "recompute_ratio": ratio, "logprobs": 2, "ignore_eos": True}
    found, own = (each.generate(PROMPT, **given | OPTIONS[name]) for each in (kv, plain))
    assert agree(found, own)
    assert found.report.tokens.reused == own.report.tokens.reused
    assert found.report.tokens.reused > 80 or ratio == 1.0
    for mine, theirs in zip(found.logprobs, own.logprobs, strict=True):
        assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-3)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("transposed", [False, True])
def test_every_format_serves(open_engine, family, transposed):
    dialect = Dialect(version=3, transposed=transposed, dtype="f2", streams=4, stream=1)
    library = StandIn(tiny_model(family), family, dialect, pairs=family == "llama")
    kv, plain = open_engine(family, lambda *_: library), open_engine(family)
    found, own = (
        each.generate(PROMPT, max_new_tokens=12, method="epic", logprobs=1) for each in (kv, plain)
    )
    for mine, theirs in zip(found.logprobs[:4], own.logprobs, strict=False):
        assert mine.logprob == pytest.approx(theirs.logprob, abs=0.02)


def test_a_refused_draft_is_removed(kv, plain, library, monkeypatch):
    given = {"max_new_tokens": 20, "ignore_eos": True, "logprobs": 1, "method": "full"}
    own = plain.generate(PROMPT, **given)

    def propose(_, history, room, *__):
        after = len(history) - history.prompt_tokens
        return [own.token_ids[after], 7, 8][: max(0, room)]

    monkeypatch.setattr(Drafts, "propose", propose)
    library.decoded.clear()
    found = kv.generate(PROMPT, **given)
    assert max(library.decoded) == 4
    assert found.report.decode.accepted * 2 < found.report.decode.drafted
    assert found.token_ids == own.token_ids


def test_a_context_grows_with_the_answer(kv, plain, library, monkeypatch):
    monkeypatch.setattr(decoder, "_FIRST_ROOM", 4)
    monkeypatch.setattr(decoder, "_MULTIPLE", 1)
    found = kv.generate(PROMPT, max_new_tokens=200, ignore_eos=True, logprobs=1)
    assert library.opened[-1] == 2 * library.opened[-2]
    own = plain.generate(PROMPT, max_new_tokens=200, ignore_eos=True, logprobs=1, method="full")
    full = kv.generate(PROMPT, max_new_tokens=200, ignore_eos=True, logprobs=1, method="full")
    assert agree(full, own)
    assert len(found.token_ids) == 200


def test_a_context_serves_the_next_answer(kv, library):
    first = kv.generate(PROMPT, max_new_tokens=8)
    opened = len(library.opened)
    assert kv.generate(PROMPT, max_new_tokens=8).token_ids == first.token_ids
    assert (len(library.opened), library.open_contexts) == (opened, 1)


def test_after_a_refused_blob_the_next_answer_is_right(kv, library):
    expected = kv.generate(PROMPT, max_new_tokens=8).token_ids
    library.spoiled = 1
    with pytest.raises(LlamaCppError, match="no blob"):
        kv.generate(PROMPT, max_new_tokens=8)
    assert kv.generate(PROMPT, max_new_tokens=8).token_ids == expected


def test_two_answers_at_once(kv):
    prompts = {"a": PROMPT, "b": ask(some_chunks()[::-1])}
    alone = {key: kv.generate(prompts[key], max_new_tokens=20).token_ids for key in prompts}
    found = {}

    def answer(key: str) -> None:
        found[key] = kv.generate(prompts[key], max_new_tokens=20).token_ids

    each_in_a_thread(answer, prompts)
    assert found == alone


def test_a_cancelled_answer_ends(kv, library):
    with kv.stream(PROMPT, max_new_tokens=2000, ignore_eos=True) as stream:
        next(iter(stream))
    kv.wait()
    library.decoded.clear()
    assert len(kv.generate(PROMPT, max_new_tokens=4, ignore_eos=True).token_ids) == 4
    assert sum(library.decoded) < 20


def test_calls_are_in_one_thread_of_their_own(open_engine, library, monkeypatch):
    seen = set[str]()
    decode = type(library.open(1)).decode
    library.open_contexts = 0

    def recorded(self, *given):
        seen.add(threading.current_thread().name)
        return decode(self, *given)

    monkeypatch.setattr("llama_stand_in.StandInContext.decode", recorded)
    open_engine(library=lambda *_: library).generate(PROMPT, max_new_tokens=4)
    assert len(seen) == 1
    assert next(iter(seen)).startswith("llama.cpp")


def test_history_has_the_prompt_and_not_the_answer(open_engine, library):
    kv = open_engine(library=lambda *_: library, reuse=ReuseConfig(recompute_ratio=1.0))
    first = kv.generate(PROMPT, max_new_tokens=12, ignore_eos=True)
    later = [*PROMPT, {"role": "assistant", "content": first.text}, *ask(["And then?"])]
    out = kv.prefill(later)
    assert out.report.tokens.history > 80
    torch.testing.assert_close(out.logits, reference(kv, out.token_ids), rtol=0, atol=1e-4)
