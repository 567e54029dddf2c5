"""A completion's usage and report as LangChain's metadata."""

from __future__ import annotations

from functools import partial
from typing import Any

from langchain_core.messages.ai import InputTokenDetails, UsageMetadata

from ragkv import Completion, RagKV
from ragkv.serve.client import RemoteRagKV


def usage(completion: Completion) -> UsageMetadata:
    """Count tokens.

    ``cache_read`` are the prompt's reused tokens, those of the sink and of former turns among
    them. ``cache_creation`` is 0: chunks are encoded, and turns kept, after the answer.
    """
    report = completion.report
    output = report.completion_tokens
    return UsageMetadata(
        input_tokens=report.prompt_tokens,
        output_tokens=output,
        total_tokens=report.prompt_tokens + output,
        input_token_details=InputTokenDetails(cache_read=report.cached_tokens, cache_creation=0),
    )


def metadata(completion: Completion, kv: RagKV | RemoteRagKV) -> dict[str, Any]:
    """Return ``model_name``, ``finish_reason``, ``logprobs`` and, as ``ragkv``, the report.

    The report without the fields that repeat the prompt, since messages are stored, traced and
    sent: no ``positions``, and ``chunks`` without their ``text``. ``misses`` have the first 80
    characters.
    """
    report = completion.report.to_dict()
    found: dict[str, Any] = {
        "model_name": kv.model_name,
        "finish_reason": completion.openai_finish_reason,
        "ragkv": report,
    }
    del report["positions"]
    for use in report["chunks"]:
        del use["text"]
    by_text = [dict(each) for each in completion.text_logprobs]
    if isinstance(kv, RagKV):
        by_text = [each.in_openais_form(partial(_text, kv)) for each in completion.logprobs]
    return found | ({"logprobs": {"content": by_text}} if by_text else {})


def _text(kv: RagKV, token: int) -> str:
    return str(kv.tokenizer.decode([token], clean_up_tokenization_spaces=False))
