"""Chunks and documents of an ingestion: checks of arguments, groups by document."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ragkv.errors import ConfigError
from ragkv.prompt.tokens import require_readable
from ragkv.report.account import PrecomputeReport

Documents = Mapping[tuple[str, str | None] | None, Sequence[str]]
"""Chunks by document and revision; the key None has chunks without a document."""


def check_texts(texts: Iterable[str]) -> list[str]:
    """Return chunk texts as a list. A single string, an iterable of characters, is refused.

    Raises
    ------
    ConfigError
        ``texts`` is a string or not an iterable, or an item is not a string.
    """
    if isinstance(texts, str) or not isinstance(texts, Iterable):
        raise ConfigError(f"give the chunk texts in a list, not {type(texts).__name__}")
    return [_require_text(text) for text in texts]


def check_chunk(text: object) -> str:
    """Return a chunk's text, stripped; raise ConfigError unless it is a string."""
    return _require_text(text).strip()


def _require_text(text: object) -> str:
    if not isinstance(text, str):
        raise ConfigError(f"a chunk must be a string, not {type(text).__name__}")
    return text


def check_chunks(texts: Iterable[str]) -> list[str]:
    """Return the distinct stripped texts in order; raises as :func:`check_texts` does."""
    unique = dict.fromkeys(text.strip() for text in check_texts(texts))
    for text in unique:
        require_readable(text, "chunk")
    return list(unique)


def check_document(name: object) -> str:
    """Return a document's name; raise ConfigError unless it is a string."""
    if not isinstance(name, str):
        raise ConfigError(f"document must be a string, not {type(name).__name__}")
    return name


def check_revision(revision: object, document: str | None) -> str | None:
    """Return a revision; raise ConfigError unless it is a string given with a document."""
    if revision is None:
        return None
    if document is None or not isinstance(revision, str):
        raise ConfigError(f"revision must be a string with document=..., not {revision!r:.80}")
    return revision


def check_seconds(seconds: object) -> float:
    """Return the seconds until a chunk expires; ConfigError unless they are a number above 0."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        raise ConfigError(f"expires_in must be a number of seconds above 0, not {seconds!r}")
    try:
        return float(seconds)
    except OverflowError:
        raise ConfigError("expires_in is too large for a number of seconds") from None


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
    neighbours: bool = False,
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
    total = precompute(texts, neighbours=neighbours, show_progress=show_progress, **settings)
    removed = sum(
        precompute(part, document=key[0], revision=key[1], show_progress=False, **settings).removed
        for key, part in documents.items()
        if key is not None
    )
    return replace(total, removed=removed)
