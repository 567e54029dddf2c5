"""What langchain-tests' suites are told of ChatRagKV, over a tiny model."""

from __future__ import annotations

from functools import cache

from langchain_ragkv import ChatRagKV
from tiny import some_chunks, tiny_model, tiny_tokenizer

from ragkv import RagKV


@cache
def engine() -> RagKV:
    kv = RagKV(tiny_model(layers=2), tiny_tokenizer(), store=":memory:")
    kv.precompute(some_chunks())
    return kv


class What:
    """What ChatRagKV can and cannot do."""

    chat_model_class = ChatRagKV
    has_tool_calling = True
    has_tool_choice = True
    has_structured_output = True
    supports_json_mode = True
    supports_model_override = False

    @property
    def standard_chat_model_params(self):
        return {**super().standard_chat_model_params, "max_tokens": 100}

    @property
    def chat_model_params(self):
        return {"kv": engine()}

    @property
    def supported_usage_metadata_details(self):
        details = ["cache_read_input", "cache_creation_input"]
        return {"invoke": details, "stream": details}
