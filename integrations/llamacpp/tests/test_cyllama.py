"""llama.cpp itself, over tiny models in float32."""

from functools import partial

import numpy as np
import pytest
import torch
from exact import agree, reference
from llamacpp_ragkv.blob import parse, render
from llamacpp_ragkv.library import Cyllama, LlamaCppError
from threads import each_in_a_thread
from tiny import ask, some_chunks

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
    decoder = open_engine(family, cyllama(half, flash))._local_decoder
    context = decoder.call(decoder._library.open, 256)
    decoder.call(context.decode, list(range(10, 110)), 3)
    blob = decoder.call(context.state)
    form, rows = parse(blob)
    assert render(form, rows) == blob
    assert rows.keys.dtype == (np.float16 if half else np.float32)
    assert form.transposed != flash
    decoder.call(context.close)


def test_a_blob_of_four_streams_comes_back(open_engine):
    decoder = open_engine(library=cyllama(half=True))._local_decoder
    library = decoder._library

    def blobs():
        library._params.n_seq_max, library._params.n_ctx = 4, 1024
        context = library._llama.LlamaContext(
            model=library._model, params=library._params, verbose=False
        )
        batch = library._llama.LlamaBatch(n_tokens=64, embd=0, n_seq_max=1, verbose=False)
        for at in range(60):
            batch.add(at + 5, at // 4, [at % 4], True)
        context.decode(batch)
        found = [context.get_state_seq_data(sequence) for sequence in range(4)]
        context.close()
        return found

    for sequence, blob in enumerate(decoder.call(blobs)):
        form, rows = parse(blob)
        assert render(form, rows) == blob
        assert (form.sequence, len(rows.positions)) == (sequence, 15)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("half", "flash"), FORMATS)
def test_behind_exact_rows_it_is_exact(open_engine, family, half, flash):
    kv = open_engine(family, cyllama(half, flash))
    decoder = kv._local_decoder
    out = kv.prefill(PROMPT, recompute_ratio=1)
    tokens = len(out.token_ids)
    context = decoder.begin(out.cache, tokens, tokens + 8)
    context, found = decoder.call(decoder.step, context, [17, 23], tokens)
    decoder.call(decoder.end, context)
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
    decoder = kv._local_decoder
    expected = kv.generate(PROMPT, max_new_tokens=20).token_ids
    context = decoder._idle
    for spoiled in (b"", bytes(64), decoder.call(context.state)[:-3] + b"abc"):
        with pytest.raises(LlamaCppError, match="refused"):
            decoder.call(context.restore, spoiled)
        assert kv.generate(PROMPT, max_new_tokens=20).token_ids == expected
    assert decoder._idle is context


def test_products_in_bfloat16_are_between_its_calls(open_engine):
    kv = open_engine(library=cyllama(half=True))
    matrix = torch.randn(64, 64, dtype=torch.bfloat16)
    for chunks in (some_chunks(), some_chunks()[::-1]):
        before = matrix @ matrix
        kv.generate(ask(chunks), max_new_tokens=8)
        assert torch.equal(before, matrix @ matrix)


def test_two_answers_at_once(open_engine):
    kv = open_engine(library=cyllama(half=False))
    prompts = {"a": PROMPT, "b": ask(some_chunks()[::-1])}
    answer = partial(kv.generate, max_new_tokens=40, ignore_eos=True)
    alone = {key: answer(prompts[key]).token_ids for key in prompts}
    found = {}

    def work(key: str) -> None:
        found[key] = answer(prompts[key]).token_ids

    each_in_a_thread(work, prompts)
    assert found == alone


def test_a_cancelled_answer_ends(open_engine):
    kv = open_engine(library=cyllama(half=True))
    with kv.stream(PROMPT, max_new_tokens=3000, ignore_eos=True) as stream:
        next(iter(stream))
    assert len(kv.generate(PROMPT, max_new_tokens=4, ignore_eos=True).token_ids) == 4
