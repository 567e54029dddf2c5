"""GGUF files: the same model as the one that was written, or a refusal by name."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from gguf_files import split, write_gguf
from tiny import LINEAR, SIZE, YARN, ask, random_model, some_chunks, tiny_model, tiny_tokenizer
from transformers import AutoConfig, Gemma3TextConfig, LlamaConfig

from ragkv import RagKV
from ragkv.errors import ModelNotFoundError, UnsupportedModelError
from ragkv.model import gguf
from ragkv.model.load import load_model, pretrained

FAMILIES = ["llama", "qwen2", "qwen3", "gemma3"]
IDS = torch.arange(4, 260)[None]
LLAMA3 = {**tiny.LLAMA3, "original_max_position_embeddings": 8192}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "ragkv" / "models"


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits
    return found


def made(family: str) -> Any:
    """Return a tiny model of a type; of Gemma 3 one with the sizes that its files do not state."""
    if family != "gemma3":
        return tiny_model(family)
    own = {"sliding_window": 48, "num_hidden_layers": 6, "query_pre_attn_scalar": 256}
    return random_model(Gemma3TextConfig(**{**SIZE, **own}))


def llama3_factors() -> np.ndarray[Any, Any]:
    """Return 1 for fast rotations and 8 for slow ones, as llama.cpp's converter does."""
    config = LlamaConfig(**{**SIZE, "rope_parameters": LLAMA3})
    scaled = random_model(config).model.rotary_emb.inv_freq.double()
    plain = 500000.0 ** -(torch.arange(8).double() / 8)
    return (plain / scaled).float().numpy()


ROPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "linear": (LINEAR, {"fields": {"type": "linear", "factor": 2.0}}),
    "yarn": (YARN, {"fields": {"type": "yarn", "factor": 4.0, "original_context_length": 1024}}),
    "llama3": (LLAMA3, {"tensors": {"rope_freqs.weight": llama3_factors()}}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_is_its_model(tmp_path, family):
    model = made(family)
    path = write_gguf(tmp_path / "tiny.gguf", model)
    with RagKV(path, store=":memory:", dtype="float32") as kv:
        assert kv.info.name == str(path)
        torch.testing.assert_close(logits(kv.loaded.model), logits(model), rtol=0, atol=1e-5)
        assert kv.tokenizer.chat_template == tiny_tokenizer().chat_template
        prompt, tokenizer = ask(some_chunks()), kv.tokenizer
        kv.precompute(some_chunks())
        found = kv.generate(prompt, max_new_tokens=6)
        full = kv.generate(prompt, max_new_tokens=6, recompute_ratio=1, history=False)
        assert found.report.tokens.reused > 50
    with RagKV(model, tokenizer, store=":memory:") as own:
        assert own.generate(prompt, max_new_tokens=6).token_ids == full.token_ids


def test_the_tokenizer_is_the_file_s(tmp_path):
    found, own = load_model(write_gguf(tmp_path / "a.gguf", tiny_model()), None), tiny_tokenizer()
    text = found.tokenizer.apply_chat_template(ask(some_chunks()), tokenize=False)
    assert text == own.apply_chat_template(ask(some_chunks()), tokenize=False)
    assert found.tokenizer(text)["input_ids"] == own(text)["input_ids"]
    assert found.tokenizer.eos_token == own.eos_token


@pytest.mark.parametrize("name", ROPES)
def test_rotary_scaling_is_read(tmp_path, name):
    parameters, given = ROPES[name]
    model = random_model(LlamaConfig(**{**SIZE, "rope_parameters": parameters}))
    fields = {f"llama.rope.scaling.{key}": each for key, each in given.get("fields", {}).items()}
    path = write_gguf(tmp_path / "a.gguf", model, fields=fields, tensors=given.get("tensors"))
    loaded = load_model(path, None).model
    torch.testing.assert_close(logits(loaded), logits(model), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "given",
    [
        {"fields": {"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}},
        {"fields": {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.attn_factor": 2.0}},
        {"tensors": {"rope_factors_long.weight": np.ones(8, np.float32)}},
        {"tensors": {"rope_freqs.weight": np.linspace(1, 9, 8, dtype=np.float32)}},
    ],
    ids=["kind", "field", "longrope", "factors"],
)
def test_rotary_scaling_of_other_kinds_is_refused(tmp_path, given):
    path = write_gguf(tmp_path / "a.gguf", tiny_model(), **given)
    with pytest.raises(UnsupportedModelError, match=r"a\.gguf.*(rotary|rope_freqs)"):
        load_model(path, None)


def test_products_of_quantised_files_are_recognised(tmp_path):
    path = write_gguf(tmp_path / "a.gguf", tiny_model(), quantised=True)
    first = load_model(path, None)
    again = load_model(path, None)
    assert first.fingerprint == again.fingerprint
    weight = first.model.model.layers[0].mlp.up_proj.weight
    levels = (weight.view(-1, 32) / weight.view(-1, 32).abs().amax(1, keepdim=True) * 8).round()
    assert len(levels.unique()) <= 17


@pytest.mark.parametrize("which", [0, 1, 2])
def test_any_part_of_a_split_file_names_it(tmp_path, which):
    model = tiny_model()
    parts = split(write_gguf(tmp_path / "a.gguf", model), 3)
    (tmp_path / "a.gguf").unlink()
    loaded = load_model(parts[which], None)
    torch.testing.assert_close(logits(loaded.model), logits(model), rtol=0, atol=1e-5)
    parts[(which + 1) % 3].unlink()
    with pytest.raises(ModelNotFoundError, match="lacks parts of the model: a-0000"):
        load_model(parts[which], None)


def test_a_file_without_the_suffix_is_recognised(tmp_path):
    """Ollama's files are named by their digests."""
    model = tiny_model()
    blob = write_gguf(tmp_path / "a.gguf", model).rename(tmp_path / "sha256-0123")
    torch.testing.assert_close(logits(load_model(str(blob), None).model), logits(model))


# ---- the cache


def test_it_is_converted_once_a_dtype(tmp_path, cache, caplog, monkeypatch):
    path = write_gguf(tmp_path / "a.gguf", tiny_model())
    with caplog.at_level(logging.WARNING):
        assert load_model(path, None).dtype == torch.float32
        assert load_model(path, None, dtype="bfloat16").dtype == torch.bfloat16
    own = [each.getMessage() for each in caplog.records if each.name == "ragkv.model.gguf"]
    assert [each.endswith("GB)") for each in own] == [True, True]
    assert len(list(cache.iterdir())) == 2
    monkeypatch.setattr(gguf, "_unpacked", None)
    load_model(path, None)
    load_model(path, None, dtype="bfloat16")


def test_a_changed_file_is_another_model(tmp_path):
    path = write_gguf(tmp_path / "a.gguf", tiny_model())
    before = load_model(path, None).fingerprint
    write_gguf(path, tiny_model(seed=1))
    assert load_model(path, None).fingerprint.weights != before.weights


@pytest.mark.parametrize("family", FAMILIES)
def test_the_cache_can_be_turned_off(tmp_path, cache, monkeypatch, family):
    path = write_gguf(tmp_path / "a.gguf", made(family))
    monkeypatch.setenv(gguf.CACHE, "off")
    uncached = load_model(path, None).fingerprint
    assert not cache.exists()
    monkeypatch.delenv(gguf.CACHE)
    assert load_model(path, None).fingerprint == uncached
    assert pretrained(AutoConfig, path).hidden_size == SIZE["hidden_size"]


# ---- refusals


def torn(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5000])


def torn_in_the_header(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:3000])


def another_kind(path: Path) -> None:
    path.write_bytes(b"PK\x03\x04" + path.read_bytes())


def empty(path: Path) -> None:
    path.write_bytes(b"GGUF")


@pytest.mark.parametrize("damage", [torn, torn_in_the_header, another_kind, empty])
def test_a_damaged_file_is_refused_by_name(tmp_path, cache, damage):
    path = write_gguf(tmp_path / "a.gguf", tiny_model())
    damage(path)
    with pytest.raises(ModelNotFoundError, match=r"a\.gguf"):
        load_model(path, None)
    assert not cache.exists() or not list(cache.iterdir())


def test_a_missing_file_is_named(tmp_path):
    for name in (tmp_path / "b.gguf", "some/b.gguf", "b.gguf"):
        with pytest.raises(ModelNotFoundError, match=r"There is no file .*b\.gguf"):
            load_model(name, None)


@pytest.mark.parametrize("architecture", ["clip", "bert", "whisper-like"])
def test_other_models_are_refused_by_name(tmp_path, architecture):
    path = write_gguf(tmp_path / "a.gguf", tiny_model(), architecture=architecture)
    with pytest.raises(UnsupportedModelError, match=architecture):
        load_model(path, None)


def test_a_file_that_lacks_weights_is_refused(tmp_path):
    path = write_gguf(tmp_path / "a.gguf", tiny_model(), without="blk.1.ffn_up.weight")
    with pytest.raises(ModelNotFoundError, match=r"lacks weights.*layers\.1\.mlp\.up_proj"):
        load_model(path, None)
