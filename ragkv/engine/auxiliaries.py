"""The auxiliary models of an engine, each with the caches that it made of the same chunks."""

from __future__ import annotations

from collections.abc import Callable

from ragkv.chunk.sinks import Sink
from ragkv.config import ReuseConfig
from ragkv.engine.check.verify import verified
from ragkv.ingest.corpus import Corpus
from ragkv.ingest.encode import get_or_encode
from ragkv.model.default_model import DEFAULT_MODEL
from ragkv.model.load import load_model
from ragkv.model.loaded import ReusableModel, require_reusable
from ragkv.prompt.render import chat_head
from ragkv.select.auxiliary import Auxiliary


class Auxiliaries:
    """Loads models by name, once each.

    Parameters
    ----------
    primary
        The engine's own corpus: a model may be its own auxiliary.
    make
        Makes another model's corpus, in the same store.
    """

    def __init__(self, primary: Corpus, make: Callable[[ReusableModel], Corpus]) -> None:
        self._make = make
        self._corpora = {primary.loaded.name: primary}

    def corpus(self, config: ReuseConfig) -> tuple[Corpus, Sink]:
        """Return the corpus of the configured auxiliary model, and its sink."""
        name = config.auxiliary_model or DEFAULT_MODEL
        if name not in self._corpora:
            loaded = verified(load_model(name, None, device="cpu"), "raise")
            self._corpora[name] = self._make(require_reusable(loaded))
        corpus = self._corpora[name]
        return corpus, corpus.sinks.of(chat_head(corpus.loaded.tokenizer))

    def scorer(self, config: ReuseConfig) -> Auxiliary:
        """Return what scores chunks, which are encoded where they are missing."""
        corpus, sink = self.corpus(config)
        keep = config.on_miss == "store"
        return Auxiliary(
            corpus.loaded,
            sink.rows,
            lambda text: get_or_encode(corpus, text, sink, keep=keep),
        )
