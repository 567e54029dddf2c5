"""What only a GPU makes models and memory do, made to happen here."""

import copy
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from exact import agree
from store_entries import FINGERPRINT, make_entry
from threads import each_in_a_thread
from tiny import SIZE, ask, random_model, some_chunks, tiny_model, tiny_tokenizer
from transformers import LlamaConfig, PreTrainedModel

from ragkv import RagKV, ReuseConfig, StoreConfig
from ragkv.config import MEMORY
from ragkv.errors import OutOfMemoryError, UnsupportedModelError
from ragkv.model.fingerprint import fingerprint_of, state_of
from ragkv.model.load import load_model
from ragkv.model.loaded import ReusableModel
from ragkv.model.memory import pass_bytes
from ragkv.model.workspace import Workspace
from ragkv.store import TieredStore
from ragkv.store.backends.memory import MemoryBackend
from ragkv.store.tiers.tier import MemoryTier

ANEW = StoreConfig(MEMORY, history_bytes=0)
"""No prompt continues an earlier one."""
CHUNKS = some_chunks(3)
PROMPT = [{"role": "user", "content": "\n\n".join(CHUNKS) + "\n\nWhat does the text say?"}]


@dataclass
class Swizzled:
    """As another package lays weights out: no parameter, not in the state dict."""

    storage: Any

    def __call__(self) -> torch.Tensor:
        weight: torch.Tensor = self.storage.data
        return weight


def with_hidden_experts(model: PreTrainedModel) -> PreTrainedModel:
    """Do to experts what transformers' MXFP4 does where a GPU computes in it."""
    for module in model.modules():
        for name in ("gate_up_proj", "down_proj") if "Experts" in type(module).__name__ else ():
            weight = module._parameters.pop(name).detach()
            setattr(module, name, Swizzled(SimpleNamespace(data=weight)))
    model.hf_quantizer = SimpleNamespace()
    return model


def test_weights_that_are_no_parameters_tell_models_apart():
    model = tiny_model("gpt-oss")
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.layers[1].mlp.experts.down_proj.mul_(-1)
    models = [with_hidden_experts(each) for each in (model, other, copy.deepcopy(model))]
    one, another, again = (fingerprint_of(each, tiny_tokenizer()).weights for each in models)
    assert one == again != another
    assert not any(name.endswith("down_proj") for name in model.state_dict())
    before = state_of(model)
    model.model.layers[1].mlp.experts.down_proj().mul_(2)
    assert state_of(model) != before
    assert fingerprint_of(model, tiny_tokenizer()).weights != one


def test_weights_that_cannot_be_read_are_served_in_full():
    class Packed(torch.Tensor):
        """As torchao's: not bytes of its own."""

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func is torch.Tensor.view:
                raise NotImplementedError("view")
            return super().__torch_function__(func, types, args, kwargs or {})

    model = tiny_model()
    own = model.state_dict
    packed = own()["lm_head.weight"].as_subclass(Packed)
    model.state_dict = lambda *a, **k: {**own(*a, **k), "lm_head.weight": packed}
    with pytest.raises(UnsupportedModelError, match=r"lm_head\.weight is a Packed"):
        load_model(model, tiny_tokenizer())
    full = load_model(model, tiny_tokenizer(), on_unsupported="full")
    assert not isinstance(full, ReusableModel)
    assert "Packed" in full.unsupported


def test_repairing_steps_compute_experts_as_a_prefill_does(make_engine, monkeypatch):
    """On a GPU ``generate`` computes all steps' experts in a way that is for one token."""
    engine = make_engine("gpt-oss", store=ANEW)
    model = engine.loaded.model
    model.set_experts_implementation("grouped_mm")
    model.generation_config.eos_token_id = None
    engine.precompute(CHUNKS)
    expected = engine.generate(PROMPT, max_new_tokens=40, recompute_ratio=0.1)

    @contextmanager
    def as_on_a_gpu(self):
        self.set_experts_implementation("batched_mm")
        yield
        self.set_experts_implementation("grouped_mm")

    monkeypatch.setattr(type(model), "_optimize_model_for_decode", as_on_a_gpu)
    seen: set[tuple[str, bool]] = set()

    def look(module, given):
        seen.add((module.config._experts_implementation, len(given[0]) > 1))

    experts = model.model.layers[0].mlp.experts
    with experts.register_forward_pre_hook(look):
        answer = engine.generate(PROMPT, max_new_tokens=40, recompute_ratio=0.1)
    assert answer.report.tokens.ahead == expected.report.tokens.ahead > 0
    assert answer.token_ids == expected.token_ids
    assert seen == {("grouped_mm", True), ("batched_mm", False)}


def test_the_device_tier_makes_room_for_a_request(make_engine, monkeypatch):
    engine = make_engine(store=ANEW)
    engine.precompute(CHUNKS)
    expected = engine.generate(PROMPT, max_new_tokens=4).token_ids
    room, asked = Workspace.uninitialised, []
    monkeypatch.setattr(engine._store, "make_room", lambda: asked.append(1) or len(asked) == 1)

    def full(*given):
        if not asked:
            raise torch.OutOfMemoryError("none left")
        return room(*given)

    monkeypatch.setattr(Workspace, "uninitialised", full)
    found = engine.generate(PROMPT, max_new_tokens=4)
    assert found.token_ids == expected
    assert found.report.tokens.reused
    assert asked == [1]

    def never(*_):
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(Workspace, "uninitialised", never)
    with pytest.raises(OutOfMemoryError, match="kv_bytes"):
        engine.generate(PROMPT, max_new_tokens=4)


def test_only_what_lies_on_a_device_is_let_go():
    near = MemoryTier(1 << 20)
    store = TieredStore(MemoryBackend(), tiers=[near])
    store.put(make_entry("a"), FINGERPRINT)
    assert not store.make_room()
    assert near.contains("a", FINGERPRINT)
    near.device = torch.device("meta")  # as a GPU's
    assert store.make_room()
    assert not near.contains("a", FINGERPRINT)
    assert store.contains("a", FINGERPRINT)
    assert not store.make_room()


# ---- a GPU's memory runs out

LONG = [ask(CHUNKS[at % 3 :], f"\n\nQuestion {at}? " + "Why? " * 600) for at in range(6)]


@pytest.fixture
def scarce_gpu() -> Iterator[RagKV]:
    """Give an engine on a GPU where two or three of the long prompts fit."""
    size = {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "head_dim": 64}
    config = LlamaConfig(**{**SIZE, **size, "num_key_value_heads": 8})
    gc.collect()
    torch.cuda.empty_cache()
    with RagKV(
        random_model(config),
        tiny_tokenizer(),
        device="cuda",
        store=StoreConfig(MEMORY, history_bytes=0, device_bytes=0),
        reuse=ReuseConfig(on_miss="skip", history=False),
    ) as engine:
        longest = max(len(engine.tokenize(engine.render(prompt))) for prompt in LONG)
        row = engine.loaded.architecture.values_per_token * 4
        room = int(2.5 * (longest + 256) * row) + pass_bytes(engine.loaded, longest)
        limit = torch.cuda.memory_reserved() + room
        torch.cuda.set_per_process_memory_fraction(
            limit / torch.cuda.get_device_properties(0).total_memory, 0
        )
        try:
            yield engine
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("waits", [True, False])
def test_prompts_that_do_not_fit_together(scarce_gpu, *, waits):
    """By default they wait for one another; with too high a limit, some can have an error."""
    engine, settings = scarce_gpu, {"max_new_tokens": 100, "ignore_eos": True, "logprobs": 2}
    alone = [engine.generate(prompt, **settings) for prompt in LONG]
    if not waits:
        engine._requests.configure(kv_bytes=1 << 40)
    found: dict[int, Any] = {}

    def work(at):
        try:
            found[at] = engine.generate(LONG[at], **settings)
        except OutOfMemoryError as error:
            found[at] = error

    each_in_a_thread(work, range(6))
    errors = [each for each in found.values() if isinstance(each, OutOfMemoryError)]
    assert len(found) == 6
    assert not (waits and errors)
    assert len(errors) < 6
    for at, answer in found.items():
        assert answer in errors or agree(answer, alone[at])
    assert (engine.status().running, engine.status().waiting) == (0, 0)
    again = engine.generate(LONG[0], **settings)  # though the errors are kept
    assert agree(again, alone[0])
