"""A hook of mkdocs: every tutorial's notebook becomes a page, its code, outputs and a download."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_LINK = re.compile(r"\]\(((?!\w+:)[^)#\s]+)\.ipynb(#[^)]*)?\)")
_DOWNLOAD = '[Download this notebook](PATH){ download="PATH" }'


def on_files(files: Files, /, *, config: MkDocsConfig) -> Files:
    """Add a page for each notebook; the notebook itself is copied beside it."""
    for file in files.media_files():
        if file.src_uri.endswith(".ipynb"):
            notebook = json.loads(Path(file.abs_src_path or "").read_text(encoding="utf-8"))
            uri = file.src_uri.removesuffix(".ipynb") + ".md"
            text = "\n\n".join(part for cell in notebook["cells"] for part in _parts(cell))
            files.append(File.generated(config, uri, content=f"{text}\n"))
    return files


def on_page_markdown(markdown: str, /, *, page: Page, files: Files, **_: Any) -> str:
    """Point links to notebooks at their pages; add the download of a page's own."""
    markdown = _LINK.sub(r"](\1.md\2)", markdown)
    notebook = page.file.src_uri.removesuffix(".md") + ".ipynb"
    if files.get_file_from_path(notebook) is not None:
        markdown += "\n" + _DOWNLOAD.replace("PATH", Path(notebook).name) + "\n"
    return markdown


def _parts(cell: dict[str, Any]) -> list[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return [source]
    return [_fenced(source, "python"), *map(_output, cell["outputs"])]


def _output(output: dict[str, Any]) -> str:
    data = output.get("data", {})
    if "image/png" in data:
        return f"![Output](data:image/png;base64,{''.join(data['image/png']).strip()})"
    block = _fenced("".join(output.get("text") or data.get("text/plain", "")), "text")
    return "\n".join(f"> {line}".rstrip() for line in block.splitlines())


def _fenced(text: str, language: str) -> str:
    fence = "`" * max(3, 1 + max(map(len, re.findall("`{3,}", text)), default=0))
    return "\n".join([fence + language, text.strip("\n"), fence])
