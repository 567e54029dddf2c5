"""Every error that ragkv raises, each with what the user can do about it."""

from __future__ import annotations


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


class ClosedError(RagKVError, RuntimeError):
    """The engine was closed before the call."""


class PeerError(RagKVError, RuntimeError):
    """Another engine, measured beside ragkv, did not start or gave no token."""


class ServerError(RagKVError, RuntimeError):
    """A server of ragkv cannot be reached, is busy, refuses the key, or fails.

    Attributes
    ----------
    status
        The HTTP status; None where there was no answer.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status
