"""Which code made a figure: what was measured by other code is measured again."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import cache
from hashlib import blake2b
from pathlib import Path

from ragkv.select import Method

_PACKAGE = Path(__file__).parents[1]


def code_of(method: Method) -> str:
    """Return a digest of ragkv's own files, and of the file with the method's rule."""
    return _digest([_own(), *_rule(method.score)])


def _rule(score: Callable[..., object] | None) -> Iterable[str]:
    """Yield what the rule's file says; of one without a file, what it was compiled to."""
    file = getattr(sys.modules.get(getattr(score, "__module__", "")), "__file__", None)
    if file is not None:
        yield Path(file).read_text(encoding="utf-8", errors="replace")
    elif (code := getattr(score, "__code__", None)) is not None:
        yield f"{code.co_code!r} {code.co_consts!r} {code.co_names!r}"


@cache
def _own() -> str:
    files = sorted(_PACKAGE.rglob("*.py"))
    return _digest(file.read_text(encoding="utf-8", errors="replace") for file in files)


def _digest(parts: Iterable[str]) -> str:
    state = blake2b(digest_size=16)
    for part in parts:
        state.update(f"{len(part)} {part}".encode(errors="surrogatepass"))
    return state.hexdigest()
