"""One call: its prompt and everything that is configured for it, resolved once."""

from __future__ import annotations

from dataclasses import dataclass

from ragkv.config import ReuseConfig
from ragkv.engine.remote import RemoteAnswer
from ragkv.errors import ConfigError
from ragkv.model.fingerprint import Fingerprint
from ragkv.prompt.render import Prompt
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
