"""The speculations of an engine: begun, found by the request that asks them, dropped."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from ragkv.engine.full import FullPrefill, Prepared
from ragkv.engine.lifecycle import Lifecycle
from ragkv.engine.request import Request
from ragkv.engine.reuse import Reuse
from ragkv.engine.speculation import PromptKey, Speculation, Tally
from ragkv.prompt.render import render
from ragkv.report.speculations import SpeculationReport

MOST_SPECULATIONS = 4
"""Speculations of an engine that are not over; another one takes the oldest one's place."""


class Speculations:
    """The speculations of an engine.

    Parameters
    ----------
    pipeline
        Computes the prompts, and asks for them when they are to be answered.
    lifecycle
        Counts the threads.
    reuse
        None for a model whose caches cannot be reused: its prompts are not computed ahead.
    """

    def __init__(self, pipeline: FullPrefill, lifecycle: Lifecycle, reuse: Reuse | None) -> None:
        self._pipeline, self._lifecycle, self._reuse = pipeline, lifecycle, reuse
        self._tally = Tally()
        self._mutex = threading.Lock()
        self._live: list[Speculation] = []
        if reuse is not None:  # which must not keep this alive: it has them
            mine = weakref.proxy(self)
            pipeline.prepared_for = lambda *asked: mine.take(*asked)  # noqa: PLW0108  a method holds
            reuse.conversations.when_cleared = lambda: mine.clear()  # noqa: PLW0108

    @property
    def report(self) -> SpeculationReport:
        """What they gave and cost so far."""
        return self._tally.report

    def start(self, request: Request, instead_of: Speculation | None) -> Speculation:
        """Begin to compute a prompt, unless ``instead_of`` does that already.

        Raises
        ------
        ConfigError
            The prompt cannot be rendered.
        ClosedError
            The engine is closed.
        """
        key = self._key(request)
        if instead_of is not None:
            if instead_of.key == key and not instead_of.is_over:
                return instead_of
            instead_of.cancel()
        speculation = Speculation(key, self._pipeline, self._tally, self._forget)
        with self._mutex:
            self._live.append(speculation)
            oldest = self._live[:-MOST_SPECULATIONS]
        for each in oldest:
            each.cancel()
        if self._reuse is None:
            speculation.cancel()
        try:
            self._lifecycle.run_in_thread(partial(speculation.work, request), _in_thread)
        except BaseException:
            speculation.cancel()
            raise
        self._tally.add("started")
        return speculation

    def take(self, request: Request, cancelled: Callable[[], bool] | None) -> Prepared | None:
        """Return what was computed of a request's prompt, waiting for what is being computed.

        Raises
        ------
        Cancelled
            ``cancelled`` returned True while waiting.
        """
        if not self._live:
            return None
        with request.clock.step("wait"):
            key = self._key(request)
            with self._mutex:
                found = next((each for each in self._live if each.key == key), None)
                if found is None:
                    return None
                self._live.remove(found)
            return found.adopt(request.clock.started, cancelled)

    def clear(self) -> None:
        """Cancel them all."""
        with self._mutex:
            live = list(self._live)
        for each in live:
            each.cancel()

    def _key(self, request: Request) -> PromptKey:
        rendered = render(request.prompt, self._pipeline.loaded.tokenizer)
        weights = None if self._reuse is None else self._reuse.corpus.fingerprint
        return PromptKey(rendered, request.config, request.method, weights)

    def _forget(self, speculation: Speculation) -> None:
        with self._mutex, suppress(ValueError):
            self._live.remove(speculation)


def _in_thread(run: Callable[[], None]) -> None:
    threading.Thread(target=run, name="ragkv-speculation", daemon=True).start()
