"""What an engine accepts: a model, a calibrated ratio, chunk texts."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch

from ragkv.config import ReuseConfig
from ragkv.errors import ConfigError, ModelInUseError, UnsupportedModelError
from ragkv.model.architecture import is_verified
from ragkv.model.fingerprint import Fingerprint
from ragkv.model.load import LoadedModel, served_in_full

_log = logging.getLogger(__name__)


def check_calibration(reuse: ReuseConfig, name: str, found: Fingerprint | None) -> None:
    """Refuse a ratio that was calibrated for another model than that of the fingerprint."""
    wanted = reuse.calibrated_for
    if wanted is not None and found is not None and wanted != found.digest:
        raise ConfigError(
            f"recompute_ratio {reuse.recompute_ratio} was calibrated for another model or dtype "
            f"than {name} in {found.dtype}: run `ragkv calibrate` for this one, or give "
            "calibrated_for=None to take the ratio all the same"
        )


def verified(loaded: LoadedModel, on_unsupported: str) -> LoadedModel:
    """Prove the invariants on a model of a family that the test suite does not cover.

    Raises
    ------
    UnsupportedModelError
        One does not hold, and ``on_unsupported`` is ``"raise"``.
    """
    if loaded.architecture is None or is_verified(loaded.model):
        return loaded
    from ragkv.engine.verify import verify_model

    _log.info("%s is of an unknown family: checking that its caches can be moved", loaded.name)
    try:
        with loaded.without_autocast():
            wrong = verify_model(loaded)
    except (torch.OutOfMemoryError, ModelInUseError):  # says nothing of the model
        raise
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
