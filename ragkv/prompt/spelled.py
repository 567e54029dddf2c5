"""Where chunks stand in tokens whose text is not known any more."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from ragkv.prompt.find import MIN_HEAD
from ragkv.prompt.render import Rendered
from ragkv.prompt.tokens import IntArray, tokenize

EDGE = 4
"""Characters at either end of a spelled text that its neighbours may change."""


class _Spelled(dict[int, str]):
    """The strings of tokens, each asked of the tokenizer once."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def __missing__(self, token: int) -> str:
        self[token] = spelled = str(self._tokenizer.convert_ids_to_tokens(token))
        return spelled


class Speller:
    """Joins the strings that a tokenizer has for tokens.

    They are the same however a text was cut into tokens: behind a blank, a chunk's first words may
    be other tokens, and so on.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._spelled = _Spelled(tokenizer)

    def head(self, text: str) -> str:
        """Return what every prompt spells that has a chunk, perhaps truncated."""
        ids = tokenize(Rendered(text[:MIN_HEAD], add_special_tokens=False), self._tokenizer).ids
        return self._text(ids)[EDGE:-EDGE]

    def first(self, heads: Sequence[str], ids: IntArray) -> int:
        """Return where the first of some heads begins in ``[tokens]``, or a little before.

        The number of tokens where there is none.
        """
        text = self._text(ids)
        places = [at for at in map(text.find, heads) if at >= 0]
        if not places:
            return len(ids)
        ends = np.cumsum([len(self._spelled[each]) for each in ids.tolist()])
        return int(np.searchsorted(ends, min(places) - EDGE, side="right"))

    def _text(self, ids: IntArray) -> str:
        return "".join(map(self._spelled.__getitem__, ids.tolist()))
