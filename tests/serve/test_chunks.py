"""Chunks over HTTP: precompute, prefetch, look for, delete."""

import json

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
    made = response.json()
    assert response.status_code == 200
    assert made["status"] == "done"
    assert made["done"] == made["total"] == 3
    assert made["error"] is None
    assert made["report"]["new"] == 3
    assert set(made["report"]) == set(PrecomputeReport().to_dict())
    assert client.get(f"/v1/chunks/{made['id']}").json() == made
    assert all(kv.contains(text) for text in CHUNKS)
    assert known(client, CHUNKS[0])
    assert not known(client, "another text that nobody has precomputed")
    again = client.post("/v1/chunks", json={"texts": CHUNKS}).json()
    assert again["report"]["existing"] == 3


def test_progress(client, kv, monkeypatch):
    monkeypatch.setattr(ingestion, "AT_ONCE", 1)
    with model_held(kv):
        response = client.post("/v1/chunks", json={"texts": CHUNKS, "wait": False})
        assert response.status_code == 202
        started = response.json()
        assert (started["status"], started["report"], started["total"]) == ("running", None, 3)
        assert client.get(f"/v1/chunks/{started['id']}").json()["done"] == 0
    seen = set()

    def ended():
        now = client.get(f"/v1/chunks/{started['id']}").json()
        seen.add(now["done"])
        return now["status"] == "done"

    until(ended)
    assert seen <= {0, 1, 2, 3}
    assert client.get(f"/v1/chunks/{started['id']}").json()["report"]["new"] == 3


def test_waiting_ends_at_the_timeout_and_the_work_goes_on(kv):
    with client_of(kv, timeout=0.2) as client:
        with model_held(kv):
            response = client.post("/v1/chunks", json={"texts": CHUNKS})
            assert response.status_code == 202
            assert response.json()["status"] == "running"
        place = f"/v1/chunks/{response.json()['id']}"
        until(lambda: client.get(place).json()["status"] == "done")


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
    later = client.post("/v1/chunks", json={"texts": CHUNKS, "wait": False}).json()["id"]
    until(lambda: client.get(f"/v1/chunks/{later}").json()["status"] == "failed")
    assert client.get(f"/v1/chunks/{later}").json()["error"] == "The store is full."


def test_bounds(kv, monkeypatch):
    monkeypatch.setattr(service, "TEXTS", 2)
    monkeypatch.setattr(service, "TEXT_CHARACTERS", 300)
    monkeypatch.setattr(ingestion, "JOBS", 1)
    with client_of(kv) as client:
        for path in ("/v1/chunks", "/v1/chunks/prefetch"):
            for texts in (CHUNKS, ["x" * 301]):
                refused(client.post(path, json={"texts": texts}), 400, code="too_large")
        many = chat(ragkv={"retrieved": CHUNKS})
        refused(client.post(CHAT, json=many), 400, param="ragkv.retrieved")
        with model_held(kv):
            body = {"texts": ["a few words " * 20], "wait": False}
            assert client.post("/v1/chunks", json=body).status_code == 202
            full = client.post("/v1/chunks", json=body)
            refused(full, 503, code="queue_full")
            assert full.headers["retry-after"]


def test_the_server_ends_with_jobs_that_wait(kv, monkeypatch):
    monkeypatch.setattr(ingestion, "AT_ONCE", 1)
    with client_of(kv) as client:
        queue = client.app.state.service.ingestion
        with model_held(kv):
            for _ in range(2):
                client.post("/v1/chunks", json={"texts": CHUNKS, "wait": False})
            queue._stopping.set()
    jobs = list(queue._jobs.values())
    assert [job.status for job in jobs] == ["failed", "failed"]
    assert jobs[0].failure.code == "draining"


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
