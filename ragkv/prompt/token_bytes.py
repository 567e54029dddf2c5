"""The bytes of tokens, and the text of prompts given as token ids."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from ragkv.prompt.render import Rendered
from ragkv.prompt.rolling import code_points
from ragkv.prompt.tokens import IntArray, Tokens, tokenize

_PRINTED = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
"""Bytes that byte-level tokenizers write as the character of the same number."""
_OTHERS = (byte for byte in range(0x100) if byte not in _PRINTED)
_LETTERS = {chr(byte): byte for byte in _PRINTED} | {
    chr(0x100 + at): byte for at, byte in enumerate(_OTHERS)
}
_BYTE = re.compile("<0x([0-9A-F]{2})>")
_INVALID = re.compile("[\ud800-\udfff]")


class TokenBytes:
    """The bytes of tokens; joined, those of a text's tokens are the text in UTF-8."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._is_byte_level = self._joins(["a", "\u0120a"], "a a")
        self._has_bytes = self._joins(["<0x41>"], "A")

    def _joins(self, tokens: list[str], text: str) -> bool:
        try:
            return bool(self._tokenizer.convert_tokens_to_string(tokens) == text)
        except TypeError:  # ByT5's tokens have one letter
            return False

    def of(self, token: int, before: int | None) -> bytes:
        """Return a token's bytes after another token, or at a text's beginning."""
        if (byte := self.fallback(token)) is not None:
            is_stripped = before is None and not self._text([token])
            return b"" if is_stripped else byte
        name: Any = self._tokenizer.convert_ids_to_tokens(token)
        if name is None:
            return b""
        if self._is_byte_level:
            letters = [_LETTERS.get(letter, -1) for letter in name]
            return name.encode() if -1 in letters else bytes(letters)
        return self.text([token], before).encode()

    def text(self, tokens: Sequence[int], before: int | None) -> str:
        """Return the text of tokens after another token, or at a text's beginning."""
        behind = [] if before is None else [before]
        head, text = self._text(behind), self._text([*behind, *tokens])
        return text.removeprefix(head) if text.startswith(head) else self._text(tokens)

    def fallback(self, token: int) -> bytes | None:
        """Return the byte of a byte-fallback token such as ``<0x41>``; None for other tokens.

        A run of these tokens is decoded together: as its characters if all bytes are valid UTF-8,
        else as one U+FFFD for each byte.
        """
        name: Any = self._tokenizer.convert_ids_to_tokens(token) if self._has_bytes else None
        byte = _BYTE.fullmatch(name or "")
        return byte and bytes([int(byte[1], 16)])

    def _text(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids))) if ids else ""


def read_ids(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> tuple[Rendered, Tokens]:
    """Return the text of token ids, and the ids with their character offsets.

    Where the tokenizer reads the text as the same tokens, the offsets are the tokenizer's own, like
    those in entries of chunks.
    """
    own = np.asarray(ids, dtype=np.int32)
    text = str(
        tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    )
    read = tokenize(Rendered(text, add_special_tokens=False), tokenizer)
    if np.array_equal(read.ids, own):
        return Rendered(text, add_special_tokens=False), Tokens(own, read.offsets)
    text, offsets = _spelled(ids, tokenizer)
    rendered = Rendered(text, add_special_tokens=False)
    if tokenizer.is_fast:
        read = tokenize(rendered, tokenizer)
        _, places = _spelled(read.ids.tolist(), tokenizer)
        usual = {
            (*place, token): offset
            for place, token, offset in zip(
                places.tolist(), read.ids.tolist(), read.offsets.tolist(), strict=True
            )
        }
        found = zip(offsets.tolist(), ids, strict=True)
        mixed = [usual.get((*place, token), place) for place, token in found]
        offsets = np.maximum.accumulate(np.asarray(mixed, dtype=np.int32).reshape(-1, 2))
    return rendered, Tokens(own, offsets)


def _spelled(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> tuple[str, IntArray]:
    """Return the text of tokens, and the characters that have a byte of each, ``[tokens, 2]``."""
    spelled = TokenBytes(tokenizer)
    parts = [spelled.of(token, before) for before, token in zip([None, *ids], ids, strict=False)]
    text = b"".join(parts).decode(errors="surrogateescape")
    codes = code_points(text)
    is_byte = (codes >= 0xD800) & (codes < 0xE000)
    sizes = 1 + (codes >= 0x80) + (codes >= 0x800) + (codes >= 0x10000)
    ends = np.cumsum(np.where(is_byte, 1, sizes))
    stops = np.cumsum([len(part) for part in parts])
    starts = stops - [len(part) for part in parts]
    first = np.searchsorted(ends, starts, side="right")
    last = np.where(stops > starts, np.searchsorted(ends, stops, side="left") + 1, first)
    return _INVALID.sub("\ufffd", text), np.stack([first, last], axis=1).astype(np.int32)
