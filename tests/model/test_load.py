"""Loading: dtype, device, tokenizer, positions; folders without a model."""

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import LINEAR, SIZE, YARN, saved, some_chunks, tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, LlamaConfig

from ragkv import RagKV, ReuseConfig
from ragkv.errors import (
    ConfigError,
    ModelNotFoundError,
    RagKVError,
    UnsupportedModelError,
)
from ragkv.model.fingerprint import fingerprint_of
from ragkv.model.load import load_model, pretrained
from ragkv.model.lock import lock_of


def opened(*args: Any, **given: Any) -> RagKV:
    return RagKV(*args, store=":memory:", **given)


def test_a_dtype_given_beside_a_loaded_model_is_that_of_loading_in_it(tmp_path):
    """Rotary frequencies stay as they are: rounded ones would put tokens elsewhere."""
    tiny_model().save_pretrained(tmp_path)
    tokenizer = tiny_tokenizer()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    cast = opened(AutoModelForCausalLM.from_pretrained(tmp_path), tokenizer, dtype="bfloat16")
    whole = opened(loaded, tokenizer)
    assert cast.loaded.model.dtype == torch.bfloat16
    assert cast.info.fingerprint == whole.info.fingerprint
    prompt = "\n".join(some_chunks(3))
    logits = [engine.prefill(prompt, method="full").logits for engine in (cast, whole)]
    torch.testing.assert_close(*logits, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounded_rotary_frequencies_are_another_fingerprint(tmp_path, dtype):
    tiny_model().save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    rounded = AutoModelForCausalLM.from_pretrained(tmp_path).to(dtype)
    for again in (dtype, torch.float32):  # what was rounded stays so
        models = (loaded.to(again), rounded.to(again)) if again != dtype else (loaded, rounded)
        ours, theirs = (fingerprint_of(model, tiny_tokenizer()) for model in models)
        assert ours.weights == theirs.weights
        assert ours.digest != theirs.digest


@pytest.mark.parametrize(
    ("rope", "known"), [(YARN, 4096), (LINEAR, 2048), ({"rope_type": "default"}, 1024)]
)
def test_a_stretched_rope_knows_as_many_positions_as_it_is_stretched_to(rope, known):
    """Qwen2.5's and older models' configurations leave ``max_position_embeddings`` as it was."""
    parameters = {"rope_theta": 10000.0, **rope}
    config = LlamaConfig(**{**SIZE, "max_position_embeddings": 1024}, rope_parameters=parameters)
    model = AutoModelForCausalLM.from_config(config)
    assert load_model(model, tiny_tokenizer()).positions == known


@pytest.mark.parametrize(
    "given",
    [{"dtype": "bfloat16"}, {"device": "meta"}, {"tokenizer": "another"}],
    ids=lambda given: next(iter(given)),
)
def test_what_a_described_model_cannot_heed_is_refused(given):
    loaded = load_model(tiny_model(), tiny_tokenizer())
    if "tokenizer" in given:
        given = {"tokenizer": copy.deepcopy(tiny_tokenizer())}
    with pytest.raises(ConfigError, match=f"{next(iter(given))}"):
        opened(loaded, **given)
    assert opened(loaded, loaded.tokenizer, device="cpu", dtype="float32").info.unsupported == ""


def test_a_model_that_is_refused_stays_as_it_was():
    config = GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=600)
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UnsupportedModelError):
        opened(model, tiny_tokenizer(), dtype="bfloat16")
    assert model.dtype == torch.float32
    full = opened(model, tiny_tokenizer(), dtype="bfloat16", on_unsupported="full")
    assert full.loaded.model.dtype == torch.bfloat16


def test_a_model_changes_its_dtype_between_requests_not_within_one():
    model, changed = tiny_model(), threading.Event()

    def change():
        opened(model, tiny_tokenizer(), dtype="bfloat16")
        changed.set()

    with lock_of(model):
        thread = threading.Thread(target=change)
        thread.start()
        assert not changed.wait(0.2)
        assert model.dtype == torch.float32
    thread.join()
    assert model.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", ["int32", torch.int8, "bool", "float99"])
def test_a_dtype_that_no_model_computes_in_is_refused(dtype):
    with pytest.raises(ConfigError, match="dtype"):
        opened(tiny_model(), tiny_tokenizer(), dtype=dtype)


def test_a_tokenizer_of_another_type_is_refused():
    with pytest.raises(ConfigError, match="tokenizer"):
        opened(tiny_model(), "HuggingFaceTB/SmolLM2-135M-Instruct")


def test_a_model_file_that_is_cut_is_no_raw_error(tmp_path):
    saved(tmp_path)
    weights = next(tmp_path.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(RagKVError, match="Cannot load") as caught:
        opened(tmp_path)
    assert isinstance(caught.value, ModelNotFoundError)


@pytest.mark.parametrize("template", [3, [{"content": "no role"}], ["text"], {"role": "user"}])
def test_a_sink_from_what_is_no_template_is_refused(template):
    with opened(tiny_model(), tiny_tokenizer()) as engine, pytest.raises(ConfigError, match="role"):
        engine.sink_from(template)


def test_messages_that_the_chat_template_refuses_are_a_config_error():
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = "{{ raise_exception('only users speak') }}"
    with opened(tiny_model(), tokenizer) as engine, pytest.raises(ConfigError, match="only users"):
        engine.generate([{"role": "system", "content": "Be brief."}], method="full")


@pytest.fixture
def models(tmp_path) -> Path:
    """Return a folder of models."""
    saved(tmp_path / "models" / "tiny-llama")
    (tmp_path / "models" / "other").mkdir()
    return tmp_path / "models"


def message(name: object) -> str:
    with pytest.raises(ModelNotFoundError) as error:
        load_model(name, None)
    assert "internet" not in str(error.value)
    return str(error.value)


def test_a_missing_folder_is_said_to_be_missing(models, monkeypatch):
    said = message(f"{models}/tiny-lama")
    assert said == f"There is no folder {models}/tiny-lama: did you mean {models}/tiny-llama?"
    assert f"{models} has the folders other, tiny-llama" in message(models / "unlike")
    assert f"did you mean {models}" in message(models.parent / "modells" / "tiny-llama")
    monkeypatch.chdir(models)
    for name in ("./tiny-lamma", "tiny-lamma/", Path("tiny-lamma"), "..\\models\\tiny", "~/no/x"):
        assert "There is no folder" in message(name)
    monkeypatch.setenv("HOME", str(models))
    assert load_model("~/tiny-llama", None).name == "~/tiny-llama"


def test_a_name_that_may_be_the_hub_s_is_looked_for_here_too(models, monkeypatch):
    monkeypatch.chdir(models.parent)
    with pytest.raises(ModelNotFoundError, match=r"no folder.*did you mean .*models/tiny-llama"):
        load_model("models/tiny-lamma", None)


def test_a_folder_without_a_model_says_what_it_has(models):
    assert (
        message(models / "other") == f"The folder {models}/other has no config.json: it is empty."
    )
    (models / "other" / "model.gguf").touch()
    assert "no config.json: it has model.gguf" in message(models / "other")
    assert f"did you mean {models}/tiny-llama?" in message(models)
    snapshot = models / "hub" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    assert f"did you mean {snapshot}?" in message(models / "hub")


def test_a_file_is_no_folder(models):
    file = models / "tiny-llama" / "model.safetensors"
    assert message(file) == f"{file} is a file: give the model's folder, {file.parent}"


def test_tokenizers_and_gguf_files_need_no_configuration(models):
    (models / "tiny-llama" / "config.json").unlink()
    assert pretrained(AutoTokenizer, models / "tiny-llama")
    with pytest.raises(ModelNotFoundError, match=r"Cannot load.*no\.gguf"):
        pretrained(AutoModelForCausalLM, models / "tiny-llama", gguf_file="no.gguf")


def test_the_auxiliary_model_s_folder_is_looked_for_first(models):
    reuse = ReuseConfig(method="cacheclip", auxiliary_model=f"{models}/tiny-lama")
    with pytest.raises(ModelNotFoundError, match="did you mean"):
        RagKV("no/such-model", reuse=reuse)
