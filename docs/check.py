"""Look at every page of the built site in a headless Chromium, and name what is wrong.

``make docs`` builds ``site/`` and runs this. A page is wrong if it asks another host for anything,
if a link or anchor of its own leads nowhere, if its console has an error, if it is wider than a
window of 400 pixels, or if it stays bright in dark mode. With a folder as argument every page is
photographed into it: light, dark and narrow.

Needs a Chromium: one on the path, or ``playwright install chromium``.
"""

from __future__ import annotations

import shutil
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from playwright.sync_api import Page, sync_playwright

SITE = Path(__file__).parents[1] / "site"
VIEWS: tuple[tuple[str, Literal["light", "dark"], tuple[int, int]], ...] = (
    ("light", "light", (1280, 900)),
    ("dark", "dark", (1280, 900)),
    ("narrow", "light", (400, 800)),
)
LINKS = "all => all.map(link => link.href)"
ANCHORS = "all => all.map(each => each.id)"
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
GROUND = """getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g)
  .slice(0, 3).reduce((sum, each) => sum + Number(each), 0)"""


class Quiet(SimpleHTTPRequestHandler):
    """Serves files, and logs nothing."""

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def watch(page: Page, root: str) -> list[str]:
    """Return a list to which the page adds what goes wrong in it."""
    wrong: list[str] = []

    def note(what: str) -> None:
        wrong.append(f"{urlsplit(page.url).path}: {what}")

    page.on("console", lambda said: note(said.text) if said.type == "error" else None)
    page.on("pageerror", lambda error: note(str(error)))
    page.on("response", lambda got: note(f"{got.status} {got.url}") if got.status > 399 else None)
    ours = (root, "data:", "blob:")
    page.on("request", lambda it: None if it.url.startswith(ours) else note(f"asks {it.url}"))
    return wrong


def check(root: str, pages: list[str], photographs: Path | None) -> list[str]:
    """Return what is wrong with the pages that are served below ``root``."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"))
        wrong = list[str]()
        links, anchors = dict[str, str](), set[str]()
        for kind, colours, (width, height) in VIEWS:
            view = browser.new_page(
                viewport={"width": width, "height": height}, color_scheme=colours
            )
            said = watch(view, root)
            for path in pages:
                view.goto(root + path)
                links |= dict.fromkeys(view.eval_on_selector_all("a[href]", LINKS), path)
                ids = view.eval_on_selector_all("[id]", ANCHORS)
                anchors |= {root + path, *(f"{root}{path}#{each}" for each in ids)}
                if colours == "dark" and view.evaluate(GROUND) > 300:
                    wrong.append(f"/{path}: bright in dark mode")
                if (over := view.evaluate(OVERFLOW)) > 0:
                    wrong.append(f"/{path}: {over} pixels wider than a window of {width}")
                if photographs:
                    name = path.strip("/").replace("/", "-") or "home"
                    view.screenshot(path=photographs / f"{name}-{kind}.png", full_page=True)
            wrong += said
        for link, path in links.items():
            file = Path(urlsplit(link).path)
            found = (SITE / str(file)[1:]).is_file() if file.suffix else link in anchors
            if link.startswith(root) and not found:
                wrong.append(f"/{path}: leads nowhere: {link.removeprefix(root)}")
        return wrong


def main() -> None:
    """Print what is wrong; exit code 1 if anything is."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(SITE)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    found = sorted(SITE.rglob("index.html"))
    pages = [path.relative_to(SITE).as_posix().removesuffix("index.html") for path in found]
    photographs = Path(sys.argv[1]) if sys.argv[1:] else None
    wrong = check(f"http://127.0.0.1:{server.server_port}/", pages, photographs)
    server.shutdown()
    print("\n".join(wrong) or f"{len(pages)} pages: nothing wrong")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
