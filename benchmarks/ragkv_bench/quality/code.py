"""Which code made a figure: what was measured by other code is measured again."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, partial
from hashlib import blake2b
from pathlib import Path
from types import CodeType, FunctionType

import ragkv
from ragkv.select import Method

_PACKAGES = (Path(ragkv.__file__).parent, Path(__file__).parents[1])


def code_of(method: Method) -> list[str]:
    """Return a digest of both packages' files, and what the method's rule is made of."""
    rule = method.score
    named = (
        f"{rule.__module__}.{getattr(rule, '__qualname__', type(rule).__name__)}" if rule else ""
    )
    return [_own(), named, _rule(rule)]


def _rule(score: Callable[..., object] | None) -> str:
    """Return the text of the rule's file, or its bytecode, and a partial's or closure's values."""
    if isinstance(score, partial):
        return f"{_rule(score.func)} {score.args!r} {score.keywords!r}"
    bound = [getattr(score, "__defaults__", None), getattr(score, "__kwdefaults__", None)]
    bound += [cell.cell_contents for cell in getattr(score, "__closure__", None) or ()]
    bound += [getattr(getattr(score, "__self__", score), "__dict__", None)]
    functions = (FunctionType, partial)
    parts = [_rule(each) if isinstance(each, functions) else repr(each) for each in bound]
    return " ".join([_text(score), *parts])


def _text(score: Callable[..., object] | None) -> str:
    file = getattr(sys.modules.get(getattr(score, "__module__", "")), "__file__", None)
    try:
        return Path(file or "").read_text(encoding="utf-8", errors="replace")
    except OSError:
        code = getattr(score, "__code__", None)
        return "" if code is None else _compiled(code)


def _compiled(code: CodeType) -> str:
    """Return what does not change from process to process, of inner functions too."""
    inner = [
        _compiled(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts
    ]
    return f"{code.co_code!r} {code.co_names!r} {inner!r}"


@cache
def _own() -> str:
    state = blake2b(digest_size=16)
    for package in _PACKAGES:
        for file in sorted(package.rglob("*.py")):
            state.update(file.read_bytes())
    return state.hexdigest()
