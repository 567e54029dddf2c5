"""vLLM's side of a hand-over against a stand-in with vLLM's interface."""

from __future__ import annotations

import ast
import json
import random
import stat
import struct
import sys
from pathlib import Path

import pytest
import torch
from handovers import file_of, write
from vllm_stand_in import (
    BLOCK,
    DIM,
    HEADS,
    LAYERS,
    Backend,
    Engine,
    FullAttentionSpec,
    MLAAttentionSpec,
    ReadingBackend,
    Request,
    cache_config,
    connector_module,
    vllm_config,
)

__all__ = ["connector_module"]


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "handovers"


@pytest.fixture
def engine(connector_module, folder):
    return Engine(connector_module, vllm_config(folder))


def random_rows(count, dtype=torch.float32, layers=LAYERS, heads=HEADS, dim=DIM):
    return [
        (torch.rand(count, heads, dim).to(dtype), torch.rand(count, heads, dim).to(dtype))
        for _ in range(layers)
    ]


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
    ],
)
def test_every_row_lies_in_its_slot(connector_module, folder, dtype, tokens, length, computed):
    engine = Engine(connector_module, vllm_config(folder), FullAttentionSpec(dtype=dtype))
    prompt, rows = prompt_of(length), random_rows(tokens, dtype)
    identity = hand_over(engine, prompt, tokens, rows)
    request = request_for(identity, prompt)
    loaded = min(tokens, length - 1)
    assert engine.load(request, computed) == loaded
    blocks = request.get_block_ids()[0]
    slots = [blocks[at // BLOCK] * BLOCK + at % BLOCK for at in range(computed, loaded)]
    for layer, (keys, values) in zip(engine.layers, rows, strict=True):
        assert list(layer.rows) == slots
        for slot, key, value in zip(slots, keys[computed:], values[computed:], strict=False):
            assert torch.equal(layer.rows[slot][0], key)
            assert torch.equal(layer.rows[slot][1], value)
    assert outcome(engine, identity)["loaded"] == loaded
    assert not file_of(folder, identity).exists()


def test_layers_are_numbered_not_sorted_by_name(connector_module, folder):
    config = vllm_config(folder)
    layers = config.compilation_config.static_forward_context
    one = layers["model.layers.0.self_attn.attn"]
    layers.clear()
    config.model_config.hf_text_config.num_hidden_layers = 11
    for number in (10, *range(10)):  # as strings, 10 comes after 1
        made = type(one)(impl=Backend(), kv_cache=torch.zeros(1), rows={}, number=number)
        layers[f"language_model.model.layers.{number}.self_attn.attn"] = made
    engine = Engine(connector_module, config)
    assert [layer.number for layer in engine.worker._layers] == list(range(11))


def test_several_at_once(engine):
    prompts = [prompt_of(100 + 30 * number, number) for number in range(5)]
    rows = [random_rows(len(prompt) - 7) for prompt in prompts]
    requests = [
        request_for(hand_over(engine, prompt, len(prompt) - 7, each), prompt, number)
        for number, (prompt, each) in enumerate(zip(prompts, rows, strict=True))
    ]
    for request in requests:
        engine.admit(request)
    ended = {}
    while len(ended) < len(requests):
        ended |= engine.step()
    for request, each in zip(requests, rows, strict=True):
        count = len(request.prompt_token_ids) - 7
        assert ended[request.request_id] == count
        for found, wanted in zip(engine.rows(request, count), each, strict=True):
            assert torch.equal(found[0], wanted[0])
            assert torch.equal(found[1], wanted[1])


def test_one_id_of_several_completions_serves_those_that_wait(engine, folder):
    prompt = prompt_of(90)
    identity = hand_over(engine, prompt, 80)
    first, second = (request_for(identity, prompt, number) for number in (1, 2))
    engine.admit(first)
    engine.admit(second)
    ended = {}
    while len(ended) < 2:
        ended |= engine.step()
    assert ended == {"1": 80, "2": 80}
    assert not file_of(folder, identity).exists()


def test_requests_without_a_hand_over_are_left_alone(engine):
    for params in (None, {}, {"other": 1}, {"ragkv": None}, {"ragkv": {}}, {"ragkv": "text"}):
        request = Request("1", prompt_of(50), params)
        assert engine.load(request) == 0
    assert engine.scheduler.request_finished(Request("1", [1]), []) == (False, None)


def test_a_probe_learns_the_instance_and_the_shape(engine, folder):
    told = engine.scheduler.request_finished(Request("1", [1], {"ragkv": {}}), [])
    assert told == (
        False,
        {
            "ragkv": {
                "format": 1,
                "instance": engine.scheduler._instance,
                "loaded": 0,
                "reason": "",
                "layers": LAYERS,
                "kv_heads": HEADS,
                "head_dim": DIM,
                "dtype": "float32",
                "folder": str(folder),
            }
        },
    )


def test_every_start_is_another_instance(connector_module, folder):
    first, second = (Engine(connector_module, vllm_config(folder)) for _ in range(2))
    assert first.scheduler._instance != second.scheduler._instance
    assert first.scheduler._secret == second.scheduler._secret


@pytest.mark.parametrize(
    ("reason", "changed"),
    [
        ("expired", {"expires_in": -2}),
        ("format", {"format": 2}),
        ("instance", {"instance": "before its restart"}),
        ("torn", {"tokens": 81}),
        ("shape", {"layers": LAYERS + 1}),
        ("shape", {"kv_heads": 8}),
        ("shape", {"head_dim": 64}),
        ("shape", {"head_dim": 64, "dtype": "float16"}),
        ("dtype", {"dtype": "bfloat16"}),
    ],
)
def test_a_hand_over_that_does_not_fit_is_refused(engine, folder, reason, changed):
    prompt = prompt_of(90)
    identity = hand_over(engine, prompt, 80, **changed)
    request = request_for(identity, prompt)
    assert engine.load(request) == 0
    assert outcome(engine, identity) == {
        "format": 1,
        "instance": engine.scheduler._instance,
        "loaded": 0,
        "reason": reason,
    }
    assert not file_of(folder, identity).exists()
    assert engine.load(request) == 0  # asked again, as vLLM does while it has no room
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
    yield mine[:-2]
    yield mine + "AA"
    yield mine[:25] + ("B" if mine[25] == "A" else "A") + mine[26:]  # expires at another time
    yield from ("", "none", "../../etc/passwd", "ü", "=" * 59, None, 7, [], {"id": 1}, "A" * 10_000)


def test_forged_ids_are_refused_and_leave_nothing(engine, folder):
    prompt = prompt_of(90)
    for number, identity in enumerate(forged(engine, folder, prompt)):
        assert engine.load(request_for(identity, prompt, number)) == 0
        request = Request(str(number), prompt, {"ragkv": {"id": identity}})
        told = engine.scheduler.request_finished(request, [])[1]["ragkv"]
        assert told["reason"] == ("" if identity is None else "signature")
    assert [path.name for path in folder.iterdir()] == ["secret"]


@pytest.mark.parametrize(
    ("reason", "changed"),
    [
        ("salt", {"cache_salt": None}),
        ("salt", {"cache_salt": "a namespace"}),
        ("prompt", {"mm_features": ["an image"]}),
        ("prompt", {"skip_reading_prefix_cache": True}),
    ],
)
def test_requests_that_cannot_take_one(engine, folder, reason, changed):
    prompt = prompt_of(90)
    identity = hand_over(engine, prompt, 80)
    assert engine.load(request_for(identity, prompt, **changed)) == 0
    assert outcome(engine, identity)["reason"] == reason
    assert not file_of(folder, identity).exists()


def test_one_token_is_vllms(engine):
    prompt = [5]
    identity = hand_over(engine, prompt, 1)
    assert engine.load(request_for(identity, prompt)) == 0
    assert outcome(engine, identity)["reason"] == "prompt"


def truncate(path, to):
    data = path.read_bytes()
    path.write_bytes(data[: to if to >= 0 else len(data) + to])


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def zero_page(path):
    data = bytearray(path.read_bytes())
    data[-5000:-904] = bytes(4096)
    path.write_bytes(data)


def swap_tensors(path):
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"key.1"', b'"key.2"', 1))


def lengthen(path):
    path.write_bytes(struct.pack("<Q", 1 << 60) + path.read_bytes()[8:])


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: truncate(path, 0),
        lambda path: truncate(path, 7),
        lambda path: truncate(path, 100),
        lambda path: truncate(path, -1),
        lambda path: truncate(path, -20_000),
        lambda path: flip(path, -1),
        lambda path: flip(path, -30_000),
        zero_page,
        swap_tensors,
        lengthen,
        lambda path: path.write_bytes(bytes(100)),
        lambda path: path.write_bytes(struct.pack("<Q", 2) + b"{}"),
        lambda path: path.write_bytes(struct.pack("<Q", 4) + b"null"),
    ],
)
def test_torn_files_are_computed_by_vllm(engine, folder, damage):
    prompt = prompt_of(90)
    identity = hand_over(engine, prompt, 80)
    damage(file_of(folder, identity))
    request = request_for(identity, prompt)
    assert engine.load(request) == 0
    assert outcome(engine, identity)["reason"] == "torn"
    assert not file_of(folder, identity).exists()
    assert engine.load(request) == 0  # as vLLM asks again
    assert engine.load(request_for(hand_over(engine, prompt, 80), prompt, 2)) == 80


def test_what_vllm_has_computed_stays_valid_when_a_load_fails(engine, folder):
    prompt = prompt_of(120)
    identity = hand_over(engine, prompt, 110)
    flip(file_of(folder, identity), -1)
    assert engine.load(request_for(identity, prompt), computed=64) == 64


def test_a_file_that_is_gone(engine, folder):
    prompt = prompt_of(90)
    identity = hand_over(engine, prompt, 80)
    file_of(folder, identity).unlink()
    assert engine.load(request_for(identity, prompt)) == 0
    assert outcome(engine, identity)["reason"] == "gone"


def test_a_file_that_goes_between_the_scheduler_and_the_worker(engine, folder):
    prompt = prompt_of(90)
    identity = hand_over(engine, prompt, 80)
    request = request_for(identity, prompt)
    assert engine.admit(request) == 80
    file_of(folder, identity).unlink()
    ended = {}
    while not ended:
        ended = engine.step()
    assert ended == {"1": 0}
    assert outcome(engine, identity)["reason"] == "gone"


def test_a_backend_that_raises_ends_one_load_and_no_more(engine):
    prompt = prompt_of(90)
    layer = engine.worker._layers[1]
    layer.impl.do_kv_cache_update = lambda *args: 1 // 0
    assert engine.load(request_for(hand_over(engine, prompt, 80), prompt)) == 0
    del layer.impl.do_kv_cache_update
    assert engine.load(request_for(hand_over(engine, prompt, 80), prompt, 2)) == 80


def test_cancelled_before_and_during_a_load(engine, folder):
    prompt = prompt_of(90)
    identity = hand_over(engine, prompt, 80)
    request = request_for(identity, prompt)
    assert engine.admit(request) == 80
    told = engine.scheduler.request_finished(request, [])[1]["ragkv"]
    assert (told["loaded"], told["reason"]) == (0, "cancelled")
    assert not file_of(folder, identity).exists()
    while engine.waiting:  # the worker still says that the blocks are free
        engine.step()
    assert not engine.scheduler._uses


def test_after_a_preemption_vllm_computes(engine):
    prompt = prompt_of(90)
    request = request_for(hand_over(engine, prompt, 80), prompt)
    assert engine.load(request) == 80
    assert engine.load(request, computed=32) == 32


def test_a_prompt_that_vllm_has_already(engine, folder):
    prompt = prompt_of(90)
    identity = hand_over(engine, prompt, 64)
    assert engine.load(request_for(identity, prompt), computed=64) == 64
    assert outcome(engine, identity)["loaded"] == 64
    assert not file_of(folder, identity).exists()


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
    ],
)
def test_what_is_not_supported_is_refused_at_the_start(connector_module, folder, message, changed):
    with pytest.raises(ValueError, match=message):
        Engine(connector_module, vllm_config(folder, **changed))


@pytest.mark.parametrize(
    ("message", "spec"),
    [
        ("MLAAttentionSpec", MLAAttentionSpec()),
        ("sliding-window", FullAttentionSpec(sliding_window=512)),
        ("chunked", FullAttentionSpec(attention_chunk_size=512)),
        ("another size", FullAttentionSpec(head_size_v=16)),
        ("quantised", FullAttentionSpec(dtype=torch.uint8)),
    ],
)
def test_kv_caches_of_other_kinds_are_refused(connector_module, folder, message, spec):
    with pytest.raises(ValueError, match=message):
        Engine(connector_module, vllm_config(folder), spec)


@pytest.mark.parametrize("groups", [0, 2])
def test_hybrid_models_are_refused(connector_module, folder, groups):
    config = vllm_config(folder)
    with pytest.raises(ValueError, match="hybrid"):
        connector_module.RagKVConnector(config, "scheduler", cache_config(config, groups=groups))


def test_a_backend_without_a_cache_update_is_refused(connector_module, folder):
    config = vllm_config(folder)
    [*_, last] = config.compilation_config.static_forward_context.values()
    last.impl = ReadingBackend()
    with pytest.raises(ValueError, match="do_kv_cache_update"):
        Engine(connector_module, config)


def test_layers_that_share_a_cache_are_refused(connector_module, folder):
    with pytest.raises(ValueError, match="share"):
        Engine(
            connector_module,
            vllm_config(
                folder, model_config__hf_text_config=type("", (), {"num_hidden_layers": 4})
            ),
        )


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o702])
def test_a_folder_that_others_may_enter_is_refused(connector_module, folder, mode):
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(ValueError, match="this user alone"):
        Engine(connector_module, vllm_config(folder))


def test_the_folder_and_its_secret_are_the_users(engine, folder):
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "secret").stat().st_mode) == 0o600
    assert len((folder / "secret").read_bytes()) == 32


def test_the_file_stands_alone():
    """vLLM's environment has none of ragkv's dependencies."""
    path = Path(__file__).parents[2] / "ragkv" / "vllm" / "connector.py"
    allowed = {*sys.stdlib_module_names, "torch", "vllm"}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            assert {alias.name.split(".")[0] for alias in node.names} <= allowed
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            assert node.module.split(".")[0] in allowed


@pytest.mark.parametrize("package", ["ragkv", "ragkv/vllm"])
def test_the_packages_around_it_import_nothing_heavy(package):
    path = Path(__file__).parents[2] / package / "__init__.py"
    lines = ast.parse(path.read_text(encoding="utf-8")).body
    imported = [
        name.name if isinstance(line, ast.Import) else line.module
        for line in lines
        if isinstance(line, ast.Import | ast.ImportFrom)
        for name in line.names
    ]
    assert {name.split(".")[0] for name in imported} <= sys.stdlib_module_names
