"""Execute the tutorials again, in place: ``make notebooks``."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

HERE = Path(__file__).parent
WIDGET = "application/vnd.jupyter.widget-view+json"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def executed(path: Path, folder: str | Path) -> NotebookNode:
    """Return a notebook with the outputs of a run in ``folder``, and nothing of this machine.

    Raises CellExecutionError: a cell fails.
    """
    notebook = nbformat.read(path, as_version=4)
    scripts = str(Path(sys.executable).parent)
    environment = {
        "PATH": os.pathsep.join([scripts, os.environ.get("PATH", "")]),
        "HF_HUB_OFFLINE": "1",
        "TQDM_DISABLE": "1",  # of commands; the kernel's bars are widgets
    }
    client = NotebookClient(
        notebook,
        timeout=1200,
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute(env=os.environ | environment)
    notebook.metadata = NotebookNode(METADATA)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [each for each in cell.outputs if WIDGET not in each.get("data", ())]
            for output in cell.outputs:
                if "text" in output:  # commands write to a terminal
                    output.text = output.text.replace("\r\n", "\n")
    return notebook


def main(names: list[str]) -> None:
    """Execute the named notebooks, or all, each in an empty folder."""
    for path in [HERE / f"{name}.ipynb" for name in names] or sorted(HERE.glob("*.ipynb")):
        with tempfile.TemporaryDirectory() as folder:
            nbformat.write(executed(path, folder), path)


if __name__ == "__main__":
    main(sys.argv[1:])
