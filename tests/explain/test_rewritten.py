"""How a chunk's text stands in a prompt is told from both alone."""

import json
import re
from pathlib import Path

import pytest

import ragkv
from ragkv.explain.rewritten import Rewritten
from ragkv.report.reasons import REASONS

CODE = 'def path():\n    print("C:\\new\\table", "it\'s")\n    return "\\n".join(lines)  # \u00e9 \U0001f600'


@pytest.mark.parametrize(
    ("written", "cause"),
    [
        (str([CODE]), "list"),
        (json.dumps(CODE), "json"),
        (json.dumps([CODE], ensure_ascii=False), "json"),
        (json.dumps(json.dumps({"code": CODE})), "json"),
        (CODE.replace("    ", "  "), "indentation"),
        (CODE.replace("    ", "\t"), "indentation"),
    ],
)
def test_code_with_escapes_of_its_own(written, cause):
    assert Rewritten(f"Read this:\n\n{written}\n\nWhy?").reason_of(CODE) == cause


@pytest.mark.parametrize("text", ["", " \n ", "\u200b", "Short", "\\", "&amp;"])
def test_texts_without_letters_are_nowhere(text):
    assert Rewritten("Words \\ and more & words.").reason_of(text) is None


def test_the_page_on_reasons_has_the_reasons_of_the_code():
    page = Path(__file__).parents[2].joinpath("docs", "reasons.md").read_text(encoding="utf-8")
    rows = re.findall(r"^- \*\*(\w+)\*\*: It (.*?)\. (.*)$", page, re.MULTILINE)
    found = {name: (meaning, mend) for name, meaning, mend in rows}
    assert found == {name: (each.meaning, each.mend) for name, each in REASONS.items()}


def test_each_reason_of_the_code_is_among_them():
    used = set[str]()
    said = re.compile(r'(?:Found\(None,|RefusedEntryError\(|CorruptEntryError\(\w+,) "(\w+)"')
    for path in Path(ragkv.__file__).parent.rglob("*.py"):
        used |= set(said.findall(path.read_text(encoding="utf-8")))
    assert {"expired", "unreadable"} <= used <= REASONS.keys()
