"""The reasons why chunks are not reused, each with its remedy; docs/reasons.md lists them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["warning", "notice", "info"]
"""``warning``: a part of ``ReuseReport.warnings``, logged as a warning the first time. ``notice``:
logged as a warning the first time. ``info``: logged as information."""


@dataclass(frozen=True, slots=True)
class Reason:
    """What happened to a chunk, and the remedy.

    Attributes
    ----------
    meaning
        Completes "the chunk …".
    mend
        The user's remedy.
    level
        Whether it is logged, and how.
    """

    meaning: str
    mend: str
    level: Level = "warning"


_AGAIN = "Precompute it again."
_JOIN = (
    'Join the texts: `retriever | (lambda found: "\\n\\n".join(d.page_content for d in found))` in '
    "LangChain, `compact` instead of `simple_summarize` in LlamaIndex."
)
_AS_IS = "Precompute the text exactly as the prompt contains it"

STORED_NEXT = "It is encoded after this answer: later prompts reuse it."
"""Follows the remedy of such a chunk."""

REASONS: dict[str, Reason] = {
    # not stored, or for a different model
    "absent": Reason(
        "has not been precomputed in this namespace",
        "Precompute it at ingestion, in the store and namespace that answer.",
    ),
    "fingerprint": Reason(
        "is stored for a different model, dtype, codec or sink",
        "Precompute with the model, dtype, codec and sink (`sink_from`) that answer.",
    ),
    "evicted": Reason(
        "was evicted because the store was full",
        "Raise `disk_bytes`, or `memory_bytes` for a store in memory.",
    ),
    "budget": Reason(
        "was not stored because the store was full",
        "Raise `disk_bytes`, or free disk space.",
    ),
    "expired": Reason(
        "has expired", "Precompute it again with a longer `expires_in`, or without one."
    ),
    "deleted": Reason(
        "was deleted from the store", "Precompute it again, or delete it from the index too."
    ),
    "too_short": Reason(
        "has fewer than 16 characters",
        "Nothing; or split documents into larger chunks.",
        "info",
    ),
    "too_long": Reason(
        "is longer than the model's positions", "Split documents into smaller chunks."
    ),
    "unknown_token": Reason(
        "contains a token without an embedding in the model",
        "Remove the token's name from the text, or use the model's own tokenizer.",
    ),
    # stored, but unreadable
    "tokens": Reason("has a different text's entry in its place", _AGAIN),
    "checksum": Reason("is corrupt: its checksum is wrong", _AGAIN),
    "format": Reason("is stored in a format that this version cannot read", _AGAIN),
    "unreadable": Reason(
        "cannot be read: the store is unreachable or the file truncated", "See the log; try again."
    ),
    # in the prompt, but changed
    "list": Reason(
        "is in the prompt as part of a printed Python list, with \\n for line ends", _JOIN
    ),
    "json": Reason(
        "is in the prompt as JSON, with \\n for line ends",
        "Let the tool return its texts joined by blank lines instead of JSON.",
    ),
    "html": Reason(
        "is in the prompt with HTML escapes such as &quot;",
        "Turn off escaping: three braces in a mustache template, `| safe` in a Jinja one.",
    ),
    "indentation": Reason(
        "is in the prompt with different indentation",
        "Write the prompt template without indentation, or dedent it before inserting texts.",
    ),
    "whitespace": Reason(
        "is in the prompt with different blanks or line ends",
        f"{_AS_IS}, with the same blanks.",
    ),
    "case": Reason("is in the prompt in different case", f"{_AS_IS}, in the same case."),
    "characters": Reason(
        "is in the prompt with different characters (Unicode form, quotes)",
        f"{_AS_IS}, with the same normalisation.",
    ),
    "metadata": Reason(
        "is in the prompt with different or no lines (metadata) around its text",
        "Render chunks the same way at ingestion and in prompts: `document_prompt` in LangChain, "
        "`metadata_mode` in LlamaIndex (`MetadataMode.NONE` for CitationQueryEngine). Exclude "
        "metadata that changes (`excluded_llm_metadata_keys`).",
    ),
    "enlarged": Reason(
        "is in the prompt as part of a longer text (a sentence window, a merged parent)",
        'Precompute the longer text: `metadata_key="window"` in LlamaIndex, or '
        "`RagKVPostprocessor` behind what inserts it.",
    ),
    "pieces": Reason(
        "is in the prompt in pieces, with other text between them",
        "Split documents into chunks that stay whole in the prompt: at most CitationQueryEngine's "
        "`citation_chunk_size`.",
    ),
    "shortened": Reason(
        "is in the prompt without some parts (removed by a compressor)",
        "Split documents into smaller chunks instead of shortening them after retrieval.",
    ),
    "cut": Reason(
        "is truncated in the prompt",
        "Retrieve fewer or smaller chunks, or keep them whole with `RagKVPromptHelper`.",
        "notice",
    ),
    "left_out": Reason(
        "is not in the prompt",
        "Nothing, if it was dropped on purpose (a cutoff, a reranker) or belongs to another call's "
        "prompt (`refine`). Otherwise check that the template has the context's field.",
        "notice",
    ),
    # in the prompt, but not used
    "unaligned": Reason(
        "shares all of its tokens with the text around it",
        "Nothing: it has few tokens.",
        "info",
    ),
    "overlap": Reason(
        "overlaps another chunk in the prompt, which was reused instead",
        "Split without `chunk_overlap`, or insert whole chunks.",
        "notice",
    ),
    "positions": Reason(
        "is in a prompt longer than the position limit of the model's first rotary table",
        "Retrieve fewer or smaller chunks.",
    ),
    "slower": Reason(
        "would take longer to load than to compute",
        "Nothing: it is being loaded into memory.",
        "info",
    ),
    "method": Reason(
        "is not reused by this method",
        'Nothing, if the method was chosen for that; the default is `method="query"`.',
        "info",
    ),
    "ratio": Reason(
        "was recomputed, like all cached tokens",
        "Nothing, for an exact answer; a `recompute_ratio` below 1 reuses chunks.",
        "info",
    ),
    "unsupported": Reason(
        "cannot be reused with this model, which is served by full prefill",
        "Use a model whose caches can be moved: docs/models.md.",
    ),
}
"""The reasons of :class:`ragkv.report.account.Miss`."""


def level_of(reason: str) -> Level:
    """Return how a reason is said; another version's is a warning."""
    return REASONS[reason].level if reason in REASONS else "warning"
