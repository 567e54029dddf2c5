"""The texts and bytes of an answer's tokens."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from ragkv.answer.completion import LEAST_LOGPROB, TokenLogprobs
from ragkv.prompt.token_bytes import TokenBytes


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
