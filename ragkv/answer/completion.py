"""An answer: its text, its tokens, its calls and its report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ragkv.prompt.tools.calls import InvalidToolCall, ToolCall
from ragkv.report.account import ReuseReport

FinishReason = Literal["stop", "length", "cancelled"]
LEAST_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON lacks."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A generated token's log-probability, before temperature.

    ``top`` has the most probable tokens with their log-probabilities, the best first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """An answer: its text without special tokens and stop texts, its tokens, its report.

    Attributes
    ----------
    finish_reason
        ``"stop"``: an end-of-sequence token, a stop token or a stop text; ``"length"``: the maximum
        number of tokens; ``"cancelled"``.
    logprobs, text_logprobs
        Of each token, if requested: by id (not from a server), and by text in OpenAI's form.
    tool_calls, invalid_tool_calls
        Calls of a :class:`ragkv.Chat`'s tools; they are not part of ``text``.
    """

    text: str
    token_ids: list[int]
    report: ReuseReport
    finish_reason: FinishReason = "stop"
    logprobs: tuple[TokenLogprobs, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    invalid_tool_calls: tuple[InvalidToolCall, ...] = ()
    text_logprobs: tuple[Mapping[str, Any], ...] = ()

    @property
    def openai_finish_reason(self) -> str:
        """``finish_reason``, or ``"tool_calls"`` if there are calls and none was cut off."""
        cut_off = self.finish_reason == "length" and self.invalid_tool_calls
        return "tool_calls" if self.tool_calls and not cut_off else self.finish_reason
