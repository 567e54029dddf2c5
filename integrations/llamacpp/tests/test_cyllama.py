"""llama.cpp itself, over tiny models in float32."""

from functools import partial

import numpy as np
import pytest
import torch
from exact import agree, reference
from llamacpp_ragkv import decoder
from llamacpp_ragkv.blob import parse, render
from llamacpp_ragkv.library import Cyllama, LlamaCppError, Part
from threads import each_in_a_thread
from tiny import ask, some_chunks

from ragkv import Completion

pytest.importorskip("cyllama", reason="needs cyllama, and it Python 3.12 or later")
FAMILIES = ("llama", "qwen2")
FORMATS = [(half, flash) for half in (False, True) for flash in (False, True)]
PROMPT = ask(some_chunks())


def cyllama(half: bool, flash: bool = False):
    return lambda file, threads: Cyllama(file, threads, half=half, flash=flash)


def kl(found: torch.Tensor, own: torch.Tensor) -> float:
    pair = (each.log_softmax(-1) for each in (found, own))
    return float(torch.nn.functional.kl_div(*pair, log_target=True, reduction="sum"))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("half", "flash"), FORMATS)
def test_its_blob_comes_back_byte_for_byte(open_engine, family, half, flash):
    opened = open_engine(family, cyllama(half, flash))._local_decoder
    context = opened.call(opened._library.open, 256)
    opened.call(context.decode, [Part(0, list(range(10, 110)), 3)])
    blob = opened.call(context.state, 0)
    form, rows = parse(blob)
    assert render(form, rows) == blob
    assert rows.keys.dtype == (np.float16 if half else np.float32)
    assert form.transposed != flash
    opened.call(context.close)


def test_a_blob_of_four_streams_comes_back(open_engine):
    opened = open_engine(library=cyllama(half=True))._local_decoder
    context = opened.call(opened._library.open, 256, 4)
    parts = [Part(sequence, list(range(5, 20)), 0) for sequence in range(4)]
    opened.call(context.decode, parts)
    for sequence in range(4):
        blob = opened.call(context.state, sequence)
        form, rows = parse(blob)
        assert render(form, rows) == blob
        assert (form.streams, form.stream, len(rows.positions)) == (4, sequence, 15)
    opened.call(context.close)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("half", "flash"), FORMATS)
def test_behind_exact_rows_it_is_exact(open_engine, family, half, flash):
    kv = open_engine(family, cyllama(half, flash))
    opened = kv._local_decoder
    out = kv.prefill(PROMPT, recompute_ratio=1)
    tokens = len(out.token_ids)
    sequence = opened.begin(out.cache, tokens, tokens + 8)
    found = opened.step(sequence, [17, 23], tokens)
    opened.end(sequence)
    for count, logits in enumerate(found, 1):
        full = reference(kv, [*out.token_ids, *[17, 23][:count]])
        assert kl(logits, full) < (1e-4 if half or flash else 1e-5)  # flash: Q in float16


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_ragkvs(open_engine, family):
    kv, plain = open_engine(family, cyllama(half=False)), open_engine(family)
    for given in ({}, {"temperature": 1.0, "seed": 3}, {"recompute_ratio": 1.0}):
        found, own = (
            each.generate(
                PROMPT,
                max_new_tokens=60,
                ignore_eos=True,
                logprobs=3,
                method="epic",
                **given,
            )
            for each in (kv, plain)
        )
        assert agree(found, own)


def test_after_a_refused_blob_the_next_answer_is_right(open_engine):
    kv = open_engine(library=cyllama(half=False))
    opened = kv._local_decoder
    expected = kv.generate(PROMPT, max_new_tokens=20).token_ids
    context = opened._memory
    for spoiled in (b"", bytes(64), opened.call(context.state, 0)[:-3]):
        with pytest.raises(LlamaCppError, match="refused"):
            opened.call(context.restore, 0, spoiled)
        assert kv.generate(PROMPT, max_new_tokens=20).token_ids == expected
    assert opened._memory is context


def test_products_in_bfloat16_are_between_its_calls(open_engine):
    kv = open_engine(library=cyllama(half=True))
    matrix = torch.randn(64, 64, dtype=torch.bfloat16)
    for chunks in (some_chunks(), some_chunks()[::-1]):
        before = matrix @ matrix
        kv.generate(ask(chunks), max_new_tokens=8)
        assert torch.equal(before, matrix @ matrix)


def test_more_than_a_batch_is_refused(open_engine):
    opened = open_engine(library=cyllama(half=True))._local_decoder
    with pytest.raises(LlamaCppError, match="513 tokens"):
        opened.call(opened._memory.decode, [Part(0, [5] * 400, 0), Part(0, [6] * 113, 400)])


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_at_once_share_their_steps(open_engine, family, monkeypatch):
    monkeypatch.setattr(decoder, "_MAX_WAIT_S", 5.0)
    kv, chunks = open_engine(family, cyllama(half=False)), some_chunks()
    prompts = [PROMPT, *(ask(chunks[at:] + chunks[:at]) for at in (1, 2, 3))]
    answer = partial(kv.generate, max_new_tokens=60, ignore_eos=True, logprobs=3)
    alone = [answer(prompt) for prompt in prompts]
    found = dict[int, Completion]()
    each_in_a_thread(lambda at: found.update({at: answer(prompts[at])}), range(4))
    assert all(agree(found[at], alone[at]) for at in range(4))
    assert kv._local_decoder._memory.sequences >= 2


def test_a_cancelled_answer_ends(open_engine):
    kv = open_engine(library=cyllama(half=True))
    with kv.stream(PROMPT, max_new_tokens=3000, ignore_eos=True) as stream:
        next(iter(stream))
    assert len(kv.generate(PROMPT, max_new_tokens=4, ignore_eos=True).token_ids) == 4
