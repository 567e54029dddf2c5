"""An answer's text while it is generated, with the tool calls read out of it."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from ragkv.config import DecodeConfig
from ragkv.decode.text import TextPieces
from ragkv.errors import ConfigError
from ragkv.prompt.chat import Chat
from ragkv.prompt.render import Prompt
from ragkv.prompt.tools.calls import InvalidToolCall, ToolCall
from ragkv.prompt.tools.reader import CallReader, format_of


def with_forced_call(decode: DecodeConfig, prompt: Prompt) -> DecodeConfig:
    """Constrain the answer to the call that the prompt's ``tool_choice`` asks for.

    Raises
    ------
    ConfigError
        The call has a schema of its own, too.
    """
    schema = prompt.forced_schema if isinstance(prompt, Chat) else None
    if schema is None:
        return decode
    if decode.json_schema is not None:
        raise ConfigError("tool_choice asks for a call, and json_schema for an answer: omit one")
    return replace(decode, json_schema=schema)


class AnswerText:
    """Text of an answer without special tokens, stop texts and tool calls.

    Attributes
    ----------
    text
        All of it, once it is finished.
    tool_calls, invalid_tool_calls
        What the answer calls, where the prompt has tools.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stops: tuple[str, ...], prompt: Prompt
    ) -> None:
        self._calls: CallReader | None = None
        marks: tuple[str, ...] = ()
        if isinstance(prompt, Chat) and prompt.reads_calls:
            form = None if prompt.has_to_call else format_of(tokenizer)
            self._calls = CallReader(form)
            marks = () if form is None else (*form.marks, *form.inner_marks)
        self._pieces = TextPieces(tokenizer, stops, keep=marks)
        self._emitted = 0
        self.text = ""
        self.tool_calls: tuple[ToolCall, ...] = ()
        self.invalid_tool_calls: tuple[InvalidToolCall, ...] = ()

    def feed(self, token: int) -> str:
        """Return the new text that is certain now."""
        return self._pass(self._pieces.feed(token))

    def finish(self) -> str:
        """Return the rest."""
        rest = self._pass(self._pieces.finish())
        if self._calls is None:
            self.text = self._pieces.text()
            return rest
        self.text, calls = self._calls.finish()
        self.tool_calls = tuple(call for call in calls if isinstance(call, ToolCall))
        invalid = (call for call in calls if isinstance(call, InvalidToolCall))
        self.invalid_tool_calls = tuple(invalid)
        return rest + self.text[self._emitted :]

    def _pass(self, piece: str) -> str:
        out = piece if self._calls is None else self._calls.feed(piece)
        self._emitted += len(out)
        return out
