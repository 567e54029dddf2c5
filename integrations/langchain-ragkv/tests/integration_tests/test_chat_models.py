"""langchain-tests' integration suite of chat models."""

from __future__ import annotations

import pytest
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_ragkv import ChatRagKV
from langchain_tests.integration_tests import ChatModelIntegrationTests
from standard import What, engine
from tiny import some_chunks

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


class TestChatRagKV(What, ChatModelIntegrationTests):
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
