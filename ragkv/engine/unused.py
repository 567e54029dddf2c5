"""Every chunk that was retrieved for a prompt and not reused, with its reason."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np

from ragkv.engine.plan import Account, Plan
from ragkv.engine.request import Request
from ragkv.engine.rewritten import Rewritten
from ragkv.ingest.corpus import Corpus
from ragkv.prompt.find import Span, is_registrable
from ragkv.report.account import Miss
from ragkv.report.reasons import level_of
from ragkv.report.summary import sentences
from ragkv.retrieve.named import NamedChunks
from ragkv.splice.layout import Origin

_log = logging.getLogger(__name__)
_HEAD_CHARS = 80
_LEAST_UNEXPLAINED = 200
"""Characters outside chunks from which on stored chunks are looked for in them."""

_MANY = 200
"""Named chunks of which each is looked for closely; of more, those that have a window there."""

_EDGES = 2
"""Tokens at a text's ends that it may share with other text."""

_OF_A_PART = frozenset({"cut", "shortened"})
"""Reasons that tell nothing of a chunk that nobody named: it may be like another one."""

_DAMAGED = frozenset({"tokens", "checksum", "format", "unreadable"})
_UNFIT = frozenset({"too_long", "unknown_token"})
_NOT_STORED_NEXT = frozenset({"budget", "expired", "slower", "too_short"}) | _UNFIT


def miss_of(text: str, reason: str, detail: str = "", *, stored_next: bool = False) -> Miss:
    """Return a miss with the head of its text."""
    return Miss(text[:_HEAD_CHARS], reason, detail, stored_next)


def unsupported(request: Request, *_: object) -> Account:
    """Account for the named chunks with a model whose caches cannot be reused."""
    texts = (*request.retrieved, *(text for each in request.named for text in each.texts))
    return tuple(miss_of(text, "unsupported") for text in dict.fromkeys(texts)), ()


class Unused:
    """Accounts for the chunks of one prompt.

    Parameters
    ----------
    named
        The engine's, for the lists of other callers, one of which may be this prompt's.
    stores
        Whether chunks that were missed are stored after the answer.
    """

    def __init__(
        self, request: Request, plan: Plan, corpus: Corpus, named: NamedChunks, *, stores: bool
    ) -> None:
        self._request, self._plan, self._corpus, self._named = request, plan, corpus, named
        self._stores = stores
        self._prompt = plan.located.text
        self._looks_closely = True

    def misses(self) -> tuple[list[str], list[tuple[str, Miss]]]:
        """Return the chunks that were named for the prompt, and all misses by their texts."""
        located = self._plan.located
        found = [
            (text, self._found_and_missed(text, reason))
            for text, reason in (*located.missed, *self._plan.spliced.missed)
        ]
        missed = {text for text, _ in found}
        texts = self._retrieved()
        self._looks_closely = len(texts) <= _MANY
        for text in texts:
            reason = None if text in missed else self._reason_of(text)
            if reason is not None:
                found.append((text, self._missed(text, reason)))
        found += self._half_used({*missed, *texts})
        missed |= {text for text, _ in found}
        looks = located.known is not None and not texts
        if looks and len(self._rewritten.prompt) >= _LEAST_UNEXPLAINED:
            found += self._not_named(missed)
        return texts, found

    def _retrieved(self) -> list[str]:
        """Return the chunks that were named for this prompt."""
        named = self._named.claim(self._request.named, self._is_in_prompt)
        return list(dict.fromkeys((*self._request.retrieved, *named)))

    @cached_property
    def _whole(self) -> dict[str, Span]:
        """The known chunks that the prompt has whole."""
        spans = self._plan.located.known or ()
        return {span.text: span for span in spans if span.end - span.start == len(span.text)}

    @cached_property
    def _rewritten(self) -> Rewritten:
        """The prompt without the chunks that it has whole."""
        parts, at = [], 0
        for span in sorted(self._whole.values(), key=lambda span: span.start):
            parts.append(self._prompt[at : span.start])
            at = span.end
        return Rewritten("\0".join([*parts, self._prompt[at:]]), self._prompt)

    @cached_property
    def _other_forms(self) -> Rewritten:
        """The chunks that the prompt has whole."""
        return Rewritten("\0".join(self._whole))

    def _is_in_prompt(self, text: str) -> bool:
        verbatim = text in self._whole or text in self._prompt
        return verbatim or self._rewritten.may_have(text) or self._other_forms.may_have(text)

    def _reason_of(self, text: str) -> str | None:
        """Return why a named chunk was not reused, or not whole; None where it was."""
        if self._plan.located.known is None:
            return "method"
        span = self._whole.get(text)
        if span is None and text not in self._prompt:
            return self._reason_of_absent(text)
        start = self._prompt.find(text) if span is None else span.start
        origins = self._origins(start, start + len(text))
        fresh, recomputed = (origins == Origin.FRESH).sum(), (origins == Origin.RECOMPUTED).sum()
        if fresh < len(origins) if span is not None else fresh <= _EDGES:
            return "ratio" if recomputed and self._all_recomputed else None
        if span is not None:
            return "method" if not self._request.method.uses_chunks else "unaligned"
        return self._reason_of_unknown(text, start)

    @property
    def _all_recomputed(self) -> bool:
        origin = self._plan.origin
        return bool((origin == Origin.RECOMPUTED).any() and not (origin == Origin.CACHED).any())

    def _reason_of_absent(self, text: str) -> str | None:
        """Return the reason of a chunk that the prompt does not have verbatim."""
        if reason := self._changed_in(self._rewritten, text):
            known = self._corpus.not_stored.reason_of(text)
            return known if known in _UNFIT else reason
        if self._changed_in(self._other_forms, text) in {None, *_OF_A_PART}:
            return "left_out"
        return "ratio" if self._all_recomputed else None

    def _changed_in(self, prompt: Rewritten, text: str) -> str | None:
        """Return what was done to a chunk; one of many is looked for only where it may be."""
        return prompt.reason_of(text) if self._looks_closely or prompt.may_have(text) else None

    def _reason_of_unknown(self, text: str, start: int) -> str:
        if not is_registrable(text):
            return "too_short"
        others = self._plan.located.known or ()
        if self._corpus.has(text) and any(
            other.start < start + len(text) and start < other.end for other in others
        ):
            return "overlap"
        return self._corpus.not_stored.reason_of(text) or "absent"

    def _origins(self, start: int, end: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """Return where the tokens of some characters came from."""
        return self._plan.origin[self._plan.located.tokens.touching(start, end)]

    def _half_used(self, but: set[str]) -> Iterator[tuple[str, Miss]]:
        """Yield known chunks of which the prompt has half or more, but not all."""
        for span in self._plan.located.known or ():
            is_half = len(span.text) <= 2 * (span.end - span.start)
            if not is_half or span.text in but or span.text in self._whole:
                continue
            but.add(span.text)
            if reason := self._reason_of(span.text):
                yield span.text, self._missed(span.text, reason)

    def _not_named(self, but: set[str]) -> Iterator[tuple[str, Miss]]:
        """Yield stored chunks that stand in the prompt in another way."""
        for text in self._corpus.landmarks.find(self._rewritten):
            if text in but or text in self._prompt:
                continue
            reason = self._rewritten.reason_of(text)
            if reason is not None and reason not in _OF_A_PART:
                yield text, self._missed(text, reason)

    def _found_and_missed(self, text: str, reason: str) -> Miss:
        """Return the miss of a chunk that was found in the prompt."""
        if reason == "absent":
            reason = self._corpus.not_stored.reason_of(text) or reason
        elif reason in _DAMAGED:  # which the store deletes
            self._corpus.not_stored.note([text], reason)
        return self._missed(text, reason)

    def _missed(self, text: str, reason: str) -> Miss:
        detail, sink = "", self._plan.located.sink
        if reason == "fingerprint" and sink is not None:
            detail = self._corpus.not_stored.differences(text, sink.fingerprint)
        stored = self._stores and reason not in _NOT_STORED_NEXT and text in self._prompt
        stored &= text in self._plan.located.to_encode or text not in self._whole
        return miss_of(text, reason, detail, stored_next=stored)


class Teller:
    """Says why chunks were not reused: in a line of the log, and in warnings."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._said: set[str] = set()

    def tell(self, named: Sequence[str], missed: Sequence[tuple[str, Miss]]) -> tuple[str, ...]:
        """Log one line on a prompt's misses; return the warnings among its sentences."""
        if not missed:
            return ()
        all_named = len(named) > 1 and {text for text, _ in missed} <= set(named)
        of = f"Of the {len(named):,} retrieved chunks, " if all_named else ""
        misses = [miss for _, miss in missed]
        with self._lock:
            new = {miss.reason for miss in misses} - self._said
            self._said |= new
        loud = any(level_of(reason) != "info" for reason in new)
        verb = "was" if len(misses) == 1 else "were"
        all_of = f"{of}{len(misses)} {verb} not reused, or not whole. " if of else ""
        level = logging.WARNING if loud else logging.INFO
        _log.log(level, "%s%s", all_of, " ".join(sentences(misses)))
        return tuple(sentences((miss for miss in misses if level_of(miss.reason) == "warning"), of))
