"""Photograph the page that ``ragkv ask --page`` writes, on light and dark pages.

Needs a Chromium: one on the path, or ``playwright install chromium``.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from pydoc_data.topics import topics
from typing import Literal

from playwright.sync_api import sync_playwright

HERE = Path(__file__).parent
QUESTION = "What does the break statement do in a loop?"
OPTIONS = ("--top-k", "10", "--max-new-tokens", "13", "--store", ":memory:")
PAGES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
WIDTH, HEIGHT = 1100, 1240
# Of the prompt the chunk alone that the question looks at most.
CUT = """chunks => {
  const share = chunk => parseFloat(chunk.querySelector(".bar.a").style.getPropertyValue("--w"));
  const most = chunks.reduce((one, other) => share(one) < share(other) ? other : one);
  document.querySelectorAll("details, .between, .notes").forEach(part => {
    if (part !== most) part.remove();
  });
}"""


def ask(page: Path) -> None:
    """Write the page of an answer from Python's reference by the default model."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in topics.items():
            if "statement" in text.partition("\n")[0]:
                Path(folder, f"{name}.txt").write_text(text, encoding="utf-8")
        ragkv = Path(sys.executable).with_name("ragkv")
        command = [str(ragkv), "ask", QUESTION, "--path", folder, *OPTIONS, "--page", str(page)]
        subprocess.run(command, check=True)


def photograph(page: Path, folder: Path = HERE) -> None:
    """Write ``ask-page-light.png`` and ``ask-page-dark.png``."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"))
        for colours in PAGES:
            view = browser.new_page(
                viewport={"width": WIDTH, "height": HEIGHT}, color_scheme=colours
            )
            view.goto(page.as_uri())
            view.eval_on_selector_all("details.chunk", CUT)
            view.screenshot(path=folder / f"ask-page-{colours}.png")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        ask(Path(made, "page.html"))
        photograph(Path(made, "page.html"))
