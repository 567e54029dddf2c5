"""Tool calling as LlamaIndex's agents and ``chat_with_tools`` want it."""

# ruff: noqa: FBT001, FBT002, PLR0917  the signatures are LlamaIndex's
# ruff: noqa: SLF001  of a copy of the same object

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, MessageRole, ToolCallBlock
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import ToolSelection
from llama_index.llms.ragkv.last_answer import LastAnswer
from llama_index.llms.ragkv.responses import as_completion, cut_off

from ragkv import Completion

if TYPE_CHECKING:
    from llama_index.core.chat_engine.types import AgentChatResponse
    from llama_index.core.tools import BaseTool


class ToolCalling(LastAnswer, FunctionCallingLLM):
    """The part of RagKVLLM that calls tools."""

    if TYPE_CHECKING:  # pydantic's __init__, which takes the fields of all parts

        def __init__(self, **fields: Any) -> None: ...

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,  # noqa: ARG002
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        tool_choice: str | dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Return the arguments of ``chat``; ``tool_required`` holds unless a choice is given."""
        messages = list(chat_history or [])
        if isinstance(user_msg, str):
            user_msg = ChatMessage(role=MessageRole.USER, content=user_msg)
        if user_msg is not None:
            messages.append(user_msg)
        if tool_choice is None and tool_required:
            tool_choice = "any"
        return {
            "messages": messages,
            "tools": [definition(tool) for tool in tools],
            "tool_choice": tool_choice,
            "parallel_tool_calls": allow_parallel_tool_calls,
            **kwargs,
        }

    def get_tool_calls_from_response(
        self,
        response: ChatResponse,
        error_on_no_tool_call: bool = True,
        **_: Any,
    ) -> list[ToolSelection]:
        """Return the answer's calls.

        Raises
        ------
        ValueError
            ``error_on_no_tool_call`` is set and there is none. It is a CutOffError if the answer
            reached ``max_new_tokens``.
        """
        calls = tool_blocks(response.message)
        if not calls and error_on_no_tool_call:
            raise cut_off(response) or ValueError(
                f"Expected at least one tool call, but got {len(calls)} tool calls."
            )
        return [
            ToolSelection(
                tool_id=call.tool_call_id or "",
                tool_name=call.tool_name,
                tool_kwargs=call.tool_kwargs if isinstance(call.tool_kwargs, dict) else {},
            )
            for call in calls
        ]

    def predict_and_call(self, *args: Any, **kwargs: Any) -> AgentChatResponse:
        """Answer and call the tools; an answer without a call is the response."""
        with self._for_one_call() as llm:
            response = super(ToolCalling, llm).predict_and_call(*args, **kwargs)
            return _with_text(response, llm._last)

    async def apredict_and_call(self, *args: Any, **kwargs: Any) -> AgentChatResponse:
        """Answer and call as :meth:`predict_and_call` does; the event loop goes on."""
        with self._for_one_call() as llm:
            response = await super(ToolCalling, llm).apredict_and_call(*args, **kwargs)
            return _with_text(response, llm._last)


def definition(tool: BaseTool) -> dict[str, Any]:
    """Return a tool as OpenAI's definition, ``additionalProperties`` and ``$ref`` included.

    LlamaIndex omits both: the second one occurs where a class contains itself.
    """
    found = tool.metadata.to_openai_tool(skip_length_check=True)
    if tool.metadata.fn_schema is not None:
        whole = tool.metadata.fn_schema.model_json_schema()
        more = {name: whole[name] for name in ("additionalProperties", "$ref") if name in whole}
        found["function"]["parameters"] |= more
    return found


def tool_blocks(message: ChatMessage) -> list[ToolCallBlock]:
    """Return a message's tool calls."""
    return [block for block in message.blocks if isinstance(block, ToolCallBlock)]


def _with_text(response: AgentChatResponse, answer: Completion | None) -> AgentChatResponse:
    """Return a response; the text of the answer is its text where no tool was called."""
    if answer is not None and not response.sources and not response.response:
        response.response = as_completion(answer).text
    return response
