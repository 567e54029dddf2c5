"""Pages in browsers: which origins may send requests, and what their preflights get."""

import pytest
from served import CHAT, chat, client_of, refused

from ragkv.errors import ConfigError
from ragkv.serve.config import ServeConfig

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
