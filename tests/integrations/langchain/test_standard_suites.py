"""langchain-tests' own suites, over a tiny model."""

from __future__ import annotations

from functools import cache

import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_ragkv import ChatRagKV, RagKVRetriever
from langchain_tests.integration_tests import ChatModelIntegrationTests, RetrieversIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests
from tiny import some_chunks, tiny_model, tiny_tokenizer

from ragkv import RagKV


@cache
def engine() -> RagKV:
    kv = RagKV(tiny_model(layers=2), tiny_tokenizer(), store=":memory:")
    kv.precompute(some_chunks())
    return kv


JOKE = ('{"setup": "Why?", "punchline": "Because."}',)
MAGIC = ('{"name": "magic_function", "arguments": {"input": 3}}',)
SAID = {
    "test_tool_calling": MAGIC,
    "test_tool_calling_async": MAGIC,
    "test_tool_calling_with_no_arguments": ('{"name": "magic_function_no_args", "arguments": {}}',),
    "test_structured_output": JOKE,
    "test_structured_output_async": JOKE,
    "test_structured_output_pydantic_2_v1": JOKE,
    "test_structured_output_optional_param": JOKE,
    "test_json_mode": JOKE,
    "test_unicode_tool_call_integration": (
        (
            '{"name": "unicode_customer", "arguments": {"customer_name": "你好 こんにちは", '
            '"description": "5"}}'
        ),
    ),
    "test_agent_loop": (
        '<tool_call>{"name": "get_weather", "arguments": {"location": "Paris"}}</tool_call>',
        "It is sunny.",
    ),
}


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


class TestUnit(What, ChatModelUnitTests):
    pass


class TestIntegration(What, ChatModelIntegrationTests):
    """The tiny model's words are given where a test is about what it says; all else is real."""

    @pytest.fixture(autouse=True)
    def _words(self, request, make_say):
        name = request.node.name.partition("[")[0]
        if name in SAID:
            make_say(engine(), *SAID[name])

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        model = ChatRagKV(kv=engine(), max_tokens=8)
        prompt = "\n\n".join([*some_chunks(), "What is a target?"])
        if not stream:
            answer = model.invoke(prompt)
        else:
            first, *rest = model.stream(prompt)
            answer = sum(rest, first)
        assert isinstance(answer, AIMessage | AIMessageChunk)
        assert answer.usage_metadata["input_token_details"]["cache_read"] > 100
        return answer

    invoke_with_cache_creation_input = invoke_with_cache_read_input


class TestRetriever(RetrieversIntegrationTests):
    retriever_constructor = RagKVRetriever
    retriever_query_example = "What is a target?"

    @property
    def retriever_constructor_params(self):
        store = InMemoryVectorStore(DeterministicFakeEmbedding(size=16))
        store.add_documents([Document(text) for text in some_chunks(5)])
        return {"retriever": store.as_retriever(search_kwargs={"k": 2}), "kv": engine()}
