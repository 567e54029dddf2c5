"""RagKVStagedRetriever: the prompt is computed while retrieval still goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.callbacks import CallbackManager
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.prompts.default_prompt_selectors import DEFAULT_TEXT_QA_PROMPT_SEL
from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore, QueryBundle
from llama_index.llms.ragkv.base import RagKVLLM
from llama_index.llms.ragkv.prompting import Prompt
from llama_index.llms.ragkv.prompts import as_dicts
from llama_index.llms.ragkv.texts import rendered_texts

from ragkv import Chat
from ragkv.retrieve.following import afollow, follow


class RagKVStagedRetriever(BaseRetriever):
    """Retrieves in stages; the engine computes the prompt of each one while the next is searched.

    The query engine's prompt is served from that if its text is the same, as where all nodes fit
    the context window; otherwise it is computed as ever. The model is in this process.

    Parameters
    ----------
    stages
        Returns, for a query, the lists of nodes found so far, as NodeWithScore or as pairs of
        node and score. The last is the result. A :class:`ragkv.StagedSearch`, or a generator
        function that yields the first hits and then, reranked, the final ones.
    llm
        The LLM that will answer.
    text_qa_template
        The query engine's; None is LlamaIndex's default.
    metadata_mode, metadata_key
        How nodes are written into the prompt, as for :func:`rendered_texts`.
    """

    def __init__(
        self,
        stages: Callable[[str], Iterable[Sequence[NodeWithScore | tuple[BaseNode, float]]]],
        llm: RagKVLLM,
        callback_manager: CallbackManager | None = None,
        *,
        text_qa_template: BasePromptTemplate | None = None,
        metadata_mode: MetadataMode = MetadataMode.LLM,
        metadata_key: str | None = None,
    ) -> None:
        super().__init__(callback_manager)
        self._stages, self._llm = stages, llm
        self._template = text_qa_template or DEFAULT_TEXT_QA_PROMPT_SEL
        self._metadata_mode = metadata_mode
        self._metadata_key = metadata_key

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        query, llm = query_bundle.query_str, self._llm
        prompt = partial(self._prompt, query)
        found: list[NodeWithScore] = follow(
            llm.kv, self._nodes(query), prompt, **llm.reuse_overrides
        )
        llm.prefetch(self._texts(found))  # those that are not stored are, after the answer
        return found

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        query, llm = query_bundle.query_str, self._llm
        prompt = partial(self._prompt, query)
        found: list[NodeWithScore] = await afollow(
            llm.kv, self._nodes(query), prompt, **llm.reuse_overrides
        )
        await asyncio.to_thread(llm.prefetch, self._texts(found))
        return found

    def _nodes(self, query: str) -> Iterator[list[NodeWithScore]]:
        for found in self._stages(query):
            yield [
                each
                if isinstance(each, NodeWithScore)
                else NodeWithScore(node=each[0], score=each[1])
                for each in found
            ]

    def _texts(self, found: Sequence[NodeWithScore]) -> list[str]:
        nodes = (each.node for each in found)
        return rendered_texts(nodes, self._metadata_mode, self._metadata_key)

    def _prompt(self, query: str, found: Sequence[NodeWithScore]) -> Prompt:
        values = {"context_str": "\n\n".join(self._texts(found)), "query_str": query}
        if self._llm.uses_chat_template:
            messages = as_dicts(self._llm.template_messages(self._template, **values))
            return Chat(messages, chat_template_kwargs=self._llm.chat_template_kwargs)
        return self._llm.render_template(self._template, **values)
