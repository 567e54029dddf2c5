"""Results that are kept in one JSON file each: written, named and read alike."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ragkv.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Saved:
    """What was found with a model, which ``model`` names: a hub name or a folder."""

    model: str

    @property
    def model_name(self) -> str:
        """The model as titles name it: a folder without the way to it."""
        path = Path(self.model)
        return path.name if path.is_absolute() else self.model

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON-ready types."""
        return asdict(self)

    def save(self, path: str | Path) -> None:
        """Write as JSON."""
        write(path, self.to_dict())


def write(path: str | Path, value: dict[str, Any]) -> None:
    """Write a JSON file for people to look into, too.

    Raises
    ------
    ConfigError
        It cannot be written.
    """
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    try:
        Path(path).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error


@contextmanager
def reading(path: str | Path, otherwise: str) -> Iterator[Any]:
    """Yield what a JSON file holds; errors say ``otherwise``, with ``{path}`` and ``{error}``.

    Raises
    ------
    ConfigError
        The file cannot be read, or the block does not find in it what it looks for.
    """
    try:
        yield json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(otherwise.format(path=path, error=error)) from error
