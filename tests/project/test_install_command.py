"""What an error says about an extra works where ragkv was installed from."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from ragkv import errors
from ragkv.errors import install_command

ROOT = Path(__file__).parents[2]
Come = Callable[[str | None], None]


@pytest.fixture
def come(monkeypatch: pytest.MonkeyPatch) -> Come:
    """Let ragkv come from somewhere, as pip writes it down."""

    def patch(url: str | None) -> None:
        found = SimpleNamespace(read_text=lambda _: url)
        monkeypatch.setattr(errors, "distribution", lambda _: found)

    return patch


def test_from_a_clone(come, tmp_path, monkeypatch):
    clone = tmp_path / "a clone"
    clone.mkdir()
    (clone / "pyproject.toml").touch()
    come(json.dumps({"url": clone.as_uri(), "dir_info": {"editable": True}}))
    assert install_command("serve") == f"pip install '{clone}[serve]'"
    monkeypatch.chdir(clone)
    assert install_command("serve") == "pip install '.[serve]'"
    (clone / "pyproject.toml").unlink()
    assert install_command("serve") == "pip install 'ragkv[serve]'"


def test_from_elsewhere(come, monkeypatch):
    for nothing in (None, "", "no JSON"):
        come(nothing)
        assert install_command("s3") == "pip install 'ragkv[s3]'"
    git = {"vcs": "git", "commit_id": "abc"}
    come(json.dumps({"url": "https://example.org/ragkv", "vcs_info": git}))
    assert install_command("s3") == "pip install 'ragkv[s3] @ git+https://example.org/ragkv'"


def test_errors_name_extras_that_exist_and_by_the_command_alone():
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    sources = [*ROOT.glob("ragkv/**/*.py"), *ROOT.glob("integrations/**/*.py")]
    texts = [path.read_text("utf-8") for path in sources if path.name != "errors.py"]
    named = {extra for text in texts for extra in re.findall(r"install_command\('(.*?)'\)", text)}
    assert len(named) >= 7
    assert all(f"\n{extra} = [" in project for extra in named)
    assert not [text for text in texts if "pip install 'ragkv[" in text]
