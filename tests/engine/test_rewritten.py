"""A report names what was done to chunks between retrieval and prompt."""

from __future__ import annotations

import pytest

from ragkv.engine.rewritten import rewriting_of

BODY = (
    "The quick brown fox jumps over the lazy dog near the river bank.\n"
    "Nobody has ever seen it come back to where it started from."
)
CHUNK = f"source: a.md\nread at: 12:00\n\n{BODY}"


@pytest.mark.parametrize(
    ("prompt", "cause"),
    [
        (f"Read:\n{[CHUNK]}\nWhy?", "simple_summarize"),
        (f'{{"content": "{CHUNK}"}}'.replace("\n", "\\n"), "as JSON"),
        (f"Read: {' '.join(CHUNK.split())} Why?", "blanks were changed"),
        (f"Read:\nsource: a.md\nread at: 12:30\n\n{BODY}\n\nWhy?", "TimeWeightedPostprocessor"),
        (f"Read:\n{BODY}\n\nWhy?", "excluded_llm_metadata_keys"),
        (f"Read:\n{BODY.splitlines()[1]}\nWhy?", "SentenceEmbeddingOptimizer"),
        (f"Read:\nSource: a.md Content: {CHUNK}\nWhy?", None),
        ("Something else.", None),
    ],
)
def test_the_cause_is_named(prompt, cause):
    found = rewriting_of([CHUNK], prompt)
    assert found is None if cause is None else cause in found
