"""A model's folder that is missing, or has no model in it."""

from pathlib import Path

import pytest
from tiny import saved
from transformers import AutoModelForCausalLM, AutoTokenizer

from ragkv import RagKV, ReuseConfig
from ragkv.errors import ModelNotFoundError
from ragkv.model.load import load_model, pretrained


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
