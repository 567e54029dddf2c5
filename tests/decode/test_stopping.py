"""Where an answer ends: at a stop text in the answer, and nowhere else."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from tiny import tiny_tokenizer

from ragkv import RagKV
from ragkv.model.calls import cache_in

Make = Callable[..., RagKV]
PROMPT = "Some question here that is long enough?\n\nAnswer:\n"


@contextmanager
def saying(engine: RagKV, text: str) -> Iterator[int]:
    """Make the model say a text; give its number of tokens."""
    engine.generate(PROMPT, max_new_tokens=1)  # the sink is encoded
    ids = tiny_tokenizer()(text, add_special_tokens=False)["input_ids"]
    prompt: list[int] = []

    def say(_: object, __: object, given: Any, out: transformers.utils.ModelOutput) -> None:
        length = cache_in(given).get_seq_length()
        prompt.append(length)  # the first call's is the prompt's
        first = length - prompt[0] - out.logits.shape[1] + 1
        for row, token in enumerate(ids[first : first + out.logits.shape[1]]):
            out.logits[:, row] = -1e9
            out.logits[:, row, token] = 1e9

    hook = engine.loaded.model.register_forward_hook(say, with_kwargs=True)
    try:
        yield len(ids)
    finally:
        hook.remove()


@pytest.mark.parametrize(
    ("text", "stop"),
    [
        ("Hello world。And then more text", "。"),
        ("Hi \U0001f600 there and more text", "\U0001f600"),
        ("answer one\n\nQuestion: two and more", "\n\nQ"),
        ("abcdef STOPPING now more", "STOP"),
        ("答えは東京です。次の質問は何", "です。次"),
        ("one turn<|im_end|>\nand another", "<|im_end|>"),
        ("ab<|im_start|>cd and so on", "bc"),
        ("word " * 30 + "and the end of it", "and the end"),
    ],
)
def test_an_answer_ends_with_the_token_that_completes_a_stop_text(make_engine, text, stop):
    engine, tokenizer = make_engine(), tiny_tokenizer()
    with saying(engine, text) as length:
        found = engine.generate(PROMPT, max_new_tokens=length, stop=[stop, "never said"])
    with saying(engine, text):
        assert "".join(engine.stream(PROMPT, max_new_tokens=length, stop=stop)) == found.text
    needed = next(
        count
        for count in range(1, length + 1)
        for raw in (True, False)
        if stop in tokenizer.decode(found.token_ids[:count], skip_special_tokens=raw)
    )
    assert len(found.token_ids) == needed
    assert found.text == tokenizer.decode(found.token_ids, skip_special_tokens=True).split(stop)[0]
    assert found.text


def test_a_stop_text_that_begins_in_the_prompt_does_not_end_the_answer(make_engine):
    engine = make_engine()
    text = "\nThe else clause runs.\n\nQuestion: next"
    with saying(engine, text) as length:
        found = engine.generate(PROMPT, max_new_tokens=length, stop="\n\n")
    assert found.text == "\nThe else clause runs."


def test_stop_texts_cost_nothing_before_the_first_token(make_engine, monkeypatch):
    def costly(*_, **__):
        raise AssertionError("built over the whole vocabulary at every call")

    monkeypatch.setattr(transformers.generation.utils, "StopStringCriteria", costly)
    engine = make_engine()
    assert engine.generate(PROMPT, max_new_tokens=3, stop="never said").token_ids


def test_little_is_decoded_for_a_stop_text_in_a_long_answer(make_engine, monkeypatch):
    from ragkv.decode.generate import StopTexts

    engine, lengths = make_engine(), []
    ends = StopTexts(engine.tokenizer, ("\nQ",))
    decode = type(engine.tokenizer).decode

    def counting(self, ids, **settings):
        lengths.append(len(ids))
        return decode(self, ids, **settings)

    monkeypatch.setattr(type(engine.tokenizer), "decode", counting)
    assert not ends.reached(torch.arange(4, 500).repeat(4))
    assert max(lengths) < 20


def test_the_models_own_stop_texts_end_its_answers(make_engine):
    engine = make_engine()
    engine.loaded.model.generation_config.stop_strings = ["Observation"]
    for stop in ((), "never said"):
        with saying(engine, "I look it up.\nObservation: it is so") as length:
            found = engine.generate(PROMPT, max_new_tokens=length, stop=stop)
        assert found.text == "I look it up.\n"
        assert len(found.token_ids) < length
    engine.loaded.model.generation_config.stop_strings = "look"  # one text
    with saying(engine, "I look it up.\nObservation: it is so") as length:
        assert engine.generate(PROMPT, max_new_tokens=length).text == "I "
