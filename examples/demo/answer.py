"""What one pipeline answered, and how two answers compare."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

AGREEMENT_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer's text and tokens, and what the engine reports of its prompt."""

    text: str
    token_ids: tuple[int, ...]
    ttft_s: float
    total_s: float
    prompt_tokens: int
    reused_tokens: int
    recomputed_tokens: int

    @classmethod
    def of(cls, text: str, tokenizer: PreTrainedTokenizerBase, report: Mapping[str, Any]) -> Self:
        """Make an answer from a framework's text and the engine's report as a dict."""
        return cls(
            text=text,
            token_ids=tuple(tokenizer(text, add_special_tokens=False)["input_ids"]),
            ttft_s=report["ttft_s"],
            total_s=report["total_s"],
            prompt_tokens=report["prompt_tokens"],
            reused_tokens=report["reused_tokens"],
            recomputed_tokens=report["recomputed_tokens"],
        )


class RagPipeline(Protocol):
    """A framework's own RAG pipeline over the demo's chunks."""

    def ask(self, question: str, method: str) -> Answer:
        """Retrieve and answer with the given method."""
        ...


@dataclass(frozen=True, slots=True)
class AnswerPair:
    """One question, answered by full prefill and by ragkv."""

    question: str
    full: Answer
    ragkv: Answer

    @property
    def speedup(self) -> float:
        """Time to first token of the full prefill over that of ragkv."""
        return self.full.ttft_s / self.ragkv.ttft_s

    @property
    def agreement(self) -> float:
        """Share of the first 16 answer tokens that are the same, place by place."""
        full = self.full.token_ids[:AGREEMENT_TOKENS]
        ragkv = self.ragkv.token_ids[:AGREEMENT_TOKENS]
        same = sum(a == b for a, b in zip(full, ragkv, strict=False))
        return same / max(len(full), len(ragkv), 1) if full or ragkv else 1.0


@dataclass(frozen=True, slots=True)
class DemoFigures:
    """One framework's pairs and what they come to."""

    pairs: Sequence[AnswerPair]

    @property
    def ttft_full_s(self) -> list[float]:
        """Seconds to the first token by full prefill, a question each."""
        return [pair.full.ttft_s for pair in self.pairs]

    @property
    def ttft_ragkv_s(self) -> list[float]:
        """Seconds to the first token by ragkv, a question each."""
        return [pair.ragkv.ttft_s for pair in self.pairs]

    @property
    def totals_s(self) -> tuple[list[float], list[float]]:
        """Seconds to the last token by full prefill and by ragkv, a question each."""
        pairs = self.pairs
        return [pair.full.total_s for pair in pairs], [pair.ragkv.total_s for pair in pairs]

    @property
    def speedup_median(self) -> float:
        """Median over the questions' own speed-ups."""
        return statistics.median(pair.speedup for pair in self.pairs)

    @property
    def token_agreement(self) -> float:
        """Mean share of the first 16 answer tokens that agree."""
        return statistics.fmean(pair.agreement for pair in self.pairs)

    def to_dict(self) -> dict[str, Any]:
        """Return the figures, ready for JSON."""
        return {
            "ttft_full_s": self.ttft_full_s,
            "ttft_ragkv_s": self.ttft_ragkv_s,
            "total_full_s": self.totals_s[0],
            "total_ragkv_s": self.totals_s[1],
            "speedup_median": self.speedup_median,
            "token_agreement": self.token_agreement,
            "answers": [
                {
                    "question": pair.question,
                    "full": pair.full.text,
                    "ragkv": pair.ragkv.text,
                    "prompt_tokens": pair.ragkv.prompt_tokens,
                    "reused_tokens": pair.ragkv.reused_tokens,
                    "recomputed_tokens": pair.ragkv.recomputed_tokens,
                }
                for pair in self.pairs
            ],
        }
