"""Text of an answer's tokens: whole characters up to a stop text, and each token's own."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from ragkv.answer.completion import LEAST_LOGPROB, TokenLogprobs
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


class AnswerSpelling:
    """Spells an answer's tokens in order: their bytes, joined, are the answer's.

    The same holds for their texts, except for tokens of a part of a character. A special token has
    its name as text and no bytes, since answers leave it out. A run of byte-fallback tokens that is
    not valid UTF-8 is one U+FFFD per byte in the answer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._bytes = TokenBytes(tokenizer)
        added = tokenizer.added_tokens_decoder.items()
        self._special = {token: each.content for token, each in added if each.special}
        self._before: int | None = None
        self._reader = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = 0
        self._run = list[int]()  # byte-fallback tokens, up to here
        self._before_run: int | None = None
        self._at_run = 0  # characters before the run

    def spell(self, token: int) -> tuple[str, bytes]:
        """Return the text and the bytes of a possible next token."""
        if token in self._special:
            return self._special[token], b""
        data = self._bytes.of(token, self._before)
        return data.decode(errors="replace"), data

    def take(self, token: int) -> int:
        """Append a token; return the number of the answer's characters before it.

        The offset of a token that continues a character is the character's beginning. Within a
        run of byte-fallback tokens, offsets are those of valid UTF-8.
        """
        if token in self._special:
            return self._characters
        is_byte = self._bytes.fallback(token) is not None
        if self._run and not is_byte:
            self._reader.reset()
            self._characters = self._at_run + len(self._bytes.text(self._run, self._before_run))
            self._run = []
        _, data = self.spell(token)
        self._before = token
        is_begun = bool(self._reader.getstate()[0])
        is_broken = is_begun and bool(data) and not 0x80 <= data[0] < 0xC0
        offset = self._characters + is_broken
        self._characters += len(self._reader.decode(data))
        if is_byte:
            self._run.append(token)
        else:
            self._before_run, self._at_run = token, self._characters
        return offset

    def item(self, record: TokenLogprobs) -> dict[str, Any]:
        """Append a token; return its item of OpenAI's ``logprobs``."""
        top = [self._item(*each) for each in record.top]
        found = {**self._item(record.token_id, record.logprob), "top_logprobs": top}
        self.take(record.token_id)
        return found

    def _item(self, token: int, logprob: float) -> dict[str, Any]:
        text, data = self.spell(token)
        return {"token": text, "logprob": max(logprob, LEAST_LOGPROB), "bytes": list(data)}


def spelled_logprobs(
    tokenizer: PreTrainedTokenizerBase, records: Sequence[TokenLogprobs]
) -> tuple[dict[str, Any], ...]:
    """Return an answer's tokens as the items of OpenAI's ``logprobs``."""
    return tuple(map(AnswerSpelling(tokenizer).item, records)) if records else ()
