"""Text completions of token ids: those that are sent are read, and the answers' are spelled."""

import pytest
from served import CHAT, CHUNKS, TEXT, events, refused
from tiny import ask
from tokenizer_kinds import KINDS, model_of, tokenizer_of

from ragkv import RagKV, ReuseConfig
from ragkv.client import RemoteRagKV
from ragkv.prompt.chat import TokenIds

TEXTS = ["if 日本語 the 😀 for the statement", "  the  if\n日本", "é😀"]
ODD = "if 日本語 the 😀"


@pytest.fixture(params=KINDS)
def kv(request):
    reuse = ReuseConfig(history=False, on_miss="skip")
    with RagKV(
        model_of(request.param), tokenizer_of(request.param), store=":memory:", reuse=reuse
    ) as kv:
        yield kv


def plain(kv, text):
    return kv.tokenizer(text, add_special_tokens=False)["input_ids"]


def test_the_ids_that_are_sent_are_read(client, kv):
    ids = plain(kv, ODD)
    letters = [token for each in "statement" for token in plain(kv, each)]
    sent = [ids, ids[:-1], ids[1:], letters, [kv.tokenizer.bos_token_id, *letters], [7, 7, 300, 9]]
    expected = [kv.generate(TokenIds(each), max_new_tokens=4) for each in sent]
    assert [each.report.tokens.prompt for each in expected] == list(map(len, sent))
    for each, one in zip(sent, expected, strict=True):
        answer = client.post(TEXT, json={"prompt": each, "max_tokens": 4}).json()
        assert answer["usage"]["prompt_tokens"] == len(each)
        assert answer["choices"][0]["text"] == one.text
    body = {"prompt": sent, "max_tokens": 4}
    together = client.post(TEXT, json=body).json()
    assert together["usage"]["prompt_tokens"] == sum(map(len, sent))
    assert [each["text"] for each in together["choices"]] == [each.text for each in expected]
    streamed = [""] * len(sent)
    for piece in events(client.post(TEXT, json={**body, "stream": True}).text):
        (choice,) = piece["choices"]
        streamed[choice["index"]] += choice["text"]
    for read, one in zip(streamed, expected, strict=True):
        assert read == one.text or "\ufffd" in one.text  # bytes of no character


def test_ids_out_of_range(client, kv):
    known = len(kv.tokenizer)
    for wrong in ([known], [[5], [known]], [-1], [2**31], [10**30], [5, None], [True], [5.5]):
        refused(client.post(TEXT, json={"prompt": wrong}), 400, code="invalid_value")


def test_a_client_sends_ids(listen, kv):
    ids = [*plain(kv, ODD), 7, 300]
    with RemoteRagKV(listen(kv).url) as remote:
        remote.prefetch([CHUNKS[0]])
        answer = remote.generate(TokenIds(ids), max_new_tokens=4)
    assert answer.token_ids == kv.generate(TokenIds(ids), max_new_tokens=4).token_ids
    assert answer.report.tokens.prompt == len(ids)
    assert [miss.reason for miss in answer.report.misses] == ["left_out"]


# ---- texts and bytes of an answer's tokens


def chat_items(client, **fields):
    body = {"messages": ask(CHUNKS[:1]), "max_tokens": 40, "logprobs": True, **fields}
    (choice,) = client.post(CHAT, json=body).json()["choices"]
    content = choice["message"]["content"]
    pieces = events(client.post(CHAT, json={**body, "stream": True}).text)
    logprobs = [piece["choices"][0]["logprobs"] for piece in pieces]
    streamed = [item for each in logprobs if each for item in each["content"]]
    assert streamed == choice["logprobs"]["content"]
    return content, streamed


def text_logprobs(client, **fields):
    body = {"prompt": "if the", "max_tokens": 40, "logprobs": 2, **fields}
    (choice,) = client.post(TEXT, json=body).json()["choices"]
    pieces = events(client.post(TEXT, json={**body, "stream": True}).text)
    parts = [each for piece in pieces if (each := piece["choices"][0]["logprobs"])]
    streamed = {name: [one for part in parts for one in part[name]] for name in choice["logprobs"]}
    assert streamed == choice["logprobs"]
    return choice["text"], streamed


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_are_the_answer_s(client, kv, make_say, text):
    make_say(kv, text)
    content, items = chat_items(client, top_logprobs=3)
    assert content == kv.tokenizer.decode(plain(kv, text), skip_special_tokens=True)
    assert b"".join(bytes(each["bytes"]) for each in items).decode() == content
    assert items[-1]["token"] == kv.tokenizer.eos_token
    assert items[-1]["bytes"] == []
    whole = [each for each in items[:-1] if "\ufffd" not in each["token"]]
    assert all(bytes(each["bytes"]).decode() == each["token"] for each in whole if each["bytes"])
    assert all(len(each["top_logprobs"]) == 3 for each in items)
    answer = kv.generate(ask(CHUNKS[:1]), max_new_tokens=40, logprobs=3)
    assert list(map(dict, answer.text_logprobs)) == items


@pytest.mark.parametrize("text", TEXTS)
def test_offsets_are_those_of_the_tokens(client, kv, make_say, text):
    make_say(kv, text)
    content, found = text_logprobs(client)
    ids = kv.tokenizer(content, add_special_tokens=False, return_offsets_mapping=True)
    assert len(found["tokens"]) == len(plain(kv, text)) + 1  # the end
    for at, token in zip(found["text_offset"], found["tokens"], strict=True):
        if "\ufffd" not in token and token not in kv.tokenizer.all_special_tokens:
            assert content[at : at + len(token)] == token
    if ids["input_ids"] == plain(kv, text) and kv.tokenizer.unk_token is None:
        assert found["text_offset"][:-1] == [start for start, _ in ids["offset_mapping"]]


def test_whole_characters_are_the_answer(client, kv, make_say):
    text = "the statement if for  the\nif"
    make_say(kv, text)
    content, items = chat_items(client)
    assert "".join(each["token"] for each in items[:-1]) == content
    content, found = text_logprobs(client)
    assert "".join(found["tokens"][:-1]) == content


def test_every_token_has_a_name_of_its_own(client):
    """Also those with the same text: at the beginning, with a blank and without; bytes."""
    for seed in range(4):
        more = {"logprobs": 20, "temperature": 1, "seed": seed, "ignore_eos": True}
        _, found = text_logprobs(client, **more)
        assert {len(each) for each in found["top_logprobs"]} <= {20, 21}
        for token, logprob, top in zip(
            found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True
        ):
            assert top[token] == logprob
