"""Where the commands write: tables and answers to stdout, progress and errors to stderr."""

from __future__ import annotations

import json
import math
from typing import Any

import typer
from rich.console import Console

out = Console()
err = Console(stderr=True)


def say_json(found: Any) -> None:
    """Write JSON and nothing else, whatever the terminal can show; what is not finite is null."""
    typer.echo(json.dumps(_finite(found), indent=2, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
