"""The answer that RagKVLLM finished last."""

# ruff: noqa: SLF001  of a copy of the same object

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.llms.llm import LLM

from ragkv import Completion, ReuseReport


class LastAnswer(LLM):
    """The part of RagKVLLM that keeps the answer finished last."""

    _last: Completion | None = PrivateAttr(default=None)

    @property
    def last_report(self) -> ReuseReport | None:
        """The report of the answer finished last: query engines do not hand responses on."""
        return None if self._last is None else self._last.report

    def _keep(self, completion: Completion) -> None:
        self._last = completion

    @contextmanager
    def _for_one_call(self) -> Iterator[Self]:
        """Yield a copy of the LLM, whose last answer is that of one call, or None."""
        llm = self.model_copy()
        llm._last = None
        try:
            yield llm
        finally:
            if llm._last is not None:
                self._last = llm._last
