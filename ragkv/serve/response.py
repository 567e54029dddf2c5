"""Responses with answers: chat and text completions, whole or in chunks."""

from __future__ import annotations

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any

from ragkv.answer.completion import LEAST_LOGPROB, Completion, TokenLogprobs
from ragkv.answer.pieces import AnswerSpelling
from ragkv.engine.engine import RagKV
from ragkv.report.account import ReuseReport
from ragkv.serve.answers import AnswerPart
from ragkv.serve.fields import AnswerFields
from ragkv.serve.service import Service


class AnswerWriter(ABC):
    """Writes one request's answers in OpenAI's form, and counts them.

    Parameters
    ----------
    count
        Number of answers: ``fields.n`` for each prompt, grouped by prompt.
    """

    kind: str
    chunk_kind: str
    prefix: str

    def __init__(self, fields: AnswerFields, service: Service, engine: RagKV, count: int) -> None:
        self._fields = fields
        self._metrics = service.metrics
        self._count = count
        self._head = {
            "id": f"{self.prefix}{uuid.uuid4().hex}",
            "object": self.kind,
            "created": int(time.time()),
            "model": service.model_name,
            "system_fingerprint": service.fingerprint,
        }
        self._ended: dict[int, Completion] = {}
        self._begun: set[int] = set()
        new = partial(AnswerSpelling, engine.tokenizer)
        self._spelling: defaultdict[int, AnswerSpelling] = defaultdict(new)

    @property
    def unfinished(self) -> int:
        """Number of answers that have not ended."""
        return self._count - len(self._ended)

    def take(self, part: AnswerPart) -> None:
        """Count an answer with its last part."""
        if part.completion is not None:
            self._ended[part.index] = part.completion
            self._metrics.record_answer(part.completion.report, part.completion.finish_reason)

    def whole(self) -> dict[str, Any]:
        """Return the response with all answers."""
        choices = [
            {
                "index": index,
                **self._whole(answer),
                "logprobs": self._logprobs(index, answer.logprobs),
                "finish_reason": answer.openai_finish_reason,
            }
            for index, answer in sorted(self._ended.items())
        ]
        return {**self._head, "choices": choices, "usage": self._usage(), **self._report()}

    def chunk(self, part: AnswerPart) -> dict[str, Any]:
        """Return a chunk of a stream."""
        self.take(part)
        ended = part.completion
        choice = {
            "index": part.index,
            **self._piece(part, first=part.index not in self._begun),
            "logprobs": self._logprobs(part.index, part.logprobs),
            "finish_reason": None if ended is None else ended.openai_finish_reason,
        }
        self._begun.add(part.index)
        if ended is not None and self._fields.ragkv.report:
            choice["token_ids"] = list(ended.token_ids)
        chunk = {**self._head, "object": self.chunk_kind, "choices": [choice]}
        if self.with_usage:
            so_far = self._fields.stream_options.continuous_usage_stats
            return {**chunk, "usage": _counts(*part.tokens) if so_far else None}
        return chunk if self.unfinished or not ended else {**chunk, **self._report()}

    @property
    def with_usage(self) -> bool:
        """Whether a stream ends with :meth:`usage_chunk`."""
        return self._fields.stream_options.include_usage

    def usage_chunk(self) -> dict[str, Any]:
        """Return the last chunk of a stream, without a choice."""
        usage = {"choices": [], "usage": self._usage()}
        return {**self._head, "object": self.chunk_kind, **usage, **self._report()}

    @abstractmethod
    def _whole(self, answer: Completion) -> dict[str, Any]:
        """Return the text of a choice."""

    @abstractmethod
    def _piece(self, part: AnswerPart, *, first: bool) -> dict[str, Any]:
        """Return the text of a choice in a chunk."""

    @abstractmethod
    def _records(self, tokens: Sequence[TokenLogprobs], spelling: AnswerSpelling) -> dict[str, Any]:
        """Return log-probabilities of the answer's next tokens."""

    def _logprobs(self, index: int, tokens: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        return self._records(tokens, self._spelling[index]) if tokens else None

    def _usage(self) -> dict[str, Any]:
        """Count the tokens of each prompt once, and those of all answers."""
        prompts = [self._ended[index].report for index in range(0, self._count, self._fields.n)]
        counts = _counts(
            sum(report.tokens.prompt for report in prompts),
            sum(answer.report.decode.tokens for answer in self._ended.values()),
        )
        reused: list[ReuseReport] = [report for report in prompts if not report.not_loaded]
        details = {
            "cached_tokens": sum(report.tokens.cached for report in reused),
            "history_tokens": sum(report.tokens.history for report in reused),
        }
        return {**counts, "prompt_tokens_details": details}

    def _report(self) -> dict[str, Any]:
        """Return the requested report, of the first answer."""
        if not self._fields.ragkv.report:
            return {}
        return {"ragkv": self._ended[0].report.to_dict()}


class ChatWriter(AnswerWriter):
    """Writes ``/v1/chat/completions``."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    prefix = "chatcmpl-"

    def _whole(self, answer: Completion) -> dict[str, Any]:
        calls = _calls(answer)
        content = answer.text or None if calls else answer.text
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        return {"message": {**message, "tool_calls": calls} if calls else message}

    def _piece(self, part: AnswerPart, *, first: bool) -> dict[str, Any]:
        delta: dict[str, Any] = {"role": "assistant"} if first else {}
        if part.text or first:
            delta["content"] = part.text
        calls = [] if part.completion is None else _calls(part.completion)
        if calls:  # complete, in the last chunk
            delta["tool_calls"] = [{"index": at, **call} for at, call in enumerate(calls)]
        return {"delta": delta}

    def _records(self, tokens: Sequence[TokenLogprobs], spelling: AnswerSpelling) -> dict[str, Any]:
        return {"content": list(map(spelling.item, tokens)), "refusal": None}


class TextWriter(AnswerWriter):
    """Writes ``/v1/completions``."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl-"

    def _whole(self, answer: Completion) -> dict[str, Any]:
        return {"text": answer.text}

    def _piece(self, part: AnswerPart, *, first: bool) -> dict[str, Any]:
        del first
        return {"text": part.text}

    def _records(self, tokens: Sequence[TokenLogprobs], spelling: AnswerSpelling) -> dict[str, Any]:
        texts, tops, offsets = [], [], []
        for each in tokens:
            top = dict[str, float]()
            # the drawn token comes first and has its plain text
            for token, logprob in {each.token_id: each.logprob, **dict(each.top)}.items():
                text, _ = spelling.spell(token)
                name = f"token_id:{token}" if text in top else text  # vLLM's name
                top[name] = max(logprob, LEAST_LOGPROB)
            texts.append(next(iter(top)))
            tops.append(top)
            offsets.append(spelling.take(each.token_id))
        return {
            "tokens": texts,
            "token_logprobs": [max(each.logprob, LEAST_LOGPROB) for each in tokens],
            "top_logprobs": tops,
            "text_offset": offsets,
        }


def _calls(answer: Completion) -> list[dict[str, Any]]:
    """Return the answer's tool calls; an invalid one's arguments are the model's text."""
    written = [(call.id, call.name, json.dumps(dict(call.arguments))) for call in answer.tool_calls]
    written += [(call.id, call.name, call.text) for call in answer.invalid_tool_calls]
    return [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for call_id, name, arguments in written
    ]


def _counts(read: int, written: int) -> dict[str, Any]:
    return {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
    }
