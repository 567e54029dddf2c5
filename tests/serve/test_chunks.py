"""Chunks over HTTP: precompute, prefetch, look for, delete."""

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from served import CHAT, CHUNKS, chat, client_of, model_held, refused, until
from tiny import some_chunks

from ragkv.errors import StoreFullError
from ragkv.report.account import PrecomputeReport
from ragkv.serve import ingestion, service


def known(client, text, **more):
    return client.get("/v1/chunks", params={"text": text, **more}).json()["text_known"]


def delete(client, **body):
    return client.request("DELETE", "/v1/chunks", json=body)


def test_precomputing(client, kv):
    response = client.post("/v1/chunks", json={"texts": [*CHUNKS, f" {CHUNKS[0]}\n"]})
    report = response.json()["report"]
    assert response.status_code == 200
    assert report["new"] == 3
    assert set(report) == set(PrecomputeReport().to_dict())
    assert all(kv.contains(text) for text in CHUNKS)
    assert known(client, CHUNKS[0])
    assert not known(client, "another text that nobody has precomputed")
    again = client.post("/v1/chunks", json={"texts": CHUNKS}).json()
    assert again["report"]["existing"] == 3


@contextmanager
def posted(client, kv):
    """Post chunks; the response is there after the block."""
    ingestion = client.app.state.service.ingestion
    with ThreadPoolExecutor(1) as thread, model_held(kv):
        response = thread.submit(client.post, "/v1/chunks", json={"texts": CHUNKS[:2]})
        until(lambda: ingestion._works)
        yield response


def test_waiting_ends_at_the_timeout_and_the_work_goes_on(kv):
    with client_of(kv, timeout=0.2) as client:
        with model_held(kv):
            refused(client.post("/v1/chunks", json={"texts": CHUNKS}), 504, code="timeout")
        until(lambda: all(known(client, text) for text in CHUNKS))


def test_a_document_has_exactly_its_texts(client, kv, monkeypatch):
    monkeypatch.setattr(ingestion, "AT_ONCE", 2)
    client.post("/v1/chunks", json={"texts": CHUNKS, "document": "a.md"})
    kept, new = CHUNKS[0], some_chunks(5)[4]
    made = client.post("/v1/chunks", json={"texts": [kept, new], "document": "a.md"}).json()
    counts = {name: made["report"][name] for name in ("new", "existing", "removed")}
    assert counts == {"new": 1, "existing": 1, "removed": 2}
    assert [kv.contains(text) for text in (*CHUNKS, new)] == [True, False, False, True]
    assert delete(client, document="a.md").json() == {"deleted": 2}
    assert not known(client, new)


def test_deleting_a_text(client):
    client.post("/v1/chunks", json={"texts": CHUNKS[:1]})
    assert delete(client, text=CHUNKS[0]).json() == {"deleted": 1}
    assert delete(client, text=CHUNKS[0]).json() == {"deleted": 0}


def test_chunks_expire(client, kv, monkeypatch):
    client.post("/v1/chunks", json={"texts": CHUNKS, "expires_in": 60})
    assert known(client, CHUNKS[0])
    now = __import__("time").time
    monkeypatch.setattr("time.time", lambda: now() + 61)
    assert not known(client, CHUNKS[0])


def test_chunks_behind_another_sink(client, kv):
    sink = client.post("/v1/sink", json={"template": "Read this:\n\n{context}"}).json()["sink"]
    assert sink == kv.sink_from("Read this:\n\n{context}") == "Read this:\n\n"
    client.post("/v1/chunks", json={"texts": CHUNKS[:1], "ragkv": {"sink": sink}})
    assert known(client, CHUNKS[0], sink=sink)
    assert not known(client, CHUNKS[0])
    messages = [{"role": "user", "content": "Read {context}"}]
    assert client.post("/v1/sink", json={"template": messages}).json()["sink"] == kv.sink_from(
        messages
    )


def test_prefetched_chunks_are_encoded_after_the_answer(client, kv):
    response = client.post("/v1/chunks/prefetch", json={"texts": CHUNKS})
    assert (response.status_code, response.json()) == (202, {"prefetching": 3})
    client.post(CHAT, json=chat())
    kv.wait()
    assert all(known(client, text) for text in CHUNKS)


def test_a_full_store(client, kv, monkeypatch):
    def full(*_args, **_kwargs):
        raise StoreFullError("no room in /secret/place")

    monkeypatch.setattr(kv, "precompute", full)
    message = refused(client.post("/v1/chunks", json={"texts": CHUNKS}), 507, code="store_full")
    assert "secret" not in message


def test_bounds(kv, monkeypatch):
    monkeypatch.setattr(service, "TEXTS", 2)
    monkeypatch.setattr(service, "TEXT_CHARACTERS", 1000)
    monkeypatch.setattr(ingestion, "JOBS", 1)
    with client_of(kv) as client:
        for path in ("/v1/chunks", "/v1/chunks/prefetch"):
            for texts in (CHUNKS, ["x" * 1001]):
                refused(client.post(path, json={"texts": texts}), 400, code="too_large")
        many = chat(ragkv={"retrieved": CHUNKS})
        refused(client.post(CHAT, json=many), 400, param="ragkv.retrieved")
        with posted(client, kv) as response:
            full = client.post("/v1/chunks", json={"texts": ["a few words " * 20]})
            refused(full, 503, code="queue_full")
            assert full.headers["retry-after"]
        assert response.result().status_code == 200


def test_the_server_ends_with_precomputations_that_wait(kv, monkeypatch):
    monkeypatch.setattr(ingestion, "AT_ONCE", 1)
    with client_of(kv) as client:
        with posted(client, kv) as response:
            client.app.state.service.ingestion._stopping.set()
        refused(response.result(), 503, code="draining")


@pytest.mark.parametrize(
    "body",
    [
        {"texts": "one text"},
        {"texts": [5]},
        {"texts": ["\ud800 and more words than a few, to be a chunk"]},
        {"texts": CHUNKS, "document": ""},
        {"texts": CHUNKS, "document": 5},
        {"texts": CHUNKS, "document": "\ud800"},
        {"texts": CHUNKS, "expires_in": -1},
        {"texts": CHUNKS, "ragkv": {"method": "magic"}},
        {"texts": CHUNKS, "path": "/etc"},
        {},
    ],
)
def test_wrong_requests(client, body):
    json_body = json.dumps(body)
    response = client.post(
        "/v1/chunks", content=json_body, headers={"Content-Type": "application/json"}
    )
    refused(response, 400)


def test_wrong_deletions(client):
    for body in ({}, {"text": "a", "document": "b"}, {"text": 5}):
        refused(delete(client, **body), 400)
    for body in ('{"text": "\\ud800"}', '{"document": "\\ud800"}'):
        headers = {"Content-Type": "application/json"}
        response = client.request("DELETE", "/v1/chunks", content=body, headers=headers)
        assert response.status_code in {200, 400}, response.text
