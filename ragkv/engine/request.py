"""One call: its prompt and everything that is configured for it, resolved once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ragkv.config import ReuseConfig
from ragkv.engine.remote import RemoteAnswer
from ragkv.errors import ConfigError
from ragkv.model.fingerprint import Fingerprint
from ragkv.prompt.render import Prompt
from ragkv.prompt.tokens import require_readable
from ragkv.report.clock import Clock
from ragkv.retrieve.named import Retrieved
from ragkv.select import Method


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A prompt to prefill or to answer.

    Attributes
    ----------
    prompt
        A string, or chat messages.
    config, method
        The call's reuse settings, and the method that they name.
    clock
        Started at the user's call.
    answer_tokens
        Tokens that may be generated after the prompt.
    retrieved, named
        The chunks that were retrieved for it: given with the call, and named before it.
    remote
        The answer where another process decodes it.
    """

    prompt: Prompt
    config: ReuseConfig
    method: Method
    clock: Clock
    answer_tokens: int = 0
    retrieved: tuple[str, ...] = ()
    named: Retrieved = Retrieved()  # noqa: RUF009  frozen
    remote: RemoteAnswer | None = None

    @property
    def uses_history(self) -> bool:
        """Whether it may take former prompts' rows, and leaves its own."""
        return self.config.history and self.method.uses_chunks


def check_calibration(config: ReuseConfig, name: str, fingerprint: Fingerprint) -> None:
    """Refuse a ratio that was calibrated for another model.

    Raises
    ------
    ConfigError
        ``calibrated_for`` is not the model's fingerprint.
    """
    if config.calibrated_for not in (None, fingerprint.digest):
        raise ConfigError(
            f"recompute_ratio {config.recompute_ratio} was calibrated for another model or dtype "
            f"than {name} in {fingerprint.dtype}: run `ragkv calibrate` for this one, or give "
            "calibrated_for=None to take the ratio all the same"
        )


def check_texts(texts: Iterable[str]) -> list[str]:
    """Return chunk texts as a list; refuse a single string, which would be its characters.

    Raises
    ------
    ConfigError
        ``texts`` is one string or no iterable, or holds something else than strings.
    """
    if isinstance(texts, str) or not isinstance(texts, Iterable):
        raise ConfigError(f"give the chunk texts in a list, not {type(texts).__name__}")
    out = list(texts)
    for text in out:
        if not isinstance(text, str):
            raise ConfigError(f"a chunk must be a string, not {type(text).__name__}")
    return out


def check_chunks(texts: Iterable[str]) -> list[str]:
    """Return the stripped texts, each once, in order; refuse what :func:`check_texts` does."""
    unique = dict.fromkeys(map(check_chunk, check_texts(texts)))
    for text in unique:
        require_readable(text, "chunk")
    return list(unique)


def check_chunk(text: object) -> str:
    """Return a chunk's text, stripped; raise ConfigError where it is no string."""
    if not isinstance(text, str):
        raise ConfigError(f"a chunk must be a string, not {type(text).__name__}")
    return text.strip()


def check_document(name: object) -> str:
    """Return a document's name; raise ConfigError where it is no string."""
    if not isinstance(name, str):
        raise ConfigError(f"document must be a string, not {type(name).__name__}")
    return name


def check_revision(revision: object, document: str | None) -> str | None:
    """Return a document's revision; raise ConfigError where it is no string, or of none."""
    if revision is None:
        return None
    if document is None or not isinstance(revision, str):
        raise ConfigError(f"revision is a string beside document=..., not {revision!r:.80}")
    return revision


def check_seconds(seconds: object) -> float:
    """Return the seconds until a chunk expires; raise ConfigError where they are none."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        raise ConfigError(f"expires_in must be a number of seconds above 0, not {seconds!r}")
    try:
        return float(seconds)
    except OverflowError:
        raise ConfigError("expires_in is too large for a number of seconds") from None
