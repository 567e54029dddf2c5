"""One prompt's way: find, load, splice, select, recompute."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar

import numpy as np
import torch
from transformers.cache_utils import Cache

from ragkv.attend.forward import observed_forward, subset_as_first_call, subset_forward
from ragkv.attend.observe import Observer
from ragkv.chunk.kv import LayeredKV
from ragkv.config import ReuseConfig
from ragkv.decode.full import full_prefill
from ragkv.decode.overlapped import overlapping
from ragkv.engine.corpus import Corpus, Sink
from ragkv.engine.plan import Prepared
from ragkv.errors import ConfigError, PromptTooLongError
from ragkv.prompt.find import Span
from ragkv.prompt.render import Prompt, render
from ragkv.prompt.tokens import tokenize
from ragkv.recompute.copy_steps import repairing_ahead
from ragkv.report.account import Miss
from ragkv.report.clock import Clock
from ragkv.select import Scene, method_of
from ragkv.select.auxiliary import Auxiliary
from ragkv.select.choose import choose, takes_all
from ragkv.splice.buffer import SplicedCache
from ragkv.splice.layout import Layout, exact_prefix, lay_out
from ragkv.splice.overlap import overlap_of
from ragkv.splice.place import splice
from ragkv.store.base import Opened
from ragkv.store.entry.lazy import CorruptEntryError, LazyKV, ReadAhead

_log = logging.getLogger(__name__)
_SPARE_ROWS, _MOST_SPARE_ROWS = 256, 4096
_HEAD_DIFFERS = (
    "The prompt's head is not the text that chunks were encoded behind ({matched} of {wanted} "
    "tokens agree): answers are closer to full prefill if sink= (or sink_from=) is given the "
    "prompt template's head."
)


@dataclass(frozen=True, slots=True, eq=False)
class Attempt:
    """One attempt at a repair.

    Attributes
    ----------
    lost
        The texts whose entries cannot be used, with the reasons.
    arriving
        What is to be ended with the attempt.
    """

    lost: Mapping[str, str]
    arriving: ExitStack


class Pipeline:
    """Prepares prompts for one model and its chunks."""

    def __init__(self, corpus: Corpus, auxiliary: Callable[[ReuseConfig], Auxiliary]) -> None:
        self._corpus = corpus
        self._loaded = corpus.loaded
        self._auxiliary = auxiliary
        self._warned = False

    def prepare(
        self,
        prompt: Prompt,
        config: ReuseConfig,
        sink_of: Callable[[ReuseConfig], Sink],
        clock: Clock,
        attempt: Attempt,
        *,
        answer: int = 0,
    ) -> Prepared:
        """Find, load, splice and select; nothing is recomputed yet.

        Chunks may still arrive until the attempt ends. ``answer`` tokens may follow. Where the
        device's memory does not suffice, its tier of chunks makes room.

        Raises
        ------
        CorruptEntryError
            A layer that arrived does not hold, here or later: see :func:`retry_without_corrupt`.
        """
        given = prompt, config, sink_of, clock, attempt
        try:
            return self._prepare(*given, answer=answer)
        except torch.OutOfMemoryError:
            if not self._corpus.store.make_room():
                raise
        return self._prepare(*given, answer=answer)

    def _prepare(
        self,
        prompt: Prompt,
        config: ReuseConfig,
        sink_of: Callable[[ReuseConfig], Sink],
        clock: Clock,
        attempt: Attempt,
        *,
        answer: int,
    ) -> Prepared:
        method = method_of(config)
        with clock.step("find"):
            rendered = render(prompt, self._loaded.tokenizer)
            tokens = tokenize(rendered, self._loaded.tokenizer)
            if not len(tokens):
                raise ConfigError("the prompt is empty")
            known = self._loaded.positions
            if known is not None and len(tokens) > known:
                raise PromptTooLongError(
                    f"a prompt of {len(tokens)} tokens, and the model knows {known} positions: "
                    "retrieve fewer or shorter chunks"
                )
            ready = Prepared(rendered.text, tokens.ids, tokens.offsets)
            if method.reuse == "none" or self._loaded.architecture is None:
                return ready
            spans = self._corpus.find(rendered.text)
            ready.found = len(spans)
        with clock.step("load"):
            sink = sink_of(config)
            found = self._load(spans, sink, ready, config, attempt.lost)
            coming = [entry for entry, _, _ in found if isinstance(entry, LazyKV)]
            if coming:
                here = self._loaded.device.type == "cpu"
                attempt.arriving.callback(ReadAhead(coming, decoded=here).stop)
        limit = self._loaded.architecture.position_limit
        if not found or (limit is not None and len(tokens) > limit):
            ready.misses += [Miss(entry.text[:80], "positions") for entry, _, _ in found]
            return ready
        with clock.step("splice"):
            layout = lay_out(tokens, sink.ids, found)
            ready.miss_unaligned(layout, found)
            if method.reuse == "prefix":
                layout = exact_prefix(layout)
            if not layout.sink and not layout.placed:
                return ready
            self._warn_of_head(layout, sink, ready)
            ready.layout = layout
            overlap = None
            if method.parallel is not None and layout.placed and not takes_all(layout, config):
                overlap = overlap_of(layout, method.parallel, self._loaded.device)
            ready.cache = splice(
                layout,
                sink.rows,
                self._loaded,
                self._spare_rows(answer),
                overlap,
                step=partial(clock.step, "splice"),
            )
        with clock.step("select"):
            scene = Scene(
                layout=layout,
                text=rendered.text,
                layers=self._loaded.architecture.layers,
                cache=ready.cache,
                probe=partial(self._probe, layout, ready.cache),
                auxiliary=lambda: self._auxiliary(config),
                seed=config.seed,
            )
            ready.choice = choose(method, scene, config)
            if len(ready.choice.positions):
                ready.plan(layout, method, self._loaded, ahead=config.repair_ahead)
        return ready

    def prefill(
        self,
        prompt: Prompt,
        config: ReuseConfig,
        sink_of: Callable[[ReuseConfig], Sink],
        clock: Clock,
    ) -> tuple[Prepared, torch.Tensor, Cache]:
        """Prepare a prompt and compute what is to be computed: all, where nothing was spliced.

        Returns
        -------
        tuple
            The prompt, the next token's logits ``[vocab]``, and the cache of the whole prompt.
        """

        def prefilled(attempt: Attempt) -> tuple[Prepared, torch.Tensor, Cache]:
            ready = self.prepare(prompt, config, sink_of, clock, attempt)
            if ready.cache is None:
                began = time.perf_counter()
                logits, cache = full_prefill(self._loaded, ready.ids)
                self._loaded.wait()
                self._corpus.computed(len(ready.ids), time.perf_counter() - began)
                return ready, logits, cache
            with self._recomputing(ready, clock):
                logits = subset_forward(
                    self._loaded,
                    ready.ids,
                    ready.rows,
                    ready.cache,
                    drift=ready.drift,
                    sparse=ready.sparse,
                )
                self._loaded.wait()
            return ready, logits, ready.cache

        return retry_without_corrupt(prefilled)

    @contextmanager
    def _recomputing(self, ready: Prepared, clock: Clock) -> Iterator[None]:
        with clock.step("recompute"):
            yield
        self._corpus.computed(len(ready.rows), clock.steps["recompute"])

    @contextmanager
    def recomputing_first(self, ready: Prepared, clock: Clock) -> Iterator[None]:
        """Compute the same tokens inside the first step of the generation in the block.

        The steps after it repair what the answer may copy, where the method does so.
        """
        if ready.cache is None:
            yield
            return
        ready.cache.crop(-1)
        step = partial(self._recomputing, ready, clock)
        with (
            overlapping(self._loaded, ready.cache),
            repairing_ahead(self._loaded, ready.cache, ready.ahead),
            subset_as_first_call(
                self._loaded,
                ready.ids,
                ready.rows,
                ready.cache,
                step,
                drift=ready.drift,
                sparse=ready.sparse,
            ),
        ):
            yield

    def _spare_rows(self, answer: int) -> int:
        """Return how many rows are kept free: on a device all, since more would copy the KV."""
        if self._loaded.device.type == "cpu":
            return _SPARE_ROWS
        return min(max(answer, _SPARE_ROWS), _MOST_SPARE_ROWS)

    def _load(
        self,
        spans: Sequence[Span],
        sink: Sink,
        ready: Prepared,
        config: ReuseConfig,
        lost: Mapping[str, str],
    ) -> list[tuple[LayeredKV, int, int]]:
        """Open the entries of the spans; count those that cannot, or should not, be used."""
        slower = set()
        for span in spans if config.load == "auto" else ():
            first, end = np.searchsorted(ready.offsets[:, 0], (span.start, span.end))
            if self._corpus.is_slower(span.text, int(end - first), sink):
                slower.add(span.text)
        texts = dict.fromkeys(s.text for s in spans if s.text not in lost and s.text not in slower)
        opened = dict(zip(texts, self._corpus.open(list(texts), sink), strict=True))
        found: list[tuple[LayeredKV, int, int]] = []
        for span in spans:
            answer = opened.get(span.text) or Opened(None, lost.get(span.text, "slower"))
            if answer.entry is not None:
                found.append((answer.entry, span.start, span.end))
            else:
                ready.miss(span.text, answer.reason)
        return found

    def _probe(
        self,
        layout: Layout,
        cache: SplicedCache,
        observer: Observer,
        *,
        rows: Literal["fresh", "all"] = "fresh",
        on_copy: bool = False,
    ) -> None:
        """Run tokens over the unrepaired cache, see :class:`ragkv.select.method.Probe`."""
        chosen = layout.fresh if rows == "fresh" else np.arange(len(layout))
        where = cache.copy() if on_copy else cache
        observed_forward(self._loaded, layout.ids, chosen, where, observer)

    def _warn_of_head(self, layout: Layout, sink: Sink, ready: Prepared) -> None:
        """Say that the prompt's head is not the sink; once in the log."""
        if layout.sink < len(sink.ids):
            message = _HEAD_DIFFERS.format(matched=layout.sink, wanted=len(sink.ids))
            ready.warnings.append(message)
            if not self._warned:
                self._warned = True
                _log.warning(message)


Result = TypeVar("Result")


def retry_without_corrupt(made: Callable[[Attempt], Result]) -> Result:
    """Attempt something; where an entry turns out to be lost, again without it."""
    lost: dict[str, str] = {}
    while True:
        try:
            with ExitStack() as arriving:
                return made(Attempt(lost, arriving))
        except CorruptEntryError as error:
            lost[error.text] = error.reason
