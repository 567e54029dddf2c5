"""Nodes as the text that they have in the prompt."""

from __future__ import annotations

from collections.abc import Iterable

from llama_index.core.schema import BaseNode, MetadataMode


def rendered_texts(
    nodes: Iterable[BaseNode],
    metadata_mode: MetadataMode = MetadataMode.LLM,
    metadata_key: str | None = None,
) -> list[str]:
    """Return the nodes' texts in the prompt.

    Parameters
    ----------
    metadata_mode
        The metadata in front of a node's text. Response synthesizers write those of ``LLM``;
        ``CitationQueryEngine`` and ``FaithfulnessEvaluator`` write ``NONE``.
    metadata_key
        The metadata field that will replace a node's text, such as ``"window"`` for
        ``MetadataReplacementPostProcessor("window")``; nodes without it keep their text.
    """
    texts = (
        _replaced(node, metadata_key).get_content(metadata_mode=metadata_mode).strip()
        for node in nodes
    )
    return [text for text in texts if text]


def _replaced(node: BaseNode, metadata_key: str | None) -> BaseNode:
    text = None if metadata_key is None else node.metadata.get(metadata_key)
    if text is None:
        return node
    node = node.model_copy()
    node.set_content(text)
    return node
