"""Access to a server: keys of namespaces, origins of browsers."""

from collections.abc import Iterator

import pytest
from fastapi.testclient import TestClient
from served import CHAT, CHUNKS, chat, client_of, refused

from ragkv import RagKV, StoreConfig
from ragkv.errors import ConfigError
from ragkv.serve.app import make_app
from ragkv.serve.config import ServeConfig
from ragkv.serve.keys import namespace_of, read_keys

KEYS = {"sk-a": "alpha", "sk-b": "beta", "sk-a2": "alpha"}


@pytest.fixture
def client(make_engine, tmp_path) -> Iterator[TestClient]:
    store = StoreConfig(tmp_path / "store", history_bytes=0)
    first = make_engine(store=store, namespace="alpha")
    second = RagKV(first.loaded, store=store, namespace="beta")
    engines = {"alpha": first, "beta": second}
    with second, TestClient(make_app(ServeConfig(keys=KEYS), engines)) as client:
        yield client


def by(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


WRONG = [{}, by("sk-c"), by(""), by("sk-"), {"Authorization": "Basic sk-a"}, by("sk-\u00e4")]
PATHS = [
    *[("GET", f"/v1/{path}") for path in ("models", "models/default", "chunks?text=x")],
    *[("POST", f"/v1/{path}") for path in ("completions", "chunks", "chunks/prefetch", "sink")],
    *[("POST", path) for path in (CHAT, "/tokenize", "/v1/route")],
    *[("GET", "/version"), ("DELETE", "/v1/chunks")],
]


@pytest.mark.parametrize("path", PATHS, ids=str)
def test_nothing_without_a_key(client, path):
    for headers in WRONG:
        encoded = {name: value.encode() for name, value in headers.items()}
        response = client.request(*path, headers=encoded)
        refused(response, 401, code="invalid_api_key")
        assert response.headers["www-authenticate"] == "Bearer"


def test_health_and_metrics_need_no_key(client):
    assert client.get("/metrics").status_code == 200
    assert client.get("/health").status_code in {200, 503}


def test_a_key_opens_its_namespace_alone(client):
    names = [client.get("/version", headers=by(key)).json()["namespace"] for key in KEYS]
    assert names == ["alpha", "beta", "alpha"]
    made = client.post("/v1/chunks", json={"texts": CHUNKS}, headers=by("sk-a")).json()
    assert made["report"]["new"] == 3

    def known(key):
        found = client.get("/v1/chunks", params={"text": CHUNKS[0]}, headers=by(key))
        return found.json()["text_known"]

    def cached(key):
        body = chat(ragkv={"report": True})
        answer = client.post(CHAT, json=body, headers=by(key)).json()
        assert len(answer["ragkv"]["chunks"]) == (3 if answer["ragkv"]["tokens"]["reused"] else 0)
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert [known(key) for key in KEYS] == [True, False, True]
    assert cached("sk-b") == 0 < cached("sk-a") == cached("sk-a2")
    gone = client.request("DELETE", "/v1/chunks", json={"text": CHUNKS[0]}, headers=by("sk-b"))
    assert gone.json() == {"deleted": 0}
    assert known("sk-a")


def test_reading_keys(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# ours\n\nalpha=sk-a\n beta = sk=b== \nalpha=sk-a2\n", encoding="utf-8")
    keys = read_keys(path)
    assert keys == {"sk-a": "alpha", "sk=b==": "beta", "sk-a2": "alpha"}
    assert namespace_of("bearer sk=b==", keys) == "beta"
    assert namespace_of("Bearer sk", keys) is None


@pytest.mark.parametrize("first", ["", "# ours\r\n", "\r\n", "\u6587=sk-c\r\n"])
def test_a_byte_order_mark_is_no_part_of_a_name(tmp_path, first):
    path = tmp_path / "keys"
    path.write_bytes(f"{first}alpha=sk-a\r\nbeta=sk-b\r\n".encode("utf-8-sig"))
    keys = read_keys(path)
    assert list(keys.items())[-2:] == [("sk-a", "alpha"), ("sk-b", "beta")]
    assert set(keys.values()) <= {"alpha", "beta", "\u6587"}


@pytest.mark.parametrize(
    ("says", "content"),
    [
        ("UTF-8", "alpha=sk-secret".encode("utf-16")),
        ("UTF-8", "alpha=sk-secret".encode("utf-16-le")),
        ("UTF-8", "alpha=sk-secret".encode("utf-16-be")),
        ("UTF-8", "alpha=sk-secret".encode("utf-32")),
        ("UTF-8", "a=b\n\ufeffalpha=sk-secret".encode()),  # two files, joined
        ("UTF-8", "al\u200bpha=sk-secret".encode()),
        ("UTF-8", b"alpha=sk-secret\x00"),
        ("UTF-8", "\u00e4=sk-secret".encode("latin-1")),
        *[("keys", text) for text in (b"", b"# nothing\n", b"alpha\n", b"=sk-secret\n", b"a=\n")],
        ("keys", b"a=sk-secret\nb=sk-secret\n"),
        ("keys", b"a=x y\n"),
        ("cannot be read", None),
    ],
)
def test_wrong_files_of_keys(tmp_path, says, content):
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=says) as caught:
        read_keys(path)
    assert "sk-secret" not in str(caught.value)


def test_a_namespace_without_an_engine(kv):
    with pytest.raises(ConfigError, match="no engine for the namespace beta"):
        make_app(ServeConfig(keys={"x": "beta"}), {"default": kv})


def test_other_machines_need_keys():
    for host in ("::", "192.168.1.5", "example.org", ""):
        with pytest.raises(ConfigError, match="--api-key-file"):
            ServeConfig(host=host)
        assert ServeConfig(host=host, keys=KEYS).namespaces == {"alpha", "beta"}
        assert ServeConfig(host=host, allow_anonymous=True)
    for host in ("127.0.0.1", "::1", "localhost", "127.1.2.3"):
        assert ServeConfig(host=host).namespaces == {"default"}
    assert "sk-a" not in repr(ServeConfig(keys=KEYS))


@pytest.mark.parametrize("wrong", [{"port": -1}, {"timeout": 0}, {"max_waiting": -1}])
def test_settings_out_of_range(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        ServeConfig(**wrong)


PAGE, OTHER = "http://localhost:5173", "https://chat.example.org"
ASKS = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type,x-ragkv-route",
}
ALLOWED = "access-control-allow-origin"


@pytest.mark.parametrize("path", [CHAT, "/v1/chunks", "/v1/models"])
@pytest.mark.parametrize(
    ("origins", "lets_in"),
    [((), ()), ((PAGE,), (PAGE,)), ((PAGE, OTHER), (PAGE, OTHER)), (("*",), (PAGE, OTHER))],
)
def test_a_preflight(kv, path, origins, lets_in):
    with client_of(kv, cors_origins=origins, keys={"secret": "default"}) as client:
        for origin in (PAGE, OTHER, "null"):
            response = client.options(path, headers={"Origin": origin, **ASKS})
            if origin in lets_in or origins == ("*",):
                assert response.status_code == 200
                assert response.headers[ALLOWED] in {"*", origin}
                assert "authorization" in response.headers["access-control-allow-headers"].lower()
                assert "POST" in response.headers["access-control-allow-methods"]
            else:
                message = refused(response, 403, code="origin_not_allowed")
                assert "--cors-origin" in message
                assert ALLOWED not in response.headers


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"model": "other"}, {"n": "x"}])
def test_answers_and_errors_name_the_origin(kv, fields):
    with client_of(kv, cors_origins=(PAGE,)) as client:
        for origin, allowed in ((PAGE, PAGE), (OTHER, None), (None, None)):
            headers = {} if origin is None else {"Origin": origin}
            response = client.post(CHAT, json=chat(max_tokens=1, **fields), headers=headers)
            assert response.headers.get(ALLOWED) == allowed
            if allowed:
                assert "x-request-id" in response.headers["access-control-expose-headers"]


def test_a_failure_of_the_servers_own_names_it_too(kv, monkeypatch):
    monkeypatch.setattr(kv, "stream", lambda *_, **__: 1 / 0)
    with client_of(kv, raise_errors=False, cors_origins=(PAGE,)) as client:
        response = client.post(CHAT, json=chat(), headers={"Origin": PAGE})
        assert (response.status_code, response.headers[ALLOWED]) == (500, PAGE)


@pytest.mark.parametrize("wrong", ["localhost:5173", f"{PAGE}/", "http://a/b", "", "http://a b"])
def test_an_origin_of_another_form(wrong):
    with pytest.raises(ConfigError, match="CORS origin"):
        ServeConfig(cors_origins=(wrong,))
