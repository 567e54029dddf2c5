"""What is released: seven distributions in step, none with another's files, each complete."""

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
from collections import Counter
from pathlib import Path, PurePosixPath
from typing import Any
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement
from packaging.version import Version
from tiny import saved, some_chunks

ROOT = Path(__file__).parents[2]
FOLDERS = {
    "ragkv": ROOT,
    "ragkv-bench": ROOT / "benchmarks",
    "langchain-ragkv": ROOT / "integrations" / "langchain-ragkv",
    "llama-index-llms-ragkv": ROOT / "integrations" / "llama-index-llms-ragkv",
    "ragkv-llamacpp": ROOT / "integrations" / "llamacpp",
    "ragkv-ray": ROOT / "integrations" / "ray",
    "vllm-ragkv": ROOT / "integrations" / "vllm",
}
PYPROJECTS = {
    name: tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
    for name, folder in FOLDERS.items()
}
PROJECTS = {name: each["project"] for name, each in PYPROJECTS.items()}
VERSION = PROJECTS["ragkv"]["version"]
FULL = "FULL_INSTALL" in os.environ
"""Whether what a distribution requires is installed beside it, from a package index."""

SMOKE = {
    "ragkv": """
import ragkv_kernels
from ragkv import RagKV
with RagKV(model, store=":memory:") as kv:
    kv.precompute([chunk])
    report = kv.generate(prompt, max_new_tokens=2).report.to_dict()
""",
    "ragkv-bench": """
import subprocess
import ragkv_bench
from pathlib import Path
command = Path(sys.prefix, "bin", "ragkv")
assert "--ratio" in subprocess.check_output([command, "eval", "--help"], text=True)
report = None
""",
    "langchain-ragkv": """
import langchain_ragkv
llm = langchain_ragkv.ChatRagKV(model_id=model, store=":memory:", max_tokens=2)
llm.kv.precompute([chunk])
report = llm.invoke(prompt).response_metadata["ragkv"]
""",
    "llama-index-llms-ragkv": """
import llama_index.llms.ragkv
llm = llama_index.llms.ragkv.RagKVLLM(model_name=model, store=":memory:", max_new_tokens=2)
llm.kv.precompute([chunk], sink=llm.reuse_overrides.get("sink"))
report = llm.complete(prompt).additional_kwargs
""",
    "ragkv-llamacpp": """
from ragkv.config.extensions import extension
assert extension("llamacpp", "ragkv-llamacpp").__name__ == "LlamaCppDecoder"
report = None
""",
    "ragkv-ray": """
from importlib.metadata import entry_points
from importlib.util import find_spec, module_from_spec
(entry,) = entry_points(group="ragkv.extensions", name="ray")
if find_spec("ray") is None:
    sys.modules["ragkv_ray"] = module_from_spec(find_spec("ragkv_ray"))
else:
    assert entry.load().__name__ == "store_on_ray"
report = None
""",
    "vllm-ragkv": """
from ragkv.config.extensions import extension
assert extension("vllm", "vllm-ragkv").__name__ == "VllmDecoder"
report = None
""",
}
BEFORE = "import sys\nmodel, chunk = sys.argv[1:]\nprompt = chunk + '\\n\\nWhat is a target?'\n"
AFTER = """
assert report is None or report["tokens"]["reused"] > 0, report
ours = ("ragkv", "ragkv_kernels", "ragkv_bench", "langchain_ragkv", "llama_index.llms.ragkv")
ours += ("llamacpp_ragkv", "ragkv_ray", "vllm_ragkv")
files = [sys.modules[name].__file__ for name in ours if name in sys.modules]
assert files and all(file.startswith(sys.prefix) for file in files), files
"""


def packages(name: str) -> list[Path]:
    wheel = PYPROJECTS[name]["tool"]["hatch"]["build"]["targets"]["wheel"]
    return [FOLDERS[name] / folder for folder in wheel["packages"]]


def files_of(name: str) -> set[str]:
    """Return the files that a distribution's wheel installs, by the sources."""
    return {
        str(PurePosixPath(path.relative_to(package.parent)))
        for package in packages(name)
        for path in package.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }


def test_each_has_its_name_its_version_and_its_pages():
    for name, project in PROJECTS.items():
        assert project["name"] == name
        assert project["version"] == VERSION
        assert project["requires-python"] == PROJECTS["ragkv"]["requires-python"]
        assert (FOLDERS[name] / project["readme"]).is_file()
        assert project["license"] == "Apache-2.0"
        assert (FOLDERS[name] / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert f"\n## [{VERSION}]: " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_they_require_one_another_in_this_minor_version():
    other = Version(VERSION)
    later = f"{other.major}.{other.minor + 1}.0"
    found = []
    for name, project in PROJECTS.items():
        extras = project.get("optional-dependencies", {}).values()
        for text in (*project["dependencies"], *(each for extra in extras for each in extra)):
            required = Requirement(text)
            if required.name in FOLDERS:
                found.append((name, required.name))
                assert required.specifier.contains(VERSION), text
                assert not required.specifier.contains(later), text
    assert sorted(found) == [
        ("langchain-ragkv", "ragkv"),
        ("llama-index-llms-ragkv", "ragkv"),
        ("ragkv", "langchain-ragkv"),
        ("ragkv", "llama-index-llms-ragkv"),
        ("ragkv", "ragkv-llamacpp"),
        ("ragkv", "ragkv-ray"),
        ("ragkv", "vllm-ragkv"),
        ("ragkv-bench", "ragkv"),
        ("ragkv-llamacpp", "ragkv"),
        ("ragkv-ray", "ragkv"),
        ("vllm-ragkv", "ragkv"),
    ]


def test_no_two_own_a_file_and_all_are_typed():
    owned = [file for name in FOLDERS for file in files_of(name)]
    assert not [file for file, count in Counter(owned).items() if count > 1]
    marked = {file.removesuffix("/py.typed") for file in owned if file.endswith("/py.typed")}
    typed = {"ragkv", "ragkv_bench", "langchain_ragkv", "llama_index/llms/ragkv"}
    assert marked == typed | {"llamacpp_ragkv", "ragkv_kernels", "ragkv_ray", "vllm_ragkv"}
    assert not [file for file in owned if not file.endswith((".py", "py.typed", ".css", ".html"))]


def hatchling(folder: Path, target: str, out: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(out)]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    (built,) = out.glob("*.whl" if target == "wheel" else "*.tar.gz")
    return built


def names_in(wheel: Path) -> set[str]:
    with ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return each distribution's wheel, made from its sdist."""
    pytest.importorskip("hatchling")
    made = {}
    for name, folder in FOLDERS.items():
        out = tmp_path_factory.mktemp(name)
        with tarfile.open(hatchling(folder, "sdist", out / "sdist")) as archive:
            archive.extractall(out / "sources", filter="data")
        (sources,) = (out / "sources").iterdir()
        made[name] = hatchling(sources, "wheel", out / "wheel")
        assert names_in(made[name]) == names_in(hatchling(folder, "wheel", out / "direct"))
    return made


@pytest.mark.slow
def test_wheels_have_their_files_and_metadata(wheels):
    for name, wheel in wheels.items():
        assert names_in(wheel) == files_of(name)
        with ZipFile(wheel) as archive:
            (folder,) = {n.partition("/")[0] for n in archive.namelist() if ".dist-info/" in n}
            metadata = archive.read(f"{folder}/METADATA").decode()
            licence = archive.read(f"{folder}/licenses/LICENSE")
        assert licence == (ROOT / "LICENSE").read_bytes()
        assert f"Name: {name}\nVersion: {VERSION}\n" in metadata
        assert re.search(r"^Description-Content-Type: text/markdown$", metadata, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.parametrize("name", FOLDERS)
def test_each_works_in_a_fresh_environment(name, wheels, tmp_path):
    """Outside of the repository; what it requires is borrowed from here, or installed, too."""
    saved(tmp_path / "model", layers=2)
    fresh = tmp_path / "fresh"
    venv.create(fresh, with_pip=False)
    python = str(fresh / "bin" / "python")
    own = [str(wheels[each]) for each in {"ragkv", name}]
    pip = [sys.executable, "-m", "pip", "--python", python]
    if FULL:
        own += ["-c", str(ROOT / "constraints.txt")]
    else:
        site = next(fresh.glob("lib/python*/site-packages"))
        (site / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
        own += ["--no-deps", "--no-index"]
    run([*pip, "install", "-q", *own], tmp_path)
    if FULL:
        run([*pip, "check"], tmp_path)
    smoke = f"{BEFORE}{SMOKE[name]}{AFTER}"
    run([python, "-I", "-c", smoke, str(tmp_path / "model"), some_chunks(1)[0]], tmp_path)
    run([str(fresh / "bin" / "ragkv"), "--help"], tmp_path)


def run(command: list[str], folder: Path) -> None:
    clean: dict[str, Any] = {**os.environ, "HF_HUB_OFFLINE": "1", "XDG_CACHE_HOME": str(folder)}
    clean.pop("PYTHONPATH", None)
    done = subprocess.run(
        command, cwd=folder, env=clean, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
