"""Settings of decoding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any, TypedDict

from ragkv.config.checks import check_bool, check_choice, check_number, check_whole
from ragkv.config.generation import check_generation
from ragkv.config.json_schema import check_schema
from ragkv.errors import ConfigError

LEAST_TEMPERATURE = 1e-20
"""Least temperature: scores divided by less can be infinite in float32."""

MOST_LOGPROBS = 20
"""Most alternatives recorded for each token, as in OpenAI's API."""


@dataclass(frozen=True, slots=True)
class SparseDecoding:
    """Decoding steps that read only some blocks of the context, in layers without a window.

    The context is an initial window, a middle of whole blocks of 16 tokens, and a local window.
    Steps always read both windows. In the middle, each KV head reads the blocks whose keys match
    the queries best, by the bound of Quest (arXiv 2406.10774). All rows of a step read the same
    blocks; every second step chooses anew. A step reads the whole context if it has no further
    blocks, or if the step recomputes some of it. The names are those of KTransformers.

    Parameters
    ----------
    second_block_count
        Blocks of the middle that a step reads, at least 1.
    initial_window, local_window
        Tokens at the beginning of the context, and before a step's first row, that are always read.
    """

    second_block_count: int = 64
    initial_window: int = 64
    local_window: int = 256

    def __post_init__(self) -> None:
        check_whole("second_block_count", self.second_block_count, 1, 2**31)
        for name in ("initial_window", "local_window"):
            check_whole(name, getattr(self, name), 0, 2**31)


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Settings of decoding, passed to transformers' ``generate``.

    Parameters
    ----------
    max_new_tokens
        Most tokens of the answer, which ends at the model's last position.
    temperature
        0 decodes greedily.
    top_p
        Nucleus sampling: the smallest set of tokens with this probability mass.
    stop
        Texts that end the answer, which does not contain them.
    seed
        Seed of sampling; ``None`` uses torch's global state.
    top_k
        Number of most probable tokens to sample from; 0 is all.
    stop_token_ids
        Tokens that end the answer, in addition to the model's end-of-sequence tokens.
    drafts
        Prompt lookup decoding: a step verifies the continuation of an earlier occurrence of the
        last tokens. It changes an answer's speed, not its tokens.
    sparse
        Blocks of a long context that steps read: ``"off"`` reads all, ``"auto"`` the best 64 if
        that saves time (on a CPU, prompts from about 7,500 tokens). Or a :class:`SparseDecoding`.
        It can change tokens.
    ignore_eos
        Whether the answer continues after the model's end-of-sequence tokens.
    logprobs
        Number of most probable alternatives whose log-probabilities are recorded, with each
        token's own, before temperature. ``None`` records none.
    json_schema
        JSON schema of the answer, unless ``max_new_tokens`` truncates it; ``{"type": "object"}`` is
        any object. Objects with ``properties`` have no further ones, unless the schema mentions
        them. Keywords that cannot be enforced are ignored and logged once each; with
        ``"strict": true`` in the schema they are an error. Needs ``ragkv[structured]``.
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
            raise ConfigError(
                f"temperature {self.temperature:g} is too close to 0: give 0 for greedy decoding"
            )
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
        """``stop`` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


def _is_readable(text: str) -> bool:
    """Whether a text has no lone surrogates, which tokenizers cannot produce."""
    with suppress(UnicodeEncodeError):
        return bool(text.encode())
    return False


DECODE_SETTINGS = tuple(each.name for each in fields(DecodeConfig))
"""The names of DecodeConfig's fields."""


@dataclass(frozen=True, slots=True)
class SchemaOrCall(DecodeConfig):
    """Settings of an answer that follows ``json_schema`` or is a tool call; internal.

    Parameters
    ----------
    call_marks
        Beginnings of calls. An answer with such a beginning does not follow the schema.
    """

    call_marks: tuple[str, ...] = ()


class DecodeOptions(TypedDict, total=False):
    """Fields of :class:`ragkv.DecodeConfig`."""

    max_new_tokens: int
    temperature: float
    top_p: float
    stop: str | Sequence[str]
    seed: int | None
    top_k: int
    stop_token_ids: Sequence[int]
    drafts: bool
    sparse: str | SparseDecoding
    ignore_eos: bool
    logprobs: int | None
    json_schema: Mapping[str, Any] | None
    generation: Mapping[str, Any] | None
