"""The tutorials: notebooks that hold what a run of them printed, and that run."""

import ast
import re
import runpy
from pathlib import Path

import nbformat
import pytest
from vllm_server import installed_python

from ragkv.model.default_model import default_model_folder

ROOT = Path(__file__).parents[2]
TUTORIALS = ROOT / "docs" / "tutorials"
NAMES = ("swap", "ingestion", "chat", "agent", "tenants", "own-model", "calibrate", "serving")
NAMES += ("llama-index-swap", "llama-index-chat", "llama-index-agent", "vllm")
MAGIC = re.compile(r"^!.*$", re.MULTILINE)
CELLS, WORDS, LINES = 15, 250, 40


def cells(notebook, kind):
    return [cell for cell in notebook.cells if cell.cell_type == kind]


def outputs(notebook):
    return [output for cell in cells(notebook, "code") for output in cell.outputs]


def words(notebook):
    return sum(len(cell.source.split()) for cell in cells(notebook, "markdown"))


@pytest.fixture(params=NAMES)
def notebook(request):
    return nbformat.read(TUTORIALS / f"{request.param}.ipynb", as_version=4)


def test_all_are_in_the_navigation():
    assert {path.stem for path in TUTORIALS.glob("*.ipynb")} == set(NAMES)
    pages = re.findall(r"tutorials/(\S+)\.md", (ROOT / "mkdocs.yml").read_text("utf-8"))
    assert sorted(pages) == sorted(NAMES)


def test_is_short_and_leads_on(notebook):
    nbformat.validate(notebook)
    first, *_, last = cells(notebook, "markdown")
    assert first.source.splitlines()[2].startswith("At the end you ")
    assert "## Go on" in last.source
    assert len(notebook.cells) <= CELLS
    assert words(notebook) <= WORDS
    targets = re.findall(r"\]\(([^)#:]+)", "".join(cell.source for cell in notebook.cells))
    assert not [target for target in targets if not (TUTORIALS / target).exists()]


def test_has_a_whole_run_s_outputs(notebook):
    code = cells(notebook, "code")
    assert [cell.execution_count for cell in code] == [*range(1, len(code) + 1)]
    assert not [cell for cell in code if cell.metadata]
    for number, cell in enumerate(code):
        source = MAGIC.sub("pass", cell.source)
        compile(source, f"cell {number}", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    found = outputs(notebook)
    assert {output.output_type for output in found} <= {"stream", "execute_result"}
    assert {output.get("name", "stdout") for output in found} == {"stdout"}
    text = "\n".join(output.get("text") or output.data["text/plain"] for output in found)
    assert not re.search(r"(?<![\w:/.])/[a-z]+/\S|\x1b|\r|\w+Warning:", text), text
    assert len(text.splitlines()) <= LINES * len(code)


def test_the_swap_over_a_tiny_model(name, small_world, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    notebook = nbformat.read(TUTORIALS / "swap.ipynb", as_version=4)
    code = "\n".join(cell.source for cell in cells(notebook, "code"))
    for own, tiny in (("RagKV(store", f"RagKV({name!r}, store"), ("tokens=40", "tokens=4")):
        assert own in code
        code = code.replace(own, tiny)
    made = {"__name__": "__main__"}
    exec(code.replace('tokens": 40', 'tokens": 4'), made)  # noqa: S102  our own page
    made["kv"].close()
    said = capsys.readouterr().out
    assert said.count("  before ") == said.count("  after ") == 3
    assert said.count("first token after ") == 3


@pytest.mark.slow
@pytest.mark.parametrize("tutorial", [*NAMES[:-1], pytest.param("vllm", marks=pytest.mark.vllm)])
def test_runs(tutorial, tmp_path, monkeypatch):
    if tutorial == "vllm":
        python = installed_python("0.32.0")
        if not python.exists():
            pytest.skip("vLLM 0.32.0 is not installed: make vllm")
        monkeypatch.setenv("RAGKV_VLLM_PYTHON", str(python))
    default_model_folder()  # the conversion on a model's first use prints a notice
    executed = runpy.run_path(str(TUTORIALS / "execute.py"))["executed"]
    path = TUTORIALS / f"{tutorial}.ipynb"
    before, after = nbformat.read(path, as_version=4), executed(path, tmp_path)
    assert after.metadata == before.metadata
    assert not [output for output in outputs(after) if output.get("name") == "stderr"]
    assert len(outputs(after)) == len(outputs(before))
