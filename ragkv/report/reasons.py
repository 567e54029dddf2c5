"""Why a chunk was not reused: the closed set of reasons, each with what mends it.

``docs/reasons.md`` has the same table; a test compares them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["warning", "notice", "info"]
"""``warning``: in ``ReuseReport.warnings``, and logged as a warning the first time. ``notice``:
logged as a warning the first time. ``info``: logged as information."""


@dataclass(frozen=True, slots=True)
class Reason:
    """What happened to a chunk, and what to do about it.

    Attributes
    ----------
    meaning
        Completes "the chunk …".
    mend
        What the user can do.
    level
        How it is said beside the report's list.
    """

    meaning: str
    mend: str
    level: Level = "warning"


_AGAIN = "Precompute it again."
_JOIN = (
    'Join the texts: `retriever | (lambda found: "\\n\\n".join(d.page_content for d in found))` in '
    "LangChain, `compact` instead of `simple_summarize` in LlamaIndex."
)
_AS_IS = "Precompute the text as the prompt has it"

STORED_NEXT = "It is encoded after this answer: later prompts reuse it."
"""Goes with the mend, where that is so."""

REASONS: dict[str, Reason] = {
    # not stored, or not for this model
    "absent": Reason(
        "has not been precomputed in this namespace",
        "Precompute it at ingestion, in the store and namespace that answer.",
    ),
    "fingerprint": Reason(
        "is stored for another model, dtype, codec or sink",
        "Precompute with the model, dtype, codec and sink (`sink_from`) that answer.",
    ),
    "evicted": Reason(
        "was evicted, since the store was full",
        "Raise `disk_bytes`, or `memory_bytes` of a store in memory.",
    ),
    "budget": Reason(
        "was not stored, since the store was full",
        "Raise `disk_bytes`, or free disk space.",
    ),
    "expired": Reason(
        "has expired", "Precompute it again, with a longer `expires_in`, or with none."
    ),
    "deleted": Reason(
        "was deleted from the store", "Precompute it again, or delete it from the index, too."
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
        "has a token that the model has no embedding for",
        "Remove the token's name from the text, or use the tokenizer that the model came with.",
    ),
    # stored, and unreadable
    "tokens": Reason("has another text's entry in its place", _AGAIN),
    "checksum": Reason("is corrupt: its bytes are not those that were written", _AGAIN),
    "format": Reason("is stored in a format that this version does not read", _AGAIN),
    "unreadable": Reason(
        "cannot be read: the place is not reachable, or the file is cut", "See the log; try again."
    ),
    # in the prompt, in other characters
    "list": Reason(
        "stands in the prompt within a printed Python list, with \\n for line ends", _JOIN
    ),
    "json": Reason(
        "stands in the prompt as JSON, with \\n for line ends",
        "Have the tool return its texts joined by blank lines instead of JSON.",
    ),
    "html": Reason(
        "stands in the prompt with HTML escapes such as &quot;",
        "Turn escaping off: three braces in a mustache template, `| safe` in a Jinja one.",
    ),
    "indentation": Reason(
        "stands in the prompt with other indentation",
        "Write the prompt template without indentation, or dedent it before texts are inserted.",
    ),
    "whitespace": Reason(
        "stands in the prompt with other blanks or line ends",
        f"{_AS_IS}: the same cleaning of blanks before both.",
    ),
    "case": Reason("stands in the prompt in other case", f"{_AS_IS}: the same case in both."),
    "characters": Reason(
        "stands in the prompt in other characters (Unicode form, quotes)",
        f"{_AS_IS}: the same normalisation before both.",
    ),
    "metadata": Reason(
        "stands in the prompt without the lines around its text, or with others (metadata)",
        "Render chunks alike in both places: `document_prompt` in LangChain, `metadata_mode` in "
        "LlamaIndex (`MetadataMode.NONE` for CitationQueryEngine); leave out metadata that "
        "changes (`excluded_llm_metadata_keys`).",
    ),
    "enlarged": Reason(
        "stands in the prompt within a longer text (a sentence window, a merged parent)",
        'Precompute the longer text: `metadata_key="window"` in LlamaIndex, or '
        "`RagKVPostprocessor` behind what inserts it.",
    ),
    "pieces": Reason(
        "stands in the prompt in pieces, with other text between them",
        "Split into chunks that the prompt keeps whole, at most CitationQueryEngine's "
        "`citation_chunk_size`.",
    ),
    "shortened": Reason(
        "stands in the prompt with parts left out (by a compressor)",
        "Split documents into smaller chunks instead of shortening them after retrieval.",
    ),
    "cut": Reason(
        "is cut off in the prompt: only a part of it is there",
        "Retrieve fewer or smaller chunks, or pack whole ones (`RagKVPromptHelper`).",
        "notice",
    ),
    "left_out": Reason(
        "is not in the prompt",
        "Nothing, if it was dropped on purpose (a cutoff, a reranker) or is in another call's "
        "prompt (`refine`); otherwise see that the template has the context's field.",
        "notice",
    ),
    # in the prompt, and not used
    "unaligned": Reason(
        "shares all of its tokens with the text around it",
        "Nothing: these are few tokens.",
        "info",
    ),
    "overlap": Reason(
        "overlaps another chunk in the prompt, whose rows were taken",
        "Split without `chunk_overlap`, or insert whole chunks.",
        "notice",
    ),
    "positions": Reason(
        "is in a prompt so long that the model rotates its keys by another table",
        "Retrieve fewer or smaller chunks.",
    ),
    "slower": Reason(
        "would have taken longer to load than to compute",
        "Nothing: it is being loaded into memory.",
        "info",
    ),
    "method": Reason(
        "is not reused by the method in use",
        'Nothing, if the method was chosen for that; the default is `method="query"`.',
        "info",
    ),
    "ratio": Reason(
        "was computed again, as all cached tokens were",
        "Nothing, if exactness is wanted; a `recompute_ratio` below 1 reuses.",
        "info",
    ),
    "unsupported": Reason(
        "cannot be reused with this model, which is served by full prefill",
        "Take a model whose caches can be moved: docs/models.md.",
    ),
}
"""The reasons of :class:`ragkv.report.account.Miss`."""


def level_of(reason: str) -> Level:
    """Return how a reason is said; another version's is a warning."""
    return REASONS[reason].level if reason in REASONS else "warning"
