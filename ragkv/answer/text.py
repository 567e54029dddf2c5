"""An answer's text while it is generated, with the tool calls read out of it."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from ragkv.answer.completion import Completion, FinishReason, TokenLogprobs
from ragkv.answer.pieces import TextPieces, spelled_logprobs
from ragkv.config import DECODE_SETTINGS, DecodeConfig
from ragkv.config.decode import SchemaOrCall
from ragkv.config.json_schema import DOCUMENT
from ragkv.errors import ConfigError, CutOffError
from ragkv.prompt.chat import Chat
from ragkv.prompt.render import Prompt
from ragkv.prompt.tools.calls import MISSING, AnyCall, InvalidToolCall, ToolCall, last_with
from ragkv.prompt.tools.reader import CallReader, format_of
from ragkv.report.account import ReuseReport

_log = logging.getLogger(__name__)
_logged: list[str] = []
"""Messages that were logged once."""


def with_calls(
    decode: DecodeConfig, prompt: Prompt, tokenizer: PreTrainedTokenizerBase
) -> DecodeConfig:
    """Constrain the answer to the call that the prompt's ``tool_choice`` requires.

    If the choice is the model's, an answer follows the schema unless it is a call.

    Raises
    ------
    ConfigError
        Both a required call and an answer's schema are given.
    """
    if not isinstance(prompt, Chat) or not prompt.reads_calls:
        return decode
    schema = prompt.forced_schema
    if schema is None and decode.json_schema is None:
        return decode
    if schema is None:
        form = format_of(tokenizer)
        texts = form.marks if form.openings is None else form.openings
        if "{" in texts:  # a call may be JSON, too
            answer = {**(decode.json_schema or {}), DOCUMENT: "json_schema"}
            decode = replace(decode, json_schema={"anyOf": [answer, *prompt.call_schemas]})
        marks = tuple(text for text in texts if text != "{")
        given = {name: getattr(decode, name) for name in DECODE_SETTINGS}
        return SchemaOrCall(**given, call_marks=marks) if marks else decode
    if decode.json_schema is not None:
        raise ConfigError("tool_choice requires a call, json_schema an answer: omit one")
    return replace(decode, json_schema=schema)


def _written(call: AnyCall) -> str:
    """Return an invalid or disallowed call as text."""
    if isinstance(call, InvalidToolCall):
        return call.text
    return json.dumps({"name": call.name, "arguments": dict(call.arguments)}, ensure_ascii=False)


class AnswerText:
    """Text of an answer without special tokens, stop texts and tool calls.

    Attributes
    ----------
    text
        The whole text of a finished answer.
    tool_calls, invalid_tool_calls
        The answer's calls, if the prompt has tools. A call that ends before its arguments, or names
        a tool that is not allowed, is text.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stops: tuple[str, ...], prompt: Prompt
    ) -> None:
        self._calls: CallReader | None = None
        self._tokenizer = tokenizer
        self._one_call = isinstance(prompt, Chat) and not prompt.parallel_tool_calls
        self._may_call = prompt.may_call if isinstance(prompt, Chat) else bool
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
        self._unread: list[AnyCall] = []

    def feed(self, token: int) -> str:
        """Return the new text that no later token can change."""
        return self._pass(self._pieces.feed(token))

    def finish(self, *, cut_off: bool) -> str:
        """Return the rest of the text.

        Parameters
        ----------
        cut_off
            Whether the answer reached its largest length, or was cancelled.
        """
        rest = self._pass(self._pieces.finish())
        if self._calls is None:
            self.text = self._pieces.text()
            return rest
        self.text, found = self._calls.finish()
        cut_off = cut_off or self._calls.format is None or self._pieces.is_stopped
        self._unread = [call for call in found if not self._is_call(call, cut_off=cut_off)]
        calls = [call for call in found if call not in self._unread]
        calls = calls[: 1 if self._one_call else None]
        self.text = "\n".join(filter(None, [self.text, *map(_written, self._unread)]))
        self.tool_calls = tuple(call for call in calls if isinstance(call, ToolCall))
        invalid = (call for call in calls if isinstance(call, InvalidToolCall))
        self.invalid_tool_calls = tuple(invalid)
        return rest + self.text[self._emitted :]

    def _is_call(self, call: AnyCall, *, cut_off: bool) -> bool:
        is_missing = cut_off and isinstance(call, InvalidToolCall) and call.error == MISSING
        return bool(call.name) and not is_missing and self._may_call(call.name)

    def completion(
        self,
        token_ids: list[int],
        report: ReuseReport,
        finish_reason: FinishReason,
        logprobs: tuple[TokenLogprobs, ...] = (),
        schema: object = None,
    ) -> Completion:
        """Return the finished answer; its report and its last call state whether it was cut off.

        Parameters
        ----------
        schema
            The JSON schema of the answer; None for free text.
        """
        invalid = self.invalid_tool_calls
        if finish_reason == "length" and not self._is_whole(schema):
            error = str(CutOffError(report.decode.tokens))
            if not _logged:
                _logged.append(error)
                _log.warning("%s", error)
            report = replace(report, warnings=(*report.warnings, error))
            invalid = last_with(invalid, error)
        return Completion(
            text=self.text,
            token_ids=token_ids,
            report=report,
            finish_reason=finish_reason,
            logprobs=logprobs,
            tool_calls=self.tool_calls,
            invalid_tool_calls=invalid,
            text_logprobs=spelled_logprobs(self._tokenizer, logprobs),
        )

    def _is_whole(self, schema: object) -> bool:
        """Whether no call of the finished answer, nor the JSON of a schema, was cut off."""
        if self.invalid_tool_calls or self._unread:
            return False
        try:
            json.loads("0" if schema is None or self.tool_calls else self.text)
        except ValueError:
            return False
        return True

    @property
    def is_complete(self) -> bool:
        """Whether the only call of the answer has ended."""
        return self._one_call and self._calls is not None and self._calls.has_call

    def _pass(self, piece: str) -> str:
        out = piece if self._calls is None else self._calls.feed(piece)
        self._emitted += len(out)
        return out
