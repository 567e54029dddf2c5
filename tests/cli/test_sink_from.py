"""``--sink-from``: an operator's system prompt, which chunks are encoded behind."""

import copy
import json
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from llama_index.core import VectorStoreIndex
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.schema import TextNode
from llama_index.llms.ragkv import RagKVLLM
from served import CHAT, CHUNKS
from templates import KINDS, tokenizer_of
from tiny import tiny_model, tiny_tokenizer
from typer.testing import CliRunner

from ragkv import RagKV
from ragkv.cli import serve as serving
from ragkv.cli.main import app
from ragkv.cli.session import messages, sink_behind
from ragkv.cli.texts import read_system_prompt
from ragkv.prompt.render import render
from ragkv.serve.app import make_app

SYSTEM = (
    'You are a clerk. Answer as JSON: {"answer": {"text": "…"}}, and never {else}.\n\nBe short.'
)


@pytest.fixture
def system(tmp_path) -> Path:
    file = tmp_path / "system.txt"
    file.write_text(f"\ufeff{SYSTEM}\r\n\r\n", encoding="utf-8", newline="")
    return file


def run(*args: object):
    return CliRunner().invoke(app, [str(arg) for arg in args])


def test_precompute_and_ask_share_it(model, system, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(CHUNKS), encoding="utf-8")
    shared = ["--model", model, "--store", tmp_path / "s", "--chunk-tokens", 100]
    behind = ["--sink-from", system]
    assert run("precompute", text, *shared, *behind).exit_code == 0
    asked = ["ask", "What?", "--path", text, *shared, "--max-new-tokens", 1, "--json"]
    ours, others = (json.loads(run(*asked, *rest).stdout) for rest in (behind, []))
    assert ours["report"]["tokens"]["reused"] > 100
    assert not ours["report"]["misses"]
    assert ours["report"]["tokens"]["sink"] > others["report"]["tokens"]["sink"]
    assert not others["report"]["tokens"]["reused"], "encoded behind another sink"
    page = run(*asked[:-1], *behind, "--page", tmp_path / "page.html")
    assert page.exit_code == 0, page.output


def test_the_server_s_chunks_are_behind_it(model, system, tmp_path, monkeypatch):
    keys = tmp_path / "keys"
    keys.write_text("alpha=sk-a\nbeta=sk-b\n", encoding="utf-8")
    reports = []

    def answer(settings, engines):
        with TestClient(make_app(settings, engines)) as client:
            for key in ("sk-a", "sk-b"):
                client.headers = {"Authorization": f"Bearer {key}"}
                client.post("/v1/chunks", json={"texts": CHUNKS})
                for prompt in (messages("What?", CHUNKS, SYSTEM), messages("What?", CHUNKS)):
                    body = {"messages": prompt, "max_tokens": 1, "ragkv": {"report": True}}
                    reports.append(client.post(CHAT, json=body).json()["ragkv"])

    monkeypatch.setattr(serving, "_run", answer)
    where = ["--model", model, "--store", tmp_path / "s", "--api-key-file", keys]
    done = run("serve", *where, "--sink-from", system)
    assert done.exit_code == 0, done.output
    assert len(reports) == 4
    for ours, others in (reports[:2], reports[2:]):
        assert ours["tokens"]["reused"] > 100
        assert not ours["warnings"]
        assert ours["tokens"]["sink"] > others["tokens"]["sink"]
        assert any("head" in each for each in others["warnings"])


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_begin_with_it(kind):
    tokenizer = tokenizer_of(kind)
    with RagKV(tiny_model(), tokenizer, store=":memory:") as kv:
        sink = sink_behind(kv, SYSTEM)
        text = render(messages("What?", CHUNKS, SYSTEM), tokenizer).text
    assert text.startswith(sink + CHUNKS[0])
    assert SYSTEM in sink


TEMPLATES = (
    'Answer from the text.\n\n{context}\n\nAs {"answer": …}.',
    "{context_str}\n---\nRead this.",
    "Never {else}. {context} {context_str}",
)


@pytest.mark.parametrize("kind", ["chatml", "qwen3", "mistral"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_is_the_sink_up_to_its_context(kind, template):
    tokenizer = tokenizer_of(kind)
    with RagKV(tiny_model(), tokenizer, store=":memory:") as kv:
        sink = sink_behind(kv, template)
        asked = messages("What?", CHUNKS, template)
        text = render(asked, tokenizer).text
    assert text.startswith(sink + CHUNKS[0])
    assert "{context" not in text
    assert asked[-1]["content"].endswith("What?")
    assert ("{else}" in text) == ("{else}" in template)


def test_the_prompt_of_llama_index_has_a_name(model, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(CHUNKS), encoding="utf-8")
    given = ["--model", model, "--store", tmp_path / "s", "--sink-from", "llama-index"]
    assert run("precompute", text, "--chunk-tokens", 100, *given).exit_code == 0
    llm = RagKVLLM(model_name=model, store=tmp_path / "s", is_chat_model=True, max_new_tokens=1)
    llm.sink = sink_behind(llm.kv, read_system_prompt(Path("llama-index")))
    index = VectorStoreIndex([TextNode(text=CHUNKS[0])], embed_model=MockEmbedding(embed_dim=4))
    index.as_query_engine(llm=llm).query("What?")
    assert not llm.last_report.warnings
    assert llm.last_report.tokens.reused > 20
    llm.kv.close()


def test_without_a_chat_template_it_is_the_text():
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = None
    with RagKV(tiny_model(), tokenizer, store=":memory:") as kv:
        assert sink_behind(kv, SYSTEM) == SYSTEM
        assert sink_behind(kv, "Read.\n{context}") == "Read.\n"


@pytest.mark.parametrize("command", ["serve", "precompute", "ask"])
@pytest.mark.parametrize(
    ("written", "said"), [(None, "there is no file"), (b" \n", "no text"), (b"\xff\xfe", "UTF-8")]
)
def test_what_is_no_text_is_refused_before_the_model_is_loaded(command, written, said, tmp_path):
    file, text = tmp_path / "system.txt", tmp_path / "a.txt"
    text.write_text("A text.", encoding="utf-8")
    if written is not None:
        file.write_bytes(written)
    given = {"precompute": [text], "serve": []}.get(command, ["What?", "--path", text])
    done = run(command, *given, "--model", "no/such-model", "--sink-from", file)
    assert done.exit_code == 2
    assert said in " ".join(done.stderr.split())


def test_a_sink_is_given_once(system):
    done = run("precompute", system, "--sink", "Read:", "--sink-from", system)
    assert done.exit_code == 2
    assert "give one of them" in done.stderr
