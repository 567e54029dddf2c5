"""What the first answer of a process would wait for is done beforehand."""

from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.runnables import RunnableLambda
from langchain_ragkv import ChatRagKV, RagKVRetriever
from llama_index.llms.ragkv import RagKVLLM
from tiny import some_chunks

from ragkv import RagKV, ReuseConfig
from ragkv.chunk import sinks
from ragkv.model import linear
from ragkv.model.implementation import override_implementation

CHUNKS = some_chunks(3)
PROMPT = [{"role": "user", "content": "\n\n".join(CHUNKS) + "\n\nWhat now?"}]


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of what was prepared."""
    found: list[str] = []

    def record(module: Any, name: str) -> None:
        own = getattr(module, name)

        def call(*args: Any, **given: Any) -> Any:
            found.append(name)
            return own(*args, **given)

        monkeypatch.setattr(module, name, call)

    record(linear, "packed_weight")
    record(sinks, "encode_sink")
    return found


WARM: dict[str, Callable[[RagKV], object]] = {
    "itself": RagKV.warm_up,
    "a LangChain model": lambda kv: ChatRagKV(kv=kv).warm_up(),
    "a LangChain retriever": lambda kv: RagKVRetriever(
        retriever=RunnableLambda(lambda _: []), llm=ChatRagKV(kv=kv)
    ).warm_up(),
    "a LlamaIndex model": lambda kv: RagKVLLM(kv=kv).warm_up(),
}


@pytest.mark.parametrize("by", WARM)
def test_the_first_answer_prepares_nothing(make_engine, done, by):
    kv = make_engine()
    with override_implementation("onednn"):
        WARM[by](kv)
        assert set(done) == {"packed_weight", "encode_sink"}
        done.clear()
        kv.precompute(CHUNKS)
        assert kv.generate(PROMPT, max_new_tokens=4).report.tokens.reused
    assert not done


def test_it_takes_no_names_and_keeps_nothing(make_engine):
    kv = make_engine(reuse=ReuseConfig())
    kv.prefetch(CHUNKS)
    kv.warm_up()
    kv.wait()
    assert not any(tier.nbytes for tier in kv.status().tiers)
    report = kv.generate(PROMPT, max_new_tokens=4, on_miss="skip").report
    assert [miss.reason for miss in report.misses] == ["absent"] * 3


def test_an_auxiliary_model_is_loaded(make_engine, auxiliary):
    kv = make_engine()
    kv.warm_up(method="cacheclip", auxiliary_model=auxiliary)
    assert auxiliary in kv._reuse.auxiliaries._corpora


def test_a_model_that_is_served_by_full_prefill(make_engine):
    kv = make_engine("gpt-oss", on_unsupported="full")
    kv.warm_up()
    assert kv.generate(PROMPT, max_new_tokens=2).token_ids
