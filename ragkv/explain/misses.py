"""The chunks that were not reused, with their reasons."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ragkv.explain.rewritten import PARTIAL, Rewritten
from ragkv.prompt.find import Span, is_registrable
from ragkv.prompt.tokens import Tokens
from ragkv.report.account import Miss
from ragkv.retrieve.named import Retrieved
from ragkv.splice.layout import Origin

DAMAGED = frozenset({"tokens", "checksum", "format", "unreadable"})
"""Reasons of entries that the store deletes."""

_HEAD_CHARS = 80
_EDGES = 2
"""Most tokens of a chunk that are shared with the text around it."""

_UNSURE = PARTIAL | {"left_out"}
"""Reasons that do not apply to a chunk named for an earlier prompt."""

_UNFIT = frozenset({"too_long", "unknown_token"})
_STORED_NEXT = DAMAGED | {"absent", "fingerprint", "evicted", "deleted"}


@dataclass(frozen=True, slots=True, eq=False)
class Facts:
    """A prompt, and what was reused in it.

    Attributes
    ----------
    text, tokens
        The prompt.
    origin
        ``[tokens]`` uint8: each token's :class:`Origin`.
    spans
        The known chunks in the prompt; None if the method does not search for them.
    missed
        The texts of the known chunks without a usable entry, with their reasons.
    uses_chunks
        Whether the method places chunks anywhere in the prompt.
    stores_missed
        Whether missed chunks are encoded after the answer.
    """

    text: str
    tokens: Tokens
    origin: npt.NDArray[np.uint8]
    spans: tuple[Span, ...] | None
    missed: tuple[tuple[str, str], ...]
    uses_chunks: bool
    stores_missed: bool


@dataclass(frozen=True, slots=True)
class Lookup:
    """Knowledge about unusable chunks.

    Attributes
    ----------
    is_known
        Whether a text is a chunk of the namespace.
    reason_of
        Why a text is not stored; empty if unknown.
    differences
        The differences between a stored chunk and the model, such as ``another sink``.
    """

    is_known: Callable[[str], bool]
    reason_of: Callable[[str], str]
    differences: Callable[[str], str]


def explain(facts: Facts, named: Retrieved, lookup: Lookup) -> list[Miss]:
    """Return the chunks in the prompt, or named for it, that were not or only partly reused."""
    prompt = _Explained(facts, lookup)
    reasons = {text: prompt.reason_of_found(text, reason) for text, reason in facts.missed}
    for text in named.new:
        if text not in reasons and (reason := prompt.reason_of(text)):
            reasons[text] = reason
    for text in named.earlier:
        reason = None if text in reasons else prompt.reason_of(text)
        if reason and reason not in _UNSURE:
            reasons[text] = reason
    for text in prompt.half_used():
        if text not in reasons and (reason := prompt.reason_of(text)):
            reasons[text] = reason
    return [prompt.miss(text, reason) for text, reason in reasons.items()]


def unsupported(texts: Iterable[str]) -> list[Miss]:
    """Return the misses of chunks named for a model whose caches cannot be reused."""
    return [Miss(head_of(text), "unsupported") for text in dict.fromkeys(texts)]


def head_of(text: str) -> str:
    """Return the beginning of a chunk's text, for reports."""
    return text[:_HEAD_CHARS]


class _Explained:
    """The chunks of one prompt."""

    def __init__(self, facts: Facts, lookup: Lookup) -> None:
        self._facts, self._lookup = facts, lookup
        self._spans = facts.spans or ()
        self._whole = {
            span.text: span for span in self._spans if span.end - span.start == len(span.text)
        }

    def reason_of(self, text: str) -> str | None:
        """Return why a chunk was not reused, or only in part; None if it was."""
        if self._facts.spans is None:
            return "method"
        if span := self._whole.get(text):
            return self._reason_of_whole(span)
        if text in self._facts.text:
            return self._reason_of_unknown(text, self._facts.text.index(text))
        return self._reason_of_absent(text)

    def reason_of_found(self, text: str, reason: str) -> str:
        """Return the reason of a known chunk without a usable entry."""
        return (self._lookup.reason_of(text) or reason) if reason == "absent" else reason

    def half_used(self) -> list[str]:
        """Return the known chunks of which the prompt contains at least half, but not all."""
        return [
            span.text
            for span in self._spans
            if span.text not in self._whole and 2 * (span.end - span.start) >= len(span.text)
        ]

    def miss(self, text: str, reason: str) -> Miss:
        """Return a chunk's miss."""
        facts = self._facts
        detail = self._lookup.differences(text) if reason == "fingerprint" else ""
        stored_next = facts.stores_missed and reason in _STORED_NEXT and text in facts.text
        return Miss(head_of(text), reason, detail, stored_next)

    def _reason_of_whole(self, span: Span) -> str | None:
        origins = self._origins(span.start, span.end)
        if (origins != Origin.FRESH).any():
            return self._ratio if (origins == Origin.RECOMPUTED).any() else None
        return "unaligned" if self._facts.uses_chunks else "method"

    def _reason_of_unknown(self, text: str, start: int) -> str | None:
        """Return the reason of an unknown chunk that the prompt contains verbatim."""
        end = start + len(text)
        origins = self._origins(start, end)
        if (origins == Origin.FRESH).sum() <= _EDGES:
            return self._ratio if (origins == Origin.RECOMPUTED).any() else None
        if not is_registrable(text):
            return "too_short"
        overlaps = any(each.start < end and start < each.end for each in self._spans)
        if overlaps and self._lookup.is_known(text):
            return "overlap"
        return self._lookup.reason_of(text) or "absent"

    def _reason_of_absent(self, text: str) -> str | None:
        """Return the reason of a chunk that the prompt does not contain verbatim."""
        if reason := self._rest.reason_of(text):
            known = self._lookup.reason_of(text)
            return known if known in _UNFIT else reason
        if self._other_forms.reason_of(text) in {None, *PARTIAL}:
            return "left_out"
        return self._ratio

    @property
    def _ratio(self) -> str | None:
        """The reason ``ratio`` if all cached tokens were recomputed."""
        origin = self._facts.origin
        recomputed, cached = (origin == Origin.RECOMPUTED).any(), (origin == Origin.CACHED).any()
        return "ratio" if recomputed and not cached else None

    @cached_property
    def _rest(self) -> Rewritten:
        """The prompt without the known chunks that it contains whole."""
        parts, at = [], 0
        for span in sorted(self._whole.values(), key=lambda span: span.start):
            parts.append(self._facts.text[at : span.start])
            at = span.end
        return Rewritten("\0".join([*parts, self._facts.text[at:]]), self._facts.text)

    @cached_property
    def _other_forms(self) -> Rewritten:
        """The known chunks that the prompt contains whole."""
        return Rewritten("\0".join(self._whole))

    def _origins(self, start: int, end: int) -> npt.NDArray[np.uint8]:
        """The origins of the characters' tokens, ``[tokens]``."""
        return self._facts.origin[self._facts.tokens.touching(start, end)]
