"""The demo's texts: the Python language reference that every interpreter carries."""

from __future__ import annotations

import pydoc_data.topics
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# About 45,000 tokens: two minutes of precomputing on two slow cores. The topics do not contain
# one another ("for", "with" and "try", say, are sections of "compound"); the shorter ones come
# first, for `--topics`.
TOPICS = (
    "comparisons",
    "assignment",
    "execmodel",
    "strings",
    "import",
    "calls",
    "raise",
    "slicings",
    "global",
    "lambda",
    "power",
    "binary",
    "operator-summary",
    "identifiers",
    "objects",
    "integers",
    "typesmapping",
    "customization",
    "formatstrings",
    "compound",
)


def corpus_chunks(
    topics: tuple[str, ...], tokenizer: PreTrainedTokenizerBase, chunk_tokens: int
) -> list[str]:
    """Split the topics as users split: LangChain's recursive splitter, counting tokens.

    Topics that this version of Python does not have are skipped.
    """
    from langchain_text_splitters import RecursiveCharacterTextSplitter

    def count(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    splitter = RecursiveCharacterTextSplitter(
        chunk_size=chunk_tokens, chunk_overlap=0, length_function=count
    )
    texts = (pydoc_data.topics.topics.get(topic, "") for topic in topics)
    return list(dict.fromkeys(chunk for text in texts for chunk in splitter.split_text(text)))
