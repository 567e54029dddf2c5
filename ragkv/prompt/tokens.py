"""Token ids with character offsets."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding, Tokenizer
from transformers import PreTrainedTokenizerBase

from ragkv.errors import ConfigError
from ragkv.prompt.pieces import Encoded, as_arrays, divider_of
from ragkv.prompt.render import Rendered

IntArray = npt.NDArray[np.int32]
_SOME_TEXT = "The"


@dataclass(frozen=True, slots=True, eq=False)
class Tokens:
    """``ids`` ``[tokens]`` and ``offsets`` ``[tokens, 2]``: first character and end."""

    ids: IntArray
    offsets: IntArray

    def __post_init__(self) -> None:
        # each column is contiguous: a search would copy it otherwise
        object.__setattr__(self, "offsets", np.asfortranarray(self.offsets))

    def __len__(self) -> int:
        return len(self.ids)

    def touching(self, start: int, end: int) -> slice:
        """Return the tokens that overlap ``[start, end)``."""
        first = np.searchsorted(self.offsets[:, 1], start, side="right")
        return slice(int(first), int(np.searchsorted(self.offsets[:, 0], end)))

    def inside(self, start: int, end: int) -> slice:
        """Return the tokens that lie within ``[start, end)``."""
        first = np.searchsorted(self.offsets[:, 0], start)
        return slice(int(first), int(np.searchsorted(self.offsets[:, 1], end, side="right")))

    def characters(self, count: int) -> int:
        """Return the number of characters that the first tokens cover."""
        return int(self.offsets[:count, 1].max(initial=0))


def tokenize(rendered: Rendered, tokenizer: PreTrainedTokenizerBase) -> Tokens:
    """Tokenise a whole text, with the ids of the model's ordinary pipeline.

    The text is cut only where no token can reach across (:mod:`ragkv.prompt.pieces`), never at
    the borders of chunks.
    """
    require_readable(rendered.text, "prompt")
    text, special = rendered.text, rendered.add_special_tokens
    if not tokenizer.is_fast:  # served in full: no chunk is looked for
        encoded = tokenizer(text, add_special_tokens=special, verbose=False)
        ids = np.asarray(encoded["input_ids"], dtype=np.int32)
        return Tokens(ids, np.zeros((len(ids), 2), dtype=np.int32))
    if not (special and tokenizer.num_special_tokens_to_add()):
        divider = divider_of(tokenizer, _encode)
        if divider is not None:
            return Tokens(*divider.encode(text))
    (found,) = tokenizer(text, add_special_tokens=special, verbose=False).encodings
    if _is_changed(found):
        return Tokens(*_encode(tokenizer.backend_tokenizer, text, special=special))
    return Tokens(*as_arrays(found))


def _encode(backend: Tokenizer, text: str, *, special: bool = False) -> Encoded:
    found = backend.encode(text, add_special_tokens=special)
    if _is_changed(found):
        own = copy.deepcopy(backend)
        own.no_truncation()
        own.no_padding()
        found = own.encode(text, add_special_tokens=special)
    return as_arrays(found)


def _is_changed(found: Encoding) -> bool:
    """Whether an encoding is cut or padded, by a call in another thread.

    transformers keeps what a call cuts and pads to in the tokenizer.
    """
    return bool(found.overflowing) or 0 in found.attention_mask


def require_readable(text: str, what: str) -> None:
    """Refuse text that tokenizers cannot read.

    Raises
    ------
    ConfigError
        The text has a lone surrogate.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{what} {text[:40]!r} has a lone surrogate, which tokenizers do not read, at "
            f"character {error.start}: text.encode(errors='replace').decode() replaces it"
        ) from None


def sink_tokens(sink: Rendered, tokenizer: PreTrainedTokenizerBase) -> Tokens:
    """Tokenise a sink as in a prompt, where text follows it.

    Its last characters, e.g. blank lines before a word, can tokenise differently there.
    """
    if not sink.text:
        return tokenize(sink, tokenizer)
    both = tokenize(Rendered(sink.text + _SOME_TEXT, sink.add_special_tokens), tokenizer)
    inside = both.offsets[:, 1] <= len(sink.text)
    count = len(both) if inside.all() else int(np.argmin(inside))
    return Tokens(both.ids[:count], both.offsets[:count])


def encode_behind(
    sink: Rendered, sink_ids: IntArray, text: str, tokenizer: PreTrainedTokenizerBase
) -> Tokens:
    """Tokenise a chunk directly behind the sink; offsets count from the chunk's start.

    ``sink_ids`` are the ids of :func:`sink_tokens`. If a token would span the boundary, the chunk
    is tokenised separately.
    """
    both = tokenize(Rendered(sink.text + text, sink.add_special_tokens), tokenizer)
    count, start = len(sink_ids), len(sink.text)
    if np.array_equal(both.ids[:count], sink_ids) and (
        len(both) == count or both.offsets[count:, 0].min() >= start
    ):
        return Tokens(both.ids[count:], both.offsets[count:] - np.int32(start))
    return tokenize(Rendered(text, add_special_tokens=False), tokenizer)
