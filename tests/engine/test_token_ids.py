"""Prompts that are token ids: exactly these are computed, and chunks are found in them."""

import random

import numpy as np
import pytest
import torch
from tiny import ask, some_chunks
from tokenizer_kinds import KINDS, model_of, tokenizer_of

from ragkv import RagKV, ReuseConfig
from ragkv.errors import ConfigError, PromptTooLongError
from ragkv.prompt.chat import TokenIds
from ragkv.prompt.token_bytes import read_ids

CHUNKS = some_chunks(3)
ODD = "The 日本語 and 😀, as in naïve café 👩‍👩‍👧."


@pytest.fixture(params=KINDS)
def kv(request):
    reuse = ReuseConfig(history=False)
    with RagKV(
        model_of(request.param), tokenizer_of(request.param), store=":memory:", reuse=reuse
    ) as kv:
        yield kv


def alone(kv, ids, count=6):
    """Return what transformers answers to exactly these tokens."""
    given = torch.tensor([ids])
    made = kv.loaded.model.generate(
        given, attention_mask=torch.ones_like(given), max_new_tokens=count, do_sample=False
    )
    return made[0, len(ids) :].tolist()


def plain(kv, text):
    return kv.tokenizer(text, add_special_tokens=False)["input_ids"]


def prompts(kv):
    """Return ids that no tokenizer writes, beside those that it does."""
    draw, ids = random.Random(5), plain(kv, ODD + CHUNKS[0])
    yield ids
    yield [kv.tokenizer.bos_token_id, *ids]
    yield [*ids, kv.tokenizer.eos_token_id, *ids]
    yield from (ids[:end] for end in range(1, 40, 3))
    yield from (ids[begin:] for begin in range(1, 40, 3))
    yield from ([draw.randrange(4, len(kv.tokenizer)) for _ in range(20)] for _ in range(10))


def test_the_prompt_has_exactly_these_tokens(kv):
    for ids in prompts(kv):
        read = kv.prefill(TokenIds(ids), recompute_ratio=1)
        assert read.token_ids == ids
        assert read.report.tokens.prompt == len(ids)
        expected = kv.loaded.model(torch.tensor([ids])).logits[0, -1]
        torch.testing.assert_close(read.logits, expected, atol=1e-3, rtol=1e-3)


def test_the_answer_is_that_to_these_tokens(kv):
    for ids in list(prompts(kv))[::5]:
        assert kv.generate(TokenIds(ids), max_new_tokens=6).token_ids == alone(kv, ids)[:6]


@pytest.mark.parametrize("kv", KINDS[:2], indirect=True)  # BERT's kind loses blanks
def test_chunks_are_found(kv):
    """As in the same text, whether the tokenizer would write these tokens or others."""
    kv.precompute(CHUNKS)
    text = kv.render(ask(CHUNKS))
    usual = plain(kv, text)
    by_text = kv.prefill(text, recompute_ratio=0.2).report
    for count in (1, 2, 3):
        letters = [token for each in "if"[:count] for token in plain(kv, each)]
        for ids in (usual, [*usual, *letters], [*usual[:-count], *letters]):
            read = kv.prefill(TokenIds(ids), recompute_ratio=0.2)
            assert read.token_ids == ids
            assert [use.text for use in read.report.chunks] == CHUNKS
            assert read.report.tokens.reused > 0.9 * by_text.tokens.reused > 0
            full = kv.prefill(TokenIds(ids), recompute_ratio=1)
            expected = kv.loaded.model(torch.tensor([ids])).logits[0, -1]
            torch.testing.assert_close(full.logits, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("kv", KINDS[:2], indirect=True)
def test_a_chunk_in_other_tokens_is_recomputed_there(kv):
    kv.precompute(CHUNKS)
    usual = plain(kv, kv.render(ask(CHUNKS)))
    at = len(usual) // 2
    split = [token for each in kv.tokenizer.decode(usual[at : at + 1]) for token in plain(kv, each)]
    ids = [*usual[:at], *split, *usual[at + 1 :]]
    read = kv.prefill(TokenIds(ids), recompute_ratio=0)
    assert read.token_ids == ids
    assert read.report.tokens.reused > 0
    placed = np.frombuffer(read.report.positions, np.uint8)
    assert (placed[at : at + len(split)] == 3).all() or split == usual[at : at + 1]


def test_earlier_prompts_are_continued():
    with RagKV(model_of("metaspace"), tokenizer_of("metaspace"), store=":memory:") as kv:
        ids = [7, 300, 9, 301] * 20
        answer = kv.generate(TokenIds(ids), max_new_tokens=4)
        kv.wait()
        report = kv.generate(TokenIds([*ids, *answer.token_ids, 5]), max_new_tokens=1).report
        assert report.tokens.history_exact >= len(ids)


@pytest.mark.parametrize("kind", KINDS[:2])
@pytest.mark.parametrize("text", ["if 日本語 the 😀 for", "the statement", "日本語"])
def test_characters_are_those_of_the_text(kind, text):
    tokenizer = tokenizer_of(kind)
    usual = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    rendered, tokens = read_ids(usual["input_ids"], tokenizer)
    assert rendered.text == text
    assert tokens.offsets.tolist() == list(map(list, usual["offset_mapping"]))
    letters = tokenizer.convert_tokens_to_ids(["i", "f"])
    rendered, tokens = read_ids([*usual["input_ids"], *letters], tokenizer)
    assert rendered.text == text + "if"
    assert tokens.offsets[:-2].tolist() == list(map(list, usual["offset_mapping"]))
    assert tokens.offsets[-2:].tolist() == [[len(text) + at, len(text) + at + 1] for at in (0, 1)]


def test_what_is_no_prompt(kv):
    beyond = len(kv.tokenizer)
    for wrong in ([beyond], [5, 10**6], [-1], [2**31], [10**12], [5, True], [5, 5.0], []):
        with pytest.raises(ConfigError):
            kv.generate(TokenIds(wrong), max_new_tokens=1)
    with pytest.raises(ConfigError, match="chat_template_kwargs"):
        kv.generate(TokenIds([5]), chat_template_kwargs={"a": 1})
    with pytest.raises(PromptTooLongError):
        kv.generate(TokenIds([5] * 4097))
