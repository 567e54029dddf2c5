"""The engine as its user sees it: ingestion, misses, overrides, streams, bad input."""

import json
import logging

import numpy as np
import pytest
import torch
from disk_store import disk_of
from tiny import LONGROPE, SIZE, ask, saved, some_chunks, tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, MambaConfig, OPTConfig, Qwen2Config

from ragkv import RagKV, ReuseConfig, StoreConfig
from ragkv.decode import generate
from ragkv.engine import planner
from ragkv.engine.planner import Planner
from ragkv.errors import (
    ConfigError,
    PromptTooLongError,
    StoreFullError,
    UnknownMethodError,
    UnsupportedModelError,
)
from ragkv.recompute.copy_repair import CopyRepair
from ragkv.select import Grouping, Method

# ---- ingestion


def test_precompute_counts_new_and_existing(make_engine):
    engine = make_engine()
    chunks = some_chunks(3)
    first = engine.precompute([chunks[0], chunks[1], f"  {chunks[0]}\n", "tiny"])
    assert (first.new, first.existing, first.skipped) == (2, 0, 1)
    assert first.tokens > 100
    assert first.bytes > 0
    second = engine.precompute(chunks)
    assert (second.new, second.existing) == (1, 2)
    assert engine.contains(f"\n{chunks[2]} ")
    assert engine.forget(chunks[2])
    assert not engine.forget(chunks[2])
    assert not engine.contains(chunks[2])
    assert engine.prefill(ask(chunks[2:])).report.tokens.reused == 0


def test_a_second_engine_over_the_same_folder_computes_nothing(tmp_path):
    chunks = some_chunks(3)
    with RagKV(tiny_model(), tiny_tokenizer(), store=tmp_path) as one:
        one.precompute(chunks)
        before = one.prefill(ask(chunks)).logits
    with RagKV(tiny_model(), tiny_tokenizer(), store=tmp_path) as two:
        assert two.precompute(chunks).existing == 3
        out = two.prefill(ask(chunks))
        assert out.report.tokens.reused > 100
        torch.testing.assert_close(out.logits, before)


def test_chunks_put_by_another_engine_are_found_without_restart(tmp_path):
    chunks = some_chunks(2)
    with (
        RagKV(tiny_model(), tiny_tokenizer(), store=tmp_path) as server,
        RagKV(tiny_model(), tiny_tokenizer(), store=tmp_path) as ingest,
    ):
        assert server.prefill(ask(chunks)).report.tokens.reused == 0
        ingest.precompute(chunks)
        assert server.prefill(ask(chunks)).report.tokens.reused > 100


def test_a_torn_entry_is_a_counted_miss_and_heals(tmp_path):
    chunks = some_chunks(2)
    with RagKV(tiny_model(), tiny_tokenizer(), store=tmp_path) as engine:
        engine.precompute(chunks)
        before = engine.prefill(ask(chunks), method="full").logits
    for path in tmp_path.rglob("*.safetensors"):
        raw = bytearray(path.read_bytes())
        raw[-5] ^= 1
        path.write_bytes(raw)
    with RagKV(tiny_model(), tiny_tokenizer(), store=tmp_path) as engine:
        torn = engine.prefill(ask(chunks))
        assert {miss.reason for miss in torn.report.misses} == {"checksum"}
        torch.testing.assert_close(torn.logits, before, atol=5e-5, rtol=1e-4)
        engine.wait()
        assert engine.prefill(ask(chunks)).report.tokens.reused > 100


def test_a_full_disk_is_a_typed_error_and_loses_nothing(tmp_path):
    chunks = some_chunks(6)
    with RagKV(tiny_model(), tiny_tokenizer(), store=tmp_path) as engine:
        disk_of(engine).budget = 200_000  # without a limit of the settings nothing is evicted
        with pytest.raises(StoreFullError):
            engine.precompute(chunks)
        kept = [chunk for chunk in chunks if engine.contains(chunk)]
        assert 0 < len(kept) < len(chunks)
        engine.prefetch(chunks)
        out = engine.generate(ask(chunks), max_new_tokens=2)
        engine.wait()
        assert len(out.report.chunks) == len(kept)


# ---- answering


def test_overrides_are_for_one_call(make_engine):
    engine = make_engine(reuse=ReuseConfig(recompute_ratio=0.5))
    chunks = some_chunks(3)
    engine.precompute(chunks)
    assert engine.prefill(ask(chunks), recompute_ratio=0.1).report.effective_ratio < 0.11
    assert engine.prefill(ask(chunks), method="full").report.method == "full"
    assert engine.prefill(ask(chunks)).report.effective_ratio == pytest.approx(0.5, abs=0.01)


def test_stream_gives_the_same_text(make_engine):
    engine = make_engine()
    chunks = some_chunks(2)
    engine.precompute(chunks)
    whole = engine.generate(ask(chunks), max_new_tokens=20)
    stream = engine.stream(ask(chunks), max_new_tokens=20)
    with pytest.raises(RuntimeError):
        _ = stream.completion
    assert "".join(stream) == whole.text == stream.completion.text
    assert stream.completion.token_ids == whole.token_ids
    assert stream.completion.report.ttft_s > 0


def test_an_answer_is_prepared_while_the_device_computes(make_engine, monkeypatch):
    engine, calls = make_engine(), list[str]()
    chunks = some_chunks(3)
    engine.precompute(chunks)

    def note(where, name):
        before = getattr(where, name)

        def noted(*args, **kwargs):
            calls.append(name)
            return before(*args, **kwargs)

        monkeypatch.setattr(where, name, noted)

    note(planner, "repair_forward")
    note(generate, "generation_config")
    note(Planner, "finish")
    note(CopyRepair, "take")
    answer = engine.generate(ask(chunks), max_new_tokens=2)
    assert calls == ["repair_forward", "generation_config", "finish", "take"]
    assert answer.report.steps["recompute"] > 0
    calls.clear()
    engine.prefill(ask(chunks))
    assert calls == ["repair_forward", "finish"]


def test_a_stream_closed_early_ends_the_generation(make_engine):
    engine = make_engine()
    with engine.stream("Some words to begin with", max_new_tokens=100_000) as stream:
        next(stream)
    assert list(stream) == []
    assert engine.generate("Some words", max_new_tokens=2).token_ids


def test_sampling_follows_its_seed(make_engine):
    engine = make_engine()

    def drawn(seed):
        settings = {"temperature": 1.5, "top_p": 0.95, "max_new_tokens": 12}
        return engine.generate("Words", seed=seed, **settings).token_ids

    assert drawn(1) == drawn(1) != drawn(2)
    greedy = engine.generate("Words", max_new_tokens=12).token_ids
    for narrow in ({"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-4}):
        settings = {"temperature": 9.0, "seed": 1, "max_new_tokens": 12, **narrow}
        assert engine.generate("Words", **settings).token_ids == greedy


def test_a_foreign_head_is_in_each_report_and_once_in_the_log(make_engine, caplog):
    engine = make_engine()
    chunks = some_chunks(2)
    engine.precompute(chunks)
    with caplog.at_level(logging.WARNING, "ragkv"):
        first = engine.prefill("No chat template here.\n\n" + "\n\n".join(chunks) + "\n\nWell?")
        second = engine.prefill("No chat template here.\n\n" + "\n\n".join(chunks) + "\n\nSo?")
    assert "head" in first.report.warnings[0]
    assert second.report.warnings == first.report.warnings
    assert len([record for record in caplog.records if "head" in record.message]) == 1


def test_sink_from_a_template_covers_the_prompts_head(make_engine):
    engine = make_engine()
    template = "Use the context.\n-----\n{context}\n-----\nQuestion: {question}"
    sink = engine.sink_from([{"role": "user", "content": template}])
    chunks = some_chunks(2)
    engine.precompute(chunks, sink=sink)
    text = template.format(context="\n\n".join(chunks), question="Why?")
    report = engine.prefill([{"role": "user", "content": text}], sink=sink).report
    assert report.tokens.sink == len(engine.tokenizer(sink)["input_ids"])
    assert report.warnings == ()
    assert report.tokens.reused > 100


def test_the_report_is_plain_data(make_engine):
    engine = make_engine()
    chunks = some_chunks(2)
    engine.precompute(chunks)
    report = engine.generate(ask(chunks), max_new_tokens=3).report.to_dict()
    again = json.loads(json.dumps(report))
    assert again["decode"]["tokens"] == 3
    assert len(again["positions"]) == again["tokens"]["prompt"]
    assert set(again["steps"]) >= {"find", "load", "splice", "select", "recompute", "first_token"}


def test_auto_says_what_it_chose(make_engine, monkeypatch):
    engine = make_engine(reuse=ReuseConfig(recompute_ratio="auto"))
    chunks = some_chunks(3)
    engine.precompute(chunks)
    monkeypatch.setattr("ragkv.select.choose.TARGET", 0.5)
    report = engine.prefill(ask(chunks)).report
    assert report.recompute_ratio == "auto"
    assert "hold 50% of the query's attention" in report.choice
    monkeypatch.setattr("ragkv.select.choose.TARGET", 0.7)
    monkeypatch.setattr("ragkv.select.choose.CEILING", 1.0)
    more = engine.prefill(ask(chunks)).report
    assert report.effective_ratio < more.effective_ratio
    assert json.loads(json.dumps(report.to_dict()))["choice"] == report.choice


def test_a_method_made_of_pieces(make_engine):
    def backwards(scene):
        return np.arange(len(scene.layout.cached), dtype=np.float32)

    engine = make_engine()
    chunks = some_chunks(3)
    engine.precompute(chunks)
    mine = Method("mine", score=backwards, grouping=Grouping(4, 3))
    report = engine.prefill(ask(chunks), method=mine).report
    assert report.method == "mine"
    assert report.chunks[0].recomputed == 0
    assert report.chunks[2].recomputed > report.chunks[1].recomputed


# ---- bad input


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"recompute_ratio": 1.5}, "between 0 and 1"),
        ({"recompute_ratio": -0.1}, "between 0 and 1"),
        ({"recompute_ratio": "much"}, "number"),
        ({"recompute_ratio": True}, "number"),
        ({"recompute_ratio": float("nan")}, "between 0 and 1"),
        ({"method": 3}, "name or a Method"),
        ({"recompute_ratio": "auto", "method": "epic"}, "'query'"),
        ({"on_miss": "explode"}, "store, skip"),
        ({"seed": 0.5}, "seed must be a whole number"),
        ({"sinks": "x"}, r"unknown reuse setting sinks: did you mean sink\?"),
        ({"recompute_ration": 0.1}, r"did you mean recompute_ratio\?"),
        ({"max_tokens": 5}, r"did you mean max_new_tokens\?"),
        ({"ratio": 0.1}, r"did you mean recompute_ratio\?"),
        ({"zzz": 5}, "unknown reuse setting zzz: reuse settings are"),
        ({"max_new_tokens": 2.5}, "whole number"),
        ({"top_k": 2.5}, "whole number"),
        ({"stop_token_ids": 5}, "stop_token_ids"),
        ({"stop_token_ids": "5"}, "stop_token_ids"),
        ({"stop_token_ids": [1.5]}, "whole number"),
        ({"temperature": 1e-40}, "give 0 for greedy"),
        ({"stop": "\ud800"}, "stop must be"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"ignore_eos": 1}, "ignore_eos"),
    ],
)
def test_bad_settings_are_refused(make_engine, settings, message):
    engine = make_engine()
    with pytest.raises(ConfigError, match=message):
        engine.generate("Hello there", **settings)


def test_a_prompt_that_no_tokenizer_reads_is_refused(make_engine):
    with pytest.raises(ConfigError, match=r"prompt .a .*. has a lone surrogate.* character 2"):
        make_engine().generate("a \ud800 b")


@pytest.mark.parametrize(
    "texts", ["one text, not a list", None, 3, [3], ["fine chunk of sufficient length", 3]]
)
def test_chunks_are_given_in_a_list(make_engine, texts):
    engine = make_engine()
    for take in (engine.precompute, engine.prefetch):
        with pytest.raises(ConfigError, match="chunk"):
            take(texts)


@pytest.mark.parametrize("device", ["abacus", "cpu:x", "xpu:7"])
def test_a_device_that_cannot_be_used_is_refused(device):
    with pytest.raises(ConfigError, match=f"device must be .* not '{device}'"):
        RagKV(tiny_model(), tiny_tokenizer(), device=device)


def test_bad_arguments_are_refused(make_engine):
    engine = make_engine()
    with pytest.raises(UnknownMethodError):
        engine.generate("Hello there", method="telepathy")
    with pytest.raises(UnknownMethodError):
        RagKV(tiny_model(), tiny_tokenizer(), reuse=ReuseConfig(method="telepathy"))
    with pytest.raises(ConfigError):
        engine.generate({"role": "user"})
    with pytest.raises(ConfigError):
        engine.generate("Hello", max_new_tokens=0)
    with pytest.raises(ConfigError):
        engine.generate("")
    with pytest.raises(ConfigError, match="message"):
        engine.generate([])
    with pytest.raises(ConfigError):
        RagKV(tiny_model())
    with pytest.raises(ConfigError):
        RagKV(42)
    with pytest.raises(ConfigError):
        Grouping(window=0)
    with pytest.raises(ConfigError, match="whole number"):
        Grouping(window=7.5)


# ---- models that cannot be reused


def unsupported() -> dict[str, tuple[object, str]]:
    small = {key: value for key, value in SIZE.items() if key != "head_dim"}
    dynamic = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    return {
        "dynamic-rope": (LlamaConfig(**{**SIZE, "rope_parameters": dynamic}), "dynamic NTK"),
        "learned-positions": (
            OPTConfig(
                vocab_size=600, hidden_size=32, num_hidden_layers=1, ffn_dim=32,
                num_attention_heads=2, word_embed_proj_dim=32, max_position_embeddings=128,
            ),
            "rotary",
        ),
        "recurrent": (
            MambaConfig(vocab_size=600, hidden_size=16, num_hidden_layers=1, state_size=4),
            "recurrent",
        ),
        "layer-type": (
            Qwen2Config(**{**small, "layer_types": ["chunked_attention"] * 4}),
            "chunked_attention",
        ),
    }  # fmt: skip


@pytest.mark.parametrize("case", ["dynamic-rope", "learned-positions", "recurrent"])
def test_unsupported_models_are_refused_by_name_or_served_in_full(case):
    config, reason = unsupported()[case]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UnsupportedModelError, match=reason) as error:
        RagKV(model, tiny_tokenizer(), store=":memory:")
    assert "on_unsupported='full'" in str(error.value)
    with RagKV(model, tiny_tokenizer(), store=":memory:", on_unsupported="full") as engine:
        assert engine.info.unsupported
        assert reason in engine.info.unsupported
        engine.precompute(some_chunks(1))
        out = engine.generate("Some words to go on", max_new_tokens=4)
        assert out.report.tokens.fresh == out.report.tokens.prompt
        ids = torch.tensor([engine.tokenizer("Some words to go on")["input_ids"]])
        mask = torch.ones_like(ids)
        theirs = model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
        assert out.token_ids == theirs[0, ids.shape[1] :].tolist()


def test_longrope_is_reused_below_its_switch_and_prefilled_beyond(make_engine):
    torch.manual_seed(0)
    config = LlamaConfig(**{**SIZE, "rope_parameters": LONGROPE})
    model = AutoModelForCausalLM.from_config(config).eval()
    chunks = some_chunks(3)
    with RagKV(model, tiny_tokenizer(), store=":memory:") as engine:
        engine.precompute(chunks)
        short = engine.prefill(ask(chunks[:1]), recompute_ratio=0.0)
        assert short.report.tokens.reused > 80
        long = engine.prefill(ask(chunks), recompute_ratio=0.0)
        assert long.report.tokens.prompt > 256
        assert long.report.tokens.reused == 0
        assert {miss.reason for miss in long.report.misses} == {"positions"}
        for out in (short, long):
            with torch.no_grad():
                full = model(torch.tensor([out.token_ids])).logits[0, -1]
            torch.testing.assert_close(out.logits, full, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("method", ["full", "query"])
def test_a_prompt_beyond_the_models_positions_is_refused(make_engine, method):
    engine = make_engine()
    with pytest.raises(PromptTooLongError, match="4096"):
        engine.generate("word " * 5000, method=method)


def test_a_store_that_is_read_only_serves_and_writes_nothing(tmp_path, caplog):
    chunks = some_chunks(3)
    with RagKV(tiny_model(), tiny_tokenizer(), store=tmp_path) as engine:
        engine.precompute(chunks[:2])
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    store = StoreConfig(path=tmp_path, read_only=True)
    with RagKV(tiny_model(), tiny_tokenizer(), store=store) as engine:
        engine.prefetch(chunks)
        assert engine.prefill(ask(chunks)).report.tokens.reused > 100
        engine.wait()
        assert not engine.contains(chunks[2])
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    assert "not stored" not in caplog.text


def test_a_full_disk_does_not_keep_the_auxiliary_from_scoring(tmp_path):
    folder, chunks = saved(tmp_path / "auxiliary", "qwen2"), some_chunks(3)
    with RagKV(tiny_model(), tiny_tokenizer(), store=tmp_path / "store") as engine:
        engine.precompute(chunks)
        used = sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
        disk_of(engine).budget = used
        settings = {"method": "cacheclip", "auxiliary_model": str(folder)}
        out = engine.generate(ask(chunks), max_new_tokens=2, **settings)
        assert len(out.report.chunks) == 3
