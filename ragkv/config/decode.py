"""How tokens are drawn."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any

from ragkv.config.checks import check_bool, check_choice, check_number, check_whole
from ragkv.config.generation import check_generation
from ragkv.config.schema import check_schema
from ragkv.config.sparse import SparseDecoding
from ragkv.errors import ConfigError

LEAST_TEMPERATURE = 1e-20
"""Scores divided by less may be infinite in float32."""

MOST_LOGPROBS = 20
"""Most probable tokens that are recorded for each token, as in OpenAI's API."""


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """How tokens are drawn; handed to transformers' ``generate``.

    Parameters
    ----------
    max_new_tokens
        At most this many tokens are generated.
    temperature
        0 is greedy decoding.
    top_p
        Nucleus sampling: smallest set of tokens with this probability mass.
    stop
        Texts at which generation ends; the answer does not contain them.
    seed
        Makes sampling repeatable; ``None`` draws from torch's global state.
    top_k
        Sample among this many most probable tokens; 0 is all.
    stop_token_ids
        Tokens that end the answer, in addition to the model's end-of-sequence tokens.
    drafts
        Prompt lookup decoding: what stood behind an earlier occurrence of the last tokens is
        verified in the step that computes them. It changes an answer's speed, not its tokens.
    sparse
        Which blocks of a long context the steps read: ``"off"`` for all of them, ``"auto"`` for
        the best of them where that saves time (prompts from about 7,500 tokens on, on a CPU),
        or a :class:`SparseDecoding`. It may change tokens.
    ignore_eos
        Whether the answer goes on past the model's end-of-sequence tokens.
    logprobs
        Record each token's log-probability, and those of this many most probable ones, by the
        model's own scores, before temperature. ``None`` records nothing.
    json_schema
        The answer is JSON that follows this schema, unless ``max_new_tokens`` cuts it short;
        ``{"type": "object"}`` is any object. Objects with ``properties`` have no others, unless
        the schema says something of others. Keywords that cannot be enforced are left out and
        logged once each; with ``"strict": true`` in the schema they are an error. Needs
        ``ragkv[structured]``.
    generation
        More settings by their names in transformers' ``GenerationConfig``: ``repetition_penalty``,
        ``no_repeat_ngram_size``, ``min_p``, ``top_h``, ``typical_p``, ``epsilon_cutoff``,
        ``eta_cutoff``, ``min_new_tokens``, ``suppress_tokens``, ``begin_suppress_tokens``,
        ``bad_words_ids``, and ``max_length``, the most tokens of prompt and answer.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    stop: str | Sequence[str] = ()
    seed: int | None = None
    top_k: int = 0
    stop_token_ids: Sequence[int] = ()
    drafts: bool = True
    sparse: str | SparseDecoding = "off"
    ignore_eos: bool = False
    logprobs: int | None = None
    json_schema: Mapping[str, Any] | None = None
    generation: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        check_whole("max_new_tokens", self.max_new_tokens, 1, 2**31)
        check_number("temperature", self.temperature, 0.0, 100.0)
        if 0 < self.temperature < LEAST_TEMPERATURE:
            raise ConfigError(f"temperature {self.temperature:g} divides by next to 0; 0 is greedy")
        check_number("top_p", self.top_p, 0.0, 1.0)
        if not isinstance(self.stop, Sequence) or not all(
            isinstance(text, str) and text and _is_readable(text) for text in self.stops
        ):
            raise ConfigError(f"stop must be non-empty strings, not {self.stop!r}")
        if self.seed is not None:
            check_whole("seed", self.seed, 0, 2**63 - 1)
        check_whole("top_k", self.top_k, 0, 2**31)
        wrong = isinstance(self.stop_token_ids, str | bytes)
        if wrong or not isinstance(self.stop_token_ids, Iterable):
            raise ConfigError(f"stop_token_ids must be a list, not {self.stop_token_ids!r}")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for token in self.stop_token_ids:
            check_whole("a stop token", token, 0, 2**31)
        check_bool("drafts", self.drafts)
        if not isinstance(self.sparse, SparseDecoding):
            check_choice("sparse (or a SparseDecoding)", self.sparse, ("off", "auto"))
        check_bool("ignore_eos", self.ignore_eos)
        if self.logprobs is not None:
            check_whole("logprobs", self.logprobs, 0, MOST_LOGPROBS)
        if self.json_schema is not None:
            check_schema("json_schema", self.json_schema)
        generation = check_generation(self.generation or {}, self.max_new_tokens)
        object.__setattr__(self, "generation", generation)

    @property
    def stops(self) -> tuple[str, ...]:
        """``stop`` as a tuple, whichever way it was given."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


def _is_readable(text: str) -> bool:
    """Whether a text has no lone surrogate, which no tokenizer can produce."""
    with suppress(UnicodeEncodeError):
        return bool(text.encode())
    return False


DECODE_SETTINGS = tuple(each.name for each in fields(DecodeConfig))
"""Names of the settings that a call can give."""


@dataclass(frozen=True, slots=True)
class SchemaOrCall(DecodeConfig):
    """Settings of an answer that follows ``json_schema`` or is a tool call; internal.

    Parameters
    ----------
    call_marks
        Beginnings of calls: an answer that begins with one of them does not follow the schema.
    """

    call_marks: tuple[str, ...] = ()
