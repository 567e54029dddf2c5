"""Commands of other packages: installed, missing, broken."""

import importlib
import sys
from importlib.metadata import EntryPoint

import pytest
from typer.testing import CliRunner

from ragkv.cli import plugins
from ragkv.cli.main import app
from ragkv.config import extensions

PLUGIN = """
import typer

group = typer.Typer(add_completion=False, help="Several.")

@group.command()
def one(): print("one of them")

@group.command()
def two(): ...

def alone(times: int = 1):
    "Says that it ran."
    print("ran " * times)
"""
ENTRIES = """[ragkv.commands]
alone = one_plugin:alone
group = one_plugin:group
broken = one_plugin:nothing
missing = no_such_module:command
"""
EXTENSIONS = [
    (["serve", "--vllm-url", "http://127.0.0.1:8001"], "vllm", "vllm-ragkv"),
    (["precompute", __file__, "--ray", "local"], "ray", "ragkv-ray"),
]


@pytest.fixture
def _installed(tmp_path, monkeypatch):
    """Install a package as pip does: a module and what it is."""
    (tmp_path / "one_plugin.py").write_text(PLUGIN)
    info = tmp_path / "one_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: one-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRIES)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield
    sys.modules.pop("one_plugin", None)


def run(*words):
    return CliRunner().invoke(app, list(words))


@pytest.mark.usefixtures("_installed")
def test_another_package_adds_commands(caplog):
    help_page = run("--help")
    assert help_page.exit_code == 0
    assert "Says that it ran." in help_page.output
    assert "Several." in help_page.output
    assert "broken" not in help_page.output
    assert sorted(
        record.message.split(" cannot")[0]
        for record in caplog.records
        if "one-plugin" in record.message
    ) == ["broken", "missing"]
    assert "ran ran" in run("alone", "--times", "2").output
    assert "one of them" in run("group", "one").output


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize(
    ("name", "reason"), [("broken", "AttributeError"), ("missing", "ModuleNotFoundError")]
)
def test_one_that_cannot_be_loaded_says_why(name, reason):
    done = run(name, "--any", "option")
    assert done.exit_code == 2
    assert done.stderr.startswith(f"Error: {name} cannot be loaded from one-plugin: {reason}")


@pytest.mark.usefixtures("_installed")
def test_nothing_is_loaded_for_ragkvs_own_commands(monkeypatch):
    monkeypatch.setattr(plugins, "entry_points", None)
    assert run("serve", "--help").exit_code == 0
    assert "one_plugin" not in sys.modules


@pytest.mark.parametrize(("words", "name", "package"), EXTENSIONS, ids=str)
def test_options_of_other_packages_name_them(words, name, package, monkeypatch):
    monkeypatch.setattr(extensions, "entry_points", lambda **_: ())
    done = run(*words)
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert f"{name} is in a separate package: pip install {package}, or" in done.stderr
    assert f"pip install ./integrations/{name}" in done.stderr


@pytest.mark.parametrize(("words", "name", "package"), EXTENSIONS, ids=str)
def test_an_option_whose_package_is_broken_says_why(words, name, package, monkeypatch):
    broken = (EntryPoint(name, "no_such_module:function", extensions.EXTENSIONS),)
    monkeypatch.setattr(extensions, "entry_points", lambda **_: broken)
    done = run(*words)
    assert done.exit_code == 2
    assert done.stderr.startswith(f"Error: {name} cannot be loaded from no_such_module")


@pytest.mark.parametrize(
    "words",
    [["eval", "--data", "d.jsonl"], ["bench", "ttft"], ["calibrate"], ["tune-auxiliary"]],
    ids=str,
)
def test_without_ragkv_bench_they_say_how_to_get_them(words, monkeypatch):
    monkeypatch.setattr(plugins, "entry_points", lambda **_: ())
    done = run(*words)
    assert done.exit_code == 2
    assert done.stderr.count("\n") == 1
    assert f"ragkv {words[0]} is in a separate package: pip install ragkv-bench" in done.stderr
    assert "pip install ./benchmarks" in done.stderr
    assert f" {words[0]} " not in run("--help").output
