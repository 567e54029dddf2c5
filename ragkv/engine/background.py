"""Background work of an engine: load named chunks, encode missed ones, heal hot runs."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVarTuple

import numpy as np

from ragkv.chunk.kv import ChunkKV
from ragkv.chunk.sinks import Sink
from ragkv.engine.healing import Healing
from ragkv.engine.plan import Plan, Request
from ragkv.history.history import History
from ragkv.history.versions import Versions
from ragkv.ingest.corpus import Corpus
from ragkv.ingest.encode import encode_missing
from ragkv.model.memory import is_out_of_memory, release_calls
from ragkv.model.pool import Pool
from ragkv.prompt.tokens import Tokens
from ragkv.retrieve.named import NamedChunks

_log = logging.getLogger(__name__)
Given = TypeVarTuple("Given")


class Background:
    """Loads and encodes chunks in one thread, and copies the rows of finished answers.

    A second thread heals while no request runs. The interpreter's exit does not wait for it.

    Parameters
    ----------
    named
        The chunks that retrievers named.
    writable
        Whether encoded chunks can be stored.
    """

    def __init__(
        self,
        corpus: Corpus,
        history: History,
        versions: Versions,
        healing: Healing,
        named: NamedChunks,
        *,
        writable: bool,
    ) -> None:
        self._corpus = corpus
        self._history = history
        self._versions = versions
        self._healing = healing
        self._named = named
        self._writable = writable
        self._thread = Pool(1, "ragkv")
        self._idle: threading.Thread | None = None
        _open.add(self)

    def fetch(self, texts: Sequence[str], sink_of: Callable[[], Sink], *, heal: bool) -> None:
        """Start loading chunks that the next prompts will contain.

        Parameters
        ----------
        texts
            Stripped texts. Those that are not stored can be encoded after an answer.
        sink_of
            Returns their sink; it can wait for the model.
        heal
            Whether the chunks are also computed behind one another while no request runs.

        Raises
        ------
        ConfigError
            The model is in training mode.
        """
        self._corpus.sinks.usable_fingerprint()
        self._named.add_missing(texts)
        self._submit(self._fetch, texts, sink_of, heal)

    def _fetch(self, texts: Sequence[str], sink_of: Callable[[], Sink], heal: bool) -> None:  # noqa: FBT001
        sink = sink_of()
        self._corpus.fetch(texts, sink)
        if heal and self._healing.prefetch(texts, sink):
            self._heal()
        self._named.remove_missing([text for text in texts if self._corpus.contains(text, sink)])

    def stores(self, request: Request) -> bool:
        """Whether chunks that a prompt missed are encoded and stored after its answer."""
        return request.config.on_miss == "store" and self._writable

    def schedule_followups(self, request: Request, plan: Plan) -> None:
        """Copy the answer's rows, encode the prompt's missed chunks, and load the slow ones.

        Chunks that are requested together repeatedly are computed while no request runs.
        """
        located, config = plan.located, request.config
        if request.uses_history:
            self._submit(self._history.settle)
        sink_of = partial(self._corpus.sinks.configured, config)
        if located.to_load:  # also measures the speed again
            self._submit(self._corpus.fetch, located.to_load, sink_of())
        known = {span.text for span in located.known or ()}
        named = dict.fromkeys((*self._named.missing, *request.retrieved))
        new = [text for text in named if text in located.text and text not in known]
        missed = [*located.to_encode, *new]
        if missed and self.stores(request):
            self._named.remove_missing(missed)
            self._submit(encode_missing, self._corpus, missed, sink_of(), self._computed)
        if self._healing.note(request, plan):
            self._heal()

    def _computed(self, text: str, tokens: Tokens, sink: Sink) -> ChunkKV | None:
        """Return the chunk's rows from a prompt with the chunk directly behind the sink."""
        ids = np.concatenate([sink.ids, tokens.ids])
        return self._history.exact_chunk(text, ids, tokens.offsets, sink.fingerprint)

    def _submit(self, work: Callable[[*Given], object], *args: *Given) -> None:
        """Do the work in the thread."""
        self._thread.submit(self._run, partial(work, *args))

    def _heal(self) -> None:
        """Start the thread that heals; it must not run."""
        self._idle = threading.Thread(
            target=self._run, args=(self._healing.work,), name="ragkv-idle", daemon=True
        )
        self._idle.start()

    def _run(self, work: Callable[[], object]) -> None:
        """Do the work; log its errors."""
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
        """Stop healing before the next layer, for good."""
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
