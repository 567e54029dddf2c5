"""The states of a prompt: ``Request -> Located -> Plan -> Computed``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt
import torch
from transformers.cache_utils import Cache

from ragkv.attend.forward import SubsetPass
from ragkv.chunk.kv import KnownChunk, LayeredKV
from ragkv.chunk.sinks import Sink
from ragkv.config import DecodeConfig, ReuseConfig
from ragkv.decode.generate import Drawn
from ragkv.decode.listener import Listener
from ragkv.decode.steps import Steps
from ragkv.history.node import PrefixMatch, Rows
from ragkv.model.loaded import LoadedModel
from ragkv.prompt.find import Span
from ragkv.prompt.render import Prompt, Rendered
from ragkv.prompt.tokens import IntArray, Tokens
from ragkv.recompute.repair import Repair
from ragkv.retrieve.named import Retrieved
from ragkv.select import Method
from ragkv.select.choose import Choice
from ragkv.splice.buffer import SplicedCache
from ragkv.splice.layout import Layout, Origin, lay_out
from ragkv.store.entry.lazy import LazyKV

LocatedEntry = tuple[LayeredKV, int, int]
"""An entry, and the characters of the prompt, start and end, that are its text or its head."""

_NO_IDS = np.zeros(0, dtype=np.int32)


class Clock:
    """Seconds by step. Construction, at the user's call, starts it."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.steps: dict[str, float] = {}
        self._within = 0.0

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Add the block's wall time to the step, without nested steps."""
        outer, self._within = self._within, 0.0
        before = time.perf_counter()
        try:
            yield
        finally:
            took = time.perf_counter() - before
            self.steps[name] = self.steps.get(name, 0.0) + took - self._within
            self._within = outer + took


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
        """Transfer the rows of the prompt's first tokens; False if they were not computed."""
        ...

    def draw(self, ids: IntArray, listener: Listener, cancelled: Callable[[], bool]) -> Drawn:
        """Answer a prompt, as :func:`ragkv.decode.generate.draw` does."""
        ...


class RemoteDecoder(Protocol):
    """The program that decodes in that process, such as a vLLM."""

    def __call__(self, loaded: LoadedModel, namespace: str, decode: DecodeConfig) -> RemoteAnswer:
        """Begin an answer; raises ConfigError for settings that the program lacks."""
        ...


class StepDecoder(Protocol):
    """A library in this process that computes an answer's steps, such as llama.cpp."""

    def steps(
        self,
        ids: IntArray,
        cache: SplicedCache,
        logits: torch.Tensor,
        *,
        room: int,
        prefilled: Callable[[], object],
    ) -> Steps:
        """Return the steps of an answer of ``room`` tokens; the rest as for :class:`Steps`."""
        ...

    def close(self) -> None:
        """Release the library's memory."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A prompt to prefill or to answer.

    Attributes
    ----------
    prompt
        A string, or chat messages.
    config, method
        The call's reuse settings, and the method that they name.
    clock
        Started at the user's call.
    answer_tokens
        Largest number of tokens after the prompt; 0 for a prefill without an answer.
    retrieved, named
        The retrieved chunks: given with the call, and named before it.
    remote
        The answer of a remote decoder; None decodes in this process.
    """

    prompt: Prompt
    config: ReuseConfig
    method: Method
    clock: Clock
    answer_tokens: int = 0
    retrieved: tuple[str, ...] = ()
    named: Retrieved = Retrieved()  # noqa: RUF009  frozen
    remote: RemoteAnswer | None = None

    @property
    def uses_history(self) -> bool:
        """Whether the request takes rows of earlier prompts, and leaves its own."""
        return self.config.history and self.method.uses_chunks


@dataclass(frozen=True, slots=True, eq=False)
class Located:
    """A tokenised prompt and the entries of the chunks in it.

    Attributes
    ----------
    entries
        The usable entries in prompt order, possibly still loading.
    sink
        The sink that they were encoded behind; None if no chunk was searched for.
    known
        The known chunks in the prompt, usable or not; None if no chunk was searched for.
    missed
        The known chunks without a usable entry, each with the reason.
    to_encode, to_load
        The texts to encode after the answer, and those to load into memory.
    history
        Rows of earlier prompts.
    """

    rendered: Rendered
    tokens: Tokens
    entries: tuple[LocatedEntry, ...] = ()
    sink: Sink | None = None
    known: tuple[Span, ...] | None = None
    missed: tuple[tuple[str, str], ...] = ()
    to_encode: tuple[str, ...] = ()
    to_load: tuple[str, ...] = ()
    history: PrefixMatch | None = None

    @property
    def text(self) -> str:
        """The prompt's text."""
        return self.rendered.text

    @property
    def lazy(self) -> list[LazyKV]:
        """The entries whose layers are read when a pass needs them, or ahead of it."""
        return [entry for entry, _, _ in self.entries if isinstance(entry, LazyKV)]

    def has_rows(self, span: Span) -> bool:
        """Whether earlier prompts computed every token of the span."""
        return bool(self._in_history()[self.tokens.touching(span.start, span.end)].all())

    def known_chunk(self, span: Span) -> KnownChunk:
        """Return a chunk all of whose rows come from an earlier prompt."""
        tokens = self.tokens.touching(span.start, span.end)
        offsets = self.tokens.offsets[tokens] - np.int32(span.start)
        inside = (offsets[:, 0] >= 0) & (offsets[:, 1] <= span.end - span.start)
        return KnownChunk(span.text, self.tokens.ids[tokens][inside], offsets[inside])

    def _in_history(self) -> npt.NDArray[np.bool_]:
        out = np.zeros(len(self.tokens), dtype=bool)
        if self.history is not None:
            out[self.history.positions] = True
        return out

    @property
    def cached_share(self) -> float:
        """Ratio of cached tokens to tokens to compute, approximate before entries are aligned."""
        there = self._in_history()
        for _, start, end in self.entries:
            there[slice(*np.searchsorted(self.tokens.offsets[:, 0], (start, end)).tolist())] = True
        cached = int(there.sum())
        return cached / max(1, len(self.tokens) - cached)


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """A prompt's layout, its cache with the entries in place, and the rows to recompute.

    Attributes
    ----------
    cache
        None for a full prefill: the prompt reuses nothing.
    missed
        The chunks whose entries share no token with the prompt, each with the reason.
    rows
        ``[rows]`` sorted positions to compute.
    """

    located: Located
    layout: Layout
    cache: SplicedCache | None = None
    missed: tuple[tuple[str, str], ...] = ()
    warnings: tuple[str, ...] = ()
    choice: Choice = Choice(np.zeros(0, np.int64))  # noqa: RUF009  frozen
    repair: Repair = Repair()  # noqa: RUF009  frozen
    rows: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    @classmethod
    def full(cls, located: Located) -> Self:
        """Return the plan of a full prefill."""
        return cls(located, lay_out(located.tokens, _NO_IDS, ()))

    @property
    def ids(self) -> IntArray:
        """``[tokens]`` the prompt's token ids."""
        return self.layout.ids

    @property
    def subset(self) -> SubsetPass:
        """The pass that recomputes the rows.

        Raises
        ------
        RuntimeError
            The plan is a full prefill.
        """
        if self.cache is None:
            raise RuntimeError("a full prefill recomputes no rows of a cache")
        return self.repair.subset(self.ids, self.rows, self.cache)

    @property
    def origin(self) -> npt.NDArray[np.uint8]:
        """``[tokens]`` an :class:`Origin` each, recomputed tokens included."""
        origin = self.layout.origin.copy()
        origin[self.choice.positions] = Origin.RECOMPUTED
        return origin


@dataclass(frozen=True, slots=True, eq=False)
class Computed:
    """A prompt whose rows are all computed.

    Attributes
    ----------
    cache
        The whole prompt's keys and values.
    logits
        ``[vocab]`` float32: of the next token. Both are None if another process, or transformers'
        own loop, computes the prompt.
    """

    plan: Plan
    cache: Cache | None = None
    logits: torch.Tensor | None = None

    @property
    def prefilled(self) -> tuple[torch.Tensor, Cache]:
        """The logits and the cache.

        Raises
        ------
        RuntimeError
            The prompt is computed elsewhere.
        """
        if self.logits is None or self.cache is None:
            raise RuntimeError("another process, or transformers' own loop, computes the prompt")
        return self.logits, self.cache
