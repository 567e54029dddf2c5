"""Texts with which an answer may begin in place of what a schema asks for: calls of tools."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase


class Openings:
    """Follows an answer's first tokens while they may become one of the texts.

    Attributes
    ----------
    possible
        Whether the answer so far is the beginning of one of them.
    reached
        Whether it has begun with one of them.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, texts: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._texts = texts
        self._ids: list[int] = []
        self._begun = ""
        self.possible = bool(texts)
        self.reached = False

    def feed(self, token: int) -> None:
        """Take the answer's next token."""
        if self.possible:
            self._ids.append(token)
            self._begun = str(self._tokenizer.decode(self._ids, skip_special_tokens=False))
            self.reached = self._begun.startswith(self._texts)
            self.possible = not self.reached and any(
                text.startswith(self._begun) for text in self._texts
            )

    def tokens(self) -> list[int]:
        """Return tokens that go on towards one of the texts."""
        if not self.possible:
            return []
        rests = [text[len(self._begun) :] for text in self._texts if text.startswith(self._begun)]
        begin = [self._tokenizer(rest, add_special_tokens=False)["input_ids"][0] for rest in rests]
        for text, token in self._tokenizer.get_added_vocab().items():  # may go beyond them
            if any(text.startswith(rest) or rest.startswith(text) for rest in rests):
                begin.append(token)
        return begin
