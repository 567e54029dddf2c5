"""From tokens to text, piece by piece: whole characters, and nothing past a stop."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase


class TextPieces:
    """Turns tokens into text as they come.

    Holds back what may still change: bytes of an unfinished character, and the head
    of a stop text.

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

    def feed(self, token: int) -> str:
        """Return the text that is certain now and was not given before."""
        self._ids.append(token)
        text = self.text()
        if text.endswith("\ufffd"):
            return ""
        return self._give(text[: len(text) - _held_back(text, self._stop)])

    def finish(self) -> str:
        """Return the rest."""
        return self._give(self.text())

    def text(self) -> str:
        """The whole answer so far, cut at the first stop text."""
        text = str(self._tokenizer.decode(self._ids, skip_special_tokens=True))
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
