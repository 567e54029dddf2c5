"""Answers in the two forms of OpenAI's API: chat and text completions."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from ragkv.answer.completion import LEAST_LOGPROB, Completion, TokenLogprobs
from ragkv.answer.spelling import AnswerSpelling
from ragkv.report.account import ReuseReport
from ragkv.serve.engine_calls import cached_tokens, history_tokens


class Form(Protocol):
    """How an answer, and a piece of one, is written."""

    kind: str
    chunk_kind: str
    prefix: str

    def whole(self, answer: Completion, logprobs: Any) -> dict[str, Any]:
        """Return a choice's answer."""
        ...

    def piece(
        self, text: str, logprobs: Any, *, first: bool, ended: Completion | None
    ) -> dict[str, Any]:
        """Return a part of a choice's answer; ``ended`` is all of it, with the last part."""
        ...

    def logprobs(self, tokens: Sequence[TokenLogprobs], spelling: AnswerSpelling) -> Any:
        """Return log-probabilities of the answer's next tokens."""
        ...


class ChatForm:
    """``/v1/chat/completions``."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    prefix = "chatcmpl-"

    def whole(self, answer: Completion, logprobs: Any) -> dict[str, Any]:
        """Return the message."""
        calls = _calls(answer)
        content = answer.text or None if calls else answer.text
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message["tool_calls"] = calls
        return {"message": message, "logprobs": logprobs}

    def piece(
        self, text: str, logprobs: Any, *, first: bool, ended: Completion | None
    ) -> dict[str, Any]:
        """Return a part of the message; calls come whole, with the last."""
        delta: dict[str, Any] = {"role": "assistant"} if first else {}
        if text or first:
            delta["content"] = text
        calls = [] if ended is None else _calls(ended)
        if calls:
            delta["tool_calls"] = [{"index": at, **call} for at, call in enumerate(calls)]
        return {"delta": delta, "logprobs": logprobs}

    def logprobs(self, tokens: Sequence[TokenLogprobs], spelling: AnswerSpelling) -> Any:
        """Return ``{"content": [...]}``, one object for each token."""
        return {"content": list(map(spelling.item, tokens)), "refusal": None}


class TextForm:
    """``/v1/completions``."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl-"

    def whole(self, answer: Completion, logprobs: Any) -> dict[str, Any]:
        """Return the text."""
        return {"text": answer.text, "logprobs": logprobs}

    def piece(
        self, text: str, logprobs: Any, *, first: bool, ended: Completion | None
    ) -> dict[str, Any]:
        """Return a part of the text."""
        del first, ended
        return {"text": text, "logprobs": logprobs}

    def logprobs(self, tokens: Sequence[TokenLogprobs], spelling: AnswerSpelling) -> Any:
        """Return one list for each kind of figure."""
        texts, tops, offsets = [], [], []
        for each in tokens:
            top = dict[str, float]()
            # the drawn token is always among them, and has its text
            for token, logprob in {each.token_id: each.logprob, **dict(each.top)}.items():
                text, _ = spelling.spell(token)
                name = f"token_id:{token}" if text in top else text  # as vLLM names tokens
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
    """Return the answer's tool calls. Arguments of an invalid one are what the model wrote."""
    written = [(call.id, call.name, json.dumps(dict(call.arguments))) for call in answer.tool_calls]
    written += [(call.id, call.name, call.text) for call in answer.invalid_tool_calls]
    return [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for call_id, name, arguments in written
    ]


def envelope(form: Form, model: str, fingerprint: str | None) -> dict[str, Any]:
    """Return what an answer, and every chunk of it, has in common."""
    return {
        "id": f"{form.prefix}{uuid.uuid4().hex}",
        "object": form.kind,
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": fingerprint,
    }


def usage(prompts: Iterable[ReuseReport], answers: Iterable[ReuseReport]) -> dict[str, Any]:
    """Count tokens.

    Parameters
    ----------
    prompts
        One report for each prompt, whichever of its answers it is of.
    answers
        The reports of all answers.
    """
    prompts = list(prompts)
    read = sum(report.prompt_tokens for report in prompts)
    written = sum(report.completion_tokens for report in answers)
    details = {
        "cached_tokens": sum(map(cached_tokens, prompts)),
        "history_tokens": sum(map(history_tokens, prompts)),
    }
    return {**counted(read, written), "prompt_tokens_details": details}


def counted(read: int, written: int) -> dict[str, Any]:
    """Return the counts of a prompt's and an answer's tokens."""
    return {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
    }
