"""Every error that ragkv raises, each with what the user can do about it."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlsplit


class RagKVError(Exception):
    """Base of all errors raised by ragkv."""


class ConfigError(RagKVError, ValueError):
    """A setting has a wrong type or lies out of its range."""


class UnknownMethodError(ConfigError):
    """The named method does not exist; the message lists those that do."""


class ModelNotFoundError(RagKVError, FileNotFoundError):
    """The model (or the embedded default's package) is not on this machine."""


class UnsupportedModelError(RagKVError, NotImplementedError):
    """Chunk caches of this model cannot be moved exactly; the message says why."""


class UnsupportedTokenizerError(UnsupportedModelError):
    """The tokenizer cannot say which characters a token covers."""


class StoreError(RagKVError, OSError):
    """The store could not be opened, read or written."""


class StoreFullError(StoreError):
    """An entry could not be written because the disk or the quota is full."""


class MissingDependencyError(RagKVError, ImportError):
    """An optional package is not installed; the message names the extra."""


class PromptTooLongError(RagKVError, ValueError):
    """The prompt has more tokens than the model knows positions."""


class ModelInUseError(RagKVError, RuntimeError):
    """An ordinary call of the model cannot be computed beside one of ragkv's passes."""


class OutOfMemoryError(RagKVError, MemoryError):
    """Memory ran out; the message says what was needed, and which setting needs less."""


class CutOffError(RagKVError, ValueError):
    """An answer reached its longest length within JSON or a tool call.

    Parameters
    ----------
    tokens
        Its tokens.
    """

    def __init__(self, tokens: int) -> None:
        super().__init__(
            f"the answer was cut off at max_new_tokens (max_tokens), in the middle of JSON or a "
            f"tool call: raise that limit beyond {tokens}"
        )


class ClosedError(RagKVError, RuntimeError):
    """The engine was closed before the call."""


class ServerError(RagKVError, RuntimeError):
    """A server of ragkv, or vLLM behind it, cannot be reached, is busy, refuses the key, or fails.

    Attributes
    ----------
    status
        The HTTP status; None where there was no answer.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


def install_command(extra: str) -> str:
    """Return the command that installs an extra of ragkv from where ragkv itself comes from.

    That is a clone, a repository, or a package index.
    """
    try:
        origin = json.loads(distribution("ragkv").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        origin = {}
    where, source = origin.get("url", ""), f"ragkv[{extra}]"
    folder = Path(unquote(urlsplit(where).path))
    if where.startswith("file:") and (folder / "pyproject.toml").is_file():
        source = f"{'.' if folder == Path.cwd() else folder}[{extra}]"
    elif "vcs_info" in origin:
        source += f" @ {origin['vcs_info']['vcs']}+{where}"
    return f"pip install '{source}'"
