"""Precompute the chunks of many documents at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ragkv.report.account import PrecomputeReport

Documents = Mapping[tuple[str, str | None] | None, Sequence[str]]
"""Chunks by their document and its revision; those of None are no document's."""


def precompute_documents(
    precompute: Callable[..., PrecomputeReport],
    documents: Documents,
    *,
    show_progress: bool | None = None,
    **settings: Any,
) -> PrecomputeReport:
    """Encode all chunks together, which is faster, then say whose they are.

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
