"""An engine's work in the background: load named chunks, encode missed ones, heal hot runs."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVarTuple

import numpy as np

from ragkv.chunk.kv import ChunkKV
from ragkv.chunk.sinks import Sink
from ragkv.engine.healing import Healing
from ragkv.engine.plan import Plan
from ragkv.engine.request import Request
from ragkv.history.history import History
from ragkv.history.versions import Versions
from ragkv.ingest.corpus import Corpus
from ragkv.ingest.encode import encode_missing
from ragkv.model.memory import is_out_of_memory, release_calls
from ragkv.model.pool import Pool
from ragkv.prompt.tokens import Tokens

_log = logging.getLogger(__name__)
MOST_NAMED = 1000
"""Named chunks that are remembered: the last ones."""

Given = TypeVarTuple("Given")


class Background:
    """Loads and encodes chunks in one thread, and copies the rows of finished answers.

    Another thread heals, while no request runs. The interpreter does not wait for it at its exit.

    Parameters
    ----------
    writable
        Whether encoded chunks can be stored.
    """

    def __init__(
        self,
        corpus: Corpus,
        history: History,
        versions: Versions,
        healing: Healing,
        *,
        writable: bool,
    ) -> None:
        self._corpus = corpus
        self._history = history
        self._versions = versions
        self._healing = healing
        self._writable = writable
        self._named: dict[str, None] = {}
        self._lock = threading.Lock()
        self._thread = Pool(1, "ragkv")
        self._idle: threading.Thread | None = None
        _open.add(self)

    @property
    def named(self) -> list[str]:
        """Named chunks that are not stored yet, the last named at the end."""
        with self._lock:
            return list(self._named)

    def fetch(self, texts: Sequence[str], sink_of: Callable[[], Sink], *, heal: bool) -> None:
        """Start loading chunks that the next prompts will contain; remember those not stored.

        Parameters
        ----------
        sink_of
            Returns their sink; may wait for the model.
        heal
            Whether they are computed behind one another besides, while no request runs.

        Raises
        ------
        ConfigError
            The model is in training mode.
        """
        self._corpus.sinks.usable_fingerprint()
        named = [text.strip() for text in texts]
        with self._lock:
            for text in named:
                self._named.pop(text, None)
                self._named[text] = None
            while len(self._named) > MOST_NAMED:
                del self._named[next(iter(self._named))]
        self._submit(self._fetch, named, sink_of, heal)

    def _fetch(self, named: Sequence[str], sink_of: Callable[[], Sink], heal: bool) -> None:  # noqa: FBT001
        sink = sink_of()
        self._corpus.fetch(named, sink)
        if heal and self._healing.prefetch(named, sink):
            self._heal()
        self._forget(text for text in named if self._corpus.contains(text, sink))

    def _forget(self, named: Iterable[str]) -> None:
        for text in named:
            with self._lock:
                self._named.pop(text, None)

    def stores(self, request: Request) -> bool:
        """Whether chunks that a prompt missed are encoded and stored after its answer."""
        return request.config.on_miss == "store" and self._writable

    def schedule_followups(self, request: Request, plan: Plan) -> None:
        """Copy the answer's rows; encode the chunks that the prompt missed; load the slow ones.

        Chunks that are asked for together again are computed while no request runs.
        """
        located, config = plan.located, request.config
        if request.uses_history:
            self._submit(self._history.settle)
        sink_of = partial(self._corpus.sinks.configured, config)
        if located.to_load:  # into memory, and to measure the speed again
            self._submit(self._corpus.fetch, located.to_load, sink_of())
        known = {span.text for span in located.known or ()}
        named = dict.fromkeys((*self.named, *request.retrieved))
        new = [text for text in named if text in located.text and text not in known]
        missed = [*located.to_encode, *new]
        if missed and self.stores(request):
            self._forget(missed)
            self._submit(encode_missing, self._corpus, missed, sink_of(), self._computed)
        if self._healing.note(request, plan):
            self._heal()

    def _computed(self, text: str, tokens: Tokens, sink: Sink) -> ChunkKV | None:
        """Return a chunk as a prompt computed it that had it directly behind the sink."""
        ids = np.concatenate([sink.ids, tokens.ids])
        return self._history.exact_chunk(text, ids, tokens.offsets, sink.fingerprint)

    def _submit(self, work: Callable[[*Given], object], *args: *Given) -> None:
        """Run it in the thread."""
        self._thread.submit(self._run, partial(work, *args))

    def _heal(self) -> None:
        """Begin to heal; nothing heals now."""
        self._idle = threading.Thread(
            target=self._run, args=(self._healing.work,), name="ragkv-idle", daemon=True
        )
        self._idle.start()

    def _run(self, work: Callable[[], object]) -> None:
        """Run it; errors go to the log."""
        try:
            work()
        except Exception as error:  # noqa: BLE001  the answer was returned already
            calls = release_calls(error) if is_out_of_memory(error) else ""
            _log.error("work in the background failed\n%s", calls, exc_info=error)

    def wait(self) -> None:
        """Return when all submitted work is done."""
        self._thread.submit(lambda: None).result()
        if self._idle is not None:
            self._idle.join()

    def stop_healing(self) -> None:
        """End it before the next layer; chunks that are not healed yet never are."""
        self._healing.stop()
        if self._idle is not None:
            self._idle.join()

    def close(self) -> None:
        """Finish the submitted work, end the threads, and drop the history."""
        self._healing.stop()
        self._thread.shutdown(wait=True)
        self.stop_healing()
        self._corpus.on_removed = lambda _: None
        self._history.clear()
        self._healing.drop()
        self._versions.kept.drop_unknown(lambda _: False)


_open = weakref.WeakSet[Background]()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_open.clear)  # a fork lacks their threads


@atexit.register
def _stop_healing() -> None:
    for each in list(_open):
        each.stop_healing()
