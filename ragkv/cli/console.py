"""The consoles: tables and answers go to stdout, progress and errors to stderr."""

from __future__ import annotations

import io
import json
import math
import os
import sys
from typing import Any

import typer
from rich.console import Console

_TERMINAL = False if "JPY_PARENT_PID" in os.environ else None  # a notebook cannot redraw lines
out = Console(force_terminal=_TERMINAL)
err = Console(stderr=True, force_terminal=_TERMINAL)


def replace_unencodable() -> None:
    """Make stdout and stderr write ``?`` for characters that their encoding lacks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def say_json(found: Any) -> None:
    """Write JSON to stdout; numbers that are not finite become null."""
    typer.echo(json.dumps(_finite(found), indent=2, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
