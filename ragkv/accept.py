"""What an engine accepts: a model, a calibrated ratio, chunk texts."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from ragkv.config import ReuseConfig
from ragkv.errors import ConfigError, UnsupportedModelError
from ragkv.model.architecture import VERIFIED, config_of
from ragkv.model.load import LoadedModel, served_in_full, with_turns

_log = logging.getLogger(__name__)


def check_calibration(reuse: ReuseConfig, loaded: LoadedModel) -> None:
    """Refuse a ratio that was calibrated for another model."""
    wanted, found = reuse.calibrated_for, loaded.fingerprint
    if wanted is not None and found is not None and wanted != found.digest:
        raise ConfigError(
            f"recompute_ratio {reuse.recompute_ratio} was calibrated for another model or dtype "
            f"than {loaded.name} in {found.dtype}: run `ragkv calibrate` for this one, or give "
            "calibrated_for=None to take the ratio all the same"
        )


def verified(loaded: LoadedModel, on_unsupported: str) -> LoadedModel:
    """Find out how a family that the test suite does not cover turns its keys; prove the rest."""
    if config_of(loaded.model).model_type in VERIFIED:
        return loaded
    from ragkv.evaluate.check import verify_model

    _log.info("%s is of an unknown family: checking that its caches can be moved", loaded.name)
    try:
        loaded = with_turns(loaded)
        wrong = verify_model(loaded)
    except Exception as error:  # noqa: BLE001  nothing is known of what such a model does
        wrong = f"{type(error).__name__}: {error}"
    if not wrong:
        return loaded
    if on_unsupported == "raise":
        raise UnsupportedModelError(
            f"ragkv does not know this model's family, and a check fails: {wrong}. Load it with "
            "on_unsupported='full' to serve it by ordinary full prefill."
        )
    return served_in_full(loaded.model, loaded.tokenizer, loaded.name, wrong)


def listed(texts: Iterable[str]) -> list[str]:
    """Return chunk texts in a list; refuse one string, which would be a list of characters."""
    if isinstance(texts, str) or not isinstance(texts, Iterable):
        raise ConfigError(f"give the chunk texts in a list, not {type(texts).__name__}")
    out = list(texts)
    for text in out:
        if not isinstance(text, str):
            raise ConfigError(f"a chunk must be a string, not {type(text).__name__}")
    return out
