"""A tokenizer with tokens that the model has no embedding for."""

import copy

import pytest
import torch
from fastapi.testclient import TestClient
from served import CHAT, TEXT, chat, refused
from tiny import SIZE, random_model, some_chunks, tiny_model, tiny_tokenizer
from transformers import LlamaConfig

from ragkv import RagKV
from ragkv.decode.constraint import SchemaConstraint
from ragkv.errors import ConfigError
from ragkv.prompt.chat import TokenIds
from ragkv.serve.app import make_app
from ragkv.serve.config import ServeConfig

CHUNKS = some_chunks(4)
ODD = {
    "a special token": "A text about padding: the token [PAD] fills up the batch.",
    "an added word": "A text about tools, in which <tool> is a word of its own.",
    "at its end": "A text that is cut off where the padding begins, here: [PAD]",
}


@pytest.fixture
def kv():
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.add_tokens(["<tool>", "<tool_call>"])
    with RagKV(tiny_model(layers=2), tokenizer, store=":memory:") as kv:
        yield kv


def names(text):
    return "'<tool>' with the id 601" if "<tool>" in text else r"'\[PAD\]' with the id 600"


def test_the_other_texts_are_stored(kv, caplog):
    odd = list(ODD.values())
    texts = [CHUNKS[0], odd[0], CHUNKS[1], odd[1], odd[2], *CHUNKS[2:]]
    report = kv.precompute(texts, document="d")
    assert (report.new, report.unknown_token, report.skipped, report.too_long) == (4, 3, 0, 0)
    assert [kv.contains(text) for text in texts] == [text in CHUNKS for text in texts]
    for text in odd:
        assert text[:30] in caplog.text
    assert "'<tool>' with the id 601" in caplog.text
    caplog.clear()
    again = kv.precompute(texts, document="d")
    assert (again.new, again.existing, again.unknown_token, again.removed) == (0, 4, 3, 0)
    assert "left out" not in caplog.text, "said once"


@pytest.mark.parametrize("text", ODD.values(), ids=ODD)
def test_a_prompt_with_one_is_refused(kv, text):
    for ask in (kv.generate, kv.prefill, lambda prompt: kv.stream(prompt).whole()):
        for prompt in (text, [{"role": "user", "content": text}], TokenIds(kv.tokenize(text))):
            with pytest.raises(ConfigError, match=f"the prompt has the token {names(text)}"):
                ask(prompt)
    with pytest.raises(ConfigError, match="the prompt has the token"):
        kv.generate(text, method="full")
    assert len(kv.generate("hello", max_new_tokens=4).token_ids) == 4


def test_a_sink_with_one_is_refused(kv):
    for call in (
        lambda: kv.precompute(CHUNKS, sink="[PAD] Read this."),
        lambda: kv.generate(CHUNKS[0], sink="[PAD] Read this."),
    ):
        with pytest.raises(ConfigError, match=r"the sink '\[PAD\] Read this.' has the token"):
            call()


def test_what_a_retriever_named_is_explained(kv):
    odd = ODD["a special token"] + " " + CHUNKS[3]
    kv.precompute([odd, *CHUNKS[:2]])
    kv.prefetch([odd, CHUNKS[0]])
    kv.wait()
    cut = odd.replace("[PAD] ", "")
    report = kv.generate(f"{CHUNKS[0]}\n\n{cut}\n\nWhat?", max_new_tokens=1).report
    assert [miss.reason for miss in report.misses] == ["unknown_token"]
    assert not report.misses[0].stored_next
    kv.wait()


def test_served(kv):
    with TestClient(make_app(ServeConfig(), {"default": kv})) as client:
        body = chat(messages=[{"role": "user", "content": ODD["a special token"]}])
        for stream in (False, True):
            answer = client.post(CHAT, json={**body, "stream": stream})
            assert "[PAD]" in refused(answer, 400, code="invalid_value")
            answer = client.post(TEXT, json={"prompt": [5, 600], "stream": stream})
            assert "[PAD]" in refused(answer, 400, code="invalid_value")
        texts = [CHUNKS[0], *ODD.values()]
        report = client.post("/v1/chunks", json={"texts": texts}).json()["report"]
        assert (report["new"], report["unknown_token"]) == (1, 3)


def test_healing_of_chunks_of_another_model(kv, tmp_path, caplog):
    """A chunk is known in the store, and another model has its tokens."""
    odd = ODD["an added word"]
    larger = random_model(LlamaConfig(**{**SIZE, "vocab_size": 603, "num_hidden_layers": 2}))
    with RagKV(larger, kv.tokenizer, store=tmp_path) as other:
        assert other.precompute([odd, *CHUNKS[:2]]).new == 3
    with RagKV(kv.loaded, store=tmp_path) as own:
        for _ in range(3):
            own.prefetch([CHUNKS[0], odd])
            own.wait()
        assert own.generate("hello", max_new_tokens=1).token_ids
    assert "failed" not in caplog.text


def test_a_call_that_the_model_cannot_open(kv):
    """Of tokens that may open a call beside a schema, those are allowed that the model has."""
    constraint = SchemaConstraint(
        {"type": "object"},
        kv.tokenizer,
        vocabulary=600,
        ends=(1,),
        begin=0,
        unless=("<tool_call>", "<function"),
    )
    scores = constraint(torch.zeros(1, 0, dtype=torch.long), torch.zeros(1, 600))
    (opening,) = kv.tokenizer("<function", add_special_tokens=False)["input_ids"][:1]
    assert scores[0, opening] == 0
    assert scores.isneginf().any()
