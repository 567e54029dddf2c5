"""Documents as the text that they have in the prompt."""

from __future__ import annotations

from collections.abc import Iterable

from langchain_core.documents import Document
from langchain_core.prompts import BasePromptTemplate, format_document

from ragkv.errors import ConfigError


def chunk_texts(
    documents: Iterable[Document | str],
    document_prompt: BasePromptTemplate[str] | None = None,
) -> list[str]:
    """Return each document's text as the chain will render it.

    Without ``document_prompt`` that is ``page_content``, verbatim. Strings stay unchanged.

    Raises
    ------
    ConfigError
        One text or document instead of a list, or an item of another type.
    """
    if isinstance(documents, str | Document):
        raise ConfigError(f"give the documents in a list, not one {type(documents).__name__}")
    return [_text(document, document_prompt) for document in documents]


def _text(document: object, document_prompt: BasePromptTemplate[str] | None) -> str:
    if isinstance(document, str):
        return document
    if not isinstance(document, Document):
        raise ConfigError(f"give Documents or strings, not a list with {document!r:.80}")
    if document_prompt is None:
        return document.page_content
    return format_document(document, document_prompt)
