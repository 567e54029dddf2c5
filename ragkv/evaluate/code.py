"""Which code made a figure: what was measured by other code is measured again."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from hashlib import blake2b
from pathlib import Path

from ragkv.select import Method

_PACKAGE = Path(__file__).parents[1]


def code_of(method: Method) -> list[str]:
    """Return a digest of ragkv's own files, and what the file with the method's rule says."""
    return [_own(), _rule(method.score)]


def _rule(score: Callable[..., object] | None) -> str:
    """Return the text of the rule's file; of one without a file, what it was compiled to."""
    file = getattr(sys.modules.get(getattr(score, "__module__", "")), "__file__", None)
    if file is not None:
        return Path(file).read_text(encoding="utf-8", errors="replace")
    code = getattr(score, "__code__", None)
    return "" if code is None else f"{code.co_code!r} {code.co_consts!r} {code.co_names!r}"


@cache
def _own() -> str:
    state = blake2b(digest_size=16)
    for file in sorted(_PACKAGE.rglob("*.py")):
        state.update(file.read_bytes())
    return state.hexdigest()
