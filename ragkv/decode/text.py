"""From tokens to text, piece by piece: whole characters, and nothing past a stop."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

_CONTEXT, _DECODED_AGAIN = 8, 64
"""Tokens."""


class TextPieces:
    """Turns tokens into text as they come.

    Holds back what may still change: bytes of an unfinished character, and the head
    of a stop text. Only the last tokens are decoded again with each new one.

    Parameters
    ----------
    stop
        Texts that end the answer and do not belong to it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._ids: list[int] = []
        self._given = 0
        self._settled = ""
        self._last = 0  # the tokens from here on are decoded again
        self._known = 0  # characters of theirs that are settled

    def feed(self, token: int) -> str:
        """Return the text that is certain now and was not given before."""
        self._ids.append(token)
        last = self._decoded(self._ids[self._last :])
        if last.endswith("\ufffd"):
            return ""
        text = self._settled + last[self._known :]
        if len(self._ids) - self._last > _DECODED_AGAIN:
            self._settle(text)
        text = self._until_stop(text)
        return self._give(text[: len(text) - _held_back(text, self._stop)])

    def _settle(self, text: str) -> None:
        """Decode the tokens of this text no more, but for some that the next ones stand behind."""
        behind = self._decoded(self._ids[-_CONTEXT:])
        if behind and text.endswith(behind):  # special tokens alone decode to nothing
            self._settled, self._known = text, len(behind)
            self._last = len(self._ids) - _CONTEXT

    def finish(self) -> str:
        """Return the rest."""
        return self._give(self.text())

    def text(self) -> str:
        """The whole answer so far, cut at the first stop text."""
        return self._until_stop(self._decoded(self._ids))

    def _decoded(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def _until_stop(self, text: str) -> str:
        ends = [at for stop in self._stop if (at := text.find(stop)) >= 0]
        return text[: min(ends)] if ends else text

    def _give(self, text: str) -> str:
        piece = text[self._given :]
        self._given = max(self._given, len(text))
        return piece


def _held_back(text: str, stops: tuple[str, ...]) -> int:
    """Length of the longest tail of ``text`` that begins one of the stop texts."""
    return max(
        (
            length
            for stop in stops
            for length in range(1, min(len(stop), len(text)) + 1)
            if text.endswith(stop[:length])
        ),
        default=0,
    )
