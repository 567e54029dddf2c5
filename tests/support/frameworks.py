"""Both wrappers behind one interface, for what they guard alike."""

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langchain_ragkv import ChatRagKV, RagKVRetriever, RagKVTransformer
from llama_index.core import VectorStoreIndex
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.prompts import ChatPromptTemplate as Messages
from llama_index.core.schema import TextNode
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from llama_index.llms.ragkv import RagKVLLM, RagKVPostprocessor, RagKVTransform
from tiny import some_chunks

Called = tuple[str, list[tuple[str, dict[str, Any]]]]
SYSTEM = 'Answer as {{"answer": ...}}.\n\n'


class LangChain:
    """ChatRagKV."""

    kind, length, form = ChatRagKV, "max_tokens", dict[str, Any]()
    chain = ChatPromptTemplate.from_messages(
        [("system", SYSTEM + "{context}"), ("human", "{input}")]
    )

    def make(
        self, url: str | None = None, name: str | None = None, length: int = 12, **given: Any
    ) -> Any:
        """Return a model over a server, or as ``given`` says."""
        return ChatRagKV(base_url=url, model_id=name, max_tokens=length, **given)

    def openai(self, url: str, length: int) -> Any:
        """Return the framework's own model of an OpenAI server."""
        named = {"model": "default", "api_key": "none", "temperature": 0}
        return ChatOpenAI(base_url=f"{url}/v1", max_tokens=length, **named)

    def sink(self, llm: Any) -> str:
        return str(llm._sink)

    def text(self, llm: Any, prompt: str, **settings: Any) -> str:
        return str(llm.invoke(prompt, **settings).content)

    def pieces(self, llm: Any, prompt: str) -> Iterator[str]:
        yield from (chunk.content for chunk in llm.stream(prompt))

    async def atext(self, llm: Any, prompt: str) -> str:
        return str((await llm.ainvoke(prompt)).content)

    async def apieces(self, llm: Any, prompt: str) -> AsyncIterator[str]:
        async for chunk in llm.astream(prompt):
            yield chunk.content

    def calls(
        self, llm: Any, tools: list[Callable[..., Any]], *, streaming: bool, **settings: Any
    ) -> Called:
        """Return an answer's text and its calls; ``settings`` are those of ``Chat``."""
        bound = llm.bind_tools([tool(each) for each in tools], **settings)
        if streaming:
            first, *rest = bound.stream("Where?")
            message = sum(rest, first)
        else:
            message = bound.invoke("Where?")
        return message.content, [(call["name"], call["args"]) for call in message.tool_calls]

    def rag(self, llm: Any, question: str) -> list[str]:
        """Ingest, retrieve and answer, as an application does; return an answer and a stream."""
        documents = [Document(text) for text in some_chunks()]
        RagKVTransformer(llm=llm).transform_documents(documents)
        retriever = RagKVRetriever(retriever=RunnableLambda(lambda _: documents), llm=llm)
        chain = create_stuff_documents_chain(llm, self.chain)
        given = {"context": retriever.invoke(question), "input": question}
        return [chain.invoke(given), "".join(chain.stream(given))]


class LlamaIndex:
    """RagKVLLM as a chat model."""

    kind, length, form = RagKVLLM, "max_new_tokens", {"is_chat_model": True}
    chain = Messages(
        [
            ChatMessage(role="system", content=SYSTEM + "{context_str}"),
            ChatMessage(role="user", content="{query_str}"),
        ]
    )

    def make(
        self, url: str | None = None, name: str | None = None, length: int = 12, **given: Any
    ) -> Any:
        """Return a model over a server, or as ``given`` says."""
        settings = {"is_chat_model": True, "max_new_tokens": length, **given}
        return RagKVLLM(api_base=url, model_name=name, **settings)

    def openai(self, url: str, length: int) -> Any:
        """Return the framework's own model of an OpenAI server."""
        settings = {"max_tokens": length, "temperature": 0, "context_window": 4096}
        where = {"api_base": f"{url}/v1", "api_key": "none", "is_chat_model": True}
        return OpenAILike("default", **where, **settings)

    def sink(self, llm: Any) -> str:
        return str(llm.sink)

    def text(self, llm: Any, prompt: str, **settings: Any) -> str:
        return str(llm.chat([ChatMessage(prompt)], **settings).message.content)

    def pieces(self, llm: Any, prompt: str) -> Iterator[str]:
        yield from (each.delta or "" for each in llm.stream_chat([ChatMessage(prompt)]))

    async def atext(self, llm: Any, prompt: str) -> str:
        return str((await llm.achat([ChatMessage(prompt)])).message.content)

    async def apieces(self, llm: Any, prompt: str) -> AsyncIterator[str]:
        async for each in await llm.astream_chat([ChatMessage(prompt)]):
            yield each.delta or ""

    def calls(
        self, llm: Any, tools: list[Callable[..., Any]], *, streaming: bool, **settings: Any
    ) -> Called:
        """Return an answer's text and its calls; ``settings`` are those of ``Chat``."""
        parallel = settings.pop("parallel_tool_calls", True)
        given = {"user_msg": "Where?", "allow_parallel_tool_calls": parallel, **settings}
        functions = [FunctionTool.from_defaults(each) for each in tools]
        if streaming:
            *_, response = llm.stream_chat_with_tools(functions, **given)
        else:
            response = llm.chat_with_tools(functions, **given)
        calls = llm.get_tool_calls_from_response(response, error_on_no_tool_call=False)
        text = response.message.content or ""
        return text, [(call.tool_name, call.tool_kwargs) for call in calls]

    def rag(self, llm: Any, question: str) -> list[str]:
        """Ingest, retrieve and answer, as an application does; return an answer and a stream."""
        nodes = [TextNode(text=text, id_=text[:9]) for text in some_chunks()]
        RagKVTransform(llm=llm)(nodes)
        index = VectorStoreIndex(nodes, embed_model=MockEmbedding(embed_dim=4))
        given = {
            "text_qa_template": self.chain,
            "node_postprocessors": [RagKVPostprocessor(llm=llm)],
        }
        engines = [
            index.as_query_engine(llm=llm, similarity_top_k=3, streaming=streaming, **given)
            for streaming in (False, True)
        ]
        return [str(engine.query(question)) for engine in engines]


FRAMEWORKS = {"langchain": LangChain(), "llama_index": LlamaIndex()}
