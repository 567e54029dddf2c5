"""From files to chunks: reading folders, cutting texts where they pause."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ragkv.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SUFFIXES = (".txt", ".md")
_PAUSES = ("\n\n", "\n", ". ", " ")


def read_chunks(
    paths: Iterable[Path], tokenizer: PreTrainedTokenizerBase, chunk_tokens: int
) -> list[str]:
    """Return the chunks of all files under ``paths``, in the order of their names.

    Raises
    ------
    ConfigError
        A path does not exist, or there is no text under any of them.
    """
    files = read_files(paths, tokenizer, chunk_tokens)
    return [chunk for chunks in files.values() for chunk in chunks]


def read_files(
    paths: Iterable[Path], tokenizer: PreTrainedTokenizerBase, chunk_tokens: int
) -> dict[Path, list[str]]:
    """Return the chunks of each file under ``paths`` by its full path; raises the same."""
    files = {
        file.resolve(): split_text(
            file.read_text(encoding="utf-8", errors="replace"), tokenizer, chunk_tokens
        )
        for file in _files(paths)
    }
    if not any(files.values()):
        raise ConfigError(f"no text found: give files, or folders of {' and '.join(_SUFFIXES)}")
    return files


def split_text(text: str, tokenizer: PreTrainedTokenizerBase, chunk_tokens: int) -> list[str]:
    """Cut a text into stripped chunks of at most ``chunk_tokens`` tokens.

    A chunk ends at the last blank line of its second half, else at the last line, the
    last sentence, the last word; only text without any is cut where the tokens end.
    """
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ends = [end for _, end in encoded["offset_mapping"]]
    chunks: list[str] = []
    start = first = 0
    while first < len(ends):
        last = min(first + chunk_tokens, len(ends))
        end = _last_pause(text, start, ends[last - 1]) if last < len(ends) else len(text)
        chunks.append(text[start:end].strip())
        start = end
        first = next((i for i in range(first, last) if ends[i] > end), last)
    return [chunk for chunk in chunks if chunk]


def _last_pause(text: str, start: int, end: int) -> int:
    """Return where the best pause in the second half of ``text[start:end]`` ends."""
    for pause in _PAUSES:
        at = text.rfind(pause, (start + end) // 2, end)
        if at >= 0:
            return at + len(pause)
    return end


def _files(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            yield from sorted(p for p in path.rglob("*") if p.suffix in _SUFFIXES and p.is_file())
        elif path.is_file():
            yield path
        else:
            raise ConfigError(f"no such file or folder: {path}")
