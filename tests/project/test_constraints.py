"""The tested versions fit one another, and an ordinary package index has them."""

import os
import subprocess
import sys
import tomllib
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
INTEGRATIONS = [path.parent for path in ROOT.glob("integrations/*/pyproject.toml")]
OWN = {
    tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))["project"]["name"]
    for folder in (ROOT, ROOT / "benchmarks", *INTEGRATIONS)
}
LINES = (ROOT / "constraints.txt").read_text("utf-8").splitlines()


def pins() -> dict[str, str]:
    """Return the version of each package in constraints.txt, by its canonical name."""
    parts = [line.split("==") for line in LINES if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in parts}


def test_what_is_installed_here_wants_no_other_versions():
    """Of ragkv itself the requirements in the sources count, not those it was installed with."""
    known = pins()
    wrong = []
    for found in distributions():
        name = canonicalize_name(found.metadata["Name"])
        if name not in OWN and found.version.split("+")[0] != known.get(name):
            continue
        for text in found.requires or ():
            required = Requirement(text)
            version = known.get(canonicalize_name(required.name))
            applies = required.marker is None or required.marker.evaluate({"extra": ""})
            if applies and version and not required.specifier.contains(version, prereleases=True):
                wrong.append(f"{name}: {text}, not {version}")
    assert not wrong


@pytest.mark.slow
@pytest.mark.parametrize("dropped", [(), ("torch==",), ("torch==", "triton==")], ids=str)
def test_an_ordinary_index_has_all_of_it(tmp_path, dropped):
    """`make setup` on a fresh machine, and on one with a GPU. Needs a network."""
    makefile = (ROOT / "Makefile").read_text("utf-8").splitlines()
    extras = next(line for line in makefile if line.startswith("EXTRAS := ")).split()[-1]
    kept = tmp_path / "constraints.txt"
    kept.write_text("\n".join(line for line in LINES if not line.startswith(dropped)))
    ordinary = {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""}
    dry_run = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"]
    ran = subprocess.run(
        [
            *dry_run,
            "-c",
            str(kept),
            f"{ROOT}[{extras},docs,release]",
            str(ROOT / "benchmarks"),
            *map(str, INTEGRATIONS),
        ],
        env=os.environ | ordinary,
        capture_output=True,
        text=True,
        check=False,
    )
    if "NewConnectionError" in ran.stderr or "NewConnectionError" in ran.stdout:
        pytest.skip("no package index can be reached")
    assert ran.returncode == 0, ran.stderr[-3000:]
