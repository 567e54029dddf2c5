"""Read files and folders, and split their texts into chunks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ragkv.cli.console import err
from ragkv.errors import ConfigError, MissingDependencyError, install_command

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SUFFIXES = (".txt", ".md")
_PAUSES = ("\n\n", "\n", ". ", " ")


def read_texts(paths: Iterable[Path]) -> dict[Path, str]:
    """Return the text of each file under ``paths`` by its full path, sorted by name.

    In folders, files that are not UTF-8 text are skipped with a message.

    Raises
    ------
    ConfigError
        A path does not exist, a given file is not readable UTF-8 text, or no file has text.
    """
    texts: dict[Path, str] = {}
    for path in paths:
        for file in _files(path):
            try:
                texts[file.resolve()] = _read(file)
            except ConfigError as error:
                if file == path:
                    raise
                err.print(f"Skipped: {error}", markup=False, highlight=False, soft_wrap=True)
    if not any(text.strip() for text in texts.values()):
        raise ConfigError(f"no text found: give files, or folders of {' and '.join(_SUFFIXES)}")
    return texts


def read_system_prompt(path: Path | None) -> str | None:
    """Return the stripped text of a file; None without a file.

    ``llama-index`` is the system message of its query engines, unless a file has that name.

    Raises
    ------
    ConfigError
        The file is not readable UTF-8 text, or is empty.
    MissingDependencyError
        LlamaIndex is not installed.
    """
    if path is None:
        return None
    if str(path) == "llama-index" and not path.exists():
        try:
            from llama_index.core.prompts.chat_prompts import TEXT_QA_SYSTEM_PROMPT
        except ImportError as error:
            raise MissingDependencyError(f"{path}: {install_command('llama-index')}") from error
        return str(TEXT_QA_SYSTEM_PROMPT.content)
    if not path.is_file():
        raise ConfigError(f"--sink-from: there is no file {path}")
    text = _read(path).strip()
    if not text:
        raise ConfigError(f"--sink-from: {path} has no text")
    return text


def split_texts(
    texts: Mapping[Path, str], tokenizer: PreTrainedTokenizerBase, chunk_tokens: int
) -> dict[Path, list[str]]:
    """Return the chunks of each text, as :func:`split_text` cuts it."""
    return {file: split_text(text, tokenizer, chunk_tokens) for file, text in texts.items()}


def split_text(text: str, tokenizer: PreTrainedTokenizerBase, chunk_tokens: int) -> list[str]:
    """Cut a text into stripped chunks of at most ``chunk_tokens`` tokens.

    A chunk ends at the last blank line of its second half; without one at the last line break,
    sentence or word; and otherwise at its last token.
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
    """Return the end of the best pause in the second half of ``text[start:end]``."""
    for pause in _PAUSES:
        at = text.rfind(pause, (start + end) // 2, end)
        if at >= 0:
            return at + len(pause)
    return end


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(p for p in path.rglob("*") if p.suffix.lower() in _SUFFIXES and p.is_file())
    if path.is_file():
        return [path]
    raise ConfigError(f"no such file or folder: {path}")


def _read(file: Path) -> str:
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}") from error
    if "\0" in text:
        raise ConfigError(f"{file} is not UTF-8 text: convert it first")
    return text
