"""Tell the engine what was retrieved, as soon as it is known."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.callbacks import CallbackManager
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.prompts.mixin import PromptMixinType
from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore, QueryBundle
from llama_index.llms.ragkv.base import RagKVLLM


def rendered_texts(nodes: Iterable[BaseNode]) -> list[str]:
    """Return the texts that a response synthesizer will put into the prompt."""
    texts = (node.get_content(metadata_mode=MetadataMode.LLM).strip() for node in nodes)
    return [text for text in texts if text]


def _prefetch(llm: RagKVLLM, found: Sequence[NodeWithScore]) -> None:
    llm.prefetch(rendered_texts(item.node for item in found))


class RagKVRetriever(BaseRetriever):
    """Wraps any retriever; the chunks that it finds start loading at once.

    Chunks that are not stored are encoded after the answer (``on_miss="store"``), so
    nothing depends on the ingestion step having run.

    Parameters
    ----------
    retriever
        The retriever that does the work.
    llm
        The LLM that will answer.
    """

    def __init__(
        self,
        retriever: BaseRetriever,
        llm: RagKVLLM,
        callback_manager: CallbackManager | None = None,
    ) -> None:
        super().__init__(callback_manager or retriever.callback_manager)
        self._retriever = retriever
        self._llm = llm

    def _get_prompt_modules(self) -> PromptMixinType:
        return {"retriever": self._retriever}

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        found = self._retriever.retrieve(query_bundle)
        _prefetch(self._llm, found)
        return found

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        found = await self._retriever.aretrieve(query_bundle)
        await asyncio.to_thread(_prefetch, self._llm, found)
        return found


class RagKVPostprocessor(BaseNodePostprocessor):
    """Does the same behind a retriever that cannot be wrapped; put it last.

    Last, because postprocessors before it may replace texts or drop nodes.
    """

    _llm: RagKVLLM = PrivateAttr()

    def __init__(self, llm: RagKVLLM, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._llm = llm

    @classmethod
    def class_name(cls) -> str:
        """Return the name that LlamaIndex writes into serialised pipelines."""
        return "RagKVPostprocessor"

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        del query_bundle
        _prefetch(self._llm, nodes)
        return nodes
