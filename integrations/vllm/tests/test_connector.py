"""vLLM's side of a hand-over against a stand-in with vLLM's interface."""

from __future__ import annotations

import ast
import json
import random
import stat
import struct
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from handovers import file_of, write
from vllm_stand_in import (
    DIM,
    HEADS,
    LAYERS,
    Engine,
    FullAttentionSpec,
    MLAAttentionSpec,
    Request,
    connector_module,
    layer,
    vllm_config,
)

__all__ = ["connector_module"]
PACKAGE = Path(__file__).parents[1] / "vllm_ragkv"


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "handovers"


@pytest.fixture
def engine(connector_module, folder):
    return Engine(connector_module, vllm_config(folder))


def random_rows(count, dtype=torch.float32):
    return [tuple(torch.rand(2, count, HEADS, DIM).to(dtype)) for _ in range(LAYERS)]


def prompt_of(count, seed=0):
    return random.Random(seed).choices(range(50_000), k=count)


def request_for(identity, prompt, number=1, **changed):
    params = {"ragkv": {"id": identity}}
    return Request(str(number), prompt, params, **{"cache_salt": identity, **changed})


def hand_over(engine, prompt, tokens, rows=None, /, **changed):
    instance = engine.scheduler._instance
    rows = random_rows(tokens) if rows is None else rows
    return write(engine.scheduler._folder, instance, prompt[:tokens], rows, **changed)


def outcome(engine, identity):
    return json.loads(file_of(engine.scheduler._folder, identity, ".json").read_text())


def check_rows(engine, request, start, stop, rows):
    """Check that each row lies in its slot in each layer's cache."""
    slots = request.slots(start, stop)
    for each, (keys, values) in zip(engine.layers, rows, strict=True):
        for slot, key, value in zip(slots, keys[start:], values[start:], strict=False):
            assert torch.equal(each.rows[slot][0], key)
            assert torch.equal(each.rows[slot][1], value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("tokens", "length", "computed"),
    [
        (1, 2, 0),
        (31, 40, 0),
        (32, 33, 0),
        (33, 200, 0),
        (150, 151, 0),
        (150, 150, 0),  # vLLM computes the last token
        (150, 200, 64),
        (97, 98, 96),
        (64, 90, 64),  # nothing is missing
    ],
)
def test_every_row_lies_in_its_slot(connector_module, folder, dtype, tokens, length, computed):
    engine = Engine(connector_module, vllm_config(folder), FullAttentionSpec(dtype=dtype))
    prompt, rows = prompt_of(length), random_rows(tokens, dtype)
    identity = hand_over(engine, prompt, tokens, rows)
    request = request_for(identity, prompt)
    loaded = min(tokens, length - 1)
    assert engine.load(request, computed) == loaded
    check_rows(engine, request, computed, loaded, rows)
    assert all(list(each.rows) == request.slots(computed, loaded) for each in engine.layers)
    assert outcome(engine, identity)["loaded"] == loaded
    assert not file_of(folder, identity).exists()


def test_layers_are_numbered_not_sorted_by_name(connector_module, folder):
    config = vllm_config(folder)
    config.model_config.hf_text_config.num_hidden_layers = 11
    config.compilation_config.static_forward_context = {
        f"language_model.model.layers.{number}.self_attn.attn": layer(number=number)
        for number in (10, *range(10))  # as strings, 10 comes after 1
    }
    engine = Engine(connector_module, config)
    assert [each.number for each in engine.worker._layers] == list(range(11))


def test_several_at_once(engine):
    loads = {}
    for number in range(5):
        prompt = prompt_of(100 + 30 * number, number)
        rows = random_rows(len(prompt) - 7)
        request = request_for(hand_over(engine, prompt, len(prompt) - 7, rows), prompt, number)
        engine.admit(request)
        loads[request.request_id] = request, rows
    for name, count in engine.run().items():
        request, rows = loads.pop(name)
        assert count == len(request.prompt_token_ids) - 7
        check_rows(engine, request, 0, count, rows)
    assert not loads


def test_one_id_of_several_completions_serves_those_that_wait(engine, folder):
    prompt = prompt_of(90)
    identity = hand_over(engine, prompt, 80)
    for number in (1, 2):
        engine.admit(request_for(identity, prompt, number))
    assert engine.run() == {"1": 80, "2": 80}
    assert not file_of(folder, identity).exists()


def test_requests_without_a_hand_over_are_left_alone(engine):
    for params in (None, {}, {"other": 1}, {"ragkv": None}, {"ragkv": {}}, {"ragkv": "text"}):
        request = Request("1", prompt_of(50), params)
        assert engine.load(request) == 0
    assert engine.scheduler.request_finished(Request("1", [1]), []) == (False, None)


def test_a_probe_learns_the_instance_and_the_shape(connector_module, engine, folder):
    told = engine.scheduler.request_finished(Request("1", [1], {"ragkv": {}}), [])[1]["ragkv"]
    known = {"format": 1, "instance": engine.scheduler._instance, "loaded": 0, "reason": ""}
    shape = {"layers": LAYERS, "kv_heads": HEADS, "head_dim": DIM, "dtype": "float32"}
    assert told == {**known, **shape, "folder": str(folder)}
    again = Engine(connector_module, vllm_config(folder)).scheduler
    assert again._instance != engine.scheduler._instance
    assert again._secret == engine.scheduler._secret


@pytest.mark.parametrize(
    ("reason", "changed"),
    [
        ("expired", {"expires_in": -2}),
        ("format", {"format": 2}),
        ("instance", {"instance": "before its restart"}),
        ("torn", {"tokens": 81}),
        ("shape", {"layers": LAYERS + 1}),
        ("shape", {"kv_heads": 8}),
        ("shape", {"head_dim": 64, "dtype": "float16"}),
        ("dtype", {"dtype": "bfloat16"}),
    ],
)
def test_a_hand_over_that_does_not_fit_is_refused(engine, folder, reason, changed):
    prompt = prompt_of(90)
    identity = hand_over(engine, prompt, 80, **changed)
    request = request_for(identity, prompt)
    assert engine.load(request) == engine.load(request) == 0  # vLLM asks again while it has no room
    known = {"format": 1, "instance": engine.scheduler._instance}
    assert outcome(engine, identity) == {**known, "loaded": 0, "reason": reason}
    assert not file_of(folder, identity).exists()
    assert engine.scheduler.request_finished(request, [])[1]["ragkv"]["reason"] == reason


def test_an_id_opens_nothing_for_another_prompt(engine, folder):
    prompt = prompt_of(90)
    identity = hand_over(engine, prompt, 80)
    others = [prompt_of(90, seed=1), prompt[:79], [*prompt[:79], 7, *prompt[80:]], []]
    for number, other in enumerate(others):
        assert engine.load(request_for(identity, other, number)) == 0
    assert not file_of(folder, identity, ".json").exists()
    assert engine.load(request_for(identity, [*prompt[:80], 1, 2], 9)) == 80


def forged(engine, folder, prompt):
    other = folder.with_name("another key")
    yield write(other, engine.scheduler._instance, prompt[:80], random_rows(80))
    mine = hand_over(engine, prompt, 80)
    file_of(folder, mine).unlink()
    yield from (mine[:-2], mine + "AA")
    yield mine[:25] + ("B" if mine[25] == "A" else "A") + mine[26:]  # expires at another time
    yield from ("", "none", "../../etc/passwd", "ü", "=" * 59, 7, [], {"id": 1}, "A" * 10_000)


def test_forged_ids_are_refused_and_leave_nothing(engine, folder):
    prompt = prompt_of(90)
    for number, identity in enumerate(forged(engine, folder, prompt)):
        request = request_for(identity, prompt, number)
        assert engine.load(request) == 0
        told = engine.scheduler.request_finished(request, [])[1]["ragkv"]
        assert told["reason"] == "signature"
    assert [path.name for path in folder.iterdir()] == ["secret"]


@pytest.mark.parametrize(
    ("reason", "changed"),
    [
        ("salt", {"cache_salt": None}),
        ("salt", {"cache_salt": "a namespace"}),
        ("prompt", {"mm_features": ["an image"]}),
        ("prompt", {"skip_reading_prefix_cache": True}),
        ("prompt", {"prompt_token_ids": prompt_of(1)}),  # vLLM has to compute one
    ],
)
def test_requests_that_cannot_take_one(engine, folder, reason, changed):
    prompt = changed.pop("prompt_token_ids", prompt_of(90))
    identity = hand_over(engine, prompt, min(80, len(prompt)))
    assert engine.load(request_for(identity, prompt, **changed)) == 0
    assert outcome(engine, identity)["reason"] == reason
    assert not file_of(folder, identity).exists()


def flip(data, at):
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def saying(about):
    header = json.dumps({"__metadata__": {"ragkv": about}}).encode()
    return struct.pack("<Q", len(header)) + header


@pytest.mark.parametrize(
    "damage",
    [
        *(lambda data, to=to: data[:to] for to in (0, 7, 100, -1, -20_000)),
        *(lambda data, at=at: flip(data, len(data) - at) for at in (1, 30_000)),
        lambda data: data[:-5000] + bytes(4096) + data[-904:],
        lambda data: data.replace(b'"key.1"', b'"key.2"', 1),
        lambda data: struct.pack("<Q", 1 << 60) + data[8:],
        lambda data: bytes(100),
        *(lambda data, text=text: struct.pack("<Q", 4) + text for text in (b"null", b"{}  ")),
        *(lambda data, about=about: saying(about) for about in ("null", "7", "text", "", "\xff")),
    ],
)
def test_torn_files_are_computed_by_vllm(engine, folder, damage):
    prompt = prompt_of(90)
    identity = hand_over(engine, prompt, 80)
    path = file_of(folder, identity)
    path.write_bytes(damage(path.read_bytes()))
    request = request_for(identity, prompt)
    assert (
        engine.load(request) == engine.load(request) == 0
    )  # vLLM asks again, as nothing is computed
    assert outcome(engine, identity)["reason"] == "torn"
    assert not path.exists()
    assert engine.load(request_for(hand_over(engine, prompt, 80), prompt, 2)) == 80


def test_what_vllm_has_computed_stays_valid_when_a_load_fails(engine, folder):
    prompt = prompt_of(120)
    identity = hand_over(engine, prompt, 110)
    path = file_of(folder, identity)
    path.write_bytes(flip(path.read_bytes(), -2))
    assert engine.load(request_for(identity, prompt), computed=64) == 64


@pytest.mark.parametrize("admitted", [False, True])
def test_a_file_that_is_gone_before_the_scheduler_or_the_worker_looks(engine, folder, admitted):
    prompt = prompt_of(90)
    identity = hand_over(engine, prompt, 80)
    request = request_for(identity, prompt)
    if admitted:
        assert engine.admit(request) == 80
    file_of(folder, identity).unlink()
    assert (engine.run()["1"] if admitted else engine.load(request)) == 0
    assert outcome(engine, identity)["reason"] == "gone"


def test_a_backend_that_raises_ends_one_load_and_no_more(engine):
    prompt = prompt_of(90)
    backend = engine.worker._layers[1].impl
    backend.do_kv_cache_update = lambda *args: 1 // 0
    assert engine.load(request_for(hand_over(engine, prompt, 80), prompt)) == 0
    del backend.do_kv_cache_update
    assert engine.load(request_for(hand_over(engine, prompt, 80), prompt, 2)) == 80


def test_cancelled_while_it_is_loaded(engine, folder):
    prompt = prompt_of(90)
    identity = hand_over(engine, prompt, 80)
    request = request_for(identity, prompt)
    assert engine.admit(request) == 80
    told = engine.scheduler.request_finished(request, [])[1]["ragkv"]
    assert (told["loaded"], told["reason"]) == (0, "cancelled")
    assert not file_of(folder, identity).exists()
    assert "1" in engine.run()  # only then vLLM frees the blocks
    assert not engine.scheduler._uses


def test_a_folder_without_room_for_outcomes_stops_nothing(engine, folder, monkeypatch):
    prompt = prompt_of(90)
    identity = hand_over(engine, prompt, 80)
    monkeypatch.setattr(Path, "write_text", lambda *args, **kwargs: (_ for _ in ()).throw(OSError))
    assert engine.load(request_for(identity, prompt)) == 80
    assert not file_of(folder, identity).exists()


@pytest.mark.parametrize(
    ("message", "changed"),
    [
        ("kv_role", {"kv_transfer_config__kv_role": "kv_both"}),
        ("kv_load_failure_policy", {"kv_transfer_config__kv_load_failure_policy": "fail"}),
        ("parallelism", {"parallel_config__world_size_across_dp": 2}),
        ("LoRA", {"lora_config": object()}),
        ("speculative", {"speculative_config": object()}),
        ("MLAAttentionSpec", MLAAttentionSpec()),
        ("sliding-window", FullAttentionSpec(sliding_window=512)),
        ("chunked", FullAttentionSpec(attention_chunk_size=512)),
        ("another size", FullAttentionSpec(head_size_v=16)),
        ("quantised", FullAttentionSpec(dtype=torch.uint8)),
        ("hybrid", 0),
        ("hybrid", 2),
        (
            "do_kv_cache_update",
            {"compilation_config__static_forward_context": {"0": layer(impl=1)}},
        ),
        ("share", {"model_config__hf_text_config": SimpleNamespace(num_hidden_layers=4)}),
    ],
)
def test_what_is_not_supported_is_refused_at_the_start(connector_module, folder, message, changed):
    config = vllm_config(folder, **(changed if isinstance(changed, dict) else {}))
    spec = changed if isinstance(changed, FullAttentionSpec) else None
    with pytest.raises(ValueError, match=message):
        Engine(connector_module, config, spec, changed if isinstance(changed, int) else 1)


def test_the_folder_and_its_secret_belong_to_the_user_only(connector_module, engine, folder):
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "secret").stat().st_mode) == 0o600
    for mode in (0o755, 0o770, 0o702):
        folder.chmod(mode)
        with pytest.raises(ValueError, match="this user only"):
            Engine(connector_module, vllm_config(folder))


@pytest.mark.parametrize("name", ["__init__", "connector", "files"])
def test_vllms_environment_needs_none_of_ragkvs_dependencies(name):
    found = set()
    for line in ast.walk(ast.parse((PACKAGE / f"{name}.py").read_text(encoding="utf-8"))):
        if isinstance(line, ast.Import):
            found |= {each.name.split(".")[0] for each in line.names}
        elif isinstance(line, ast.ImportFrom) and line.module != "vllm_ragkv.files":
            found.add(line.module.split(".")[0])
    assert found <= {*sys.stdlib_module_names, "torch", "vllm"}
