"""Chat and text completions: what the engine says, in OpenAI's form."""

import pytest
from served import CHAT, CHUNKS, TEXT, chat, client_of, events
from threads import each_in_a_thread
from tiny import ask

from ragkv import ReuseConfig


@pytest.fixture
def warm(client, kv):
    kv.precompute(CHUNKS)
    return client


def test_a_chat_answer_is_the_engines(warm, kv):
    alone = kv.generate(ask(CHUNKS), max_new_tokens=6)
    answer = warm.post(CHAT, json=chat()).json()
    (choice,) = answer["choices"]
    assert choice == {
        "index": 0,
        "message": {"role": "assistant", "content": alone.text, "refusal": None},
        "logprobs": None,
        "finish_reason": "length",
    }
    report = alone.report
    assert answer["usage"] == {
        "prompt_tokens": report.tokens.prompt,
        "completion_tokens": 6,
        "total_tokens": report.tokens.prompt + 6,
        "prompt_tokens_details": {"cached_tokens": report.tokens.cached, "history_tokens": 0},
    }
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["model"] == kv.info.name
    assert "ragkv" not in answer


def test_a_conversation_goes_on(make_engine):
    with client_of(make_engine(reuse=ReuseConfig())) as client:
        first = client.post(CHAT, json=chat()).json()["choices"][0]["message"]["content"]
        body = chat(ragkv={"report": True})
        body["messages"] += [
            {"role": "assistant", "content": first.lstrip()},
            {"role": "user", "content": "And then?"},
        ]
        answer = client.post(CHAT, json=body).json()
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    report = answer["ragkv"]
    assert cached == report["tokens"]["sink"] + report["tokens"]["history_exact"] > 300


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("serves", [True, False])
def test_usage_names_the_tokens_from_history(make_engine, serves, streaming):
    engine = make_engine(reuse=ReuseConfig(history=serves))
    engine.precompute(CHUNKS)
    with client_of(engine) as client:

        def found(**ragkv):
            body = chat(ragkv={"report": True, **ragkv}, stream=streaming)
            if streaming:
                body["stream_options"] = {"include_usage": True}
                answer = events(client.post(CHAT, json=body).text)[-1]
            else:
                answer = client.post(CHAT, json=body).json()
            report, details = answer["ragkv"], answer["usage"]["prompt_tokens_details"]
            rows = report["tokens"]["history_exact"] + report["tokens"]["history_repaired"]
            assert details["history_tokens"] == report["tokens"]["history"] == rows
            return rows

        assert found() == 0
        assert (found() > 100) == serves
        assert (found(history=True) > 100) == serves  # who serves without it, has none
        assert found(history=False) == 0


def test_a_chat_stream_is_the_answer_in_pieces(warm):
    whole = warm.post(CHAT, json=chat()).json()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    response = warm.post(CHAT, json=chat(**options))
    assert response.headers["content-type"].startswith("text/event-stream")
    *pieces, last = events(response.text)
    deltas = [piece["choices"][0]["delta"] for piece in pieces]
    assert deltas[0]["role"] == "assistant"
    text = "".join(delta.get("content", "") for delta in deltas)
    assert text == whole["choices"][0]["message"]["content"]
    assert [piece["choices"][0]["finish_reason"] for piece in pieces][-2:] == [None, "length"]
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    assert all(piece["usage"] is None for piece in pieces)
    assert len({piece["id"] for piece in [*pieces, last]}) == 1
    plain = events(warm.post(CHAT, json=chat(stream=True)).text)
    assert all("usage" not in piece for piece in plain)


@pytest.mark.parametrize(("path", "asked"), [(CHAT, chat()), (TEXT, {"prompt": CHUNKS[0]})])
def test_every_piece_may_have_the_usage_so_far(warm, path, asked):
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**asked, "n": 2, "temperature": 1, "stream": True, "stream_options": options}
    *pieces, last = events(warm.post(path, json=body).text)
    assert last["choices"] == []
    written = [0, 0]
    for piece in pieces:
        at, usage = piece["choices"][0]["index"], piece["usage"]
        assert usage["prompt_tokens"] == last["usage"]["prompt_tokens"]
        assert max(written[at], 1) <= usage["completion_tokens"]
        written[at] = usage["completion_tokens"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + written[at]
    assert sum(written) == last["usage"]["completion_tokens"]
    body["stream_options"] = {
        "continuous_usage_stats": True
    }  # as vLLM: without include_usage, none
    assert not any("usage" in piece for piece in events(warm.post(path, json=body).text))


def test_a_text_completion(warm, kv):
    prompt = "\n\n".join([kv.sink_from("{context}") + CHUNKS[0], "So"])
    alone = kv.generate(prompt, max_new_tokens=5)
    answer = warm.post(TEXT, json={"prompt": prompt, "max_tokens": 5}).json()
    assert answer["choices"][0]["text"] == alone.text
    assert answer["object"] == "text_completion"
    pieces = events(warm.post(TEXT, json={"prompt": prompt, "max_tokens": 5, "stream": True}).text)
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == alone.text


def test_prompts_of_token_ids_are_their_text(warm, kv):
    text = "<|bos|>" + CHUNKS[0]
    ids = kv.tokenizer(text, add_special_tokens=False)["input_ids"]
    by_text = warm.post(TEXT, json={"prompt": text}).json()
    by_ids = warm.post(TEXT, json={"prompt": ids}).json()
    assert by_ids["choices"] == by_text["choices"]
    assert by_ids["usage"] == by_text["usage"]
    assert by_text["usage"]["completion_tokens"] <= 16
    both = warm.post(TEXT, json={"prompt": [ids, ids], "n": 2, "max_tokens": 2}).json()
    assert [choice["index"] for choice in both["choices"]] == [0, 1, 2, 3]
    assert both["usage"]["prompt_tokens"] == 2 * by_text["usage"]["prompt_tokens"]


def test_several_prompts(warm):
    each = [
        warm.post(TEXT, json={"prompt": text, "max_tokens": 3}).json()["choices"][0]["text"]
        for text in CHUNKS
    ]
    answer = warm.post(TEXT, json={"prompt": CHUNKS, "max_tokens": 3}).json()
    assert [choice["text"] for choice in answer["choices"]] == each


def test_several_answers_differ_and_a_seed_repeats_them(warm):
    fields = chat(n=3, temperature=1.5, seed=-7, top_p=0.9, top_k=50)
    one, two = (warm.post(CHAT, json=fields).json() for _ in range(2))
    texts = [choice["message"]["content"] for choice in one["choices"]]
    assert len(set(texts)) == 3
    assert one["choices"] == two["choices"]
    assert one["usage"]["completion_tokens"] == 18
    streamed = ["", "", ""]
    for piece in events(warm.post(CHAT, json={**fields, "stream": True}).text):
        (choice,) = piece["choices"]
        streamed[choice["index"]] += choice["delta"].get("content", "")
    assert streamed == texts


def test_a_stop_text_ends_the_answer(warm):
    whole = warm.post(CHAT, json=chat()).json()["choices"][0]["message"]["content"]
    for stop in (whole[3:5], [whole[3:5]]):
        (choice,) = warm.post(CHAT, json=chat(stop=stop)).json()["choices"]
        assert choice["finish_reason"] == "stop"
        assert choice["message"]["content"] == whole[: whole.index(whole[3:5])]


def test_the_end_is_ignored_on_request(warm, kv):
    first = kv.generate(ask(CHUNKS), max_new_tokens=1).token_ids
    kv.loaded.model.generation_config.eos_token_id = first
    assert warm.post(CHAT, json=chat()).json()["choices"][0]["finish_reason"] == "stop"
    asked = chat(ignore_eos=True, sparse="auto")
    (choice,) = warm.post(CHAT, json=asked).json()["choices"]
    assert choice["finish_reason"] == "length"


def test_chat_logprobs(warm):
    fields = chat(logprobs=True, top_logprobs=2)
    (choice,) = warm.post(CHAT, json=fields).json()["choices"]
    content = choice["logprobs"]["content"]
    assert "".join(token["token"] for token in content) == choice["message"]["content"]
    for token in content:
        best, second = token["top_logprobs"]
        assert token["logprob"] == best["logprob"] >= second["logprob"]
        assert bytes(token["bytes"]).decode(errors="replace") == token["token"]
    data = b"".join(bytes(token["bytes"]) for token in content)
    assert data.decode(errors="replace") == choice["message"]["content"]
    streamed = [
        token
        for piece in events(warm.post(CHAT, json={**fields, "stream": True}).text)
        for token in (piece["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert [token["token"] for token in streamed] == [token["token"] for token in content]
    (choice,) = warm.post(CHAT, json=chat(logprobs=True)).json()["choices"]
    assert choice["logprobs"]["content"][0]["top_logprobs"] == []


def test_text_logprobs(warm):
    fields = {"prompt": CHUNKS[0], "max_tokens": 4, "logprobs": 1, "temperature": 1, "seed": 3}
    (choice,) = warm.post(TEXT, json=fields).json()["choices"]
    found = choice["logprobs"]
    assert "".join(found["tokens"]) == choice["text"]
    assert found["text_offset"] == [len("".join(found["tokens"][:at])) for at in range(4)]
    for token, logprob, top in zip(
        found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True
    ):
        assert top[token] == logprob
    offsets = [
        at
        for piece in events(warm.post(TEXT, json={**fields, "stream": True}).text)
        for at in (piece["choices"][0]["logprobs"] or {"text_offset": []})["text_offset"]
    ]
    assert offsets == found["text_offset"]


def test_reuse_is_set_and_reported_on_request(warm):
    reports = [
        warm.post(CHAT, json=chat(ragkv={"recompute_ratio": ratio, "report": True})).json()["ragkv"]
        for ratio in (0, 0.5)
    ]
    assert [report["recompute_ratio"] for report in reports] == [0, 0.5]
    assert reports[0]["tokens"]["recomputed"] == 0 < reports[1]["tokens"]["recomputed"]
    full = chat(ragkv={"method": "full", "report": True}, stream=True)
    *pieces, last = events(warm.post(CHAT, json=full).text)
    assert last["ragkv"]["method"] == "full"
    assert last["choices"][0]["finish_reason"] == "length"
    assert not any("ragkv" in piece for piece in pieces)
    *pieces, last = events(
        warm.post(CHAT, json={**full, "stream_options": {"include_usage": True}}).text
    )
    assert last["ragkv"]["tokens"]["prompt"] == last["usage"]["prompt_tokens"]
    assert not any("ragkv" in piece for piece in pieces)


def test_retrieved_chunks_are_stored_after_the_answer(client, kv):
    body = chat(ragkv={"retrieved": CHUNKS})
    assert client.post(CHAT, json=body).json()["usage"]["prompt_tokens_details"] == {
        "cached_tokens": 0,
        "history_tokens": 0,
    }
    kv.wait()
    answer = client.post(CHAT, json=body).json()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 100


def test_content_in_parts_is_one_text(warm):
    (message,) = ask(CHUNKS)
    half = len(message["content"]) // 2
    parts = [message["content"][:half], message["content"][half:]]
    content = [{"type": "text", "text": part} for part in parts]
    split = chat(messages=[{"role": "user", "content": content}])
    assert (
        warm.post(CHAT, json=split).json()["choices"]
        == warm.post(CHAT, json=chat()).json()["choices"]
    )


def test_an_answer_can_be_sent_back_as_a_message(warm):
    message = warm.post(CHAT, json=chat()).json()["choices"][0]["message"]
    earlier = {**message, "annotations": [], "tool_calls": None, "audio": None}
    messages = [*ask(CHUNKS), earlier, {"role": "user", "content": "And?", "name": "Ada"}]
    assert warm.post(CHAT, json=chat(messages=messages)).status_code == 200
    system = [{"role": "developer", "content": "Be brief."}, *messages]
    assert warm.post(CHAT, json=chat(messages=system)).status_code == 200


def test_many_clients_get_what_they_get_alone(warm):
    questions = [f"\n\nQuestion {number}?" for number in range(6)]

    def answer(question):
        return warm.post(CHAT, json=chat(messages=ask(CHUNKS, question))).json()["choices"]

    alone = {question: answer(question) for question in questions}
    together = {}
    each_in_a_thread(lambda question: together.update({question: answer(question)}), questions)
    assert together == alone


@pytest.mark.parametrize("stream", [False, True])
def test_each_retrieved_chunk_is_accounted_for(client, kv, stream):
    kv.precompute(CHUNKS[:2])
    text = f"{CHUNKS[0]}\n\n{CHUNKS[1].upper()}\n\n{CHUNKS[2]}\n\nWhat?"
    client.post(
        "/v1/chunks/prefetch", json={"texts": ["Another caller's chunk, for another prompt."]}
    )
    body = {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 1,
        "stream": stream,
        "ragkv": {"retrieved": [*CHUNKS[:3], "A chunk that nobody wrote."], "report": True},
    }
    answer = client.post(CHAT, json=body)
    report = (
        [e["ragkv"] for e in events(answer.text) if "ragkv" in e]
        if stream
        else [answer.json()["ragkv"]]
    )
    found = {miss["reason"]: miss for miss in report[-1]["misses"]}
    assert set(found) == {"case", "absent", "left_out"}
    assert found["case"]["chunk"] == CHUNKS[1][:80]
    assert found["absent"]["stored_next"]
    assert "in the same case" in found["case"]["mend"]
    other = client.post(CHAT, json={**body, "ragkv": {"report": True}, "stream": False}).json()
    assert not any(miss["reason"] == "left_out" for miss in other["ragkv"]["misses"])
