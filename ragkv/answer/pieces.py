"""Incremental decoding of tokens to text, in whole characters and up to a stop text."""

from __future__ import annotations

from collections.abc import Iterable

from transformers import PreTrainedTokenizerBase

from ragkv.prompt.token_bytes import TokenBytes

_CONTEXT, _DECODED_AGAIN = 8, 64
"""Tokens."""


class TextPieces:
    """Decodes tokens to text incrementally.

    Text that can still change is withheld: bytes of an incomplete character, a run of byte-fallback
    tokens, and the beginning of a stop text. Only the last tokens are decoded again with each new
    one.

    Parameters
    ----------
    stop
        Texts that end the answer and are not part of it.
    keep
        Names of special tokens to include in the text.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stop: tuple[str, ...], keep: Iterable[str] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._bytes = TokenBytes(tokenizer)
        self._stop = stop
        added = tokenizer.added_tokens_decoder.items()
        special = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
        special |= {each.content: token for token, each in added if each.special}
        self._hidden = frozenset(special.values()) - {special.get(name, -1) for name in keep}
        self._keeps = len(self._hidden) < len(set(special.values()))
        self._ids: list[int] = []
        self._is_in_run = False  # whether the last visible token is a byte-fallback token
        self._emitted = 0
        self._settled = ""
        self._last = 0  # the tokens from here on are decoded again
        self._known = 0  # characters of theirs that are settled

    def feed(self, token: int) -> str:
        """Add a token; return the text that cannot change any more."""
        self._ids.append(token)
        if token not in self._hidden:
            self._is_in_run = self._bytes.fallback(token) is not None
        if self._is_in_run:
            return ""
        last = self._decoded(self._ids[self._last :])
        if last.endswith("\ufffd"):
            return ""
        text = self._settled + last[self._known :]
        if len(self._ids) - self._last > _DECODED_AGAIN:
            self._settle(text)
        text = self._until_stop(text)
        return self._emit(text[: len(text) - _withheld(text, self._stop)])

    def _settle(self, text: str) -> None:
        """Stop decoding this text's tokens again, except the last ones for context."""
        behind = self._decoded(self._ids[-_CONTEXT:])
        if behind and text.endswith(behind):  # special tokens decode to nothing
            self._settled, self._known = text, len(behind)
            self._last = len(self._ids) - _CONTEXT

    def finish(self) -> str:
        """Return the rest."""
        return self._emit(self.text())

    def text(self) -> str:
        """Return the whole answer so far, cut at the first stop text."""
        return self._until_stop(self._decoded(self._ids))

    @property
    def is_stopped(self) -> bool:
        """Whether a stop text ended the answer."""
        text = self._decoded(self._ids)
        return self._until_stop(text) != text

    def _decoded(self, ids: list[int]) -> str:
        if self._keeps:
            ids = [token for token in ids if token not in self._hidden]
        return str(self._tokenizer.decode(ids, skip_special_tokens=not self._keeps))

    def _until_stop(self, text: str) -> str:
        ends = [at for stop in self._stop if (at := text.find(stop)) >= 0]
        return text[: min(ends)] if ends else text

    def _emit(self, text: str) -> str:
        piece = text[self._emitted :]
        self._emitted = max(self._emitted, len(text))
        return piece


def _withheld(text: str, stops: tuple[str, ...]) -> int:
    """Return the length of the longest tail of ``text`` that begins a stop text."""
    return max(
        (
            length
            for stop in stops
            for length in range(1, min(len(stop), len(text)) + 1)
            if text.endswith(stop[:length])
        ),
        default=0,
    )
