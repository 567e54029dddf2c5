"""RemoteRagKV against a stub: what is sent, what comes back, what goes wrong."""

import contextlib
import gc
import pickle
import threading
from concurrent.futures import CancelledError

import httpx
import pytest
from fresh import output_of
from stub_server import REPORT, VERSION, Endless, refused, sse, text_events
from threads import each_in_a_thread
from tiny import ask, some_chunks

from ragkv import ReuseConfig, SparseDecoding
from ragkv.client import RemoteRagKV
from ragkv.errors import (
    ClosedError,
    ConfigError,
    PromptTooLongError,
    RagKVError,
    ServerError,
)
from ragkv.retrieve.named import Retrieved
from ragkv.select import Method

MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.fixture(autouse=True)
def _no_key(monkeypatch):
    monkeypatch.delenv("RAGKV_API_KEY", raising=False)
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.0)


# ---- answers


def test_an_answer_and_what_is_asked_for_it(connect, stub):
    kv = connect(api_key="secret", reuse=ReuseConfig(recompute_ratio=0.3))
    completion = kv.generate("Hi", max_new_tokens=2, stop="X", top_k=3, seed=0, method="epic")
    assert (completion.text, completion.report, completion.finish_reason) == (
        "Hello",
        REPORT,
        "length",
    )
    assert completion.token_ids == [7, 8]
    assert stub.bodies("/v1/completions") == [
        {
            "prompt": "Hi",
            "max_tokens": 2,
            "temperature": 0.0,
            "top_p": 1.0,
            "top_k": 3,
            "stop": ["X"],
            "seed": 0,
            "model": "default",
            "stream": True,
            "stream_options": {"include_usage": True},
            "ragkv": {"method": "epic", "recompute_ratio": 0.3, "report": True},
        }
    ]
    assert stub.requests[0].headers["authorization"] == "Bearer secret"


def test_messages_are_a_chat_and_token_ids_come_along(connect, stub):
    delta = {"delta": {"role": "assistant", "content": "Yes"}, "finish_reason": None}
    end = {"delta": {}, "finish_reason": "stop", "token_ids": [5, 1]}
    stub.answers["POST /v1/chat/completions"] = [
        sse({"choices": [delta]}, {"choices": [end], "ragkv": REPORT.to_dict()}, "[DONE]")
    ]
    kv = connect(model="tiny")
    with kv.stream(MESSAGES, ignore_eos=True, sparse="auto", stop_token_ids=[4]) as stream:
        assert "".join(stream) == "Yes"
        assert stream.completion.token_ids == [5, 1]
    (body,) = stub.bodies("/v1/chat/completions")
    assert (body["messages"], body["model"], body["max_completion_tokens"]) == (
        MESSAGES,
        "tiny",
        256,
    )
    assert (body["ignore_eos"], body["sparse"], body["stop_token_ids"]) == (True, "auto", [4])
    assert body["ragkv"] == {"report": True}


async def test_an_answer_in_an_event_loop(connect):
    async with connect().stream("Hi") as stream:
        assert "".join([piece async for piece in stream]) == "Hello"
    assert stream.completion.text == "Hello"
    assert await anext(stream, None) is None


def test_closing_a_stream_closes_its_connection(connect, stub):
    kv = connect()
    for leave in ("close", "drop", "block"):
        body = Endless()
        stub.answers["POST /v1/completions"] = [httpx.Response(200, stream=body)]
        stream = kv.stream("Hi")
        assert next(stream) == "Word"
        with pytest.raises(TimeoutError):
            stream.read(0.01)
        if leave == "close":
            stream.close()
            with pytest.raises(RuntimeError, match="to its end"):
                _ = stream.completion
        elif leave == "block":
            with stream:
                pass
        else:
            del stream
            gc.collect()
        assert body.closed.wait(10)


def test_an_answer_that_takes_too_long(connect, stub):
    stub.answers["POST /v1/completions"] = [httpx.Response(200, stream=Endless())]
    with pytest.raises(TimeoutError, match=r"timeout=0\.05"):
        connect(timeout=0.05).generate("Hi")
    stub.answers["POST /v1/completions"] = [httpx.Response(200, stream=Endless())]
    with pytest.raises(TimeoutError, match=r"timeout=0\.04"):
        connect().generate("Hi", timeout=0.04)


def test_closing_the_client(connect, stub):
    stub.answers["POST /v1/completions"] = [httpx.Response(200, stream=Endless())]
    kv = connect()
    stream = kv.stream("Hi")
    assert next(stream) == "Word"
    kv.close()
    kv.close()
    with pytest.raises(ClosedError):
        next(stream)
    for call in (lambda: kv.stream("Hi"), lambda: kv.contains("text"), lambda: kv.info.name):
        with pytest.raises(ClosedError, match="closed"):
            call()


def test_nothing_hangs_where_a_client_is_closed_under_way(connect):
    for _ in range(20):
        kv, ended = connect(), []
        assert kv.info.name

        def ask(kv=kv, ended=ended):
            with contextlib.suppress(ClosedError, RuntimeError, CancelledError):
                kv.generate("Hi")
            ended.append(True)

        threads = [threading.Thread(target=ask, daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        kv.close()
        for thread in threads:
            thread.join(10)
        assert len(ended) == 4


def test_many_threads_share_a_client(connect):
    kv, texts = connect(), []
    each_in_a_thread(lambda _: texts.append(kv.generate("Hi").text), range(8))
    assert texts == ["Hello"] * 8


# ---- refusals


@pytest.mark.parametrize(
    ("response", "error", "says"),
    [
        (refused(400, "invalid_value", message="stop: wrong"), ConfigError, "stop: wrong"),
        (refused(400, "context_length_exceeded"), PromptTooLongError, "No"),
        (refused(401, "invalid_api_key"), ServerError, "RAGKV_API_KEY"),
        (refused(404, "model_not_found"), ServerError, "404 Not Found: No"),
        (refused(413, "too_large"), ConfigError, "refuses"),
        (refused(500), ServerError, "500"),
        (refused(503, headers={"Retry-After": "0"}), ServerError, "503"),
        (refused(504), TimeoutError, "No"),
        (httpx.Response(502, text="<html>"), ServerError, "502"),
        (httpx.Response(302, headers={"Location": "http://other"}), ServerError, "302"),
        (sse({"error": {"message": "late", "code": "timeout"}}), TimeoutError, "late"),
        (sse({"error": {"message": "gone", "code": "draining"}}), ServerError, "gone"),
        (sse({"choices": []}), ServerError, "before the answer was complete"),
        (sse("{"), ServerError, "not JSON"),
        (text_events("Hi", report=None), ServerError, "no report"),
    ],
)
def test_what_goes_wrong_has_a_type(connect, stub, response, error, says):
    stub.answers["POST /v1/completions"] = [response]
    with pytest.raises(error, match=says):
        connect(max_retries=1).generate("Hi")


def test_a_refused_connection_names_the_address():
    with (
        RemoteRagKV("http://127.0.0.1:9", max_retries=1) as kv,
        pytest.raises(ServerError, match=r"http://127\.0\.0\.1:9 cannot be reached"),
    ):
        kv.generate("Hi")


def test_what_cannot_have_begun_is_sent_again(connect, stub):
    answers = [
        refused(503, headers={"Retry-After": "0"}),
        httpx.ConnectError("no"),
        text_events("Hi"),
    ]
    stub.answers["POST /v1/completions"] = list(answers)
    assert connect(max_retries=2).generate("Hi").text == "Hi"
    stub.answers["POST /v1/completions"] = list(answers)
    with pytest.raises(ServerError, match="cannot be reached"):
        connect(max_retries=1).generate("Hi")


def test_settings_are_refused_before_anything_is_sent(connect, stub):
    kv = connect()
    own = Method("mine", score=lambda _: None)
    for wrong in (
        {"max_new_tokens": 0},
        {"recompute_ration": 1},
        {"method": own},
        {"cache_implementation": "static"},
        {"drafts": False},
        {"sparse": SparseDecoding()},
        {"logprobs": 1},
    ):
        with pytest.raises(ConfigError):
            kv.stream("Hi", **wrong)
    with pytest.raises(ConfigError, match="messages"):
        kv.stream([1])
    with pytest.raises(ConfigError, match="in a list"):
        kv.precompute("text")
    assert not stub.requests


@pytest.mark.parametrize(
    "wrong",
    [
        {"base_url": "host:8000"},
        {"base_url": "ftp://host"},
        {"base_url": "http://me:secret@host"},
        {"base_url": 3},
        {"api_key": "sécret"},
        {"timeout": 0},
        {"max_retries": -1},
    ],
)
def test_wrong_arguments_are_refused_without_secrets(wrong):
    with pytest.raises(ConfigError) as refusal:
        RemoteRagKV(**{"base_url": "http://host", **wrong})
    assert "cret" not in str(refusal.value)


# ---- chunks and the rest


MADE = {"new": 2, "existing": 0, "skipped": 0, "tokens": 9, "bytes": 8000, "seconds": 0.5}


def test_precompute_names_the_document_last(connect, stub):
    last = {**MADE, "new": 0, "existing": 2, "tokens": 0, "removed": 3}
    stub.answers["POST /v1/chunks"] = [{"report": MADE}, {"report": last}]
    report = connect().precompute(
        (text for text in ("a", "b")), document="d", expires_in=5, neighbours=True, sink="Read:"
    )
    assert (report.new, report.existing, report.removed, report.seconds) == (2, 0, 3, 1.0)
    given = {"texts": ["a", "b"], "expires_in": 5, "ragkv": {"sink": "Read:"}}
    assert stub.bodies("/v1/chunks") == [
        {**given, "neighbours": True},
        {**given, "document": "d"},
    ]


def test_progress_is_written_as_in_the_process(connect, stub, capsys, monkeypatch):
    monkeypatch.setattr("ragkv.report.ingestion_progress.FIRST_LINE_S", 0.0)
    monkeypatch.setattr("ragkv.client.remote._BATCH_CHUNKS", 1)
    one = {**MADE, "new": 1, "bytes": 4000}
    stub.answers["POST /v1/chunks"] = [{"report": one}] * 4
    kv = connect()
    kv.precompute(["a", "b"], show_progress=False)
    assert not capsys.readouterr().err
    kv.precompute(["a", "b"], show_progress=None)
    assert capsys.readouterr().err.splitlines() == [
        "ragkv: 1 of 2 chunks done, 00:00 left",
        "ragkv: 2 chunks new, 0 known: 8 KB in 00:01",
    ]


def test_a_corpus_goes_in_parts_and_a_document_whole(connect, stub):
    stub.answers["POST /v1/chunks"] = [{"report": {"new": 1}}]
    texts = [f"text {at}" for at in range(70)]
    assert connect().precompute(texts, show_progress=False).new == 3
    sent = [body["texts"] for body in stub.bodies("/v1/chunks")]
    assert [len(part) for part in sent] == [32, 32, 6]
    assert [text for part in sent for text in part] == texts
    connect().precompute(texts, document="all")
    assert len(stub.bodies("/v1/chunks")[-1]["texts"]) == 70
    assert connect().precompute([]).new == 0


def test_chunks_are_looked_up_deleted_and_prefetched(connect, stub):
    stub.answers |= {
        "GET /v1/chunks": [{"text_known": True}] * 2,
        "DELETE /v1/chunks": [{"deleted": 1}, {"deleted": 4}],
        "POST /v1/chunks/prefetch": [{"prefetching": 1}, {"prefetching": 2}],
        "POST /v1/sink": [{"sink": "Read:"}],
    }
    kv = connect(reuse=ReuseConfig(sink="Read:"))
    assert kv.contains("a & b") is True
    assert stub.requests[-1].url.params.multi_items() == [("text", "a & b"), ("sink", "Read:")]
    assert connect().contains("a", method="prefix")
    assert stub.requests[-1].url.params.multi_items() == [("text", "a"), ("method", "prefix")]
    assert (kv.forget("a"), kv.forget(document="d")) == (1, 4)
    with pytest.raises(ConfigError, match="too long"):
        kv.contains("字" * 9000)
    kv.prefetch(["a"], method="epic")
    kv.prefetch(["c", "b"], for_next_answer=False)
    assert stub.bodies("/v1/chunks/prefetch") == [
        {"texts": ["a"], "ragkv": {"method": "epic", "sink": "Read:"}},
        {"texts": ["c", "b"], "ragkv": {"sink": "Read:"}},
    ]
    assert kv._named.take() == Retrieved(new=("a",))
    assert kv.sink_from([{"role": "system", "content": "Read: {context}"}]) == "Read:"
    kv.wait()


def test_what_the_server_says_of_itself(connect, stub):
    kv = connect("http://host:8000/prefix/v1/")
    stub.answers["GET /prefix/version"] = [VERSION]
    assert (kv.info.name, kv.namespace, kv.info.fingerprint) == ("tiny", "team", "abc")
    assert (kv.info.positions, kv.info.unsupported, kv.base_url) == (
        4096,
        "",
        "http://host:8000/prefix",
    )
    assert len(stub.requests) == 1
    assert connect().tokenize("x") == [7, 8]
    stub.answers["GET /version"] = [{"version": "vllm"}]
    with pytest.raises(ServerError, match="fingerprint"):
        _ = connect().info
    stub.answers["GET /version"] = ["plain"]
    with pytest.raises(ServerError, match="without JSON"):
        _ = connect().info


def test_what_only_a_model_here_has_is_refused_by_name(connect):
    kv = connect()
    for name in ("tokenizer", "loaded", "render", "prefill", "turn"):
        with pytest.raises(ConfigError, match=name):
            getattr(kv, name)
    with pytest.raises(AttributeError):
        _ = kv.nonesuch


def test_the_key_is_never_shown(connect, stub, monkeypatch):
    kv = connect(api_key="secret")
    assert "secret" not in repr(kv)
    with pytest.raises(TypeError, match="each process"):
        pickle.dumps(kv)
    monkeypatch.setenv("RAGKV_API_KEY", "from-outside")
    assert connect().info
    assert stub.requests[-1].headers["authorization"] == "Bearer from-outside"
    monkeypatch.delenv("RAGKV_API_KEY")
    assert connect().info
    assert "authorization" not in stub.requests[-1].headers


def test_errors_are_ragkvs():
    assert issubclass(ServerError, RagKVError)
    assert pickle.loads(pickle.dumps(ServerError("no", 503))).args == ("no",)


def test_the_client_knows_neither_server_nor_engine():
    others = ("torch", "transformers", "fastapi", "ragkv.serve", "ragkv.engine", "ragkv.store")
    code = f"import ragkv.client.connection, sys; print([m for m in {others} if m in sys.modules])"
    assert output_of(code).strip() == "[]"


@pytest.mark.parametrize("way", ["engine", "call"])
def test_history_can_be_switched_off_from_here(listen, make_engine, way):
    url = listen(make_engine(reuse=ReuseConfig())).url
    settings = {"reuse": ReuseConfig(history=False)} if way == "engine" else {}
    with RemoteRagKV(url, **settings) as remote:
        given = {} if way == "engine" else {"history": False}
        for _ in range(2):
            report = remote.generate(ask(some_chunks(2)), max_new_tokens=2, **given).report
            assert report.tokens.history == 0
