"""Answers that follow a JSON schema: llguidance masks the tokens of each step."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel, Sequence
from transformers import LogitsProcessor, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ragkv.config.json_schema import grammar_of
from ragkv.config.json_schema.grammar import matcher_of
from ragkv.errors import ConfigError

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_lock = threading.Lock()
_tokenizers: weakref.WeakKeyDictionary[PreTrainedTokenizerBase, dict[Any, LLTokenizer]] = (
    weakref.WeakKeyDictionary()
)


class SchemaConstraint(LogitsProcessor):
    """Sets the score of every token that would violate the schema to -inf.

    It follows the answer token by token. A draft's tokens are drawn one after another too.

    Parameters
    ----------
    schema
        A JSON schema.
    vocabulary
        Width of the model's scores, which can exceed the tokenizer's vocabulary.
    ends
        The model's end-of-sequence tokens.
    begin
        Tokens of ``input_ids`` before the answer.
    unless
        Texts such as the marks of a tool call: an answer that begins with one is unconstrained.

    Raises
    ------
    ConfigError
        llguidance does not support the schema or the tokenizer.
    """

    def __init__(
        self,
        schema: Mapping[str, Any],
        tokenizer: PreTrainedTokenizerBase,
        *,
        vocabulary: int,
        ends: tuple[int, ...],
        begin: int,
        unless: tuple[str, ...] = (),
    ) -> None:
        self._matcher = matcher_of(grammar_of(schema), _wrapped(tokenizer, vocabulary, ends))
        self._seen = begin
        self._openings = Openings(tokenizer, unless)
        self._broken = False
        self._check()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Mask ``[1, vocab]`` scores after ``input_ids`` ``[1, tokens]``."""
        self._follow(input_ids)
        if self._openings.reached:
            return scores
        allowed = np.zeros(scores.shape[-1], dtype=np.uint8)
        if not self._broken:
            bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
            self._check()
            allowed = np.unpackbits(bits, bitorder="little", count=scores.shape[-1])
        allowed[[token for token in self._openings.tokens() if token < len(allowed)]] = 1
        hidden = torch.from_numpy(allowed == 0).to(scores.device)
        return scores.masked_fill(hidden, float("-inf"))

    def is_complete(self, input_ids: torch.Tensor) -> bool:
        """Whether only the end can follow."""
        self._follow(input_ids)
        return self._matcher.is_stopped() and not self._openings.reached

    def _follow(self, input_ids: torch.Tensor) -> None:
        new = input_ids[0, self._seen :].tolist()
        self._seen += len(new)
        for token in new:
            self._openings.feed(token)
            if self._openings.reached or self._matcher.is_stopped():
                return
            if self._openings.possible:  # the schema may not allow the beginning of a text
                self._broken |= not self._matcher.validate_tokens([token])
            if not self._broken:
                self._matcher.consume_token(token)
                self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ConfigError(f"json_schema cannot be followed: {self._matcher.get_error()}")


class Openings:
    """Follows an answer's first tokens while it can still begin with one of the texts.

    Attributes
    ----------
    possible
        Whether the answer so far is a prefix of one of them.
    reached
        Whether the answer begins with one of them.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, texts: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._texts = texts
        self._ids: list[int] = []
        self._begun = ""
        self.possible = bool(texts)
        self.reached = False

    def feed(self, token: int) -> None:
        """Add the answer's next token."""
        if self.possible:
            self._ids.append(token)
            self._begun = str(self._tokenizer.decode(self._ids, skip_special_tokens=False))
            self.reached = self._begun.startswith(self._texts)
            self.possible = not self.reached and any(
                text.startswith(self._begun) for text in self._texts
            )

    def tokens(self) -> list[int]:
        """Return tokens that continue one of the texts."""
        if not self.possible:
            return []
        ids, done = self._ids, len(self._begun)
        found = list(self._tokenizer.get_added_vocab().values())  # can extend beyond the texts
        planned: list[int] = []
        for text in self._texts:
            whole, rest = (
                self._tokenizer(part, add_special_tokens=False)["input_ids"]
                for part in (text, text[done:])
            )
            found += rest[:1]
            if whole[: len(ids)] == ids:
                planned += whole[len(ids) : len(ids) + 1]
        return planned + [token for token in found if self._extends(token)]

    def _extends(self, token: int) -> bool:
        """Whether a token adds characters of one of the texts; some tokens begin with a space."""
        begun = str(self._tokenizer.decode([*self._ids, token], skip_special_tokens=False))
        return len(begun) > len(self._begun) and any(
            text.startswith(begun) or begun.startswith(text) for text in self._texts
        )


def _wrapped(
    tokenizer: PreTrainedTokenizerBase, vocabulary: int, ends: tuple[int, ...]
) -> LLTokenizer:
    """Return llguidance's form of a tokenizer, cached since making it takes a second."""
    from llguidance.hf import from_tokenizer

    given: Any = _of_bytes(tokenizer)
    with _lock:
        known = _tokenizers.setdefault(tokenizer, {})
        key = vocabulary, ends
        if key not in known:
            size = max(vocabulary, len(tokenizer))
            inside = [end for end in ends if end < size]  # without ignore_eos's unused id
            try:
                known[key] = from_tokenizer(given, n_vocab=size, eos_token=inside or None)
            except ValueError as error:
                raise ConfigError(
                    f"json_schema needs a fast tokenizer, not {type(tokenizer).__name__}: {error}"
                ) from error
        return known[key]


def _of_bytes(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return a tokenizer whose decoder shows llguidance that its tokens are written in bytes.

    transformers loads Llama 3's GGUF files with decoders for both kinds of vocabularies, which
    llguidance reads as the other kind.
    """
    if not tokenizer.is_fast or not isinstance(tokenizer.backend_tokenizer.decoder, Sequence):
        return tokenizer
    known = tokenizer.get_vocab()
    if "\u0120" not in known or "<0x0A>" in known:
        return tokenizer
    raw = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    raw.decoder = ByteLevel()
    own: Any = PreTrainedTokenizerFast
    made: PreTrainedTokenizerBase = own(tokenizer_object=raw, eos_token=tokenizer.eos_token)
    return made
