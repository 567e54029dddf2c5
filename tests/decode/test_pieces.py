"""From tokens to text, piece by piece."""

import copy
import random

import pytest
from tiny import VOCAB, tiny_tokenizer
from tokenizer_kinds import KINDS, tokenizer_of
from tokenizers import AddedToken

from ragkv.answer.pieces import AnswerSpelling, TextPieces

LONG = (
    "Some words, naïve façades, 東京の答え, \U0001f600\U0001f468\u200d\U0001f469 and\n\n  spaces. "
    * 12
)


def of_text() -> list[int]:
    return tiny_tokenizer()(LONG, add_special_tokens=False)["input_ids"]


def at_random() -> list[int]:
    """Return tokens that are mostly no text: halves of characters, special ones."""
    draw = random.Random(0)
    return [draw.randrange(VOCAB) for _ in range(700)]


@pytest.mark.parametrize("tokens", [of_text(), at_random()], ids=["text", "random"])
@pytest.mark.parametrize("stop", [(), ("no such stop", "spaces. Some words, naïve fa" + "x")])
def test_pieces_join_to_the_whole(tokens, stop):
    pieces = TextPieces(tiny_tokenizer(), stop)
    given = ""
    for count, token in enumerate(tokens, 1):
        given += pieces.feed(token)
        whole = tiny_tokenizer().decode(tokens[:count], skip_special_tokens=True)
        assert whole.startswith(given)
    assert given + pieces.finish() == tiny_tokenizer().decode(tokens, skip_special_tokens=True)
    assert len(given) > 0.9 * len(pieces.text())


def random_answers(kind: str) -> list[list[int]]:
    """Return short answers of random tokens; of byte-fallback tokens, most are no character."""
    draw, tokenizer = random.Random(1), tokenizer_of(kind)
    everything = list(range(len(tokenizer)))
    names = [f"<0x{byte:02X}>" for byte in (0x0A, 0x20, 0x61, 0xC3, 0xA9, 0xE6, 0xFF)]
    own = tokenizer.convert_tokens_to_ids([tokenizer.eos_token, *names])
    pool = everything + 90 * [each for each in own if each not in {None, tokenizer.unk_token_id}]
    return [draw.choices(pool, k=draw.randrange(1, 14)) for _ in range(500)]


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_of_random_tokens_join_to_the_whole(kind):
    tokenizer = tokenizer_of(kind)
    for tokens in random_answers(kind):
        pieces = TextPieces(tokenizer, ())
        given = "".join(map(pieces.feed, tokens))
        whole = tokenizer.decode(tokens, skip_special_tokens=True)
        assert given + pieces.finish() == pieces.text() == whole


def test_a_hidden_token_is_within_a_run_of_bytes():
    tokenizer = copy.deepcopy(tokenizer_of("metaspace"))
    tokenizer.add_tokens([AddedToken("<|hidden|>", special=True)])
    tokens = tokenizer.convert_tokens_to_ids(["<0x61>", "<|hidden|>", "<0xFF>"])
    pieces = TextPieces(tokenizer, ())
    assert "".join(map(pieces.feed, tokens)) + pieces.finish() == "\ufffd\ufffd"


def test_a_stop_text_of_bytes_ends_the_answer():
    tokenizer = tokenizer_of("metaspace")
    pieces = TextPieces(tokenizer, ("\n",))
    for token in tokenizer.convert_tokens_to_ids(["\u2581if", "<0x0A>"]):
        assert not pieces.is_stopped
        pieces.feed(token)
    assert pieces.is_stopped
    assert pieces.text() == "if"


@pytest.mark.parametrize("kind", KINDS)
def test_offsets_do_not_drift(kind):
    tokenizer = tokenizer_of(kind)
    word = tokenizer("the if", add_special_tokens=False)["input_ids"][-1]
    for tokens in random_answers(kind):
        spelling = AnswerSpelling(tokenizer)
        before = [spelling.take(token) for token in tokens]
        assert before == sorted(before)
        head = tokenizer.decode([*tokens, word], skip_special_tokens=True)
        text, _ = spelling.spell(word)
        assert spelling.take(word) == len(head) - len(text)
        assert head.endswith(text)


def test_a_token_costs_as_much_late_in_an_answer(monkeypatch):
    tokenizer = tiny_tokenizer()
    decode, lengths = type(tokenizer).decode, []

    def counting(self, ids, **settings):
        lengths.append(len(ids))
        return decode(self, ids, **settings)

    monkeypatch.setattr(type(tokenizer), "decode", counting)
    pieces = TextPieces(tokenizer, ("stop",))
    for token in of_text():
        pieces.feed(token)
    assert len(lengths) > 500
    assert max(lengths) < 100
