"""The repository itself: what must not be in it, which way imports go, that documents hold."""

import ast
import importlib
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from fresh import output_of

ROOT = Path(__file__).parents[2]
FOLDERS = ("ragkv", "kernels", "integrations", "benchmarks", "tests", "examples", "docs", ".ci")
WRAPPERS = (
    "integrations/langchain-ragkv/langchain_ragkv",
    "integrations/llama-index-llms-ragkv/llama_index",
)
EXTENSIONS = (
    "integrations/llamacpp/llamacpp_ragkv",
    "integrations/ray/ragkv_ray",
    "integrations/vllm/vllm_ragkv",
)
PACKAGES = (*WRAPPERS, *EXTENSIONS, "benchmarks/ragkv_bench")
SOURCES = ("ragkv", "kernels", *PACKAGES, "examples")
# Which rooms each room may import, in the order of a prompt's way. The engine knows all before it.
WALLS = {
    "errors": "",
    "config": "errors",
    "report": "errors",
    "retrieve": "errors",
    "prompt": "config errors",
    "answer": "config errors prompt report",
    "model": "errors",
    "client": "answer config errors model prompt report retrieve",
    "chunk": "config errors model prompt",
    "store": "chunk config errors model prompt",
    "history": "chunk errors model prompt store",
    "splice": "chunk history model prompt store",
    "attend": "config errors model prompt splice",
    "select": "attend chunk config errors model prompt splice store",
    "recompute": "attend model prompt select splice",
    "decode": "answer attend config errors model prompt recompute splice",
    "schedule": "decode errors model",
    "explain": "prompt report retrieve splice",
    "ingest": "chunk errors model prompt report store",
    "engine": "answer attend chunk config decode errors explain history ingest model prompt recompute "
    "report retrieve schedule select splice store",
    "workers": "answer config engine errors ingest report",
    "serve": "answer config engine errors ingest prompt report retrieve select",
    "cli": "config engine errors ingest model prompt report serve store workers",
}
# Written in pieces, so that this file does not contain them.
FORBIDDEN = [
    "/" + "tmp/",
    "/" + "work/",
    "/" + "root/",
    "file:" + "//",
    "pypi." + "org",
    "python" + "hosted",
    "hugging" + "face.co",
]


def text_files() -> list[Path]:
    below = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))
    files = [*(path for path in ROOT.iterdir() if path.name != ".git"), *below]  # a worktree's
    suffixes = {".py", ".md", ".toml", ".txt", ".yml", ".yaml", ".json", ".jsonl", ".ipynb", ""}
    return [
        p for p in files if p.is_file() and p.suffix in suffixes and "__pycache__" not in p.parts
    ]


def python_files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


@pytest.mark.parametrize("text", FORBIDDEN)
def test_nothing_names_this_machine_or_a_host(text):
    found = [p.relative_to(ROOT) for p in text_files() if text in p.read_text("utf-8", "replace")]
    assert not found


def test_files_are_short():
    long = {
        str(path.relative_to(ROOT)): lines
        for path in python_files(*SOURCES, "tests", "benchmarks/tests")
        if (lines := len(path.read_text(encoding="utf-8").splitlines()))
        > (500 if "tests" in path.relative_to(ROOT).parts[:2] else 400)
    }
    assert not long


def test_namespaces_have_no_init():
    for folder in (
        "kernels",
        "integrations/llama-index-llms-ragkv/llama_index",
        "integrations/llama-index-llms-ragkv/llama_index/llms",
    ):
        assert not (ROOT / folder / "__init__.py").exists()


def test_no_file_catches_everything():
    assert not [
        p for p in python_files(*SOURCES) if p.stem in {"utils", "helpers", "misc", "common"}
    ]


def test_nothing_is_unpickled():
    modules = {"pickle", "dill", "cloudpickle", "shelve", "marshal"}
    assert not [p for p in python_files(*SOURCES) if modules & set(imported(p))]


def room_of(path: Path) -> str:
    return path.relative_to(ROOT / "ragkv").parts[0].removesuffix(".py")


def test_rooms_keep_their_walls():
    """A room imports itself and the rooms of its row; ``ragkv`` itself counts as the engine."""
    wrong = []
    for path in python_files("ragkv"):
        own = room_of(path)
        if own == "__init__":
            continue
        allowed = {own, *WALLS[own].split()}
        for name in imported(path):
            top, _, rest = name.partition(".")
            if top == "ragkv" and (rest.split(".")[0] or "engine") not in allowed:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong


def test_walls_let_nothing_up():
    rooms = list(WALLS)
    assert not [
        (room, other)
        for at, room in enumerate(rooms)
        for other in WALLS[room].split()
        if other not in rooms[:at]
    ]


@pytest.mark.parametrize("package", [*EXTENSIONS, "benchmarks/ragkv_bench"])
def test_only_a_package_imports_itself(package):
    """ragkv loads their functions by entry points."""
    name = package.rpartition("/")[2]
    assert not [
        path
        for path in python_files(*(folder for folder in SOURCES if folder != package))
        if any(each.split(".")[0] == name for each in imported(path))
    ]


def test_imports_have_no_circles():
    modules = {_module(path): path for path in python_files("ragkv")}
    imports = {
        module: {name for name in _at_run_time(path, modules) if name != module}
        for module, path in modules.items()
    }
    while leaves := {module for module, names in imports.items() if not names & imports.keys()}:
        for module in leaves:
            del imports[module]
    assert not sorted(imports)


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _at_run_time(path: Path, modules: Mapping[str, Path]) -> Iterator[str]:
    """Yield the modules that a file imports anywhere, but for the sake of types alone."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module in modules:
            parts = [f"{node.module}.{alias.name}" for alias in node.names]
            found = [part for part in parts if part in modules]
            yield from found
            if len(found) < len(parts):
                yield node.module


def test_only_what_users_share_lies_loose():
    loose = {path.name for path in (ROOT / "ragkv").iterdir() if path.is_file()}
    assert loose == {"__init__.py", "errors.py", "py.typed"}


def test_no_class_name_stands_for_two_things():
    names = [
        node.name
        for path in python_files("ragkv")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    ]
    assert not {name for name in names if names.count(name) > 1}


def test_wrappers_know_only_the_engine():
    """And what helps retrievers and ingestion, which is given an engine."""
    allowed = {"ragkv", "ragkv.config", "ragkv.errors", "ragkv.select", "ragkv.client"}
    allowed |= {"ragkv.ingest.documents", "ragkv.engine.settings", "ragkv.model.load"}
    allowed |= {"ragkv.answer.engine", "ragkv.answer.stream"}
    wrong = [
        f"{path.name} imports {name}"
        for path in python_files(*WRAPPERS)
        for name in imported(path)
        if name.split(".")[0] == "ragkv" and name not in allowed
    ]
    assert not wrong


def test_importing_ragkv_is_light():
    code = "import ragkv, sys; print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    assert output_of(code).strip() == "[]"


def test_public_names_exist_and_are_few():
    import ragkv

    assert len(ragkv.__all__) <= 13
    assert all(getattr(ragkv, name).__doc__ for name in ragkv.__all__)


def test_every_direct_requirement_is_pinned():
    projects = [
        tomllib.loads((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        for folder in (".", *(path.rpartition("/")[0] for path in PACKAGES))
    ]
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {_name(line) for line in lines if line and not line.startswith("#")}
    expected = [
        each
        for project in projects
        for extra in (project["dependencies"], *project.get("optional-dependencies", {}).values())
        for each in extra
    ]
    own = {project["name"] for project in projects} - {"ragkv-bench"}
    assert {_name(each) for each in expected} - pinned == own


def _name(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement)[0].lower().replace("_", "-")


def documents() -> list[Path]:
    packages = [*ROOT.glob("benchmarks/README.md"), *sorted(ROOT.glob("integrations/*/README.md"))]
    return [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md")), *packages]


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    targets = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8"))
    assert not [target for target in targets if not (path.parent / target).exists()]


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_files_named_in_documents_exist(path):
    text = path.read_text(encoding="utf-8").replace("`ragkv/select/rules/edges.py`", "")
    named = set(re.findall(r"`((?:[a-z_]+/)+[a-z_0-9]*(?:\.py)?)`", text))
    mirrors = [ROOT, ROOT / "ragkv", ROOT / "kernels" / "ragkv_kernels", ROOT / "ragkv" / "store"]
    missing = [name for name in named if not any((home / name).exists() for home in mirrors)]
    homes = ("ragkv/", "tests/", "kernels/", "integrations/", "benchmarks/", "examples/", "docs/")
    assert not [name for name in missing if name.endswith(".py") or name.startswith(homes)]


def test_the_api_page_has_what_users_import_and_nothing_else():
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    paths = re.findall(r"^::: (\S+)$", page, re.MULTILINE)
    classes = [path for path in paths if path != "ragkv.errors"]
    homes = ("ragkv", "langchain_ragkv", "llama_index.llms.ragkv")
    public = {name for home in homes for name in importlib.import_module(home).__all__}
    assert {path.rpartition(".")[2] for path in classes} == public | {
        "Grouping",
        "InvalidToolCall",
        "RemoteRagKV",
        "RemoteStream",
        "Scene",
        "Scored",
        "VllmDecoder",
        "default_model_folder",
        "default_model_gguf",
        "page",
    }
    for path in classes:
        module, _, name = path.rpartition(".")
        assert getattr(importlib.import_module(module), name).__module__ == module


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_python_in_documents_is_python(path):
    for block in re.findall(
        r"^```python\n(.*?)^```", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    ):
        compile(block, str(path), "exec")
