"""An engine on a device other than the CPU gives the same answers."""

import math
import os
from itertools import product

import pytest
import ragkv_kernels
import tiny
import torch
from pairwise import all_pairs
from tiny import ask, some_chunks, tiny_model, tiny_tokenizer

from ragkv import RagKV
from ragkv.attend import graphs
from ragkv.config import CODECS, ReuseConfig, StoreConfig
from ragkv.decode import batch
from ragkv.engine.verify import check_model
from ragkv.errors import StoreError, UnsupportedModelError
from ragkv.report.page.page import page
from ragkv.select import method_names
from ragkv.store.entry.codecs import GridCodec, Raw, codec_of
from ragkv_bench.speed.ttft import TtftPlan, bench_ttft

DEVICE = os.environ["RAGKV_SECOND_DEVICE"]
EXACT = {"atol": 0, "rtol": 0} if DEVICE == "second" else {"atol": 1e-5, "rtol": 1e-5}
"""A GPU's cosine is another in the last place."""

CHUNKS = some_chunks(3)
PROMPT = [{"role": "user", "content": "\n\n".join(CHUNKS) + "\n\nWhat does it say?"}]
REUSED = 1
"""In a report's positions."""


def slow(*cases):
    """Mark cases that take seconds on a device that is written in Python."""
    marks = [pytest.mark.slow] if DEVICE == "second" else []
    return [pytest.param(*case, marks=marks) for case in cases]


WITHOUT_TIES = [("llama", name) for name in method_names()] + [
    (family, "query")
    for family in ("qwen2", "qwen3", "gemma2", "gemma3", "gpt-oss", "phi3", "mistral-window")
]


@pytest.mark.parametrize(("family", "name"), WITHOUT_TIES, ids=str)
def test_answers_are_those_of_the_cpu(make_engine, auxiliary, family, name):
    settings = {"method": name, "recompute_ratio": 0.3, "auxiliary_model": auxiliary}
    logits, tokens, reused = [], [], []
    for device in ("cpu", DEVICE):
        engine = make_engine(family, device=device)
        engine.precompute(CHUNKS, **settings)
        prefilled = engine.prefill(PROMPT, **settings)
        assert prefilled.logits.device.type == device
        logits.append(prefilled.logits.cpu())
        reused.append(prefilled.report.tokens.reused)
        tokens.append(engine.generate(PROMPT, max_new_tokens=3, **settings).token_ids)
    torch.testing.assert_close(*logits, atol=5e-5, rtol=1e-4)
    assert tokens[0] == tokens[1]
    assert reused[0] == reused[1]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_versions_are_those_of_the_cpu(make_engine, family):
    logits = []
    for device in ("cpu", DEVICE):
        engine = make_engine(family, device=device, reuse=ReuseConfig())
        engine.precompute(CHUNKS)
        engine.prefetch(CHUNKS[1:])
        engine.wait()
        out = engine.prefill(PROMPT, recompute_ratio=0.3)
        assert sorted(use.source for use in out.report.chunks) == ["entry", "entry", "version"]
        logits.append(out.logits.cpu())
    torch.testing.assert_close(*logits, atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "ratio"), [("gemma3", 0.3), *slow(("llama", 0.3), ("phi3", 1.0))]
)
def test_a_conversation_goes_on(make_engine, family, ratio):
    """Rows of earlier turns stay in host memory, and new chunks are placed behind them."""
    answers = []
    for device in ("cpu", DEVICE):
        engine, chat = make_engine(family, device=device, reuse=ReuseConfig()), PROMPT
        late = " ".join(CHUNKS[0].split()[::-1])
        engine.precompute([*CHUNKS, late])
        for question in (late, "Why?", ""):
            answer = engine.generate(chat, recompute_ratio=ratio, max_new_tokens=3)
            engine.wait()
            answers.append((answer.token_ids, answer.report.positions))
            chat = [
                *chat,
                {"role": "assistant", "content": answer.text.lstrip()},
                {"role": "user", "content": question},
            ]
        report = answer.report
        kept = report.tokens.history_exact, report.tokens.history_repaired
        assert sum(kept) > 400
    assert answers[:3] == answers[3:]


TIERS = {
    "device": {},
    "memory": {"device_bytes": 0},
    "disk": {"device_bytes": 0, "memory_bytes": 0},
}


@pytest.mark.parametrize(
    ("tier", "codec", "fetched"), all_pairs([*TIERS], ["raw", "int8", "int4"], [False, True])
)
def test_from_every_tier(make_engine, tmp_path, tier, codec, fetched):
    """Entries of one store, written on either device, are those of the other."""
    logits = []
    for device in ("cpu", DEVICE):
        store = StoreConfig(tmp_path, codec=codec, **TIERS[tier])
        engine = make_engine(device=device, store=store)
        assert engine.precompute(CHUNKS).new == (len(CHUNKS) if device == "cpu" else 0)
        for _ in range(2):
            if fetched:
                engine.prefetch(CHUNKS)
            out = engine.prefill(PROMPT, recompute_ratio=0.3)
            assert out.report.misses == ()
            logits.append(out.logits.cpu())
        engine.close()
    for other in logits[1:]:
        torch.testing.assert_close(other, logits[0], atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "codec"),
    [
        *(("llama", codec) for codec in ("raw", "int8", "int4")),
        *product(("gemma3", "phi3"), ("raw", "int4")),
    ],
)
def test_what_a_disk_has_is_decoded_there(make_engine, tmp_path, monkeypatch, family, codec):
    """Codes cross to the device, and become what the CPU makes of them, to the last bit."""
    store = StoreConfig(tmp_path, codec=codec, device_bytes=0, memory_bytes=0)
    settings = {"method": "reuse", "recompute_ratio": 0.0, "on_miss": "skip"}
    engine = make_engine(family, store=store)
    engine.precompute(CHUNKS)
    expected = engine.prefill(PROMPT, **settings)
    for plain in (GridCodec, Raw):
        monkeypatch.setattr(plain, "decode", None)
    found = make_engine(family, device=DEVICE, store=store).prefill(PROMPT, **settings)
    assert found.report.misses == ()
    cached = torch.tensor(list(found.report.positions)) == REUSED
    assert int(cached.sum()) > 100
    for ours, theirs in zip(found.cache.layers, expected.cache.layers, strict=True):
        for part in ("keys", "values"):
            mine, wanted = (getattr(layer, part)[0, :, : len(cached)] for layer in (ours, theirs))
            torch.testing.assert_close(mine.cpu()[:, cached], wanted[:, cached], **EXACT)


@pytest.mark.parametrize("codec", ["raw", "int8"])
@pytest.mark.parametrize("memory", [0, 1 << 24])
def test_a_chunk_that_is_damaged_costs_itself(make_engine, tmp_path, codec, memory):
    answers = []
    for device in ("cpu", DEVICE):
        store = StoreConfig(tmp_path / device, codec=codec, memory_bytes=memory, device_bytes=0)
        make_engine(store=store).precompute(CHUNKS)
        path = max((tmp_path / device).rglob("*.safetensors"))
        raw = bytearray(path.read_bytes())
        raw[-len(raw) // 4] ^= 1  # in one of the later layers
        path.write_bytes(raw)
        engine = make_engine(device=device, store=store)
        found = engine.generate(PROMPT, max_new_tokens=2, on_miss="skip")
        assert [miss.reason for miss in found.report.misses] == ["checksum"]
        answers.append((found.report.misses, found.token_ids))
        engine.close()
    assert answers[0] == answers[1]


@pytest.mark.parametrize("codec", ["raw", "int8", "int4"])
def test_chunks_that_are_encoded_on_it_are_read_everywhere(
    make_engine, tmp_path, monkeypatch, codec
):
    made_on, encode = set(), ragkv_kernels.encode

    def watched(keys, *given, **settings):
        made_on.add(keys.device.type)
        return encode(keys, *given, **settings)

    monkeypatch.setattr(ragkv_kernels, "encode", watched)
    logits = []
    for writer, reader in (("cpu", "cpu"), (DEVICE, "cpu"), (DEVICE, DEVICE)):
        store = StoreConfig(tmp_path / writer, codec=codec)
        make_engine(device=writer, store=store).precompute(CHUNKS)
        out = make_engine(device=reader, store=store).prefill(PROMPT, recompute_ratio=0.3)
        assert out.report.misses == ()
        logits.append(out.logits.cpu())
    assert made_on == (set() if codec == "raw" else {"cpu", torch.device(DEVICE).type})
    # a number near the middle of two codes may be rounded otherwise by another writer
    first, *others = logits if codec == "raw" else logits[1:]
    for other in others:
        torch.testing.assert_close(other, first, atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    all_pairs(CODECS, [(2, 150, 64), (3, 21, 6), (1, 1, 2)], [torch.float32, torch.bfloat16]),
    ids=str,
)
def test_codecs_make_the_same_bytes_there(name, shape, dtype):
    draw = torch.Generator().manual_seed(0)
    layer = [torch.randn(shape, generator=draw).mul(5).to(dtype) for _ in range(2)]
    codec = codec_of(name)
    there = codec.encode(*(part.to(DEVICE) for part in layer))
    assert b"".join(there) == b"".join(codec.encode(*layer))


@pytest.mark.parametrize("number", [math.nan, -math.inf, 1e6])
@pytest.mark.parametrize("where", [0, 1], ids=["keys", "values"])
def test_what_cannot_be_kept_is_refused_there(number, where):
    layer = torch.ones(2, 2, 9, 4)
    layer[where, 1, 4, 3] = number
    with pytest.raises(StoreError, match="use codec raw"):
        codec_of("int8").encode(*layer.to(DEVICE))


def test_what_users_do_with_an_engine_works_there(make_engine):
    answers = []
    for device in ("cpu", DEVICE):
        engine = make_engine(device=device)
        engine.precompute(CHUNKS)
        settings = {"max_new_tokens": 6, "recompute_ratio": "auto"}
        drawn = engine.generate(PROMPT, seed=3, temperature=1.2, **settings)
        assert "of the cached tokens" in drawn.report.choice
        assert "recomputed" in page(drawn.report)
        answers.append((drawn.token_ids, "".join(engine.stream(PROMPT, **settings))))
    assert answers[0] == answers[1]


def test_the_check_holds(make_engine, monkeypatch):
    monkeypatch.setattr("ragkv.splice.buffer._MOST_SPARE_ROWS", 20)
    monkeypatch.setitem(tiny.SIZE, "num_hidden_layers", 2)  # a check has many passes
    kinds = ["sliding_attention", "full_attention"]
    monkeypatch.setitem(tiny.FAMILIES["gemma3"][1], "layer_types", kinds)
    engine = make_engine("gemma3", device=DEVICE)
    assert all(row.holds for row in check_model(engine.loaded))
    with torch.device(DEVICE):  # as torch.set_default_device does
        assert all(row.holds for row in check_model(engine.loaded))
        assert engine.generate(PROMPT, max_new_tokens=40).token_ids  # the buffer grows


def test_the_benchmark_measures_there(make_engine):
    loaded = make_engine(device=DEVICE, layers=2).loaded
    plan = TtftPlan((400,), 64, ratios=(0.2,), tiers=("memory", "disk"), rounds=1)
    found = bench_ttft(loaded, plan)
    assert [(r["tier"], r["ratio"]) for r in found["rows"]] == [("memory", 0.2), ("disk", 0.2)]
    assert all(row["ragkv_s"] > 0 and row["bound_s"] > 0 for row in found["rows"])


def test_a_model_on_two_devices_is_refused():
    model = tiny_model()
    model.model.layers[1].to(DEVICE)
    with pytest.raises(UnsupportedModelError, match=f"weights on cpu and {DEVICE}:0"):
        RagKV(model, tiny_tokenizer(), store=":memory:")


@pytest.mark.parametrize(
    ("family", "method", "drafts"),
    [("gemma3", "query", True), *slow(("llama", "full", True), ("llama", "query", False))],
)
def test_an_ordinary_step_between_layers_is_no_part_of_the_prompts_pass(
    make_engine, monkeypatch, family, method, *, drafts
):
    monkeypatch.setattr(batch, "MAX_WAIT_S", 0)
    monkeypatch.setattr(graphs, "REPAIR_ROWS", ())  # no step is computed between a graph's layers
    kv = make_engine(family, device=DEVICE, store=StoreConfig(":memory:", history_bytes=0))
    kv.loaded.model.generation_config.eos_token_id = None
    chunks = some_chunks(2)
    prompts = [ask(chunks[at:] + chunks[:at], f"\n\nQuestion {at}?") for at in range(2)]
    kv.precompute(chunks)
    settings = {"max_new_tokens": 30, "drafts": drafts, "method": "full"}
    alone = kv.generate(prompts[0], **settings).token_ids
    expected = kv.prefill(prompts[1], method=method).logits
    compute, during = batch._compute, list[int]()

    def counting(*given):
        during.append(kv.status().running)
        return compute(*given)

    monkeypatch.setattr(batch, "_compute", counting)
    with kv.stream(prompts[0], **settings) as stream:
        next(stream)
        found = kv.prefill(prompts[1], method=method).logits
        list(stream)
    assert during.count(2) >= 3
    torch.testing.assert_close(found.cpu(), expected.cpu(), atol=1e-5, rtol=1e-5)
    assert stream.completion.token_ids == alone
