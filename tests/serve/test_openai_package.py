"""The ``openai`` package as it is, against a server."""

from collections.abc import Iterator

import openai
import pytest
from openai import OpenAI
from served import CHUNKS
from tiny import ask

from ragkv.serve.refusal import RefusedError


@pytest.fixture
def server(listen):
    server = listen(keys={"sk-a": "alpha"})
    server.engine.precompute(CHUNKS)
    return server


@pytest.fixture
def client(server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="sk-a", max_retries=0) as client:
        yield client


def test_chat(client, server):
    alone = server.engine.generate(ask(CHUNKS), max_new_tokens=6)
    answer = client.chat.completions.create(
        model="default",
        messages=ask(CHUNKS),
        max_completion_tokens=6,
        temperature=0,
        n=2,
        logprobs=True,
        top_logprobs=3,
        extra_body={"ragkv": {"recompute_ratio": 0.2, "report": True}},
    )
    assert [choice.message.content for choice in answer.choices] == [alone.text] * 2
    assert [len(token.top_logprobs) for token in answer.choices[0].logprobs.content] == [3] * 6
    assert answer.usage.prompt_tokens_details.cached_tokens > 100
    assert answer.model_extra["ragkv"]["tokens"]["prompt"] == answer.usage.prompt_tokens


def test_streamed_chat(client, server):
    alone = server.engine.generate(ask(CHUNKS), max_new_tokens=6)
    chunks = list(
        client.chat.completions.create(
            model="default",
            messages=ask(CHUNKS),
            max_tokens=6,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == alone.text
    assert chunks[-1].usage.completion_tokens == 6
    given = {"model": "default", "messages": ask(CHUNKS), "max_tokens": 6}
    with client.chat.completions.stream(**given) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
    assert "".join(deltas) == alone.text


def test_text(client, server):
    alone = server.engine.generate(CHUNKS[0], max_new_tokens=5)
    fields = {"model": "default", "prompt": CHUNKS[0], "max_tokens": 5}
    answer = client.completions.create(**fields, logprobs=2)
    assert answer.choices[0].text == alone.text
    assert len(answer.choices[0].logprobs.tokens) == 5
    chunks = client.completions.create(**fields, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == alone.text


def test_models(client, server):
    names = [model.id for model in client.models.list()]
    assert names == [server.engine.info.name, "default"]
    assert client.models.retrieve("default").owned_by == "ragkv"


def create(client: OpenAI, **fields: object):
    given = {"model": "default", "messages": ask(CHUNKS), "max_tokens": 2, **fields}
    return client.chat.completions.create(**given)


def test_errors_are_the_packages_own(client, server):
    with pytest.raises(openai.AuthenticationError) as caught:
        create(client.with_options(api_key="sk-b"))
    assert caught.value.code == "invalid_api_key"
    with pytest.raises(openai.NotFoundError) as caught:
        create(client, model="gpt-4o")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as caught:
        create(client, logit_bias={"5": 1})
    assert (caught.value.param, caught.value.code) == ("logit_bias", "unsupported_parameter")
    with pytest.raises(openai.BadRequestError) as caught:
        create(client, messages=[{"role": "user", "content": "word " * 5000}])
    assert caught.value.code == "context_length_exceeded"
    server.service.gate.draining = True
    with pytest.raises(openai.InternalServerError) as caught:
        create(client)
    assert caught.value.status_code == 503
    server.service.gate.draining = False


def test_an_error_within_a_stream(client, server):
    stream = create(client, stream=True, max_tokens=3000, extra_body={"ignore_eos": True})
    next(stream)
    (end,) = server.service.gate._end.values()
    end(RefusedError(503, "The server is stopping."))
    with pytest.raises(openai.APIError, match="stopping"):
        list(stream)
