"""Tokenise a text in pieces whose tokens are remembered, with the ids of the whole text.

A text is cut only where no token and no merge can reach across: before a blank between two ASCII
letters, for byte-pair tokenizers without a token that contains a letter with a blank behind it.
Which of these places are cuts depends on the next characters only (content-defined chunking), so
a chunk has the same pieces in every prompt, but for its first and its last.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache, partial
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding, Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerBase

from ragkv.prompt.rolling import Codes, code_points, window_hashes

Encoded = tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]
"""Ids ``[tokens]``, and the first character and the end of each token, ``[tokens, 2]``."""

_KEPT = 32768
"""Remembered pieces of a tokenizer: about 30 MB."""
_SPACING = 16
"""One of so many places is a cut: pieces of about 100 characters of English."""
_SEEN = 8
"""Characters that decide whether a place is a cut, from its blank on."""
_ACROSS = re.compile("[A-Za-z][ \u0120\u2581]")  # vocabularies write a blank in three ways
_LETTER = re.compile("[A-Za-z]$")
_LONG = 16
"""Repetitions in the longest probe: about 3,000 characters."""
_PROBES = (
    "The cat's 12 kids (all 345) ran to x y and Z.",
    "  a b\n\nc d\tE f  g h\n i\r\nj k.. l m 'n o' p_q r-s t/u 1 v 2w x3 y",
    "def f(a): return a if b else \u00e9t\u00e9 na\u00efve",
    " \u65e5\u672c\u8a9e and \U0001f600 ok e\u0301 z",
)
_dividers: WeakKeyDictionary[PreTrainedTokenizerBase, tuple[object, Divider | None]] = (
    WeakKeyDictionary()
)


class Divider:
    """Encodes texts piece by piece, without special tokens.

    Parameters
    ----------
    encode
        Encodes a text as a whole.
    """

    def __init__(self, encode: Callable[[str], Encoded]) -> None:
        self._encode = lru_cache(_KEPT)(encode)

    def encode(self, text: str) -> Encoded:
        """Return the tokens of the whole text."""
        codes = code_points(text)
        hashes, places = window_hashes(codes, _SEEN), _places(codes)
        places = places[places < len(hashes)]
        return self._join(text, places[(hashes[places] >> np.uint64(32)) % _SPACING == 0].tolist())

    def is_exact(self, text: str, whole: Encoded) -> bool:
        """Whether the text has the same tokens when it is cut at every place."""
        ids, offsets = self._join(text, _places(code_points(text)).tolist())
        return np.array_equal(ids, whole[0]) and np.array_equal(offsets, whole[1])

    def _join(self, text: str, cuts: list[int]) -> Encoded:
        starts, ends = [0, *cuts], [*cuts, len(text)]
        pieces = [self._encode(text[s:e]) for s, e in zip(starts, ends, strict=True)]
        ids = np.concatenate([ids for ids, _ in pieces])
        offsets = np.concatenate([offsets for _, offsets in pieces])
        shift = np.repeat(np.asarray(starts, np.int32), [len(ids) for ids, _ in pieces])
        return ids, offsets + shift[:, None]


def divider_of(
    tokenizer: PreTrainedTokenizerBase, encode: Callable[[Tokenizer, str], Encoded]
) -> Divider | None:
    """Return the divider of a fast tokenizer; None if its texts cannot be cut.

    It is created again after a change of the tokenizer's tokens, normaliser or pre-tokenizer.
    """
    backend = tokenizer.backend_tokenizer
    parts = (backend.pre_tokenizer, backend.normalizer)
    state = (
        tokenizer.split_special_tokens,
        backend.get_vocab_size(with_added_tokens=True),
        len(backend.get_added_tokens_decoder()),
        *(None if part is None else part.__getstate__() for part in parts),
    )
    known = _dividers.get(tokenizer)
    if known is None or known[0] != state:
        known = (state, _divider(tokenizer, partial(encode, backend)))
        _dividers[tokenizer] = known
    return known[1]


def _divider(
    tokenizer: PreTrainedTokenizerBase, encode: Callable[[str], Encoded]
) -> Divider | None:
    backend = tokenizer.backend_tokenizer
    if not isinstance(backend.model, BPE) or backend.model.dropout or _has_tokens_across(backend):
        return None
    divider = Divider(encode)
    for text in (*_PROBES, "".join(_PROBES) * _LONG):
        (whole,) = tokenizer(text, add_special_tokens=False, verbose=False).encodings
        if not divider.is_exact(text, as_arrays(whole)):
            return None
    return divider


def _has_tokens_across(backend: Tokenizer) -> bool:
    """Whether a token contains a place where texts are cut, or takes its blank."""
    added = backend.get_added_tokens_decoder().values()
    if any(token.rstrip and _LETTER.search(token.content) for token in added):
        return True
    return any(_ACROSS.search(token) for token in backend.get_vocab(with_added_tokens=True))


def as_arrays(encoding: Encoding) -> Encoded:
    """Return the ids and offsets of an encoding."""
    offsets = np.asarray(encoding.offsets, dtype=np.int32).reshape(-1, 2)
    return np.asarray(encoding.ids, dtype=np.int32), offsets


def _places(codes: Codes) -> npt.NDArray[np.intp]:
    """Return the offsets of blanks between two ASCII letters."""
    letters = (codes | 32) - np.uint32(ord("a")) < 26
    return np.flatnonzero((codes[1:-1] == ord(" ")) & letters[:-2] & letters[2:]) + 1
