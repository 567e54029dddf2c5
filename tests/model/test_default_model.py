"""The packaged model where the cache folder cannot be written, as in a container."""

from pathlib import Path

import pytest
import torch
from gguf_files import write_gguf
from tiny import tiny_model

from ragkv import RagKV
from ragkv.errors import ConfigError, ModelNotFoundError, StoreError
from ragkv.model import default_model, load
from ragkv.model.default_model import default_model_folder


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let a tiny model stand for the packaged one."""
    path = write_gguf(tmp_path / "package.gguf", tiny_model())
    monkeypatch.setattr(default_model, "default_model_gguf", lambda: path)
    return path


def below_a_file(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No folder can be made there, not even by root."""
    (tmp_path / "file").touch()
    patch.setenv("XDG_CACHE_HOME", str(tmp_path / "file" / "cache"))


def full_disk(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    patch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    patch.setattr("transformers.PreTrainedModel.save_pretrained", fail)


def no_home(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As for a random user id in a container."""
    for name in ("HOME", "XDG_CACHE_HOME"):
        patch.delenv(name, raising=False)
    patch.setattr("os.getuid", lambda: 54321)


UNWRITABLE = [below_a_file, full_disk, no_home]


@pytest.mark.parametrize("place", UNWRITABLE)
def test_it_is_loaded_without_the_cache_folder(tmp_path, monkeypatch, package, place):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "writable"))
    with RagKV(package, store=":memory:") as written:
        expected = written.info.fingerprint
    place(monkeypatch, tmp_path)
    with RagKV(store=":memory:") as kv:
        assert kv.info.name == "SmolLM2-135M-Instruct"
        assert kv.info.fingerprint == expected
        assert kv.generate("The", max_new_tokens=2).token_ids
    assert not Path("~").exists()
    with pytest.raises(ModelNotFoundError, match="Set XDG_CACHE_HOME"):
        default_model_folder()


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("place", [below_a_file, no_home])
def test_a_store_there_is_refused_with_what_to_set(tmp_path, monkeypatch, place):
    place(monkeypatch, tmp_path)
    with pytest.raises((StoreError, ConfigError), match=r"XDG_CACHE_HOME|cannot be|file"):
        RagKV()
    if place is no_home:
        for given in ({"model": "~/model"}, {"store": "~/store"}):
            with pytest.raises(ConfigError, match="set HOME"):
                RagKV(**given)


@pytest.mark.slow
def test_the_package_itself_and_its_folder_are_one_model(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = load.load_model(None, None)
    below_a_file(monkeypatch, tmp_path)
    package = load.load_model(None, None)
    assert folder.fingerprint == package.fingerprint
    assert package.dtype == torch.float32
