"""Decoding over transformers' static cache: the same tokens, compiled once."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tiny import FAMILIES, some_chunks, tiny_model, tiny_tokenizer
from torch._dynamo.utils import counters
from transformers import CompileConfig, PreTrainedModel
from transformers.cache_utils import StaticCache

from ragkv import DecodeConfig, RagKV, StoreConfig
from ragkv.decode import static
from ragkv.decode.generate import draw
from ragkv.errors import ConfigError
from ragkv.model.loaded import LoadedModel
from ragkv.select import method_names

Make = Callable[..., RagKV]
CHUNKS = some_chunks(4, 30)
OVER = {"cache_implementation": "static"}


def prompt_of(*chunks: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": "\n\n".join(chunks) + "\n\nWhat does it say?"}]


PROMPT = prompt_of(*CHUNKS)


@pytest.fixture
def make(make_engine: Make) -> Make:
    """An engine that knows the chunks, and whose answers are long."""

    def made(*args: Any, **kwargs: Any) -> RagKV:
        engine = make_engine(*args, **kwargs)
        engine.precompute(CHUNKS)
        engine.model.generation_config.eos_token_id = None
        return engine

    return made


def kept(engine: RagKV) -> StaticCache:
    return static._kept[engine.model].cache


def shared() -> list[RagKV]:
    model = tiny_model()
    return [RagKV(model, tiny_tokenizer(), store=":memory:") for _ in range(2)]


def assert_shared_and_freed(engines: list[RagKV]) -> None:
    assert kept(engines[0]) is kept(engines[1])
    keys = weakref.ref(kept(engines[0]).layers[0].keys)
    for engine in engines:
        engine.close()
    gc.collect()
    assert keys() is None


# ---- uncompiled, as on a CPU


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_says_the_same(make: Make, family: str) -> None:
    engine = make(family, store=StoreConfig(":memory:", prefix_bytes=0))
    for chunks, ratio in ((CHUNKS, 0.2), (CHUNKS[:1], 0.0), (CHUNKS[::-1], 1.0)):
        settings = {"recompute_ratio": ratio, "repair_ahead": False, "max_new_tokens": 24}
        expected = engine.generate(prompt_of(*chunks), **settings)
        found = engine.generate(prompt_of(*chunks), **settings, **OVER)
        assert found.token_ids == expected.token_ids
        assert found.report.positions == expected.report.positions


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_the_rows_are_those_that_were_repaired(make: Make, family: str) -> None:
    engine = make(family)
    engine.generate(PROMPT, recompute_ratio=0.3, max_new_tokens=1, **OVER)
    rows = engine.prefill(PROMPT, recompute_ratio=0.3)
    length = len(rows.token_ids)
    for layer, static_layer in zip(rows.cache.layers, kept(engine).layers, strict=True):
        there = min(length, static_layer.keys.shape[2])
        for name in ("keys", "values"):
            ours = getattr(layer, name)[:, :, length - there : length]
            torch.testing.assert_close(getattr(static_layer, name)[:, :, :there], ours)


@pytest.mark.parametrize("method", [name for name in method_names() if "clip" not in name])
def test_every_method(make: Make, method: str) -> None:
    engine = make()
    if method == "ape":
        with pytest.raises(ConfigError, match="overlap"):
            engine.generate(PROMPT, method=method, **OVER)
        return
    engine.precompute(CHUNKS, method=method)
    settings = {"method": method, "repair_ahead": False, "max_new_tokens": 8}
    expected = engine.generate(PROMPT, **settings).token_ids
    assert engine.generate(PROMPT, **settings, **OVER).token_ids == expected


def test_nothing_is_repaired_while_the_answer_is_drawn(make: Make) -> None:
    engine = make()
    settings = {"recompute_ratio": 0.2, "max_new_tokens": 30, "repair_ahead": True}
    assert engine.generate(PROMPT, **settings).report.ahead_tokens > 0
    assert engine.generate(PROMPT, **settings, **OVER).report.ahead_tokens == 0


@pytest.mark.parametrize("method", ["query", "full"])
def test_sampling_streaming_and_stopping(make: Make, method: str) -> None:
    engine = make()
    settings = {"max_new_tokens": 20, "method": method, "repair_ahead": False}
    sampled = {"temperature": 1.2, "seed": 3, "top_k": 40, **settings}
    answer = engine.generate(PROMPT, **settings)
    for given in (sampled, {**settings, "stop": answer.text[6:9]}):
        expected = engine.generate(PROMPT, **given)
        assert engine.generate(PROMPT, **given, **OVER).token_ids == expected.token_ids
        stream = engine.stream(PROMPT, **given, **OVER)
        assert "".join(stream) == expected.text
    ends = {"stop_token_ids": [answer.token_ids[4]], **settings}
    expected = engine.generate(PROMPT, **ends)
    assert len(expected.token_ids) <= 5
    assert engine.generate(PROMPT, **ends, **OVER).token_ids == expected.token_ids


def test_a_stream_that_is_left_leaves_nothing_behind(make: Make) -> None:
    engine = make()
    expected = engine.generate(PROMPT, repair_ahead=False, max_new_tokens=12).token_ids
    with engine.stream(PROMPT, max_new_tokens=300, **OVER) as stream:
        next(iter(stream))
    assert engine.generate(PROMPT, max_new_tokens=12, **OVER).token_ids == expected
    assert not engine.model._forward_hooks
    assert not engine.model._forward_pre_hooks


def test_an_error_leaves_nothing_behind(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make()
    expected = engine.generate(PROMPT, repair_ahead=False, max_new_tokens=12).token_ids
    with monkeypatch.context() as patch:
        patch.setattr(static, "_copy", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.generate(PROMPT, **OVER)
    assert not engine.model._forward_hooks
    assert not engine.model._forward_pre_hooks
    assert engine.generate(PROMPT, max_new_tokens=12, **OVER).token_ids == expected


def test_chunks_from_a_disk_are_loaded_before_they_are_copied(make: Make, tmp_path: Any) -> None:
    expected = make(store=str(tmp_path)).generate(PROMPT, repair_ahead=False, max_new_tokens=12)
    again = make(store=str(tmp_path))
    found = again.generate(PROMPT, max_new_tokens=12, **OVER)
    assert found.token_ids == expected.token_ids
    assert found.report.reused_tokens > 0


def test_the_cache_is_kept_until_something_does_not_fit(make: Make) -> None:
    engine = make()
    engine.generate(PROMPT, max_new_tokens=2, **OVER)
    first = kept(engine)
    assert first.layers[0].max_cache_len == 1024
    engine.generate(prompt_of(CHUNKS[0]), max_new_tokens=2, **OVER)
    engine.generate(PROMPT, method="full", max_new_tokens=2, **OVER)
    assert kept(engine) is first
    engine.generate(PROMPT, max_new_tokens=1000, stop_token_ids=range(600), **OVER)
    assert kept(engine).layers[0].max_cache_len == 2048
    engine.model.double()
    engine.precompute(CHUNKS)
    engine.generate(PROMPT, max_new_tokens=2, **OVER)
    assert kept(engine).layers[0].keys.dtype == torch.float64


def test_the_models_config_and_positions_say_how_large_it_is(make: Make) -> None:
    engine = make()
    stops = {"stop_token_ids": range(600)}
    engine.generate(PROMPT, max_new_tokens=3000, **stops, **OVER)
    assert kept(engine).layers[0].max_cache_len == 4096
    tokens = len(engine.prefill(PROMPT).token_ids)
    engine.model.generation_config.max_cache_len = 700
    static.release(engine.model)
    engine.generate(PROMPT, max_new_tokens=700 - tokens, **stops, **OVER)
    assert kept(engine).layers[0].max_cache_len == 700
    engine.model.generation_config.max_cache_len = None
    engine.model.config.max_position_embeddings = 1500
    engine.generate(PROMPT, max_new_tokens=1200 - tokens, **stops, **OVER)
    assert kept(engine).layers[0].max_cache_len == 1500


def test_a_cache_that_was_repaired_before(make: Make) -> None:
    """As in evaluation: no pass stands for the first call, which is ordinary."""
    engine = make()
    found = []
    for config in (DecodeConfig(12), DecodeConfig(12, **OVER)):
        prefilled = engine.prefill(PROMPT, repair_ahead=False)
        prefilled.cache.crop(-1)
        ids = np.asarray(prefilled.token_ids, dtype=np.int32)
        with engine.turn():
            found.append(draw(engine.loaded, ids, prefilled.cache, config).token_ids)
    assert found[0] == found[1]
    overlapping = engine.prefill(PROMPT, method="ape").cache
    overlapping.crop(-1)
    with engine.turn(), pytest.raises(RuntimeError, match="overlap"):
        draw(engine.loaded, ids, overlapping, config)


def test_engines_of_one_model_share_it_and_closing_frees_it() -> None:
    engines = shared()
    for engine in engines:
        engine.generate(PROMPT, max_new_tokens=2, **OVER)
    assert_shared_and_freed(engines)


def test_it_is_used_under_the_models_lock_alone(make: Make) -> None:
    engine = make()
    with pytest.raises(RuntimeError, match="lock"):
        static.static_cache(engine.loaded, engine.loaded.architecture, 8)


def test_requests_inside_and_outside_of_inference_mode(make: Make) -> None:
    engine = make()
    expected = engine.generate(PROMPT, repair_ahead=False, max_new_tokens=8).token_ids
    with torch.inference_mode():
        assert engine.generate(PROMPT, max_new_tokens=8, **OVER).token_ids == expected
    assert engine.generate(PROMPT, max_new_tokens=8, **OVER).token_ids == expected


def test_a_model_without_reuse_gets_transformers_own(make_engine: Make) -> None:
    engine = make_engine()
    expected = engine.generate(PROMPT, max_new_tokens=8, method="full").token_ids
    bare = LoadedModel(model=engine.model, tokenizer=engine.tokenizer, name="", unsupported="bare")
    seen = []
    hook = engine.model.register_forward_pre_hook(
        lambda _, __, given: seen.append(type(given["past_key_values"])), with_kwargs=True
    )
    with RagKV(bare, store=":memory:") as without:
        assert without.generate(PROMPT, max_new_tokens=8, **OVER).token_ids == expected
    hook.remove()
    assert set(seen) == {StaticCache}


@pytest.mark.parametrize("value", ["dynamic", "hybrid", 1, True, ""])
def test_other_caches_are_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="cache_implementation"):
        DecodeConfig(cache_implementation=value)  # type: ignore[arg-type]


# ---- compiled, on a CPU: traced and not translated


@pytest.fixture
def compiled(make: Make) -> Iterator[Callable[..., RagKV]]:
    """``compiled(family, backend="eager")``: an engine whose steps transformers compiles."""
    torch._dynamo.reset()
    counters.clear()

    def made(family: str = "llama", backend: Any = "eager", **kwargs: Any) -> RagKV:
        engine = make(family, **kwargs)
        compile_all(engine.model, backend)
        return engine

    yield made
    torch._dynamo.reset()


def compile_all(model: PreTrainedModel, backend: Any) -> None:
    config = CompileConfig(backend=backend, mode=None)
    config._compile_all_devices = True
    model.generation_config.compile_config = config


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


ALONE = {"repair_ahead": False, "max_new_tokens": 16}


@pytest.mark.parametrize(
    ("family", "backend"),
    [("llama", "eager"), ("llama", "aot_eager"), ("gemma3", "eager"), ("mistral-window", "eager")],
)
def test_compiled_steps_say_the_same_and_are_compiled_once(
    compiled: Callable[..., RagKV], family: str, backend: str
) -> None:
    engine = compiled(family, backend)
    prompts = [prompt_of(*CHUNKS[:count]) for count in (0, 1, 4, 2, 0, 3)]
    expected = [engine.generate(prompt, **ALONE).token_ids for prompt in prompts]
    assert graphs() == 0
    made = []
    for prompt, tokens in zip(prompts, expected, strict=True):
        assert engine.generate(prompt, **ALONE, **OVER).token_ids == tokens
        made.append(graphs())
    assert made[0] > 0
    if family == "llama":  # a window's layer is another once it is full
        assert made[0] == 1
    assert made[2:] == made[2:3] * 4
    assert counters["graph_break"] == {}


def test_passes_between_compiled_steps_change_neither(
    compiled: Callable[..., RagKV], each_implementation: None
) -> None:
    """Passes switch the attention, hook the last layer, and give layers another product."""
    engine, plain = compiled(), compiled()
    plain.model.generation_config.compile_config = None
    for ratio in (0.0, 0.2, 0.7, 1.0):
        settings = {"recompute_ratio": ratio, **ALONE}
        tokens = plain.generate(PROMPT, **settings).token_ids
        assert engine.generate(PROMPT, **settings, **OVER).token_ids == tokens
        assert engine.generate(PROMPT, **settings).token_ids == tokens
        found = engine.prefill(PROMPT, recompute_ratio=ratio).logits
        torch.testing.assert_close(found, plain.prefill(PROMPT, recompute_ratio=ratio).logits)
    assert graphs() == 1


def test_full_prefill_and_repair_share_what_is_compiled(compiled: Callable[..., RagKV]) -> None:
    engine = compiled()
    for method in ("query", "full", "query", "prefix"):
        settings = {"method": method, **ALONE}
        expected = engine.generate(PROMPT, **settings).token_ids
        assert engine.generate(PROMPT, **settings, **OVER).token_ids == expected
    assert graphs() == 1


def test_steps_under_another_attention_are_other_steps(compiled: Callable[..., RagKV]) -> None:
    """Code that was compiled under one is not used under the other, there and back."""
    engine = compiled()
    expected = engine.generate(PROMPT, **ALONE).token_ids
    assert engine.generate(PROMPT, **ALONE, **OVER).token_ids == expected
    for attention in ("eager", "sdpa"):
        engine.model.set_attn_implementation(attention)
        assert engine.generate(PROMPT, **ALONE, **OVER).token_ids == expected
        assert graphs() == 2


def test_hooks_of_a_pass_are_not_in_what_is_compiled(compiled: Callable[..., RagKV]) -> None:
    """torch compiles hooks along, and does not look again whether they are there."""
    engine = compiled()
    seen: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        model = engine.model
        seen.extend(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
        return graph.forward

    compile_all(engine.model, backend)
    engine.generate(PROMPT, **ALONE, **OVER)
    assert graphs() == 1
    assert set(seen) == {0}


def test_what_was_compiled_does_not_hold_the_cache(compiled: Callable[..., RagKV]) -> None:
    engines = shared()
    compile_all(engines[0].model, "aot_eager")
    for engine in engines:
        engine.generate(PROMPT, **ALONE, **OVER)
    assert graphs() == 1
    assert_shared_and_freed(engines)


def test_graphs_that_are_replayed_where_they_were_captured(
    compiled: Callable[..., RagKV],
) -> None:
    """What stands for a CUDA graph here keeps what it was first called with, as that does."""
    engine = compiled()
    captures = []

    def capturing(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        memory: list[torch.Tensor] = []
        given_out: list[torch.Tensor] = []
        layers = kept(engine).layers
        lasting = {p.data_ptr() for p in engine.model.parameters()}
        lasting |= {part.data_ptr() for layer in layers for part in (layer.keys, layer.values)}
        lasting |= {layer.cumulative_length.data_ptr() for layer in layers}
        captures.append(graph)

        def replay(*given: torch.Tensor) -> list[torch.Tensor]:
            if not memory:
                memory.extend(x if x.data_ptr() in lasting else x.clone() for x in given)
            for ours, theirs in zip(memory, given, strict=True):
                if ours.data_ptr() not in lasting:
                    ours.copy_(theirs)
            out = graph.forward(*memory)
            if not given_out:
                given_out.extend(part.clone() for part in out)
            for ours, new in zip(given_out, out, strict=True):
                ours.copy_(new)
            return list(given_out)

        return replay

    for chunks in (CHUNKS[:1], CHUNKS, CHUNKS[2:], CHUNKS):
        for method in ("query", "full"):
            settings = {"method": method, **ALONE}
            expected = engine.generate(prompt_of(*chunks), **settings).token_ids
            compile_all(engine.model, capturing)
            found = engine.generate(prompt_of(*chunks), **settings, **OVER).token_ids
            assert found == expected
    assert len(captures) == 1


def test_who_decides_how_steps_are_compiled(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph for each length, as layers with a window would have it, is none."""
    plain, windowed = make("llama"), make("gemma3")
    assert static.compile_config_for(windowed.loaded, None) is None
    monkeypatch.setattr(LoadedModel, "device", torch.device("cuda"))
    assert static.compile_config_for(plain.loaded, None) is None
    chosen = static.compile_config_for(windowed.loaded, None)
    assert chosen is not None
    assert chosen.mode == "default"
    own = CompileConfig(dynamic=True)
    assert static.compile_config_for(windowed.loaded, own) is own
    monkeypatch.undo()


def test_disable_compile_is_heeded(compiled: Callable[..., RagKV]) -> None:
    engine = compiled()
    engine.model.generation_config.disable_compile = True
    expected = engine.generate(PROMPT, **ALONE).token_ids
    assert engine.generate(PROMPT, **ALONE, **OVER).token_ids == expected
    assert graphs() == 0


def test_a_thread_of_each_answer_compiles_nothing_again(compiled: Callable[..., RagKV]) -> None:
    engine = compiled()
    expected = engine.generate(PROMPT, **ALONE).text
    for _ in range(3):
        assert "".join(engine.stream(PROMPT, **ALONE, **OVER)) == expected
    assert graphs() == 1


def test_a_larger_cache_is_compiled_for(compiled: Callable[..., RagKV]) -> None:
    engine = compiled()
    expected = engine.generate(PROMPT, **ALONE).token_ids
    engine.generate(PROMPT, **ALONE, **OVER)
    for room in (2000, 4000):
        engine.model.generation_config.max_cache_len = room
        static.release(engine.model)
        assert engine.generate(PROMPT, **ALONE, **OVER).token_ids == expected
    static.release(engine.model)
    before = graphs()
    assert engine.generate(PROMPT, **ALONE, **OVER).token_ids == expected
    assert graphs() == before


def test_other_threads_call_the_model_beside_compiled_steps(
    compiled: Callable[..., RagKV],
) -> None:
    engine = compiled()
    expected = engine.generate(PROMPT, **ALONE).token_ids
    other = torch.randint(2, 600, (1, 20))
    alone = engine.model(input_ids=other).logits
    over, found = threading.Event(), []

    def calls() -> None:
        with torch.no_grad():
            while not over.is_set():
                found.append(torch.equal(engine.model(input_ids=other).logits, alone))

    thread = threading.Thread(target=calls)
    thread.start()
    try:
        for _ in range(4):
            assert engine.generate(PROMPT, **ALONE, **OVER).token_ids == expected
    finally:
        over.set()
        thread.join()
    assert found
    assert all(found)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_cuda_graphs_say_the_same(make_engine: Make, family: str) -> None:
    """transformers' own choice of how to compile: CUDA graphs. From several threads, too."""
    engine = make_engine(family, device="cuda")
    engine.precompute(CHUNKS)
    engine.model.generation_config.eos_token_id = None
    for chunks in (CHUNKS[:2], CHUNKS, CHUNKS[:1], CHUNKS):
        expected = engine.generate(prompt_of(*chunks), **ALONE)
        assert engine.generate(prompt_of(*chunks), **ALONE, **OVER).token_ids == expected.token_ids
        assert "".join(engine.stream(prompt_of(*chunks), **ALONE, **OVER)) == expected.text
