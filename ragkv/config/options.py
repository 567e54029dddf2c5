"""The keyword arguments of calls, for type checkers: the settings' fields, all optional."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from ragkv.config.decode import SparseDecoding
from ragkv.config.reuse import Named


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


class ReuseOptions(TypedDict, total=False):
    """Fields of :class:`ragkv.ReuseConfig`, for one call."""

    method: str | Named
    recompute_ratio: float | Literal["auto"]
    sink: str
    auxiliary_model: str | None
    on_miss: Literal["store", "skip"]
    history: bool
    calibrated_for: str | None


class AnswerOptions(DecodeOptions, ReuseOptions, total=False):
    """Arguments of an answer: fields of both, and those of its prompt."""

    chat_template_kwargs: Mapping[str, Any] | None
    retrieved: Sequence[str]
