"""Answers by a stand-in for llama.cpp are ragkv's own."""

import os
import sys
import threading
from collections.abc import Callable

import pytest
import torch
from exact import agree, reference
from llama_stand_in import Dialect, StandIn
from llamacpp_ragkv import decoder
from llamacpp_ragkv import library as library_module
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
    dialect = Dialect(version=3, transposed=transposed, dtype="f2")
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
    assert max(library.decoded) == [4]
    assert found.report.decode.accepted * 2 < found.report.decode.drafted
    assert found.token_ids == own.token_ids


def test_a_context_grows_with_the_answer(kv, plain, library, monkeypatch):
    monkeypatch.setattr(decoder, "_FIRST_ROOM", 4)
    monkeypatch.setattr(decoder, "_MULTIPLE", 1)
    found = kv.generate(PROMPT, max_new_tokens=200, ignore_eos=True, logprobs=1)
    (last, _), (before, _) = library.opened[-1], library.opened[-2]
    assert last == 2 * before
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


@pytest.fixture
def at_once(kv, library, monkeypatch) -> Callable[[], list[bool]]:
    """Return a function that answers prompts alone, then at once, and compares the answers."""
    chunks = some_chunks()
    prompts = [PROMPT, *(ask(chunks[at:] + chunks[:at]) for at in (1, 2, 3))]
    monkeypatch.setattr(decoder, "_MAX_WAIT_S", 5.0)

    def answer(at: int) -> list[int]:
        return kv.generate(prompts[at], max_new_tokens=40 + at, ignore_eos=True).token_ids

    alone = [answer(at) for at in range(4)]

    def answer_at_once() -> list[bool]:
        found = dict[int, list[int]]()
        library.decoded.clear()
        each_in_a_thread(lambda at: found.update({at: answer(at)}), range(4))
        return [found[at] == alone[at] for at in range(4)]

    return answer_at_once


def test_answers_at_once_share_their_steps(at_once, library):
    assert all(at_once())
    assert max(map(len, library.decoded)) >= 2
    assert library.opened[-1][1] >= 2
    opened = len(library.opened)
    assert all(at_once())
    assert len(library.opened) <= opened + 2
    assert library.open_contexts == 1


def test_answers_at_once_grow(at_once, library, monkeypatch):
    monkeypatch.setattr(decoder, "_FIRST_ROOM", 4)
    monkeypatch.setattr(decoder, "_MULTIPLE", 1)
    assert all(at_once())
    assert library.open_contexts == 1


def test_a_failed_step_of_several_is_computed_alone(at_once, library):
    library.fails = 3
    assert all(at_once())
    assert not library.fails


def test_a_cancelled_answer_ends(kv, library):
    with kv.stream(PROMPT, max_new_tokens=2000, ignore_eos=True) as stream:
        next(iter(stream))
    kv.wait()
    library.decoded.clear()
    assert len(kv.generate(PROMPT, max_new_tokens=4, ignore_eos=True).token_ids) == 4
    assert sum(map(sum, library.decoded)) < 20


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


@pytest.mark.skipif(not hasattr(os, "RTLD_DEEPBIND"), reason="needs RTLD_DEEPBIND of glibc")
def test_the_library_has_symbols_of_its_own(monkeypatch):
    flags = sys.getdlopenflags()
    with library_module._own_symbols():
        assert sys.getdlopenflags() == flags | os.RTLD_DEEPBIND
    assert sys.getdlopenflags() == flags
    monkeypatch.setenv("LD_PRELOAD", "libjemalloc.so")
    with library_module._own_symbols():
        assert sys.getdlopenflags() == flags
