"""What an engine must not take from others, or from itself: locks, caches, named chunks, verdicts."""

import copy
import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from served import model_held
from tiny import LONGROPE, SIZE, some_chunks, tiny_model, tiny_tokenizer
from tokenizers import Tokenizer, normalizers
from transformers import AutoModelForCausalLM, LlamaConfig, Olmo2Config, PreTrainedModel

from ragkv import RagKV, StoreConfig
from ragkv.attend.interface import pass_suspended, run_pass, running_pass
from ragkv.engine import verify as check
from ragkv.errors import ConfigError, UnsupportedModelError

CHUNKS = some_chunks(3)
PROMPT = [{"role": "user", "content": "\n\n".join(CHUNKS) + "\n\nWhat now?"}]


def unlisted() -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(Olmo2Config(**SIZE)).eval()


def test_named_chunks_are_remembered_until_they_are_stored(make_engine):
    engine = make_engine()
    engine.prefetch(CHUNKS)
    engine.wait()
    engine.prefill(PROMPT, on_miss="skip")
    assert engine.prefill(PROMPT).report.tokens.reused == 0
    engine.wait()
    assert engine.prefill(PROMPT, recompute_ratio=0.0).report.tokens.reused > 100


def test_naming_chunks_does_not_wait_for_the_model(make_engine):
    engine = make_engine()
    with ThreadPoolExecutor(1) as pool, model_held(engine):
        naming = pool.submit(engine.prefetch, CHUNKS, sink="A sink that nobody has encoded yet.")
        naming.result(timeout=30)


def test_a_chunk_without_a_token_is_skipped():
    tokenizer = copy.deepcopy(tiny_tokenizer())
    raw: Tokenizer = tokenizer.backend_tokenizer
    raw.normalizer = normalizers.Replace("\u200b", "")
    with RagKV(tiny_model(), tokenizer, store=":memory:") as engine:
        report = engine.precompute([*CHUNKS, "\u200b" * 20])
        assert (report.new, report.skipped) == (3, 1)
        assert engine.precompute([*CHUNKS, "\u200b" * 20]).existing == 3


def test_a_ratio_is_for_the_model_as_it_is_now(make_engine):
    engine = make_engine()
    before = engine.info.fingerprint
    with torch.no_grad():
        engine.loaded.model.model.layers[0].mlp.up_proj.weight.mul_(1.01)
    with pytest.raises(ConfigError, match="calibrated for another"):
        engine.prefill(PROMPT, calibrated_for=before)
    assert engine.prefill(PROMPT, calibrated_for=engine.info.fingerprint).report.tokens.prompt


def test_the_callers_autocast_has_no_part_in_the_check():
    with (
        torch.autocast("cpu", torch.bfloat16),
        RagKV(unlisted(), tiny_tokenizer(), store=":memory:") as engine,
    ):
        assert not engine.info.unsupported


def test_want_of_memory_is_no_verdict_on_a_model(monkeypatch):
    def fails(*_):
        raise torch.OutOfMemoryError("for now")

    monkeypatch.setattr(check, "check_model", fails)
    with pytest.raises(torch.OutOfMemoryError):
        RagKV(unlisted(), tiny_tokenizer(), store=":memory:", on_unsupported="full")


def test_a_pass_refuses_what_would_change_its_scores(make_engine, monkeypatch):
    engine = make_engine()
    engine.precompute(CHUNKS)
    layer = engine.loaded.model.model.layers[1].self_attn
    own, bias = layer.forward, {"position_bias": torch.zeros(1)}
    monkeypatch.setattr(layer, "forward", lambda *args, **given: own(*args, **given, **bias))
    with pytest.raises(UnsupportedModelError, match="Layer 1 attends with position_bias"):
        engine.prefill(PROMPT, recompute_ratio=0.2)


def test_the_innermost_pass_describes_a_call(make_engine):
    config = make_engine().loaded.model.config
    module = torch.nn.Module()
    module.config = config
    own = config._attn_implementation
    with run_pass(config, print, "outer"):
        with run_pass(config, print, "inner"):
            assert running_pass(module) == "inner"
            with pass_suspended(config):
                assert config._attn_implementation == own
            assert config._attn_implementation != own
        assert running_pass(module) == "outer"
    assert config._attn_implementation == own


def test_a_step_that_fails_leaves_the_model_as_it_was(make_engine):
    """A step is a pass: it ends with the error, whatever it repairs."""
    engine = make_engine(store=StoreConfig(":memory:", history_bytes=0))
    engine.loaded.model.generation_config.eos_token_id = None
    engine.precompute(CHUNKS)
    settings: dict[str, Any] = {"recompute_ratio": 0.1, "max_new_tokens": 40}
    expected = engine.generate(PROMPT, **settings)
    assert expected.report.tokens.ahead
    model: Any = engine.loaded.model
    calls = itertools.count()

    def fails(*_):
        if next(calls) > 5:
            raise RuntimeError("in layer 2")

    hook = model.model.layers[2].register_forward_pre_hook(fails)
    with pytest.raises(RuntimeError, match="in layer 2"):
        engine.generate(PROMPT, **settings)
    hook.remove()
    assert model.config._attn_implementation == "sdpa"
    assert engine.generate(PROMPT, **settings).token_ids == expected.token_ids


def test_a_chunk_beyond_longropes_switch_is_told_once():
    torch.manual_seed(0)
    config = LlamaConfig(**{**SIZE, "rope_parameters": LONGROPE})
    model = AutoModelForCausalLM.from_config(config).eval()
    with RagKV(model, tiny_tokenizer(), store=":memory:") as engine:
        engine.precompute(CHUNKS[1:])
        engine.precompute(CHUNKS[:1], expires_in=0.001)
        time.sleep(0.01)
        misses = engine.prefill(PROMPT).report.misses
    assert sorted(miss.reason for miss in misses) == ["expired", "positions", "positions"]


def test_a_chunk_that_no_prompt_can_hold_is_left_out(make_engine, caplog):
    engine, (short, *_) = make_engine(), some_chunks(1)
    long = " ".join(f"word{number}" for number in range(4096))
    report = engine.precompute([long, short], document="book")
    assert (report.new, report.too_long, report.skipped) == (1, 1, 0)
    assert not engine.contains(long)
    assert "4096 positions" in caplog.text
    assert engine.precompute([long]).too_long == 1
