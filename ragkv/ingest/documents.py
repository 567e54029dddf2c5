"""Documents: their chunks, precomputed together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ragkv.report.account import PrecomputeReport

Documents = Mapping[tuple[str, str | None] | None, Sequence[str]]
"""Chunks by document and revision; the key None has chunks without a document."""


@dataclass(frozen=True, slots=True)
class Document:
    """A document's chunks, or chunks without a document.

    ``name`` and ``revision`` are ``document`` and ``revision`` of :meth:`ragkv.RagKV.precompute`.
    """

    texts: Sequence[str]
    name: str | None = None
    revision: str | None = None


def grouped(documents: Iterable[Document]) -> Documents:
    """Group chunks by document and revision."""
    groups: dict[tuple[str, str | None] | None, list[str]] = {}
    for each in documents:
        key = None if each.name is None else (each.name, each.revision)
        groups.setdefault(key, []).extend(each.texts)
    return groups


def precompute_documents(
    precompute: Callable[..., PrecomputeReport],
    documents: Documents,
    *,
    show_progress: bool | None = None,
    **settings: Any,
) -> PrecomputeReport:
    """Encode all chunks in one call, which is faster, then assign them to their documents.

    Parameters
    ----------
    precompute
        An engine's method.
    documents
        As in :meth:`ragkv.RagKV.precompute`.
    """
    texts = [text for part in documents.values() for text in part]
    total = precompute(texts, show_progress=show_progress, **settings)
    removed = sum(
        precompute(part, document=key[0], revision=key[1], show_progress=False, **settings).removed
        for key, part in documents.items()
        if key is not None
    )
    return replace(total, removed=removed)
