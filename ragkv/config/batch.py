"""How one model serves many callers."""

from __future__ import annotations

from dataclasses import dataclass

from ragkv.config.checks import check_number, check_whole


@dataclass(frozen=True, slots=True)
class BatchConfig:
    """How one model serves many callers at once. Engines over one model share it.

    Parameters
    ----------
    max_running
        Answers that run at once; further requests wait.
    kv_bytes
        Budget of their keys and values, in bytes: a request that does not fit beside those that
        run waits. ``None`` is a quarter of the memory of the model's device.
    max_step_ms
        About how long an answer's next token waits for the prompts of others, in milliseconds:
        longer by one layer of a prompt, and by the step itself.
    max_overtaken
        Waiting requests are served by the share of their prompt that is cached, the highest
        first; none is overtaken more often than this (RAGCache, section 5.3).
    """

    max_running: int = 16
    kv_bytes: int | None = None
    max_step_ms: float = 200.0
    max_overtaken: int = 2

    def __post_init__(self) -> None:
        check_whole("max_running", self.max_running, 1, 4096)
        if self.kv_bytes is not None:
            check_number("kv_bytes", self.kv_bytes, 1, 2**60)
        check_number("max_step_ms", self.max_step_ms, 0, 3_600_000)
        check_whole("max_overtaken", self.max_overtaken, 0, 2**31)
