"""A text that is tokenised in pieces has the tokens of the whole text, for every tokenizer."""

import pydoc_data.topics
from functools import cache

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from tiny import some_chunks
from tokenizer_kinds import KINDS as SMALL_KINDS
from tokenizer_kinds import tokenizer_of
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from ragkv.prompt import pieces
from ragkv.prompt.pieces import Divider
from ragkv.prompt.render import Rendered
from ragkv.prompt.tokens import tokenize

TOPICS = [pydoc_data.topics.topics[each] for each in ("if", "for", "assignment", "numbers")]
NAMES = ["<unk>", "<|start|>", "<|end|>"]
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (r"\p{N}{1,3}", "[\u4e00-\u9fff\u3040-\u30ff]+", r" ?\p{L}+|[\r\n]+|\s+")


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
METASPACE = normalizers.Replace(" ", "\u2581")
PARTS = {
    "gpt-2": (None, pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "starcoder": (
        None,
        pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)]),
    ),
    "llama-3": (None, pre_tokenizers.Sequence([split(LLAMA_3), BYTES])),
    "qwen": (normalizers.NFC(), pre_tokenizers.Sequence([split(LLAMA_3), BYTES])),
    "deepseek": (None, pre_tokenizers.Sequence([*map(split, DEEPSEEK), BYTES])),
    "gemma": (METASPACE, pre_tokenizers.Split(" ", "merged_with_previous")),
    "trimmed": (None, pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "prefix space": (None, pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "llama-2": (normalizers.Sequence([normalizers.Prepend("\u2581"), METASPACE]), None),
    "metaspace always": (None, pre_tokenizers.Metaspace(prepend_scheme="always")),
    "words joined": (METASPACE, None),
}
WHOLE = {"trimmed", "llama-2", "words joined"}
"""Kinds that write a text's first blank differently, or have tokens of several words."""


@cache
def trained(kind: str) -> PreTrainedTokenizerFast:
    normalizer, pre_tokenizer = PARTS[kind]
    raw = Tokenizer(models.BPE(unk_token="<unk>"))
    if normalizer is not None:
        raw.normalizer = normalizer
    if pre_tokenizer is not None:
        raw.pre_tokenizer = pre_tokenizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1200, special_tokens=NAMES, initial_alphabet=alphabet, show_progress=False
    )
    texts = TOPICS
    if kind in ("gemma", "llama-2"):  # trained by SentencePiece: no token has two words
        texts = [f" {word}" for text in TOPICS for word in text.split()]
    if kind == "trimmed":
        raw.post_processor = processors.ByteLevel(trim_offsets=True)
    raw.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=raw)


def expect_whole(tokenizer: PreTrainedTokenizerFast, text: str, *, special: bool = False) -> None:
    read = tokenize(Rendered(text, add_special_tokens=special), tokenizer)
    (whole,) = tokenizer(text, add_special_tokens=special).encodings
    assert read.ids.tolist() == whole.ids
    assert [tuple(each) for each in read.offsets.tolist()] == whole.offsets


def divider(tokenizer: PreTrainedTokenizerFast) -> Divider | None:
    tokenize(Rendered("a text", add_special_tokens=False), tokenizer)
    return pieces._dividers[tokenizer][1]


@pytest.fixture
def cut_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "_SPACING", 1)


SCRAPS = st.sampled_from(
    [
        *(" ", "  ", "\n", "\r\n", "\t", ".", ",", "'", "'s", "..."),
        *("a", "b", "the", "if", "assignment", "12", "3456", " a b c d ", "x = y if z else w"),
        *("\u00e9", "e\u0301", "\u0301", "\u65e5\u672c", "\U0001f600", "\u200d", "\u00a0"),
        *("\u2581", "\u0120", "<0x41>", *NAMES),
    ]
)


@pytest.mark.usefixtures("cut_everywhere")
@pytest.mark.parametrize("kind", [*PARTS, *SMALL_KINDS])
@settings(max_examples=60, deadline=None)
@given(texts=st.lists(st.lists(SCRAPS, max_size=30).map("".join), min_size=1, max_size=3))
def test_same_tokens_as_the_whole_text(kind, texts):
    tokenizer = trained(kind) if kind in PARTS else tokenizer_of(kind)
    for text in texts:
        for special in (False, True):
            expect_whole(tokenizer, text, special=special)


@pytest.mark.parametrize("kind", [*PARTS, *SMALL_KINDS])
def test_which_tokenizers_are_cut(kind):
    tokenizer = trained(kind) if kind in PARTS else tokenizer_of(kind)
    assert (divider(tokenizer) is None) == (kind in WHOLE | {"wordpiece"})
    for text in TOPICS:
        expect_whole(tokenizer, text)


def test_chunk_is_encoded_once():
    tokenizer = trained("llama-3")
    chunk = " ".join(TOPICS[2].split())
    cut = divider(tokenizer)
    assert cut is not None
    expect_whole(tokenizer, f"One question. {chunk} And its end.")
    known = cut._encode.cache_info().misses
    expect_whole(tokenizer, f"Quite another question\n\n{chunk}\n\nwith another end")
    hits = cut._encode.cache_info().hits
    assert cut._encode.cache_info().misses <= known + 2
    assert hits >= len(chunk) // 1000


@pytest.mark.usefixtures("cut_everywhere")
@pytest.mark.parametrize(
    "token",
    [AddedToken("b c"), AddedToken("b", rstrip=True), AddedToken("b", lstrip=True), "rap", "the"],
)
def test_tokens_that_are_added_later(token):
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(trained("gpt-2").backend_tokenizer.to_str())
    )
    text = "a b c the wrap of a  b c d b\nthe b"
    expect_whole(tokenizer, text)
    tokenizer.add_tokens([token])
    expect_whole(tokenizer, text)
    tokenizer.add_special_tokens({"pad_token": "of"})
    expect_whole(tokenizer, text)


@pytest.mark.usefixtures("cut_everywhere")
def test_pre_tokenizer_that_is_set_later():
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(trained("gpt-2").backend_tokenizer.to_str())
    )
    text = "a wrap of 12 words and 345 more"
    expect_whole(tokenizer, text)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    expect_whole(tokenizer, text)
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    expect_whole(tokenizer, text.upper())


def test_another_call_cuts_and_pads():
    tokenizer, text = trained("qwen"), " ".join(some_chunks(3))
    expect_whole(tokenizer, text)
    want = tokenize(Rendered(text, add_special_tokens=False), tokenizer).ids
    backend = tokenizer.backend_tokenizer
    backend.enable_truncation(3)
    backend.enable_padding(length=900)
    for same in (text, f"{text} and a new piece of it"):
        read = tokenize(Rendered(same, add_special_tokens=False), tokenizer).ids
        assert np.array_equal(read[: len(want) - 1], want[:-1])
        backend.enable_truncation(3)
    backend.no_truncation()
    backend.no_padding()
