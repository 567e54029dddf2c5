"""The format of a model's calls, and the calls in an answer while it is generated."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from ragkv.prompt.tools.calls import AnyCall, ToolCall, ToolFormat, call_of
from ragkv.prompt.tools.formats import FORMATS


def writes_tools(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the chat template takes tools; a template that does not ignores them."""
    return "tools" in _template(tokenizer)


def format_of(tokenizer: PreTrainedTokenizerBase) -> ToolFormat:
    """Return the format of a model's calls, by its chat template.

    A template without tools gets ragkv's own definitions, which require the Hermes format.
    """
    template = _template(tokenizer)
    suited = [each for each in FORMATS if writes_tools(tokenizer) and each.suits(template)]
    hermes = [each for each in FORMATS if each.name == "hermes"]
    return (suited or hermes)[0]


def _template(tokenizer: PreTrainedTokenizerBase) -> str:
    return tokenizer.get_chat_template(tools=[{}]) if tokenizer.chat_template else ""


@dataclass(slots=True)
class CallReader:
    """Passes an answer's text on up to its first call, and reads the calls at its end.

    Attributes
    ----------
    format
        None for an answer that is a single JSON call by construction.
    """

    format: ToolFormat | None
    _text: str = ""
    _emitted: int = 0

    def feed(self, piece: str) -> str:
        """Add a piece; return the text that certainly precedes any call."""
        self._text += piece
        if self.format is None:
            return ""
        end = self._certain(self.format.marks)
        out = self._text[self._emitted : end]
        self._emitted = max(self._emitted, end)
        return out

    @property
    def has_call(self) -> bool:
        """Whether the first call is complete."""
        if self.format is None or "}" not in self._text[self._emitted :]:
            return False
        calls = [call for call in self.format.parse(self._text)[1] if call.name]
        return len(calls) > 1 or (bool(calls) and isinstance(calls[0], ToolCall))

    def finish(self) -> tuple[str, list[AnyCall]]:
        """Return the whole text without calls, and the calls.

        The text begins with what :meth:`feed` returned.
        """
        if self.format is None:
            return "", [call_of(self._text)]
        text, calls = self.format.parse(self._text)
        return (text.rstrip() if calls else text), calls

    def _certain(self, marks: tuple[str, ...]) -> int:
        """Return the number of characters before the first mark or a possible beginning of one.

        Trailing white space is held back, because it is dropped before a call.
        """
        text = self._text
        if "{" in marks and text.lstrip()[:1] in ("", "{"):
            return 0
        ends = [len(text)]
        for mark in marks:
            if mark == "{":
                continue
            at = text.find(mark)
            if at < 0:
                sizes = range(min(len(mark) - 1, len(text)), 0, -1)
                at = next((len(text) - n for n in sizes if text.endswith(mark[:n])), -1)
            if at >= 0:
                ends.append(at)
        return len(text[: min(ends)].rstrip())
