"""What transformers renames: an argument nobody reads, a hook nobody calls. An error, never an answer."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from threads import each_in_a_thread
from tiny import FAMILIES, some_chunks, tiny_model, tiny_tokenizer
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import DynamicCache

from ragkv import RagKV, StoreConfig
from ragkv.attend import interface
from ragkv.attend.forward import SubsetPass, ordinary_forward
from ragkv.errors import UnsupportedModelError
from ragkv.model import calls
from ragkv.model.architecture import KeyProbe
from ragkv.splice.buffer import SplicedCache
from ragkv_bench.speed.bound import timed_prefill

Make = Callable[..., RagKV]
Patch = pytest.MonkeyPatch
CHUNKS = some_chunks(3)
PROMPT = [{"role": "user", "content": "\n\n".join(CHUNKS) + "\n\nWhat does it say?"}]
NO_TREE = StoreConfig(":memory:", history_bytes=0)


@pytest.fixture
def kv(make_engine: Make) -> RagKV:
    engine = make_engine(store=NO_TREE)
    engine.loaded.model.generation_config.eos_token_id = None
    engine.precompute(CHUNKS)
    return engine


def rename_cache(patch: Patch) -> None:
    """The model takes the argument as one of **kwargs, and looks at none of them."""
    patch.setattr(calls, "_name", lambda _: "former_name_of_the_cache")


def rename_attention(patch: Patch) -> None:
    """The model attends by another function than ragkv's, and without a mask."""
    name = "not ragkv's"
    AttentionInterface.register(name, lambda _, query, *__, **___: (query.transpose(1, 2), None))
    AttentionMaskInterface.register(name, lambda *_, **__: None)
    patch.setattr(interface, "register_over", lambda *_: name)


@pytest.mark.parametrize("rename", [rename_cache, rename_attention])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_repaired_prompt(make_engine, family, rename, monkeypatch):
    engine = make_engine(family, store=NO_TREE)
    engine.precompute(CHUNKS)
    expected = engine.generate(PROMPT, max_new_tokens=4).token_ids
    with monkeypatch.context() as patch:
        rename(patch)
        for ratio in (0.0, 0.2, 1.0):
            with pytest.raises(UnsupportedModelError, match=r"instead of.*transformers 5"):
                engine.prefill(PROMPT, recompute_ratio=ratio)
            with pytest.raises(UnsupportedModelError, match="on_unsupported='full'"):
                engine.generate(PROMPT, recompute_ratio=ratio, max_new_tokens=4)
        with pytest.raises(UnsupportedModelError), engine.stream(PROMPT) as stream:
            list(stream)
    assert engine.generate(PROMPT, max_new_tokens=4).token_ids == expected


@pytest.mark.parametrize("method", ["cacheblend", "cacheclip", "cachecraft"])
@pytest.mark.parametrize("rename", [rename_cache, rename_attention])
def test_passes_of_methods(make_engine, method, rename, monkeypatch):
    engine = make_engine(store=NO_TREE)
    engine.precompute(CHUNKS, method="query" if method == "cacheclip" else method)
    rename(monkeypatch)
    with pytest.raises(UnsupportedModelError, match="instead of"):
        engine.prefill(PROMPT, method=method, recompute_ratio=0.3)


@pytest.mark.parametrize("rename", [rename_cache, rename_attention])
def test_steps_of_one_answer_and_of_several(kv, rename, monkeypatch):
    """The prompts are computed before the name changes."""
    for count in (1, 3):
        wrong: list[str] = []

        def ask(number: int, wrong: list[str] = wrong) -> None:
            with kv.stream(f"{CHUNKS[number]} Say more.", max_new_tokens=400) as stream:
                try:
                    for _ in stream:
                        if number == 0:
                            rename(monkeypatch)
                except UnsupportedModelError as error:
                    wrong.append(str(error))

        each_in_a_thread(ask, range(count))
        assert len(wrong) == count
        monkeypatch.undo()


def test_ingestion_and_full_prefill(kv, monkeypatch):
    rename_cache(monkeypatch)
    for wrong in (
        lambda: kv.precompute(["A chunk that is new."]),
        lambda: kv.precompute(["Another one."], sink="Behind this"),
        lambda: kv.generate("No chunk in it", max_new_tokens=3),
        lambda: kv.generate(PROMPT, method="full", max_new_tokens=3),
        lambda: KeyProbe(kv.loaded.model),
    ):
        with pytest.raises(UnsupportedModelError, match="instead of"):
            wrong()
    assert not kv.contains("A chunk that is new.")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_that_keeps_its_own_attention_and_masks(make_engine, family, monkeypatch):
    engine = make_engine(family, store=NO_TREE)
    engine.precompute(CHUNKS)
    monkeypatch.setattr(interface, "register_over", lambda before, _: before)
    for ratio in (0.2, 1.0):
        with pytest.raises(UnsupportedModelError, match="ragkv's attention"):
            engine.generate(PROMPT, recompute_ratio=ratio, max_new_tokens=4)


def test_ordinary_steps_of_a_device(kv, monkeypatch):
    out = kv.prefill(PROMPT)
    assert isinstance(out.cache, SplicedCache)
    ids = np.array([*out.token_ids, 5], dtype=np.int32)
    subset = SubsetPass(ids, np.array([len(ids) - 1]), out.cache)
    rename_cache(monkeypatch)
    with pytest.raises(UnsupportedModelError, match="rows in the cache"):
        ordinary_forward(kv.loaded, subset)


@pytest.mark.parametrize("method", ["query", "full"])
def test_the_loop_of_generate(kv, method, monkeypatch):
    generate = kv.loaded.model.generate

    def without(*args: Any, custom_generate: object, **given: Any) -> Any:
        return generate(*args, **given)

    monkeypatch.setattr(kv.loaded.model, "generate", without)
    with pytest.raises(UnsupportedModelError, match="ragkv's loop"):
        kv.generate(PROMPT, method=method, max_new_tokens=3)


def test_a_seed_of_a_model_without_reuse(monkeypatch):
    model = tiny_model()
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_type": "unknown"}
    with RagKV(model, tiny_tokenizer(), store=":memory:", on_unsupported="full") as engine:
        assert engine.info.unsupported
        assert engine.generate("Hi", max_new_tokens=3, temperature=1.0, seed=1).token_ids
        generate = model.generate

        def without(*args: Any, custom_generate: object, **given: Any) -> Any:
            return generate(*args, **given)

        monkeypatch.setattr(model, "generate", without)
        with pytest.raises(UnsupportedModelError, match="ragkv's sampling"):
            engine.generate("Hi", max_new_tokens=3, temperature=1.0, seed=1)


def test_attention_that_is_timed(kv, monkeypatch):
    monkeypatch.setattr("ragkv_bench.speed.bound.AttentionInterface.register", lambda *_: None)
    with pytest.raises((UnsupportedModelError, KeyError, AttributeError)):
        timed_prefill(kv.loaded, list(range(5, 40)))


def test_either_name_is_read_and_the_right_one_written(monkeypatch):
    class Older:
        def forward(self, input_ids: Any, past_key_values: Any = None) -> None: ...

    class Newer:
        def forward(self, input_ids: Any, cache: Any = None, **given: Any) -> None: ...

    class Open:
        def forward(self, *args: Any, **given: Any) -> None: ...

    cache: Any = DynamicCache()
    own = next(iter(calls.cache_argument(tiny_model(), cache)))
    names = [next(iter(calls.cache_argument(kind(), cache))) for kind in (Older, Newer, Open)]
    assert names == ["past_key_values", "cache", own]
    assert all(calls.cache_in({name: cache}) is cache for name in (*names, "cache_params"))
    assert calls.cache_in({"use_cache": True}) is None
    monkeypatch.setattr(calls, "_NAMES", ("another",))
    calls._name.cache_clear()
    with pytest.raises(UnsupportedModelError, match="takes no cache"):
        calls.cache_argument(tiny_model(), cache)
    calls._name.cache_clear()
