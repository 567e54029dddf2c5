"""What cannot be decoded by llama.cpp is refused by name."""

import pytest
from llama_stand_in import Dialect, StandIn
from llamacpp_ragkv.library import Cyllama
from llamacpp_ragkv.probe import RowOrder
from tiny import tiny_model, tiny_tokenizer

from ragkv import RagKV
from ragkv.config import extensions
from ragkv.errors import ConfigError, MissingDependencyError, UnsupportedModelError
from ragkv.model.load import load_model
from ragkv.model.loaded import require_reusable

WRONG = {
    "untried": StandIn(tiny_model("llama"), "gemma9"),
    "keys differ by": StandIn(tiny_model("llama"), pairs=False),
    "values differ by": StandIn(tiny_model("llama")),
    "keys have the shape": StandIn(tiny_model("llama", layers=2)),
    "K or V have the type 2": StandIn(tiny_model("llama"), dialect=Dialect(kind=2)),
    "rotated": StandIn(tiny_model("llama"), dialect=Dialect(rotation=(16, 16))),
}


@pytest.mark.parametrize("reason", WRONG)
def test_another_model_is_refused(open_engine, reason):
    library = WRONG[reason]
    if reason == "values differ by":
        library.model.model.layers[-1].self_attn.v_proj.weight.data.mul_(2)
    with pytest.raises(UnsupportedModelError, match=reason):
        open_engine(library=lambda *_: library)
    assert not library.open_contexts


def test_another_head_is_refused(open_engine):
    library = StandIn(tiny_model("llama"))
    library.model.lm_head.weight.data.mul_(-1)
    with pytest.raises(UnsupportedModelError, match="has a KL of"):
        open_engine(library=lambda *_: library)


def test_windows_are_refused():
    loaded = require_reusable(load_model(tiny_model("mistral-window"), tiny_tokenizer()))
    with pytest.raises(UnsupportedModelError, match="windows"):
        RowOrder(loaded, "llama")


def test_without_the_package_the_command_is_named(monkeypatch):
    monkeypatch.setattr(extensions, "entry_points", lambda **_: ())
    with pytest.raises(MissingDependencyError, match="pip install ragkv-llamacpp"):
        RagKV("no-such-model.gguf", decoder="llama.cpp")


def test_without_cyllama_the_command_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "cyllama.llama", None)
    with pytest.raises(MissingDependencyError, match="pip install ragkv-llamacpp"):
        Cyllama(tmp_path / "a.gguf", 1)


def test_a_model_from_elsewhere_is_refused(monkeypatch):
    monkeypatch.setattr("ragkv.engine.settings.extension", lambda *_: None)
    with pytest.raises(ConfigError, match="needs a GGUF file"):
        RagKV(tiny_model(), tiny_tokenizer(), store=":memory:", decoder="llama.cpp")


def test_another_name_is_refused():
    with pytest.raises(ConfigError, match=r"must be 'llama\.cpp'"):
        RagKV(decoder="ollama")
