"""From tokens to text, piece by piece."""

from __future__ import annotations

import random

import pytest
from tiny import VOCAB, tiny_tokenizer

from ragkv.decode.text import TextPieces

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
def test_pieces_join_to_the_whole(tokens: list[int], stop: tuple[str, ...]) -> None:
    pieces = TextPieces(tiny_tokenizer(), stop)
    given = ""
    for count, token in enumerate(tokens, 1):
        given += pieces.feed(token)
        whole = tiny_tokenizer().decode(tokens[:count], skip_special_tokens=True)
        assert whole.startswith(given)
    assert given + pieces.finish() == tiny_tokenizer().decode(tokens, skip_special_tokens=True)
    assert len(given) > 0.9 * len(pieces.text())


def test_a_token_costs_as_much_late_in_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tiny_tokenizer()
    decode, lengths = type(tokenizer).decode, []

    def counting(self: object, ids: list[int], **settings: object) -> str:
        lengths.append(len(ids))
        return decode(self, ids, **settings)

    monkeypatch.setattr(type(tokenizer), "decode", counting)
    pieces = TextPieces(tokenizer, ("stop",))
    for token in of_text():
        pieces.feed(token)
    assert len(lengths) > 500
    assert max(lengths) < 100
