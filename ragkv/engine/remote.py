"""Decoding in another process: the interface that the engine calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ragkv.config import DecodeConfig
from ragkv.decode.generate import Drawn
from ragkv.decode.listener import Listener
from ragkv.history.node import Rows
from ragkv.model.loaded import LoadedModel
from ragkv.prompt.tokens import IntArray


class RemoteAnswer(Protocol):
    """An answer that another process decodes.

    Its methods raise ServerError if the process cannot be reached, or has a different model.

    Attributes
    ----------
    handed_over, not_loaded
        The report's fields of these names, final when :meth:`draw` returns.
    """

    handed_over: int
    not_loaded: str

    def hand_over(self, ids: IntArray, compute: Callable[[], Rows]) -> bool:
        """Give the rows of the prompt's first tokens; False where they are not even computed."""
        ...

    def draw(self, ids: IntArray, listener: Listener, cancelled: Callable[[], bool]) -> Drawn:
        """Answer a prompt, as :func:`ragkv.decode.generate.draw` does."""
        ...


class RemoteDecoder(Protocol):
    """The program that decodes in that process, such as a vLLM."""

    def __call__(self, loaded: LoadedModel, namespace: str, decode: DecodeConfig) -> RemoteAnswer:
        """Begin an answer; raises ConfigError for settings that the program lacks."""
        ...
