"""What goes wrong between ragkv and vLLM: recomputed there and counted, or an error by name."""

from __future__ import annotations

import pytest
from fastapi.testclient import TestClient
from served import CHAT, CHUNKS, chat, events, refused, until
from tiny import ask, tiny_model, tiny_tokenizer
from typer.testing import CliRunner
from vllm_over_http import running
from vllm_ragkv.decoder import VllmDecoder
from vllm_ragkv.handover import HandOverFolder

from ragkv.cli import serve
from ragkv.cli.main import app
from ragkv.errors import ClosedError, ConfigError, ServerError
from ragkv.serve.app import make_app
from ragkv.serve.config import ServeConfig

PROMPT = ask(CHUNKS)


def client(kv, **settings) -> TestClient:
    return TestClient(make_app(ServeConfig(**settings), {"default": kv}))


def no_space(*_):
    raise OSError("No space left on device")


@pytest.mark.parametrize("reason", ["full", "full, as it turns out", "expired", "instance"])
def test_vllm_computes_what_it_cannot_load(kv, vllm, connect, monkeypatch, reason):
    exact = kv.generate(PROMPT, method="full", drafts=False, max_new_tokens=6).token_ids
    server = connect(kv, most_bytes=20_000 if reason == "full" else None)
    server.connect(kv.loaded)
    if reason == "expired":
        server.folder.expires_in = -1.0
    elif reason == "instance":
        vllm.instance = "second"
    elif reason != "full":
        monkeypatch.setattr("vllm_ragkv.handover.save_file", no_space)
    with client(kv) as http:
        until(lambda: http.get("/health").status_code == 200)
        answer = http.post(CHAT, json=chat(ragkv={"report": True})).json()
        metrics = http.get("/metrics").text
    counted = reason.partition(",")[0]
    assert answer["choices"][0]["message"]["content"] == kv.tokenizer.decode(exact)
    assert answer["ragkv"]["not_loaded"] == counted
    assert bool(answer["ragkv"]["tokens"]["handed_over"]) == (counted != "full")
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert f'ragkv:handovers_total{{outcome="{counted}"}} 1.0' in metrics
    if reason == "instance":
        assert not kv.generate(PROMPT, max_new_tokens=1).report.not_loaded
    assert [path.name for path in vllm.folder.iterdir()] == ["secret"]


def test_a_vllm_that_is_down_is_waited_for(make_engine, connect, tmp_path, monkeypatch):
    monkeypatch.setattr("ragkv.serve.service._PAUSE_S", 0.01)
    down = VllmDecoder("http://127.0.0.1:9", tmp_path / "kv")
    kv = make_engine(layers=2, decoder=down)
    with client(kv) as http:
        refused(http.get("/health"), 503, code="starting")
        response = http.post(CHAT, json=chat())
        refused(response, 503, code="vllm_unavailable")
        assert response.headers["retry-after"] == "1"
        connect(kv)
        until(lambda: http.get("/health").status_code == 200)
        assert http.post(CHAT, json=chat()).status_code == 200
    down.close()


def test_a_connection_that_breaks_in_the_middle(kv, vllm, connect):
    server = connect(kv)
    vllm.breaks_after = 3
    with pytest.raises(ServerError, match="broke off in the middle"):
        kv.generate(PROMPT, max_new_tokens=6)
    assert not server.instance, "another vLLM may run there now"
    with client(kv) as http:
        last = events(http.post(CHAT, json=chat(stream=True)).text)[-1]
        assert last["error"]["code"] == "vllm_unavailable"
        vllm.breaks_after = None
        assert http.post(CHAT, json=chat()).status_code == 200


@pytest.mark.parametrize(("status", "told"), [(500, 502), (503, 503), (400, 400)])
def test_a_request_that_vllm_refuses(kv, vllm, connect, status, told):
    connect(kv).connect(kv.loaded)
    vllm.fails = status
    with client(kv) as http:
        message = refused(http.post(CHAT, json=chat()), told)
    assert ("vLLM's own reason" in message) == (status == 400)


def test_another_model_is_refused_with_both_figures(kv, vllm, connect):
    connect(kv)
    vllm.model = tiny_model(layers=2, seed=5)
    with pytest.raises(ServerError, match=r"is -\d+\.\d+ there and -\d+\.\d+ here, \d+\.\d+ apart"):
        kv.generate(PROMPT)


def test_a_vllm_without_the_connector_or_the_folder(kv, vllm, connect, tmp_path):
    server = connect(kv)
    vllm.connector = False
    with pytest.raises(ServerError, match="not a vLLM with ragkv's connector"):
        kv.generate(PROMPT)
    vllm.connector, vllm.folder = True, HandOverFolder(tmp_path / "other").path
    with pytest.raises(ServerError, match=r"does not load from .*\(unknown\).* same folder"):
        kv.generate(PROMPT)
    assert not list(server.folder.path.glob("*.safetensors"))


def test_an_id_opens_nothing_for_another_prompt_or_salt(kv, vllm, connect):
    server, taken = connect(kv), []
    write = server.folder.write
    server.folder.write = lambda *given: taken.append(write(*given)) or taken[-1]
    kv.generate(PROMPT, max_new_tokens=1)
    vllm.load([5] * 500, taken[-1], taken[-1])
    vllm.load(vllm.streamed[0]["prompt"], taken[-1], "another")
    assert vllm.reasons == ["", "", "signature", "salt"]


def test_whoever_does_not_wait_ends_vllm_s_work(kv, vllm, connect):
    server = connect(kv)
    server.connect(kv.loaded)
    vllm.going.clear()
    stream = kv.stream(PROMPT, max_new_tokens=100)
    until(lambda: vllm.streamed)
    stream.close()
    until(lambda: vllm.aborted == 1)
    with client(kv, timeout=0.5) as http:
        refused(http.post(CHAT, json=chat()), 504, code="timeout")
    until(lambda: vllm.aborted >= 2)
    stream = kv.stream(PROMPT, max_new_tokens=100)
    server.close()
    with pytest.raises(ClosedError):
        stream.whole()


def test_the_command(vllm, tmp_path, monkeypatch):
    vllm.model.save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "keys").write_text("alpha=sk-a\nbeta=sk-b\n", encoding="utf-8")
    found = []

    def answer(settings, engines) -> None:
        with TestClient(make_app(settings, engines)) as http:
            for key in ("sk-a", "sk-b"):
                http.headers = {"Authorization": f"Bearer {key}"}
                http.post("/v1/chunks", json={"texts": CHUNKS})
                report = http.post(CHAT, json=chat(ragkv={"report": True})).json()["ragkv"]
                found.append(report["tokens"]["handed_over"])

    def run(*options: object):
        return CliRunner().invoke(app, ["serve", *map(str, options)])

    monkeypatch.setattr(serve, "_run", answer)
    where = ["--model", tmp_path / "model", "--store", tmp_path / "s"]
    with running(vllm) as url:
        folder = ["--vllm-url", f"{url}/v1", "--vllm-folder", vllm.folder]
        done = run(*where, *folder, "--api-key-file", tmp_path / "keys")
    assert done.exit_code == 0, done.output
    assert min(found) > 100
    assert "address" in run(*where, "--vllm-url", "localhost:8001").output


def test_settings_that_vllm_lacks_are_refused_over_http(kv, connect):
    connect(kv)
    with client(kv) as http:
        assert "sparse" in refused(http.post(CHAT, json=chat(sparse="auto")), 400)
    with pytest.raises(ConfigError, match="address"):
        VllmDecoder("localhost:8001", connect().folder.path)
