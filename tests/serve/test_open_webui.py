"""Open WebUI's requests, and what its page in the documents says to set."""

import re
from pathlib import Path

import httpx
import pytest
from served import events, until
from tiny import some_chunks

from ragkv import ReuseConfig
from ragkv.cli.session import sink_behind

PAGE = (Path(__file__).parents[2] / "docs" / "open-webui.md").read_text(encoding="utf-8")
SYSTEM = re.search(r"<<'END'\n(.*)\nEND", PAGE)[1]
TEMPLATE = re.sub(
    r"^ {4}", "", re.search(r"```text\n(.*?) *```", PAGE, re.DOTALL)[1], flags=re.MULTILINE
)
LONG_TEMPLATE = (
    "### Task:\nRespond to the user query using the provided context, with citations.\n\n"
    "### Guidelines:\n- If you don't know the answer, clearly state that.\n\n" + TEMPLATE
)
"""In the form of the default: instructions before the documents."""

CHUNKS = some_chunks(4)
QUESTIONS = ("What is a target list?", "And where may it stand?")
TASK = (
    "### Task:\nGenerate a concise, 3-5 word title.\n### Output:\n"
    'JSON format: {{ "title": "your concise title here" }}\n'
    "### Chat History:\n<chat_history>\n{}\n</chat_history>"
)


def with_documents(question, chunks, template):
    """Return a last message as Open WebUI writes it."""
    sources = "".join(
        f'<source id="{at}" name="a {at}.md" resource-type="file">{text}</source>\n'
        for at, text in enumerate(chunks, 1)
    )
    return f"{template.replace('{{CONTEXT}}', sources.strip())}\n{question}"


@pytest.fixture
def server(listen, make_engine):
    engine = make_engine(reuse=ReuseConfig(), max_running=2)
    engine.reuse = engine.reuse.override(sink=sink_behind(engine, SYSTEM))
    found = listen(engine)
    until(lambda: httpx.get(f"{found.url}/health").status_code == 200)
    return found


@pytest.fixture
def reports(server, monkeypatch):
    """Return the reports of all answers, in order."""
    found, account = [], server.service.metrics.record_answer
    monkeypatch.setattr(
        server.service.metrics,
        "record_answer",
        lambda report, why: found.append(report) or account(report, why),
    )
    return found


def precompute(server, monkeypatch, knowledge):
    """Run the page's script; ``knowledge`` are Open WebUI's chunks."""
    script = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1]
    post, asked = httpx.post, []

    def to_stub(url, **given):
        if "/api/v1/retrieval/" not in url:
            return post(url, **given)
        asked.append(given["json"])
        body = {"distances": [[0.1] * len(knowledge)], "documents": [knowledge]}
        return httpx.Response(200, json=body, request=httpx.Request("POST", url))

    monkeypatch.setattr(httpx, "post", to_stub)
    exec(script.replace("http://localhost:8000", server.url), {})  # noqa: S102  our own page
    assert asked[0]["k"] >= len(knowledge)


def chat(server, messages, **fields):
    """Send a chat as Open WebUI does; return its text and usage."""
    body = {
        "stream": True,
        "model": "default",
        "messages": messages,
        "stream_options": {"include_usage": True},
        "max_tokens": 6,
        **fields,
    }
    headers = {"Authorization": "Bearer none", "X-OpenWebUI-User-Name": "Ada"}
    response = httpx.post(
        f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=60
    )
    assert response.status_code == 200, response.text
    *pieces, last = events(response.text)
    text = "".join(piece["choices"][0]["delta"].get("content", "") for piece in pieces)
    return text, last["usage"]


@pytest.mark.parametrize("template", [TEMPLATE, LONG_TEMPLATE])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0), (3, 1)])
def test_documents_are_reused(server, reports, monkeypatch, caplog, order, template):
    precompute(server, monkeypatch, CHUNKS)
    chunks = [CHUNKS[at] for at in order]
    system = {"role": "system", "content": SYSTEM}
    asked = {"role": "user", "content": with_documents(QUESTIONS[0], chunks, template)}
    text, usage = chat(server, [system, asked])
    (report,) = reports
    assert [use.text for use in report.chunks] == chunks
    assert report.tokens.sink == len(
        server.engine._reuse.corpus.sinks.of(server.engine.reuse.sink).ids
    )
    assert usage["prompt_tokens_details"]["cached_tokens"] == report.tokens.cached > 100
    assert "prompt's head" not in caplog.text
    # the next turn: the first one's documents are gone
    said = [{"role": "user", "content": QUESTIONS[0]}, {"role": "assistant", "content": text}]
    asked = {"role": "user", "content": with_documents(QUESTIONS[1], chunks[::-1], template)}
    chat(server, [system, *said, asked])
    assert [use.text for use in reports[1].chunks] == chunks[::-1]
    assert reports[1].tokens.reused > 100
    # another user, another question
    asked = {"role": "user", "content": with_documents("Why?", chunks[:1], template)}
    chat(server, [system, asked], temperature=0.7, seed=1, top_p=0.9, stop=["\n\n"])
    assert [use.text for use in reports[2].chunks] == chunks[:1]


@pytest.mark.parametrize("tokens", [{"max_completion_tokens": 40}, {"max_tokens": 40}])
def test_tasks_are_answered(server, tokens):
    history = f"USER: {QUESTIONS[0]}\nASSISTANT: It binds."
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": TASK.format(history)}],
        "stream": False,
        "metadata": {"task": "title_generation", "chat_id": "1"},
        **tokens,
    }
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
    assert answer["choices"][0]["message"]["role"] == "assistant"


def test_what_the_page_advises_against(server, reports, monkeypatch):
    precompute(server, monkeypatch, CHUNKS)
    system = {"role": "system", "content": f"{SYSTEM} It is Monday."}
    chat(server, [system, {"role": "user", "content": with_documents("Why?", CHUNKS, TEMPLATE)}])
    assert "head" in " ".join(reports[0].warnings)
    whole = "\n".join(["A title", *(text[20:] for text in CHUNKS)])
    asked = {"role": "user", "content": with_documents("Why?", [whole], TEMPLATE)}
    chat(server, [{"role": "system", "content": SYSTEM}, asked])
    assert not reports[1].chunks


def test_the_script_replaces_what_changed(server, monkeypatch):
    precompute(server, monkeypatch, CHUNKS[:3])
    precompute(server, monkeypatch, CHUNKS[1:])
    found = [server.engine.contains(text) for text in CHUNKS]
    assert found == [False, True, True, True]
