"""Every Python block of the documents, run over a tiny model."""

import json
import re
from functools import reduce
from pathlib import Path
from typing import Literal

import pytest
from gguf_files import write_gguf
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import tool
from langchain_core.utils.function_calling import convert_to_openai_tool
from listening import listening
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from pydantic import BaseModel
from tiny import ask, some_chunks, tiny_model, tiny_tokenizer

from ragkv import RagKV
from ragkv_bench.quality.calibration import NotShownError

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "start.md").read_text(encoding="utf-8")
SERVED = PAGE.partition("## From in-process to served")[2]
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
AHEAD = PAGE.partition("## While retrieval goes on")[2]


def test_stages_of_a_retrieval():
    texts = some_chunks(6)
    with RagKV(tiny_model(layers=2), tiny_tokenizer(), store=":memory:") as kv:
        made = run(
            BLOCK.search(AHEAD)[1],
            kv=kv,
            stages=lambda _: [texts[:5], texts[:4]],
            question="What is a target?",
            prompt_of=ask,
        )
        assert len(made["found"]) == 4
        assert [miss.reason for miss in made["answer"].report.misses] == ["absent"] * 4


def run(snippet, **given):
    exec(snippet, given)  # noqa: S102  our own page
    return given


@pytest.fixture
def follow_page(name, small_world):
    """Return ``step()``: run the page's next snippet over the tiny model; its names so far."""
    swapped = {
        "ChatRagKV(sink_from": f"ChatRagKV(model_id={name!r}, sink_from",
        "RagKVLLM(is_chat": f"RagKVLLM(model_name={name!r}, is_chat",
        "=60": "=4",
    }
    opened = []

    def follow(page):
        names = {"__name__": "__main__"}
        for snippet in BLOCK.findall((DOCS / page).read_text(encoding="utf-8")):
            here = reduce(lambda text, pair: text.replace(*pair), swapped.items(), snippet)
            exec(here, names)  # noqa: S102
            opened.append(names["llm"])
            yield names

    yield follow
    for llm in opened:
        llm.kv.close()


def wants(search, query):
    """Return what a model writes that calls a tool."""
    return f'<tool_call>{{"name": "{search}", "arguments": {query}}}</tool_call>'


def test_the_page_of_langchain(follow_page, capsys):
    steps = follow_page("langchain.md")
    made = next(steps)
    llm, prompt, splits = made["llm"], made["prompt"], made["splits"]
    assert llm.last_report.tokens.reused > 0
    assert not llm.last_report.warnings
    assert "ragkv: encoding" in capsys.readouterr().err

    def chunks(context):
        answer = (prompt | llm).invoke({"context": context, "input": "What?"})
        return len(answer.response_metadata["ragkv"]["chunks"])

    assert (
        chunks(splits[:1]) == chunks(json.dumps([splits[0].page_content])) == 0
    )  # the list mistake
    made = next(steps)
    found = made["retriever"].invoke("What?")
    assert made["chain"].invoke("What?")
    assert len(llm.last_report.chunks) == len(found) > 1
    assert not llm.last_report.misses
    next(steps)
    assert "'num_deleted': 0" in (said := capsys.readouterr().out)
    assert f"'num_deleted': {len(splits) - 3}" in said
    kept = [llm.kv.contains(split.page_content) for split in splits]
    assert kept == [True] * 3 + [False] * (len(splits) - 3)
    made = next(steps)
    assert made["state"]["messages"][-1].type == "ai"
    assert next(steps, None) is None


def test_the_page_of_langchain_leaves_what_it_says(follow_page, make_say):
    *_, made = follow_page("langchain.md")
    llm, retriever, kept = made["llm"], made["retriever"], made["splits"][:3]
    texts = sorted(each.page_content for each in kept)
    assert sorted(each["text"] for each in made["vectors"].store.values()) == texts
    for each in kept:
        first, *_ = retriever.invoke(each.page_content)
        assert first.page_content == each.page_content
    made["chain"].invoke("What?")
    assert {use.text for use in llm.last_report.chunks} <= set(texts)
    assert len(llm.last_report.chunks) > 1
    assert not llm.last_report.misses
    assert made["index"](kept, made["records"], made["store"], **made["settings"])["num_added"] == 0
    llm.max_tokens = 60
    make_say(llm.kv, wants("search", '{"query": "loops"}'), "It loops.")
    state = made["agent"].invoke({"messages": [("human", "What does a for loop do?")]})
    assert state["messages"][-1].text == "It loops."
    report = llm.last_report
    assert sorted(use.text for use in report.chunks) == texts
    assert not report.misses


# the default memory leaves its SQLite open
MEMORY = "llama_index.core.chat_engine.context.Memory"


def test_the_page_of_llama_index(follow_page, monkeypatch, capsys):
    monkeypatch.setattr(MEMORY, ChatMemoryBuffer)
    steps = follow_page("llama-index.md")
    made = next(steps)
    llm = made["llm"]
    assert llm.last_report.tokens.reused > 0
    assert not llm.last_report.warnings
    assert "ragkv: encoding" in capsys.readouterr().err
    forgotten, forget = [], llm.kv.forget
    monkeypatch.setattr(llm.kv, "forget", lambda **of: forgotten.append(forget(**of)))
    made = next(steps)
    assert made["llm"] is made["Settings"].llm is llm
    assert len(made["cited"].query("What?").source_nodes) == 3
    assert len(llm.last_report.chunks) == 3
    chat = made["chat"]
    for question in ("What?", "And why?"):
        chat.chat(question)
        assert len(llm.last_report.chunks) == 3
        assert not llm.last_report.misses
    next(steps)
    assert len(forgotten) == 2
    assert all(forgotten)
    made = next(steps)
    assert made["agent"].tools == [made["tool"]]
    assert next(steps, None) is None


def test_the_page_of_llama_index_leaves_what_it_says(follow_page, monkeypatch, make_say):
    monkeypatch.setattr(MEMORY, ChatMemoryBuffer)
    *_, made = follow_page("llama-index.md")
    llm, index = made["llm"], made["index"]
    assert made["Settings"].llm is llm
    assert set(index.ref_doc_info) == {"while", "try"}
    stored = {node.get_content().strip() for node in index.docstore.docs.values()}
    assert stored
    assert all(any(text in made["topics"][name] for name in ("with", "try")) for text in stored)
    assert all(map(llm.kv.contains, stored))
    found = made["retriever"].retrieve("What?")
    assert len(found) == 3 <= len(stored)
    assert {each.get_content().strip() for each in found} <= stored
    llm.max_new_tokens = 60
    made["engine"].query("What?")
    assert {use.text for use in llm.last_report.chunks} <= stored
    assert len(llm.last_report.chunks) == 3
    assert not llm.last_report.misses
    make_say(llm.kv, wants("handbook", '{"input": "loops"}'), "Of loops.", "It loops.")
    assert str(made["asyncio"].run(made["ask"]("What does a while loop do?"))) == "It loops."


@pytest.mark.parametrize("snippet", BLOCK.findall(SERVED))
def test_one_argument_leads_to_a_server(make_engine, name, snippet):
    prompt = ChatPromptTemplate([("system", "Read.\n\n{context}"), ("human", "{input}")])
    before, line = snippet.rstrip().rsplit("\n", 1)
    here = run(before, name=name, prompt=prompt)["llm"]
    with listening(make_engine(layers=2)) as url:
        there = run(snippet, name=name, prompt=prompt, url=url)["llm"]
        assert line.startswith("llm = ")
        answers = []
        for llm in (here, there):
            llm.kv.precompute(some_chunks(2))
            answers.append(llm.kv.generate("\n\n".join(some_chunks(2)), max_new_tokens=6).text)
            llm.kv.close()
        assert answers[0] == answers[1]


README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


class Store:
    """Stands for a vector store."""

    def __init__(self, documents):
        self.documents = documents

    def as_retriever(self):
        return RunnableLambda(lambda _: self.documents)


def test_the_readme_s_chain(name, caplog):
    (snippet,) = (block for block in BLOCK.findall(README) if "langchain_ragkv" in block)
    splits = [Document(f"{text}\nThe end.") for text in some_chunks(3)]
    snippet = snippet.replace("Qwen/Qwen2.5-7B-Instruct", name)
    made = run(snippet, splits=splits, vector_store=Store(splits))
    llm, chain = made["llm"], made["chain"]
    llm.max_tokens = 4
    report = chain.invoke("What is a target?").response_metadata["ragkv"]
    assert len(report["chunks"]) == 3
    assert report["chunks"][0]["start"] == report["tokens"]["sink"] > 5
    assert not report["misses"]
    assert not report["warnings"]
    assert not caplog.records
    llm.kv.close()


class Person(BaseModel):
    """What a model without sense can write, too."""

    name: Literal["Ada", "Grace"]


@tool
def look_up(word: str) -> str:
    """Look a word up."""
    return word


def blocks(page):
    return BLOCK.findall((DOCS.parent / page).read_text(encoding="utf-8"))


OTHERS = ("README.md", "CONTRIBUTING.md", "docs/agents.md", "docs/evaluation.md", "docs/store.md")
OTHERS += ("docs/start.md", "docs/gguf.md", "docs/migration.md", "docs/serving.md")
OTHERS += ("integrations/langchain-ragkv/README.md",)
OTHERS += ("integrations/llama-index-llms-ragkv/README.md",)


def test_all_pages_with_code_are_run():
    pages = [*DOCS.parent.glob("*.md"), *DOCS.glob("*.md"), *DOCS.parent.glob("*/*/README.md")]
    found = {page.relative_to(DOCS.parent).as_posix() for page in pages if blocks(page)}
    own = {"docs/langchain.md", "docs/llama-index.md", "docs/in-100-lines.md"}
    own |= {"docs/open-webui.md"}  # tests/serve/test_open_webui.py
    assert found == {*OTHERS, *own}


@pytest.mark.parametrize(
    ("page", "snippet"),
    [
        pytest.param(page, block, id=f"{page} {number}")
        for page in OTHERS
        for number, block in enumerate(blocks(page))
        if "langchain_ragkv import ChatRagKV, RagKVRetriever" not in block  # these have tests
        and block not in (*BLOCK.findall(AHEAD), *BLOCK.findall(SERVED))  # of their own
    ],
)
def test_a_block_runs(name, make_engine, tmp_path, monkeypatch, page, snippet):
    monkeypatch.chdir(tmp_path)
    if page == "docs/gguf.md":
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        Path("models").mkdir()
        write_gguf(Path("models", "qwen2.5-0.5b-instruct-q4_k_m.gguf"), tiny_model())
    chunks = some_chunks(3)
    prompt = ask(chunks, "\n\nWhat is a target?")
    example = (DOCS / "evaluation.md").read_text(encoding="utf-8")
    Path("questions.jsonl").write_text(example.split("```json\n")[1].split("```")[0], "utf-8")
    kv = make_engine()
    kv.precompute(chunks)
    given = {
        "kv": kv,
        "chunks": chunks,
        "chunk": chunks[0],
        "a_part": chunks[:1],
        "digest": "1",
        "context": "\n\n".join(chunks),
        "question": "What is a target?",
        "prompt": PromptTemplate("Who is {name}?") if "llama_index" in snippet else prompt,
        "messages": prompt,
        "tools": [convert_to_openai_tool(look_up)],
        "retriever": RunnableLambda(lambda _: [Document(chunks[0])]),
        "splits": [Document(text) for text in chunks],
        "query_tool": FunctionTool.from_defaults(lambda word: word, "look_up", "Looks."),
        "Person": Person,
    }
    with listening(kv) as url:
        for text, here in (
            ("Qwen/Qwen2.5-7B-Instruct", name),
            ('"MODEL"', repr(name)),
            ("http://localhost:8000", url),
            ("tokens=200", "tokens=4"),
            ('model="default",', 'model="default", max_tokens=4,'),
        ):
            snippet = snippet.replace(text, here)
        if "NotShownError" in snippet:  # one example shows nothing
            with pytest.raises(NotShownError, match="no ratio below 1 is shown"):
                run(snippet, **given)
            assert Path("result.json").exists()
            return
        made = run(snippet, **given)
    if hasattr(made.get("answer"), "report"):
        assert made["answer"].report.tokens.reused > 0
    if "METHOD" in made:
        assert kv.generate(prompt, method=made["METHOD"]).report.tokens.recomputed > 0
    for each in (made["kv"], getattr(made.get("llm"), "kv", kv)):
        each.close()
