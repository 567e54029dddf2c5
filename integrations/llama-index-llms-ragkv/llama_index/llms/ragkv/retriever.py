"""Retriever and postprocessor that start loading the found chunks at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.callbacks import CallbackManager
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.prompts.mixin import PromptMixinType
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle
from llama_index.llms.ragkv.base import RagKVLLM
from llama_index.llms.ragkv.serialisation import OverLLM
from llama_index.llms.ragkv.texts import rendered_texts

from ragkv.answer.engine import Engine, OverEngine


class Prefetching(OverEngine, BaseRetriever):
    """A retriever of nodes that the LLM's engine starts loading."""

    def __init__(
        self,
        llm: RagKVLLM,
        callback_manager: CallbackManager | None,
        metadata_mode: MetadataMode,
        metadata_key: str | None,
    ) -> None:
        super().__init__(callback_manager)
        self._llm = llm
        self._metadata_mode = metadata_mode
        self._metadata_key = metadata_key

    def _engine(self) -> Engine:
        return self._llm.kv

    def _prefetch(self, found: Sequence[NodeWithScore], *, for_next_answer: bool = True) -> None:
        nodes = (each.node for each in found)
        texts = rendered_texts(nodes, self._metadata_mode, self._metadata_key)
        self._llm.prefetch(texts, for_next_answer=for_next_answer)


class RagKVRetriever(Prefetching):
    """Wraps any retriever; the chunks that it finds start loading at once.

    Chunks that are not stored are encoded after the answer (``on_miss="store"``), so the
    ingestion step is optional.

    Parameters
    ----------
    retriever
        Any retriever.
    llm
        The LLM that will answer.
    metadata_mode, metadata_key
        How nodes are written into the prompt, as for :func:`rendered_texts`.
    """

    def __init__(
        self,
        retriever: BaseRetriever,
        llm: RagKVLLM,
        callback_manager: CallbackManager | None = None,
        *,
        metadata_mode: MetadataMode = MetadataMode.LLM,
        metadata_key: str | None = None,
    ) -> None:
        manager = callback_manager or retriever.callback_manager
        super().__init__(llm, manager, metadata_mode, metadata_key)
        self._retriever = retriever

    def _get_prompt_modules(self) -> PromptMixinType:
        return {"retriever": self._retriever}

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        found = self._retriever.retrieve(query_bundle)
        self._prefetch(found)
        return found

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        found = await self._retriever.aretrieve(query_bundle)
        await asyncio.to_thread(self._prefetch, found)
        return found


class RagKVPostprocessor(OverLLM, BaseNodePostprocessor):
    """Does the same for a retriever that cannot be wrapped; the last postprocessor.

    Earlier ones can replace texts or drop nodes.
    ``metadata_mode`` and ``metadata_key`` are :class:`RagKVRetriever`'s; behind a
    ``MetadataReplacementPostProcessor`` the texts are replaced already.
    """

    metadata_mode: MetadataMode = MetadataMode.LLM
    metadata_key: str | None = None

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
        found = (item.node for item in nodes)
        self._llm.prefetch(rendered_texts(found, self.metadata_mode, self.metadata_key))
        return nodes
