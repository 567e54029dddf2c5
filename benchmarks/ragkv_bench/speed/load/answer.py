"""What one request gave."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class ServedAnswer:
    """What one request gave, and when. Times are seconds from its start.

    Attributes
    ----------
    turn
        Its turn in the conversation, from 0.
    started_s
        When it was to be sent, from the start of the run: latencies count from then.
    ttft_s, answer_s
        To the first and to the last piece of the answer; None where none came.
    longest_gap_s
        Longest time between two pieces.
    completion_tokens, counted
        From ``usage``; where the endpoint sends none, the pieces, and ``counted`` is True.
    sources
        Prompt tokens by where they came from, of endpoints that report it.
    error
        What went wrong, in a word: an HTTP status, ``timeout``, ``connection``, ``cut off``,
        ``stream``; None for a whole answer. ``message`` has the endpoint's words.
    """

    turn: int = 0
    started_s: float = 0.0
    text: str = ""
    ttft_s: float | None = None
    answer_s: float | None = None
    longest_gap_s: float = 0.0
    completion_tokens: int = 0
    counted: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    sources: dict[str, int] = field(default_factory=dict)
    error: str | None = None
    message: str = ""

    @property
    def inter_token_s(self) -> float | None:
        """Mean seconds between two tokens."""
        if self.ttft_s is None or self.answer_s is None or self.completion_tokens < 2:
            return None
        return (self.answer_s - self.ttft_s) / (self.completion_tokens - 1)
