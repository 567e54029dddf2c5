"""The text that needles are hidden in: read from a file, cut into sentences."""

from __future__ import annotations

import pydoc_data.topics
import re
from pathlib import Path

from ragkv.errors import ConfigError

# The full stop, exclamation and question mark of Chinese and Japanese stand without a space.
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|(?<=[\u3002\uff01\uff1f])|\n\s*\n")
_LONGEST_SENTENCE = 400


def default_haystack() -> str:
    """Return the Python language reference, which every interpreter carries."""
    return "\n\n".join(pydoc_data.topics.topics.values())


def read_haystack(path: str | Path) -> str:
    """Read a UTF-8 text file to hide needles in.

    Raises
    ------
    ConfigError
        The file cannot be read or has no text.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"haystack {path} cannot be read as UTF-8 text: {error}") from error
    if not text.strip():
        raise ConfigError(f"haystack {path} is empty")
    return text


def sentences(text: str) -> list[str]:
    """Cut a text into sentences of at most 400 characters, white space collapsed."""
    out: list[str] = []
    for part in _SENTENCE_END.split(text):
        words = " ".join((part or "").split())
        while len(words) > _LONGEST_SENTENCE:
            cut = words.rfind(" ", 0, _LONGEST_SENTENCE)
            cut = cut if cut > 0 else _LONGEST_SENTENCE
            out.append(words[:cut])
            words = words[cut:].lstrip()
        if words:
            out.append(words)
    return out
