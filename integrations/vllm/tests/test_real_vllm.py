"""Hand-overs to vLLM itself: exact KV gives vLLM's own tokens, spoiled KV is never read."""

from __future__ import annotations

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from handovers import exact_rows, file_of, write
from tiny import SIZE
from transformers import AutoModelForCausalLM, AutoTokenizer, MistralConfig
from vllm_server import VERSIONS, VLLM, installed_python

from ragkv.model.default_model import default_model_folder

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
TEXTS = (
    "The ferry to the island leaves at nine in the morning from the old harbour. ",
    "To bake bread, mix flour, water, salt and yeast, and knead the dough well. ",
    "The museum was built in 1897 by a merchant who collected clocks. ",
)


@pytest.fixture(scope="module", params=VERSIONS)
def version(request):
    if not installed_python(request.param).exists():
        pytest.skip(f"vLLM {request.param} is not installed: make vllm")
    return request.param


@pytest.fixture(scope="module")
def server(version, tmp_path_factory):
    folder = tmp_path_factory.mktemp(f"vllm-{version}") / "handovers"
    few_blocks = ("--num-gpu-blocks-override", "24", "--max-model-len", "512")
    server = VLLM(version, default_model_folder(), folder, *few_blocks)
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(default_model_folder(), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def make_prompt():
    """Return ``make(topic)``: a prompt that begins as no other does, and it without its question."""
    encode = AutoTokenizer.from_pretrained(default_model_folder()).encode

    def make(topic: int = 0) -> tuple[list[int], list[int]]:
        start = encode(f"{random.getrandbits(48)}. " + TEXTS[topic] * 10)
        return [*start, *encode("\nQuestion: what is this about?\nAnswer: It is")], start

    return make


@pytest.fixture
def hand_over(server, model):
    def write_exact(prefix, rows_of=None, **changed):
        rows = exact_rows(model, prefix if rows_of is None else rows_of)
        return write(server.folder, server.instance, prefix, rows, **changed)

    return write_exact


def outcome(server, identity):
    told = json.loads(file_of(server.folder, identity, ".json").read_text())
    return told["loaded"], told["reason"]


@pytest.mark.parametrize("cut", [1, 40, 64, 95, 97, 0])
def test_exact_kv_gives_vllms_own_tokens(server, hand_over, make_prompt, cut):
    prompt, prefix = make_prompt()
    prefix = prefix[:cut] if cut else prompt[:-1]
    identity = hand_over(prefix)
    answer = server.ask(prompt, identity)
    assert answer["choices"][0]["token_ids"] == server.tokens(prompt)
    told = answer["kv_transfer_params"]["ragkv"]
    assert (told["loaded"], told["reason"]) == outcome(server, identity) == (len(prefix), "")
    assert not file_of(server.folder, identity).exists()
    stream = server.stream(prompt, identity := hand_over(prefix))
    first = next(stream)
    assert outcome(server, identity) == (len(prefix), "")
    assert [*first, *(token for part in stream for token in part)] == server.tokens(prompt)


def test_other_kv_is_really_read_and_poisons_nothing(server, hand_over, make_prompt):
    (prompt, prefix), (_, other) = make_prompt(0), make_prompt(1)
    other = (other * 2)[: len(prefix)]
    wrong = server.tokens(prompt, hand_over(prefix, other))
    plain = server.tokens(prompt)
    assert wrong != plain
    assert server.tokens(prompt, hand_over(prefix, other)) == wrong
    assert server.tokens(prompt, hand_over(prefix)) == plain
    assert server.tokens(prompt) == plain
    assert server.tokens(prompt, cache_salt="another namespace") == plain


def flip_last(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("reason", "changed"),
    [
        ("expired", {"expires_in": -2}),
        ("format", {"format": 2}),
        ("instance", {"instance": "another vLLM"}),
        ("shape", {"kv_heads": 1}),
        ("dtype", {"dtype": "bfloat16"}),
        ("torn", flip_last),
        ("torn", lambda path: path.write_bytes(path.read_bytes()[:100])),
        ("torn", lambda path: path.write_bytes(path.read_bytes()[:-100])),
        ("gone", lambda path: path.unlink()),
    ],
)
def test_what_does_not_hold_is_computed(server, hand_over, make_prompt, reason, changed):
    (prompt, prefix), (_, other) = make_prompt(0), make_prompt(1)
    other = (other * 2)[: len(prefix)]  # so that reading it would show
    identity = hand_over(prefix, other, **(changed if isinstance(changed, dict) else {}))
    if not isinstance(changed, dict):
        changed(file_of(server.folder, identity))
    assert server.tokens(prompt, identity) == server.tokens(prompt)
    assert outcome(server, identity) == (0, reason)
    assert not file_of(server.folder, identity).exists()


def test_an_id_opens_nothing_for_another_prompt_or_salt(server, hand_over, make_prompt):
    (prompt, prefix), (other, _) = make_prompt(0), make_prompt(1)
    identity = hand_over(prefix)
    assert server.tokens(other, identity) == server.tokens(other)
    assert file_of(server.folder, identity).exists()
    plain = server.tokens(prompt)
    assert server.tokens(prompt, identity, cache_salt="a namespace") == plain
    assert outcome(server, identity) == (0, "salt")


def test_prompt_logprobs_are_vllms_own(server, hand_over, make_prompt):
    prompt, prefix = make_prompt()
    identity = hand_over(prefix)
    answer = server.ask(prompt, identity, prompt_logprobs=0)
    assert len(answer["choices"][0]["prompt_logprobs"]) == len(prompt)
    assert outcome(server, identity) == (0, "prompt")


def test_many_at_once_preempted_spoiled_and_plain(server, hand_over, make_prompt):
    prompts = [make_prompt(number % 3) for number in range(6)]
    alone = [server.tokens(prompt, max_tokens=60, ignore_eos=True) for prompt, _ in prompts]
    identities = [hand_over(prefix) for _, prefix in prompts]
    flip_last(file_of(server.folder, identities[2]))
    identities[4] = ""
    server.client.post("/reset_prefix_cache")
    before = server.metric("vllm:num_preemptions_total")
    with ThreadPoolExecutor(6) as pool:
        together = pool.map(
            lambda pair: server.tokens(pair[0][0], pair[1], max_tokens=60, ignore_eos=True),
            zip(prompts, identities, strict=True),
        )
        assert list(together) == alone
    assert server.metric("vllm:num_preemptions_total") > before
    told = [outcome(server, identity) for identity in identities if identity]
    assert told == [
        (0, "torn") if number == 2 else (len(prefix), "")
        for number, (_, prefix) in enumerate(prompts)
        if number != 4
    ]


def test_cancelled_requests_leave_nothing(server, hand_over, make_prompt):
    identities = []
    for parts in range(3):
        prompt, prefix = make_prompt(parts)
        identities.append(hand_over(prefix))
        stream = server.stream(prompt, identities[-1], max_tokens=200, ignore_eos=True)
        for _ in range(parts + 1):
            next(stream)
        stream.close()
    for _ in range(100):
        if not server.metric("vllm:num_requests_running"):
            break
        time.sleep(0.1)
    assert not any(file_of(server.folder, identity).exists() for identity in identities)
    prompt, prefix = make_prompt()
    assert server.tokens(prompt, hand_over(prefix)) == server.tokens(prompt)


def test_a_restart_is_another_instance(server, hand_over, make_prompt):
    (prompt, prefix), (_, other) = make_prompt(0), make_prompt(1)
    before = hand_over(prefix, (other * 2)[: len(prefix)])
    stream = server.stream(*make_prompt(2)[:1], max_tokens=200, ignore_eos=True)
    next(stream)
    server.kill()
    with pytest.raises(Exception, match=r"closed|disconnected|reset"):
        list(stream)
    server.start()
    assert server.tokens(prompt, before) == server.tokens(prompt)
    told = json.loads(file_of(server.folder, before, ".json").read_text())
    assert (told["reason"], told["instance"]) == ("instance", server.instance)
    assert server.tokens(prompt, hand_over(prefix)) == server.tokens(prompt)


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("does not support LoRA", ["--enable-lora"]),
        ("kv_load_failure_policy other than recompute", ["fail"]),
        ("sliding-window or chunked attention", ["--skip-tokenizer-init"]),
    ],
)
def test_what_is_not_supported_stops_the_start(version, tmp_path, message, options):
    model = default_model_folder()
    if "sliding" in message:
        model = tmp_path / "model"
        config = MistralConfig(**SIZE | {"head_dim": 32}, sliding_window=64)
        AutoModelForCausalLM.from_config(config).save_pretrained(model)
    server = VLLM(version, model, tmp_path / "handovers")
    if options == ["fail"]:
        server.command = [text.replace("recompute", "fail") for text in server.command]
    else:
        server.command += options
    with pytest.raises(RuntimeError, match=message):
        server.start()
