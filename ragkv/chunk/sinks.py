"""The sinks of one model: the texts that chunks are encoded behind, and their rows."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from functools import partial

from ragkv.chunk.encode import Passes, encode_sink
from ragkv.chunk.kv import ChunkKV
from ragkv.config import ReuseConfig
from ragkv.errors import ConfigError
from ragkv.model.fingerprint import Fingerprint, fingerprint_of, state_of
from ragkv.model.loaded import ReusableModel
from ragkv.prompt.render import Rendered, chat_head, render_sink, undated
from ragkv.prompt.tokens import IntArray, sink_tokens

_log = logging.getLogger(__name__)
SINKS_KEPT = 16
"""Number of sinks whose rows stay in memory, the last used."""


@dataclass(frozen=True, slots=True, eq=False)
class Sink:
    """The text that chunks are encoded behind, with its tokens, rows and fingerprint."""

    rendered: Rendered
    ids: IntArray
    rows: ChunkKV | None
    fingerprint: Fingerprint


class Sinks:
    """Sinks of one model, encoded on first use, and again when the weights change.

    Parameters
    ----------
    codec
        The codec of their entries, a part of every fingerprint.
    """

    def __init__(self, loaded: ReusableModel, passes: Passes, codec: str) -> None:
        self._loaded, self._passes, self._codec = loaded, passes, codec
        self._fingerprint, self._state = loaded.fingerprint, loaded.state
        self._kept: dict[str, Sink] = {}  # the last used at the end
        self._lock = threading.Lock()

    def configured(self, config: ReuseConfig) -> Sink:
        """Return the sink of a configuration."""
        tokenizer = self._loaded.tokenizer
        if config.sink == "auto":
            return self.of(chat_head(tokenizer))
        return self.of(undated(config.sink, tokenizer))

    def of(self, text: str) -> Sink:
        """Return the sink of a text."""
        bare = self.usable_fingerprint()
        with self._lock:
            sink = self._kept.pop(text, None)
            if sink is not None:
                self._kept[text] = sink
                return sink
        sink = self._encoded(text, bare)
        if self.usable_fingerprint() is not bare:  # weights changed while it waited
            return self.of(text)
        with self._lock:
            self._kept[text] = sink
            while len(self._kept) > SINKS_KEPT:
                del self._kept[next(iter(self._kept))]
        return sink

    def _encoded(self, text: str, bare: Fingerprint) -> Sink:
        loaded = self._loaded
        rendered = render_sink(text, loaded.tokenizer)
        tokens = sink_tokens(rendered, loaded.tokenizer)
        loaded.require_embedded(tokens.ids, f"the sink {text[:40]!r}")
        rows = None
        if len(tokens):
            rows, _ = self._passes.run(partial(encode_sink, text, tokens, loaded))
        fingerprint = bare.with_codec(self._codec).with_sink(tokens.ids.tolist())
        return Sink(rendered, tokens.ids, rows, fingerprint)

    def usable_fingerprint(self) -> Fingerprint:
        """Return :attr:`fingerprint`; raise ConfigError for a model whose caches are invalid."""
        if self._loaded.model.training:
            raise ConfigError(
                "the model is in training mode, where caches are invalid: call model.eval() first"
            )
        return self.fingerprint

    @property
    def fingerprint(self) -> Fingerprint:
        """The current fingerprint of the model, without a sink."""
        loaded = self._loaded
        state = state_of(loaded.model)
        if state != self._state:
            _log.info("the weights of %s may have changed", loaded.name)
            with self._lock:
                self._kept.clear()
            kinds = loaded.architecture.rope_kinds
            self._fingerprint = fingerprint_of(loaded.model, loaded.tokenizer, kinds)
            self._state = state
        return self._fingerprint

    def require_unchanged(self, sink: Sink) -> None:
        """Raise ConfigError if the weights have changed since the sink was encoded."""
        if self.usable_fingerprint().weights != sink.fingerprint.weights:
            raise ConfigError(
                "the model's weights changed while chunks were encoded: encode them again"
            )
