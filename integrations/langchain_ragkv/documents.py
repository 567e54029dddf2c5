"""Documents as the text that stands for them in the prompt."""

from __future__ import annotations

from collections.abc import Iterable

from langchain_core.documents import Document
from langchain_core.prompts import BasePromptTemplate, format_document


def chunk_texts(
    documents: Iterable[Document | str],
    document_prompt: BasePromptTemplate[str] | None = None,
) -> list[str]:
    """Return each document's text as the chain will render it.

    Without ``document_prompt`` that is ``page_content``, verbatim. Texts stay as
    they are.
    """
    return [_text(document, document_prompt) for document in documents]


def _text(document: Document | str, document_prompt: BasePromptTemplate[str] | None) -> str:
    if isinstance(document, str):
        return document
    if document_prompt is None:
        return document.page_content
    return format_document(document, document_prompt)
