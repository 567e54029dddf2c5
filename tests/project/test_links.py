"""Links between pages lead to files and headings that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]+))?\)")


def text_of(page: Path) -> str:
    return CODE.sub("", page.read_text(encoding="utf-8"))


def anchors_of(page: Path) -> set[str]:
    """The site's names of a page's headings."""
    plain = (re.sub(r"[^\w\s-]", "", heading) for heading in HEADING.findall(text_of(page)))
    return {re.sub(r"[\s-]+", "-", heading.strip().lower()) for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for name, anchor in LINK.findall(text_of(page)):
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), name
        if anchor and target.suffix == ".md" and not anchor.startswith("gh-"):
            assert anchor in anchors_of(target), f"{name}#{anchor}"
