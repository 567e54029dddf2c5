"""What the program around does with torch and with the model, before and between calls."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from tiny import some_chunks, tiny_model, tiny_tokenizer

from ragkv import RagKV, ReuseConfig, StoreConfig
from ragkv.config import MEMORY
from ragkv.errors import ConfigError
from ragkv.ingest import encode
from ragkv.model.fingerprint import fingerprint_of
from ragkv.select import method_names

CHUNKS = some_chunks(3)
FIRST = ReuseConfig(history=False)
ONE = [{"role": "user", "content": CHUNKS[0] + "\n\nWhat does the text say?"}]
PROMPT = [{"role": "user", "content": "\n\n".join(CHUNKS) + "\n\nWhat does the text say?"}]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def drawn(engine: RagKV, method: str) -> list[int]:
    engine.precompute(CHUNKS, method=method)
    return engine.generate(PROMPT, method=method, recompute_ratio=0.2, max_new_tokens=8).token_ids


@pytest.mark.parametrize(
    ("method", "dtype"),
    [
        *((name, torch.bfloat16) for name in method_names() if "clip" not in name),
        ("query", torch.float64),
    ],
)
def test_torchs_default_dtype_changes_nothing(make_engine, method, dtype):
    expected = drawn(make_engine(), method)
    engine = make_engine()
    with default_dtype(dtype):
        assert drawn(engine, method) == expected


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    """What a model draws whose generation config says nothing."""
    found = {}
    for method in ("query", "full"):
        with RagKV(tiny_model(), tiny_tokenizer(), store=MEMORY, reuse=FIRST) as engine:
            found[method] = drawn(engine, method)
    return found


def test_autocast_changes_nothing(make_engine):
    expected = drawn(make_engine(), "query")
    # the prefill below must not continue the answers before it
    engine = make_engine(store=StoreConfig(MEMORY, history_bytes=0))
    with torch.autocast("cpu", torch.bfloat16):
        assert drawn(engine, "query") == expected
        assert torch.is_autocast_enabled("cpu")
        pieces = engine.stream(PROMPT, recompute_ratio=0.2, max_new_tokens=8)
        list(pieces)
        assert pieces.completion.token_ids == expected
        inside = engine.prefill(PROMPT, recompute_ratio=0.0)
    outside = make_engine()
    outside.precompute(CHUNKS)
    assert torch.equal(inside.logits, outside.prefill(PROMPT, recompute_ratio=0.0).logits)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cache_implementation", "static"),
        ("cache_implementation", "dynamic"),
        ("num_return_sequences", 2),
        ("prompt_lookup_num_tokens", 3),
        ("penalty_alpha", 0.6),
        ("dola_layers", "low"),
        ("force_words_ids", [[5, 6]]),
        ("token_healing", True),
    ],
)
def test_what_the_models_generation_config_says_of_the_work(make_engine, expected, name, value):
    """It has no part in what is drawn, and would not do with a repaired cache."""
    engine = make_engine()
    setattr(engine.loaded.model.generation_config, name, value)
    assert {method: drawn(engine, method) for method in expected} == expected


def test_a_chunk_without_a_token_of_the_prompts_is_a_miss(make_engine):
    engine = make_engine()
    stars = "*" * 18
    assert len(engine.tokenizer(stars)["input_ids"]) == 1
    engine.precompute([stars, *CHUNKS[1:]])
    for text in ("\n".join([CHUNKS[0], *CHUNKS[1:]]), CHUNKS[0]):
        assert stars in text
        report = engine.prefill(text, recompute_ratio=0.0).report
        assert [(miss.chunk, miss.reason) for miss in report.misses] == [(stars, "unaligned")]
        assert stars not in [use.text for use in report.chunks]


def assert_exact(engine: RagKV) -> None:
    """One chunk behind the sink is a full prefill, by the weights as they are now."""
    out = engine.prefill(ONE, recompute_ratio=0.0)
    with torch.no_grad():
        full = engine.loaded.model(torch.tensor([out.token_ids])).logits[0, -1]
    torch.testing.assert_close(out.logits, full, atol=5e-5, rtol=0)


def train_a_little(model: torch.nn.Module) -> None:
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    ids = torch.arange(20, 60)[None]
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    model.eval()


def load_others(model: torch.nn.Module, seed: int = 1) -> None:
    model.load_state_dict(tiny_model(seed=seed).state_dict())


@pytest.mark.parametrize("change", [train_a_little, load_others])
def test_weights_that_change_between_calls(make_engine, change):
    engine = make_engine()
    engine.precompute(CHUNKS)
    assert engine.prefill(ONE, recompute_ratio=0.0).report.tokens.reused > 80
    change(engine.loaded.model)
    assert not engine.contains(CHUNKS[0])
    out = engine.prefill(ONE, recompute_ratio=0.0)
    assert [miss.reason for miss in out.report.misses] == ["fingerprint"]
    assert_exact(engine)
    engine.precompute(CHUNKS)
    assert engine.prefill(ONE, recompute_ratio=0.0).report.tokens.reused > 80
    assert_exact(engine)


@pytest.mark.parametrize("change", [load_others, torch.nn.Module.train])
def test_weights_that_change_while_chunks_are_encoded_behind_an_answer(
    make_engine, monkeypatch, change
):
    engine = make_engine()
    encode_now = encode.encode

    def changed(*given, **more):
        change(engine.loaded.model)
        return encode_now(*given, **more)

    monkeypatch.setattr(encode, "encode", changed)
    engine.prefetch(CHUNKS)
    engine.generate(PROMPT, max_new_tokens=2)
    engine.wait()
    engine.loaded.model.eval()
    assert not any(map(engine.contains, CHUNKS))
    load_others(engine.loaded.model, seed=0)  # the weights that the prompt was answered with
    assert not any(map(engine.contains, CHUNKS))
    assert_exact(engine)


def test_a_model_in_training_mode_computes_no_caches(make_engine):
    engine = make_engine()
    engine.loaded.model.train()
    for call in (engine.precompute, engine.prefetch):
        with pytest.raises(ConfigError, match="training mode"):
            call(CHUNKS)
    with pytest.raises(ConfigError, match="training mode"):
        engine.generate(PROMPT)
    engine.loaded.model.eval()
    engine.precompute(CHUNKS)
    assert_exact(engine)


class Adapted(torch.nn.Module):
    """A linear layer with adapters, as PEFT has them: one of them is in use, or none."""

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        draw = torch.Generator().manual_seed(0)
        self.deltas = torch.nn.ParameterDict(
            {
                name: torch.nn.Parameter(0.1 * torch.randn(base.weight.shape, generator=draw))
                for name in ("one", "other")
            }
        )
        self.scaling = {"one": 1.0, "other": 1.0}
        self.active_adapters = ["one"]
        self.merged_adapters: list[str] = []
        self.disable_adapters = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.base_layer(x)
        for name in () if self.disable_adapters else self.active_adapters:
            out = out + self.scaling[name] * torch.nn.functional.linear(x, self.deltas[name])
        return out


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("active_adapters", ["other"]),
        ("disable_adapters", True),
        ("scaling", {"one": 2.0, "other": 1.0}),
    ],
)
def test_the_adapter_in_use_is_part_of_what_a_cache_depends_on(field, value):
    model = tiny_model()
    adapted = Adapted(model.model.layers[1].mlp.up_proj)
    model.model.layers[1].mlp.up_proj = adapted
    model.peft_config = {"one": {}, "other": {}}
    before = fingerprint_of(model, tiny_tokenizer())
    with RagKV(model, tiny_tokenizer(), store=":memory:") as engine:
        engine.precompute(CHUNKS)
        setattr(adapted, field, value)
        assert fingerprint_of(model, tiny_tokenizer()) != before
        out = engine.prefill(ONE, recompute_ratio=0.0)
        assert [miss.reason for miss in out.report.misses] == ["fingerprint"]
        assert_exact(engine)


def test_what_a_tokenizer_padded_to_before_is_no_part_of_it():
    model, tokenizer = tiny_model(), copy.deepcopy(tiny_tokenizer())
    before = fingerprint_of(model, tokenizer)
    tokenizer(["one", "one and another"], padding=True, truncation=True, max_length=5)
    assert tokenizer.backend_tokenizer.padding is not None
    assert fingerprint_of(model, tokenizer) == before
    assert tokenizer.backend_tokenizer.truncation is not None
