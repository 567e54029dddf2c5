"""Answers of vLLM itself behind ragkv: those of ragkv alone, token for token."""

from __future__ import annotations

import pydoc_data.topics
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from tiny import ask
from vllm_ragkv.decoder import VllmDecoder
from vllm_server import VERSIONS, VLLM, installed_python

from ragkv import RagKV
from ragkv.model.default_model import default_model_folder
from ragkv.select.rules.query import METHOD

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
WITHOUT_COPIES = replace(METHOD, lookup=None)
TOPICS = [" ".join(text.split()[:150]) for text in pydoc_data.topics.topics.values()]
CHUNKS = [text for text in TOPICS if len(text) > 600][:30]
QUESTIONS = 40
NEAR_TIE = 1e-3
"""Nats between the two most probable tokens, below which rounding decides."""


def prompts() -> Iterator[list[dict[str, str]]]:
    rng = random.Random(0)
    for number in range(QUESTIONS):
        rng.shuffle(CHUNKS)
        topic = CHUNKS[number % 5].split()[0]
        yield ask(CHUNKS[:5], f"\n\nAnswer from the text above. What does it say of {topic}?")


@pytest.fixture(scope="module", params=VERSIONS[-1:])
def server(request, tmp_path_factory):
    if not installed_python(request.param).exists():
        pytest.skip(f"vLLM {request.param} is not installed: make vllm")
    server = VLLM(request.param, default_model_folder(), tmp_path_factory.mktemp("kv") / "kv")
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def engines(server):
    alone = RagKV(store=":memory:", dtype="float32")
    decoder = VllmDecoder(f"http://127.0.0.1:{server.port}", server.folder)
    remote = RagKV(alone.loaded, store=":memory:", decoder=decoder)
    with alone, remote:
        for kv in (alone, remote):
            kv.precompute(CHUNKS)
        yield alone, remote
    decoder.close()


@pytest.mark.parametrize("ratio", [0.2, 1.0])
def test_forty_questions(engines, ratio):
    alone, remote = engines
    asked = {"recompute_ratio": ratio, "max_new_tokens": 24, "history": False, "logprobs": 2}
    ties = 0
    for prompt in prompts():
        own = alone.generate(prompt, method=WITHOUT_COPIES, drafts=False, **asked)
        answer = remote.generate(prompt, method=WITHOUT_COPIES, **asked)
        assert answer.report.tokens.handed_over > 500
        assert not answer.report.not_loaded
        pairs = enumerate(zip(own.token_ids, answer.token_ids, strict=False))
        apart = next((at for at, (one, other) in pairs if one != other), None)
        if apart is None:
            assert own.text == answer.text
        else:
            (_, first), (_, second) = own.logprobs[apart].top
            assert first - second < NEAR_TIE, f"{own.text!r} is not {answer.text!r}"
            ties += 1
    assert ties <= QUESTIONS // 10
