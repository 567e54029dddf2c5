"""LlamaIndex's chat engines put what they retrieved before the conversation."""

import pytest
from llama_index.core import VectorStoreIndex
from llama_index.core.base.llms.types import MessageRole
from llama_index.core.embeddings import BaseEmbedding
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.schema import TextNode
from llama_index.llms.ragkv import RagKVLLM, RagKVTransform
from tiny import some_chunks

QUESTIONS = [
    "What is a target list, and where may it stand in an assignment?",
    "And what happens to the items of an iterable on the right hand side?",
    "Which of the two is evaluated first, and how can one tell?",
]


class InTurn(BaseEmbedding):
    """Likens each question, and any other text after it, to a chunk of its own."""

    def _get_text_embedding(self, text: str) -> list[float]:
        at = next((at for at, chunk in enumerate(some_chunks(3)) if chunk in text), 0)
        return [1.0 if place == at else 0.0 for place in range(3)]

    def _get_query_embedding(self, query: str) -> list[float]:
        at = next((at for at in (2, 1) if QUESTIONS[at] in query), 0)
        return [1.0 if place == at else 0.0 for place in range(3)]

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_query_embedding(query)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("chat_mode", "settings"),
    [("context", {}), ("condense_plus_context", {}), ("condense_plus_context", {"alone": True})],
)
def test_every_turn_reuses_what_it_retrieved(make_engine, chat_mode, settings, streaming):
    kv = make_engine()
    llm = RagKVLLM(kv=kv, max_new_tokens=12, context_window=4000, is_chat_model=True)
    nodes = RagKVTransform(llm=llm)([TextNode(text=text) for text in some_chunks(3)])
    memory = ChatMemoryBuffer.from_defaults(token_limit=3000)
    engine = VectorStoreIndex(nodes, embed_model=InTurn()).as_chat_engine(
        chat_mode=chat_mode,
        llm=llm,
        similarity_top_k=1,
        memory=memory,
        skip_condense=settings.get("alone", False),
    )
    for question in QUESTIONS:
        if streaming:
            response = engine.stream_chat(question)
            assert "".join(response.response_gen) is not None
        else:
            engine.chat(question)
        reused = {use.text for use in llm.last_report.chunks if use.reused}
        assert len(reused & set(some_chunks(3))) == len(reused) == 1
    history = memory.get_all()
    assert [message.role for message in history] == [MessageRole.USER, MessageRole.ASSISTANT] * 3
