"""Needles: where they stand, what is asked, how long the prompt is."""

from __future__ import annotations

from collections import Counter

import pytest
from tiny import tiny_tokenizer

from ragkv.errors import ConfigError
from ragkv_bench.data.needle_words import ADJECTIVES, NOUNS
from ragkv_bench.data.needles import (
    _prompt_tokens,
    build_needles,
    default_haystack,
    read_haystack,
    sentences,
)
from ragkv_bench.data.tasks import TASKS, chunk_text, prompt

KINDS = {"single": (1, 1), "multikey": (4, 1), "multivalue": (4, 4), "multiquery": (4, 4)}
HAYSTACK = " ".join(f"Sentence number {i} says nothing of use." for i in range(300))


def _needles(example):
    text = " ".join(chunk.text for chunk in example.chunks)
    return [s for s in sentences(text) if s.startswith("One of the special magic")]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_hides_and_asks_as_ruler_does(kind):
    hidden, expected = KINDS[kind]
    for example in build_needles(HAYSTACK, tiny_tokenizer(), kind, 1500, count=4, seed=7):
        assert example.task == f"niah_{kind}"
        needles = _needles(example)
        assert len(needles) == len(set(needles)) == hidden
        assert len(set(example.answers)) == len(example.answers) == expected
        gold = [needle for needle in needles if any(a in needle for a in example.answers)]
        assert len(gold) == expected
        keys = {needle.split(" for ")[1].split(" is: ")[0] for needle in gold}
        assert len(keys) == (4 if kind == "multiquery" else 1)
        assert all(key in example.question for key in keys)
        assert ("What is the" in example.question) == (expected == 1)
        for chunk in example.chunks:
            assert chunk.is_gold == any(needle in chunk.text for needle in gold)
        assert all(a.isdigit() and len(a) == 7 for a in example.answers)


@pytest.mark.parametrize("tokens", [400, 1000, 4000, 20_000])
def test_prompt_and_answer_fill_the_length_and_never_pass_it(tokens):
    tokenizer = tiny_tokenizer()
    longest = max(len(tokenizer(f" {s}")["input_ids"]) for s in sentences(HAYSTACK))
    (example,) = build_needles(HAYSTACK, tokenizer, "single", tokens)
    messages = prompt(example)
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    used = len(tokenizer(text)["input_ids"]) + TASKS["niah_single"].max_new_tokens
    assert tokens - longest - 16 < used <= tokens  # 16: a chunk's title


def test_a_base_model_counts_the_bare_prompt():
    tokenizer = tiny_tokenizer()
    (example,) = build_needles(HAYSTACK, tokenizer, "single", 600)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "chat_template", None)
        bare = _prompt_tokens(example, tokenizer)
    assert bare == len(tokenizer(prompt(example, chat=False))["input_ids"])
    assert bare != _prompt_tokens(example, tokenizer)


def test_chunks_have_about_the_wanted_length():
    tokenizer = tiny_tokenizer()
    (example,) = build_needles(HAYSTACK, tokenizer, "multikey", 4000)
    lengths = [len(tokenizer(chunk_text(chunk))["input_ids"]) for chunk in example.chunks]
    assert len(lengths) > 10
    assert all(206 < length < 271 for length in lengths[:-1])
    assert [chunk.title for chunk in example.chunks[:2]] == ["Part 1", "Part 2"]


def test_needles_stand_at_all_depths_and_texts_begin_anywhere():
    examples = build_needles(HAYSTACK, tiny_tokenizer(), "single", 2500, count=80)
    depths, first = Counter(), set()
    for example in examples:
        (gold,) = [i for i, chunk in enumerate(example.chunks) if chunk.is_gold]
        depths[4 * gold // len(example.chunks)] += 1
        first.add(example.chunks[0].text[:30])
    assert min(depths[quarter] for quarter in range(4)) >= 5
    assert len(first) > 40
    assert len({example.id for example in examples}) == 80


def test_seeds_repeat():
    def make(seed):
        return build_needles(HAYSTACK, tiny_tokenizer(), "multikey", 600, seed=seed)

    assert make(1) == make(1)
    assert make(1) != make(2)


def test_a_short_text_is_repeated_and_odd_ones_work():
    for text in (
        "One line. Another?",
        "no full stop at all " * 400,
        "x" * 3000,
        "汉字。句子\uff01" * 50,
    ):
        (example,) = build_needles(text, tiny_tokenizer(), "single", 2000)
        assert _prompt_tokens(example, tiny_tokenizer()) > 1200
        joined = " ".join(chunk.text for chunk in example.chunks)
        assert joined.count("One of the special magic numbers for") == 1
        assert example.answers[0] in joined
    assert max(len(sentence) for sentence in sentences("x" * 3000)) <= 400
    assert sentences("汉字。句子\uff01好") == ["汉字。", "句子\uff01", "好"]


def test_what_cannot_be_made_is_refused(tmp_path):
    tokenizer = tiny_tokenizer()
    with pytest.raises(
        ConfigError, match=r"multiquery needles need at least [0-9]+ tokens, not 200"
    ):
        build_needles(HAYSTACK, tokenizer, "multiquery", 200)
    with pytest.raises(ConfigError, match="no text"):
        build_needles("  \n ", tokenizer, "single", 500)
    with pytest.raises(ConfigError, match="kind must be one of single"):
        build_needles(HAYSTACK, tokenizer, "double", 500)
    with pytest.raises(ConfigError, match="cannot be read as UTF-8"):
        read_haystack(tmp_path / "none.txt")


def test_the_least_length_named_is_enough():
    tokenizer = tiny_tokenizer()
    with pytest.raises(ConfigError, match="at least") as refused:
        build_needles(HAYSTACK, tokenizer, "multikey", 10)
    least = int(str(refused.value).split("at least ")[1].split()[0])
    (example,) = build_needles(HAYSTACK, tokenizer, "multikey", least)
    assert len(_needles(example)) == 4


def test_the_default_text_and_the_key_words():
    assert len(default_haystack()) > 300_000
    for words in (ADJECTIVES, NOUNS):
        assert len(words) == len(set(words)) > 90
        assert all(word.isalpha() and word.islower() for word in words)
