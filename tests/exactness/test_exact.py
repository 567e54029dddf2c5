"""What always holds (DESIGN.md 1, 2, 4): equality with an ordinary full prefill.

The reference is transformers' own forward pass over the same token ids, on tiny random
models of every supported family.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from exact import assert_exact, reference
from templates import tokenizer_of
from tiny import FAMILIES, ask, some_chunks, tiny_model, tiny_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from ragkv import RagKV
from ragkv.model.calls import cache_argument

TOLERANCE = 5e-5


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_ratio_one_and_one_chunk_behind_the_sink(make_engine, family, attention):
    assert_exact(make_engine(family, attention))


@pytest.mark.parametrize("family", FAMILIES)
def test_unknown_chunks_and_prefixes_are_exact_and_plain_reuse_is_not(make_engine, family):
    """Without the last the test above could pass by never reusing anything."""
    engine, chunks = make_engine(family), some_chunks(3)
    out = engine.prefill(ask(chunks))
    assert out.report.tokens.fresh == out.report.tokens.prompt
    full = reference(engine, out.token_ids)
    assert distance(out.logits, full) < TOLERANCE
    engine.precompute(chunks)
    out = engine.prefill(ask(chunks), method="prefix")
    assert 80 < out.report.tokens.reused < 200
    assert distance(out.logits, full) < TOLERANCE
    out = engine.prefill(ask(chunks), method="reuse")
    assert out.report.tokens.reused > 150
    assert distance(out.logits, full) > 10 * TOLERANCE


@pytest.mark.parametrize("method", ["query", "epic", "reuse"])
def test_generation_at_ratio_one_is_transformers_own(make_engine, method):
    engine = make_engine()
    chunks = some_chunks(3)
    engine.precompute(chunks, method=method)
    ours = engine.generate(ask(chunks), max_new_tokens=12, recompute_ratio=1.0, method=method)
    assert ours.report.tokens.recomputed > 100
    ids = torch.tensor([engine.prefill(ask(chunks), method="full").token_ids])
    theirs = engine.loaded.model.generate(ids, max_new_tokens=12, do_sample=False)
    assert ours.token_ids == theirs[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("ratio", [0.0, 0.3])
@pytest.mark.parametrize("family", ["llama", "mistral-window", "gemma3", "phi3"])
def test_generation_begins_with_the_logits_of_prefill(make_engine, family, ratio):
    """generate() repairs inside its first step, prefill() in a pass of its own."""
    engine = make_engine(family)
    chunks = some_chunks(3)
    engine.precompute(chunks)
    out = engine.prefill(ask(chunks), recompute_ratio=ratio)
    ids = torch.tensor([out.token_ids])
    drawn = engine.generate(ask(chunks), recompute_ratio=ratio, max_new_tokens=4)
    expected = [int(out.logits.argmax())]
    with torch.no_grad():
        while len(expected) < 4:
            step = engine.loaded.model(
                torch.tensor([expected[-1:]]), **cache_argument(engine.loaded.model, out.cache)
            )
            expected.append(int(step.logits[0, -1].argmax()))
    assert drawn.token_ids == expected
    assert ids.shape[1] == drawn.report.tokens.prompt
    assert not engine.loaded.model._forward_pre_hooks
    assert not engine.loaded.model._forward_hooks
    assert engine.loaded.model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("family", ["llama", "mistral-window", "gemma3", "phi3"])
def test_decoding_continues_the_repaired_cache(make_engine, family):
    """The cache that prefill returns gives the same next logits as a longer full prefill."""
    engine = make_engine(family)
    chunks = some_chunks(3)
    engine.precompute(chunks)
    out = engine.prefill(ask(chunks), recompute_ratio=1.0)
    more = [7, 301, 44]
    with torch.no_grad():
        ours = engine.loaded.model(
            torch.tensor([more]), **cache_argument(engine.loaded.model, out.cache)
        ).logits[0, -1]
    assert distance(ours, reference(engine, out.token_ids + more)) < TOLERANCE


@pytest.mark.parametrize(
    "text",
    [
        "plain",
        "naïve Ünïcode — “quotes” 你好 😀👨‍👩‍👧 combining e\u0301 end",
        "  leading and trailing  \n\n\n",
        "tabs\tand\r\nwindows\r\nlines",
    ],
)
def test_token_ids_are_the_ordinary_ones_and_decode_to_the_prompt(make_engine, text):
    engine = make_engine()
    chunks = [f"{chunk} {text} {chunk[::-1]}" for chunk in some_chunks(2)]
    engine.precompute(chunks)
    prompt = f"Head {text}\n\n{chunks[1]}\n---\n{chunks[0]}\nQuestion: {text}?"
    out = engine.prefill(prompt, recompute_ratio=0.5)
    assert out.token_ids == engine.tokenizer(prompt)["input_ids"]
    assert engine.tokenizer.decode(out.token_ids) == prompt
    assert out.report.tokens.reused > 50


def test_recomputing_more_comes_closer(make_engine):
    engine = make_engine()
    chunks = some_chunks(4)
    engine.precompute(chunks)
    errors = []
    for ratio in (0.0, 0.5, 0.9, 1.0):
        out = engine.prefill(ask(chunks), recompute_ratio=ratio)
        errors.append(distance(out.logits, reference(engine, out.token_ids)))
    assert errors[-1] < TOLERANCE < errors[0]
    assert errors[2] < errors[0]


@pytest.mark.parametrize("ratio", [0.0, 0.2, 1.0])
def test_a_chunk_that_ends_the_prompt(make_engine, ratio):
    """The last prompt token is computed in any case: it gives the first logits."""
    engine = make_engine()
    chunks = some_chunks(2)
    engine.precompute(chunks)
    prompt = "Question first. " + "\n\n".join(chunks)
    out = engine.prefill(prompt, recompute_ratio=ratio)
    assert out.report.tokens.fresh >= 1
    if ratio == 1.0:
        assert distance(out.logits, reference(engine, out.token_ids)) < TOLERANCE
    assert len(engine.generate(prompt, max_new_tokens=3, recompute_ratio=ratio).token_ids) == 3


def test_repeated_and_truncated_chunks(make_engine):
    engine = make_engine()
    first, second = some_chunks(2)
    engine.precompute([first, second])
    prompt = f"{first}\n\n{second[:150]}\n\n{first}\n\nQuestion?"
    half = engine.prefill(prompt, recompute_ratio=0.0)
    assert [use.text for use in half.report.chunks] == [first, second, first]
    whole = len(engine.tokenizer(second)["input_ids"])
    assert 40 < half.report.chunks[1].reused < whole - 20
    out = engine.prefill(prompt, recompute_ratio=1.0)
    assert distance(out.logits, reference(engine, out.token_ids)) < TOLERANCE


def test_bfloat16_stays_close():
    model = tiny_model().to(torch.bfloat16)
    with RagKV(model, tiny_tokenizer(), store=":memory:") as engine:
        chunks = some_chunks(3)
        engine.precompute(chunks)
        out = engine.prefill(ask(chunks), recompute_ratio=1.0)
        assert distance(out.logits, reference(engine, out.token_ids)) < 0.15


JOINTS = ("", " ", "\n", "\n\n", "\n---\n", "\t", ". ", "|", "</doc><doc>", "\u3000", "e\u0301")


def spaced(model: Any, trainer: Any, *, split: bool) -> PreTrainedTokenizerFast:
    """Train a tokenizer that writes spaces as SentencePiece's do, with a BOS of its own."""
    raw = Tokenizer(model)
    raw.pre_tokenizer = pre_tokenizers.Metaspace(split=split)
    raw.train_from_iterator(some_chunks(10), trainer)
    raw.post_processor = processors.TemplateProcessing("<|bos|> $A", None, [("<|bos|>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<|bos|>", eos_token="<|eos|>")


def bpe() -> PreTrainedTokenizerFast:
    special = ["<|bos|>", "<|eos|>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special)
    return spaced(models.BPE(unk_token="<unk>", byte_fallback=True), trainer, split=False)


def unigram() -> PreTrainedTokenizerFast:
    special = {"special_tokens": ["<|bos|>", "<|eos|>", "<unk>"], "unk_token": "<unk>"}
    return spaced(models.Unigram(), trainers.UnigramTrainer(vocab_size=600, **special), split=True)


TOKENIZERS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "bytes": tiny_tokenizer,
    **{f"bytes, {kind}": partial(tokenizer_of, kind) for kind in ("mistral", "gemma2", "llama3")},
    "bpe": bpe,
    "unigram": unigram,
}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_no_token_is_lost_at_a_documents_seam(kind):
    """Whatever stands between two chunks, and in every kind of tokenizer."""
    tokenizer, chunks = TOKENIZERS[kind](), some_chunks(len(JOINTS) + 1, 14)
    text = chunks[0] + "".join(map("".join, zip(JOINTS, chunks[1:], strict=True))) + "\n\nWhat?"
    prompt: Any = ask([text], "") if tokenizer.chat_template else text
    with RagKV(tiny_model(layers=2), tokenizer, store=":memory:") as engine:
        engine.precompute(chunks)
        plain, out = (engine.prefill(prompt, recompute_ratio=ratio) for ratio in (0.0, 1.0))
        whole = engine.render(prompt) if tokenizer.chat_template else prompt
        special = not tokenizer.chat_template
        ordinary = tokenizer(whole, add_special_tokens=special)["input_ids"]
        assert plain.token_ids == out.token_ids == ordinary
        for report in (plain.report, out.report):
            tokens = report.tokens
            parts = [tokens.sink, tokens.reused, tokens.recomputed, tokens.fresh]
            assert np.bincount([*report.positions], minlength=4).tolist() == parts
            assert sum(parts) == len(report.positions) == len(ordinary)
            assert [use.text for use in report.chunks] == chunks
        sizes = [len(tokenizer(each, add_special_tokens=False)["input_ids"]) for each in chunks]
        assert plain.report.tokens.reused > sum(sizes) - 4 * len(chunks)
        assert distance(out.logits, reference(engine, out.token_ids)) < TOLERANCE
