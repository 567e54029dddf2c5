"""Write the answers of one request: whole, or chunk by chunk."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any

from ragkv.answer.completion import Completion, TokenLogprobs
from ragkv.answer.spelling import AnswerSpelling
from ragkv.engine.engine import RagKV
from ragkv.serve.answers import AnswerPart
from ragkv.serve.fields import AnswerFields
from ragkv.serve.forms import Form, counted, envelope, usage
from ragkv.serve.service import Service


class AnswerWriter:
    """Writes one request's answers in their form, and counts them.

    Parameters
    ----------
    count
        Answers in all: ``fields.n`` for each prompt, one prompt after the other.
    """

    def __init__(
        self,
        form: Form,
        fields: AnswerFields,
        service: Service,
        engine: RagKV,
        count: int,
    ) -> None:
        self._form = form
        self._fields = fields
        self._metrics = service.metrics
        self._head = envelope(form, service.model_name, service.fingerprint)
        self._count = count
        self._ended: dict[int, Completion] = {}
        self._begun: set[int] = set()
        new = partial(AnswerSpelling, engine.tokenizer)
        self._spelled: defaultdict[int, AnswerSpelling] = defaultdict(new)

    @property
    def unfinished(self) -> int:
        """Number of answers that have not come to their end."""
        return self._count - len(self._ended)

    def take(self, part: AnswerPart) -> None:
        """Count an answer that has come to its end."""
        if part.completion is not None:
            self._ended[part.index] = part.completion
            self._metrics.record_answer(part.completion.report, part.completion.finish_reason)

    def whole(self) -> dict[str, Any]:
        """Return the response, all answers in it."""
        choices = [
            {
                "index": index,
                **self._form.whole(each, self._logprobs(index, each.logprobs)),
                "finish_reason": each.openai_finish_reason,
            }
            for index, each in sorted(self._ended.items())
        ]
        return {**self._head, "choices": choices, "usage": self._usage(), **self._report()}

    def chunk(self, part: AnswerPart) -> dict[str, Any]:
        """Return a chunk of a stream."""
        self.take(part)
        first = part.index not in self._begun
        self._begun.add(part.index)
        logprobs = self._logprobs(part.index, part.logprobs)
        ended = part.completion
        choice = {
            "index": part.index,
            **self._form.piece(part.text, logprobs, first=first, ended=ended),
            "finish_reason": None if ended is None else ended.openai_finish_reason,
        }
        if ended is not None and self._fields.ragkv.report:
            choice["token_ids"] = list(ended.token_ids)
        chunk = {**self._head, "object": self._form.chunk_kind, "choices": [choice]}
        if self.with_usage:
            so_far = self._fields.stream_options.continuous_usage_stats
            return {**chunk, "usage": counted(*part.tokens) if so_far else None}
        return chunk if self.unfinished or not ended else {**chunk, **self._report()}

    @property
    def with_usage(self) -> bool:
        """Whether a stream ends with a chunk that has no choice, but the usage."""
        return self._fields.stream_options.include_usage

    def last(self) -> dict[str, Any]:
        """Return that chunk."""
        kind = self._form.chunk_kind
        usage = {"choices": [], "usage": self._usage()}
        return {**self._head, "object": kind, **usage, **self._report()}

    def _logprobs(self, index: int, tokens: Sequence[TokenLogprobs]) -> Any:
        if not tokens:
            return None
        return self._form.logprobs(tokens, self._spelled[index])

    def _usage(self) -> dict[str, Any]:
        reports = {index: each.report for index, each in self._ended.items()}
        prompts = [reports[index] for index in range(0, self._count, self._fields.n)]
        return usage(prompts, reports.values())

    def _report(self) -> dict[str, Any]:
        """Return the report of the first answer, where it was asked for."""
        wanted = self._fields.ragkv.report
        return {"ragkv": self._ended[0].report.to_dict()} if wanted else {}
