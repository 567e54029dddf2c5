"""An answer: its text, its tokens, its calls and its report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ragkv.prompt.tools.calls import InvalidToolCall, ToolCall
from ragkv.report.account import ReuseReport

FinishReason = Literal["stop", "length", "cancelled"]
LEAST_LOGPROB = -9999.0
"""In place of minus infinity, which JSON does not have."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A drawn token's log-probability by the model's own scores, before temperature.

    ``top`` are the most probable tokens with theirs, the best first.
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
        ``"stop"``: the model's end, a stop token or a stop text; ``"length"``: as many tokens as
        were allowed; ``"cancelled"``.
    logprobs, text_logprobs
        Of each token, where they were asked for: by its id (not a server's), and by its text in
        OpenAI's form.
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
        """``finish_reason``, or ``"tool_calls"`` where there are some and none was cut off."""
        cut_off = self.finish_reason == "length" and self.invalid_tool_calls
        return "tool_calls" if self.tool_calls and not cut_off else self.finish_reason
