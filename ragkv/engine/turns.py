"""The turns of chats: what was asked and answered, as chunks that expire."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from ragkv.engine.corpus import Corpus, Sink
from ragkv.errors import ConfigError, StoreError
from ragkv.prompt.find import Span, is_registrable
from ragkv.prompt.messages import Message
from ragkv.store.base import TURNS, Terms, has_expired

_log = logging.getLogger(__name__)
MOST_TURNS = 256
"""Texts that are remembered: the last said, or found in a prompt."""

MOST_BYTES = 1 << 30
"""Bytes that they may take together."""


class _Turn(NamedTuple):
    nbytes: int
    expires_at: float | None


class Turns:
    """Remembers a namespace's turns, as the chunks of the document :data:`TURNS`.

    They are ordinary chunks: a prompt reuses one where it contains the text verbatim. The bounds
    hold for what this process remembered and what it found at its start.
    """

    def __init__(self, corpus: Corpus) -> None:
        self._corpus = corpus
        self._lock = threading.Lock()
        self._kept: dict[str, _Turn] | None = None  # the oldest first

    def remember(
        self, prompt: Sequence[Message], text: str, answer: str, sink: Sink, expires_in: float
    ) -> None:
        """Encode a turn's question and answer; never raise.

        Parameters
        ----------
        prompt, text
            The messages, and the text that the model read. Known chunks are no question. Turns
            in the text are kept for longer.
        expires_in
            Seconds.
        """
        try:
            self._delete_expired()
            spans = self._corpus.find(text)
            kept, expires_at = self._read(), time.time() + expires_in
            for said in dict.fromkeys(span.text for span in spans if span.text in kept):
                if has_expired(kept[said].expires_at, expires_at - expires_in / 2):  # it soon will
                    self._renew(said, kept[said], sink, expires_at)
            for said in (*_questions(prompt, text, spans), answer.strip()):
                if is_registrable(said) and not self._corpus.knows(said):
                    self._encode(said, sink, expires_in, expires_at)
            self._delete_oldest()
        except (StoreError, ConfigError) as error:
            _log.warning("a turn was not remembered: %s", error)

    def release(self, texts: Iterable[str]) -> None:
        """Forget turns that become chunks of the user's own, which do not expire with them."""
        try:
            kept = self._read()
            for text in {text.strip() for text in texts} & kept.keys():
                self._delete(text)
        except StoreError as error:
            _log.warning("cannot read the turns of chats: %s", error)

    def _read(self) -> dict[str, _Turn]:
        """Return the turns; at first, those that the store has."""
        with self._lock:
            if self._kept is None:
                self._kept = {}
                for info in self._corpus.store.entries_of(TURNS):
                    known = self._kept.get(info.text, _Turn(0, None))
                    self._kept[info.text] = _Turn(known.nbytes + info.nbytes, info.expires_at)
            return dict(self._kept)

    def _keep(self, text: str, turn: _Turn) -> None:
        """Note a turn as the youngest."""
        with self._lock:
            if self._kept is not None:
                self._kept.pop(text, None)
                self._kept[text] = turn

    def _encode(self, text: str, sink: Sink, expires_in: float, expires_at: float) -> None:
        done = self._corpus.encode(
            [text], sink, document=TURNS, replace=False, expires_in=expires_in
        )
        if done.new:
            self._keep(text, _Turn(done.bytes, expires_at))

    def _renew(self, text: str, turn: _Turn, sink: Sink, expires_at: float) -> None:
        terms = Terms(TURNS, expires_at)
        if self._corpus.store.retain(text, sink.fingerprint, terms):
            self._keep(text, turn._replace(expires_at=expires_at))

    def _delete(self, text: str) -> None:
        self._corpus.forget(text)
        with self._lock:
            if self._kept is not None:
                self._kept.pop(text, None)

    def _delete_expired(self) -> None:
        now = time.time()
        for text, turn in self._read().items():
            if has_expired(turn.expires_at, now):
                self._delete(text)

    def _delete_oldest(self) -> None:
        kept = self._read()
        nbytes = sum(turn.nbytes for turn in kept.values())
        for at, (text, turn) in enumerate(kept.items()):
            if len(kept) - at <= MOST_TURNS and nbytes <= MOST_BYTES:
                break
            self._delete(text)
            nbytes -= turn.nbytes


def _questions(prompt: Sequence[Message], text: str, spans: Sequence[Span]) -> Iterator[str]:
    """Yield the parts of the last user message that are no known chunks."""
    asked = next((message for message in reversed(prompt) if message["role"] == "user"), None)
    content = "" if asked is None else asked["content"]
    parts = [content] if isinstance(content, str) else [part["text"] for part in content]
    for part in map(str.strip, parts):
        start = text.rfind(part)
        end = start + len(part)
        for span in spans if start >= 0 else ():
            if start < span.end and span.start < end:
                yield text[start : span.start].strip()
                start = span.end
        yield text[start:end].strip() if 0 <= start < end else ""
