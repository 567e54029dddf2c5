"""What an engine does behind its calls, and the account of the calls that are under way."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, Self, TypeVar

from ragkv.config import ReuseConfig
from ragkv.engine.corpus import Corpus, Sink
from ragkv.engine.plan import Prepared
from ragkv.errors import ClosedError

_log = logging.getLogger(__name__)
MOST_NAMED = 1000
"""Chunks that were named, are not stored, and may come in a prompt: the last ones."""

_TELLING = 40
"""Characters of a line that no two texts share by chance."""

_REWRITTEN = (
    "No chunk was found in the prompt, but lines of those that were named ({count}) are in it, in "
    "another form: precompute, and name, what the pipeline writes (other metadata, a list or JSON "
    "of texts?)."
)

Given = ParamSpec("Given")
Done = TypeVar("Done")
T = TypeVar("T")


class Calls:
    """The calls under way; used as a context, one of them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._under_way = 0
        self._closed = False
        self._process = os.getpid()

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of that which made the engine, without its threads."""
        return self._process != os.getpid()

    def __enter__(self) -> Self:
        if self.forked:  # the lock below may be held for ever
            raise ClosedError(
                "this RagKV was made before a fork: make one in each process, after it. The model "
                "may be loaded before: RagKV(kv.loaded, store=...)"
            )
        with self._changed:
            if self._closed:
                raise ClosedError("this RagKV is closed: make another one")
            self._under_way += 1
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._under_way -= 1
            self._changed.notify_all()

    def run_in_thread(
        self, run: Callable[Given, Done], start: Callable[[Callable[Given, Done]], T]
    ) -> T:
        """Begin a call that ``start`` gives to another thread; it ends when ``run`` does."""

        def run_and_end(*args: Given.args, **kwargs: Given.kwargs) -> Done:
            try:
                return run(*args, **kwargs)
            finally:
                self.__exit__()

        self.__enter__()
        try:
            return start(run_and_end)
        except BaseException:  # no thread to be had
            self.__exit__()
            raise

    def close(self) -> bool:
        """Refuse calls from now on; return when the last has ended, and whether that was news."""
        with self._changed:
            was_open, self._closed = not self._closed, True
            self._changed.wait_for(lambda: not self._under_way)
        return was_open


class Background:
    """Loads what was named and encodes what was missed, in a thread of its own.

    Parameters
    ----------
    keeps
        Whether the store takes what is encoded.
    """

    def __init__(self, corpus: Corpus, *, keeps: bool) -> None:
        self._corpus = corpus
        self._keeps = keeps
        self._named: dict[str, None] = {}
        self._last_named: Sequence[str] = ()
        self._warned = False
        self._naming = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ragkv")

    @property
    def named(self) -> list[str]:
        """Chunks that were named and not stored when that was looked up, the last at the end."""
        with self._naming:
            return list(self._named)

    def fetch(self, texts: Sequence[str], sink_of: Callable[[], Sink]) -> None:
        """Start to load chunks that the next prompts will hold; remember those not stored.

        ``sink_of`` may have to wait for the model; ConfigError where it is in training mode.
        """
        self._corpus.usable_fingerprint()
        named = [text.strip() for text in texts]
        with self._naming:
            self._last_named = named
            for text in named:
                self._named.pop(text, None)
                self._named[text] = None
            while len(self._named) > MOST_NAMED:
                del self._named[next(iter(self._named))]
        self._begin(self._fetch, named, sink_of)

    def _fetch(self, named: Sequence[str], sink_of: Callable[[], Sink]) -> None:
        sink = sink_of()
        self._corpus.fetch(named, sink)
        self._forget(text for text in named if self._corpus.contains(text, sink))

    def _forget(self, named: Iterable[str]) -> None:
        for text in named:
            with self._naming:
                self._named.pop(text, None)

    def look_for_named(self, ready: Prepared) -> None:
        """Warn where no chunk was found, and lines of what was named before stand in the prompt."""
        with self._naming:
            named, self._last_named = self._last_named, ()
        if ready.found != 0 or any(text in ready.text for text in named):
            return
        lines = [max(text.splitlines(), key=len).strip() for text in named if text]
        if any(len(line) >= _TELLING and line in ready.text for line in lines):
            message = _REWRITTEN.format(count=len(named))
            ready.warnings.append(message)
            if not self._warned:
                self._warned = True
                _log.warning(message)

    def after(self, ready: Prepared, config: ReuseConfig, sink_of: Callable[..., Sink]) -> None:
        """Encode what a prompt needed and the store did not have."""
        if ready.late:  # in memory by the next time, and the speed measured again
            self._begin(self._corpus.fetch, ready.late, sink_of(config))
        missed = [*ready.missed, *(text for text in self.named if text in ready.text)]
        if missed and config.on_miss == "store" and self._keeps:
            self._forget(missed)
            self._begin(self._corpus.heal, missed, sink_of(config))

    def _begin(
        self, work: Callable[Given, object], *args: Given.args, **kwargs: Given.kwargs
    ) -> None:
        """Do it in the thread; nobody waits for it, so that an error goes to the log."""

        def said() -> None:
            try:
                work(*args, **kwargs)
            except Exception:  # noqa: BLE001  an answer was given already
                _log.exception("work in the background failed")

        self._thread.submit(said)

    def wait(self) -> None:
        """Return when all is done."""
        self._thread.submit(lambda: None).result()

    def close(self) -> None:
        """Finish."""
        self._thread.shutdown(wait=True)
