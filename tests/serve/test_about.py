"""Models, health, version, tokens, metrics."""

from contextlib import ExitStack
from importlib.metadata import version

import pytest
from prometheus_client.parser import text_string_to_metric_families
from served import CHAT, CHUNKS, TEXT, chat, client_of, model_held, refused, until
from tiny import ask, saved

from ragkv import RagKV, ReuseConfig


def figures(client) -> dict[str, float]:
    """Return the metrics by name and labels, as Prometheus reads them."""
    text = client.get("/metrics").text
    return {
        sample.name + "".join(f"[{value}]" for value in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_health_waits_for_the_sink(kv):
    with ExitStack() as stack:
        with model_held(kv):
            client = stack.enter_context(client_of(kv))
            refused(client.get("/health"), 503, code="starting")
            assert client.get("/version").status_code == 200
        until(lambda: client.get("/health").status_code == 200)
        assert client.get("/health").json() == {"status": "ok"}


def test_models(client, kv):
    page = client.get("/v1/models").json()
    assert page["object"] == "list"
    assert [model["id"] for model in page["data"]] == [kv.info.name, "default"]
    for model in page["data"]:
        assert client.get(f"/v1/models/{model['id']}").json() == model
        assert model["object"] == "model"
        assert model["max_model_len"] == 4096
    refused(client.get("/v1/models/gpt-4o/x"), 404, code="model_not_found")


@pytest.mark.parametrize("name", ["default", "tgi", "dummy"])
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_names_for_whichever_model_there_is(client, kv, path, name):
    body = {"prompt": "A", "max_tokens": 1} if path == TEXT else chat(max_tokens=1)
    answer = client.post(path, json={**body, "model": name}).json()
    assert answer["model"] == kv.info.name
    refused(client.post(path, json={**body, "model": f"{name}s"}), 404, code="model_not_found")


@pytest.mark.parametrize("path", ["/", "/health", "/v1/models", "/v1/models/default"])
def test_probes_look_at_heads(client, path):
    until(lambda: client.get("/health").status_code == 200)
    found, head = client.get(path), client.head(path)
    assert (head.status_code, head.content) == (found.status_code, b"") == (200, b"")
    assert head.headers["content-length"] == str(len(found.content))


def test_a_folders_place_is_not_told(tmp_path):
    with RagKV(saved(tmp_path / "tiny-model"), store=":memory:") as kv:
        with client_of(kv) as client:
            for path in ("/v1/models", "/version"):
                assert str(tmp_path) not in client.get(path).text
            assert client.post(CHAT, json=chat(model="tiny-model")).status_code == 200
        with client_of(kv, model_name="org/x") as client:
            assert client.get("/v1/models/org/x").json()["id"] == "org/x"


def test_version(client, kv):
    assert client.get("/version").json() == {
        "version": version("ragkv"),
        "model": kv.info.name,
        "fingerprint": kv.info.fingerprint,
        "namespace": "default",
        "supported": True,
        "positions": 4096,
    }


def test_tokenize(client, kv):
    prompt = "A text to be cut."
    found = client.post("/tokenize", json={"prompt": prompt}).json()
    count = {"count": len(found["tokens"]), "max_model_len": 4096}
    assert found == {"tokens": kv.tokenizer(prompt)["input_ids"], **count}
    found = client.post("/tokenize", json={"messages": ask(CHUNKS)}).json()
    assert found["tokens"] == kv.prefill(ask(CHUNKS)).token_ids
    for body in ({}, {"prompt": "a", "messages": ask(CHUNKS)}, {"prompt": 5}, {"text": "a"}):
        refused(client.post("/tokenize", json=body), 400)


def test_metrics_are_the_reports_figures(client, kv):
    client.post("/v1/chunks", json={"texts": CHUNKS})
    before = figures(client)
    assert before["ragkv:prompt_tokens_total"] == before["ragkv:num_requests_running"] == 0
    reports = [
        client.post(CHAT, json=chat(ragkv={"report": True}, stop=stop)).json()["ragkv"]
        for stop in ([], ["e"])
    ]
    kv.forget(CHUNKS[0])
    kv.prefetch(CHUNKS[:1])
    kv.wait()
    found = figures(client)

    def total(name, part=None):
        return sum((report[part] if part else report)[name] for report in reports)

    assert found["ragkv:prompt_tokens_total"] == total("prompt", "tokens")
    assert found["ragkv:generation_tokens_total"] == total("tokens", "decode")
    sources = {
        name: found[f"ragkv:prompt_tokens_by_source_total[{name}]"]
        for name in ("sink", "exact", "repaired", "reused", "version", "recomputed", "fresh")
    }
    of = {"exact": "history_exact", "repaired": "history_repaired"}
    assert sources == {name: total(of.get(name, name), "tokens") for name in sources}
    assert found["ragkv:request_success_total[length]"] == 1
    assert found["ragkv:request_success_total[stop]"] == 1
    for name, seconds in (
        ("time_to_first_token_seconds", total("ttft_s")),
        ("e2e_request_latency_seconds", total("total_s")),
        ("request_queue_time_seconds", sum(report["steps"]["wait"] for report in reports)),
    ):
        assert found[f"ragkv:{name}_count"] == 2
        assert found[f"ragkv:{name}_sum"] == pytest.approx(seconds)
    assert found["ragkv:repair_seconds_count[recompute]"] == 2
    longer = [report for report in reports if report["decode"]["tokens"] > 1]
    assert found["ragkv:inter_token_latency_seconds_count"] == len(longer)


def test_tiers_are_counted(make_engine):
    kv = make_engine(reuse=ReuseConfig())
    client = client_of(kv)
    kv.precompute(CHUNKS)
    asked = chat(max_tokens=4, ignore_eos=True)
    client.post(CHAT, json=asked)
    kv.wait()
    first = figures(client)
    assert first["ragkv:tier_hits_total[memory]"] >= len(CHUNKS)
    assert first["ragkv:tier_hits_total[prompts]"] == 0
    client.post(CHAT, json=asked)
    found = figures(client)
    assert found["ragkv:tier_hits_total[prompts]"] == 1
    held = {use.name: use.nbytes for use in kv.status().tiers}
    for name in ("memory", "prompts"):
        assert found[f"ragkv:tier_bytes[{name}]"] == held[name] > 0


def test_misses_and_errors_are_counted(client, kv):
    client.post("/v1/chunks", json={"texts": CHUNKS})
    sink = {"sink": "Read:\n\n", "report": True}
    missed = client.post(CHAT, json=chat(ragkv=sink)).json()["ragkv"]["misses"]
    assert missed
    client.post(CHAT, json=chat(model="other"))
    client.get("/nowhere")
    found = figures(client)
    assert found[f"ragkv:chunk_misses_total[{missed[0]['reason']}]"] == len(missed)
    assert found["ragkv:request_errors_total[model_not_found]"] == 1
    assert found["ragkv:request_errors_total[not_found]"] == 1


def test_each_application_has_figures_of_its_own(kv):
    with client_of(kv) as one, client_of(kv) as other:
        one.post(CHAT, json=chat())
        assert figures(one)["ragkv:prompt_tokens_total"] > 0
        assert figures(other)["ragkv:prompt_tokens_total"] == 0
