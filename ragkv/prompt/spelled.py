"""Positions of chunks in tokens without their text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from ragkv.prompt.find import MIN_HEAD
from ragkv.prompt.render import Rendered
from ragkv.prompt.tokens import IntArray, tokenize

EDGE = 4
"""Characters at both ends of a spelled text that its neighbours can change."""


class _Spelled(dict[int, str]):
    """A cache of the strings of tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def __missing__(self, token: int) -> str:
        self[token] = spelled = str(self._tokenizer.convert_ids_to_tokens(token))
        return spelled


class Speller:
    """Joins the strings that a tokenizer has for tokens.

    The result does not depend on how a text was split into tokens, e.g. at a chunk's first words
    after a blank.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._spelled = _Spelled(tokenizer)

    def head(self, text: str) -> str:
        """Return the spelling that all prompts with a chunk contain, even a truncated one."""
        ids = tokenize(Rendered(text[:MIN_HEAD], add_special_tokens=False), self._tokenizer).ids
        return self._text(ids)[EDGE:-EDGE]

    def first(self, heads: Sequence[str], ids: IntArray) -> int:
        """Return the index of the first head's beginning in ``[tokens]``, or slightly before it.

        Without a head, this is the number of tokens.
        """
        text = self._text(ids)
        places = [at for at in map(text.find, heads) if at >= 0]
        if not places:
            return len(ids)
        ends = np.cumsum([len(self._spelled[each]) for each in ids.tolist()])
        return int(np.searchsorted(ends, min(places) - EDGE, side="right"))

    def _text(self, ids: IntArray) -> str:
        return "".join(map(self._spelled.__getitem__, ids.tolist()))
