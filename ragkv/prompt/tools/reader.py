"""Which format a model's calls have, and calls out of an answer while it is generated."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from functools import cache

from transformers import PreTrainedTokenizerBase

from ragkv.prompt.tools import formats
from ragkv.prompt.tools.calls import AnyCall, ToolCall, ToolFormat, call_of


@cache
def tool_formats() -> tuple[ToolFormat, ...]:
    """Return all formats, in the order in which templates are asked for them."""
    modules = pkgutil.iter_modules(formats.__path__)
    found = [
        importlib.import_module(f"{formats.__name__}.{module.name}").FORMAT for module in modules
    ]
    return tuple(sorted(found, key=lambda each: (each.first, each.name)))


def writes_tools(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template takes tools; others leave them out without a word."""
    return "tools" in _template(tokenizer)


def format_of(tokenizer: PreTrainedTokenizerBase) -> ToolFormat:
    """Return how the model's calls are written, by its chat template.

    Templates without tools get definitions of ragkv's own, which ask for Hermes' form.
    """
    template = _template(tokenizer)
    known = {each.name: each for each in tool_formats()}
    if not writes_tools(tokenizer):
        return known["hermes"]
    return next((each for each in tool_formats() if each.suits(template)), known["hermes"])


def _template(tokenizer: PreTrainedTokenizerBase) -> str:
    return tokenizer.get_chat_template(tools=[{}]) if tokenizer.chat_template else ""


@dataclass(slots=True)
class CallReader:
    """Lets an answer's text pass up to its first call, and reads the calls at its end.

    Attributes
    ----------
    format
        How calls are written; None for an answer that is one call by construction, a JSON object.
    """

    format: ToolFormat | None
    _text: str = ""
    _emitted: int = 0

    def feed(self, piece: str) -> str:
        """Return the text of a piece that is certainly no call's."""
        self._text += piece
        if self.format is None:
            return ""
        end = self._certain(self.format.marks)
        out = self._text[self._emitted : end]
        self._emitted = max(self._emitted, end)
        return out

    @property
    def has_call(self) -> bool:
        """Whether the first call is there to its end."""
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
        """Return how many characters stand before the first mark, or what may become one.

        Blanks at their end wait, too: before a call they are dropped.
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
