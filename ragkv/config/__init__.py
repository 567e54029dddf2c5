"""The settings: frozen dataclasses, validated when they are made."""

from ragkv.config.checks import check_known, check_whole, checked_variables
from ragkv.config.decode import (
    DECODE_SETTINGS,
    LEAST_TEMPERATURE,
    MOST_LOGPROBS,
    DecodeConfig,
    SparseDecoding,
)
from ragkv.config.generation import (
    GENERATION,
    PASSED_ON,
    engine_arguments,
    refuse_unsupported,
)
from ragkv.config.reuse import PROFILE_FORMAT, Named, ReuseConfig
from ragkv.config.store import CODECS, MEMORY, STORE_SETTINGS, StoreConfig, with_store

__all__ = [
    "CODECS",
    "DECODE_SETTINGS",
    "GENERATION",
    "LEAST_TEMPERATURE",
    "MEMORY",
    "MOST_LOGPROBS",
    "PASSED_ON",
    "PROFILE_FORMAT",
    "STORE_SETTINGS",
    "DecodeConfig",
    "Named",
    "ReuseConfig",
    "SparseDecoding",
    "StoreConfig",
    "check_known",
    "check_whole",
    "checked_variables",
    "engine_arguments",
    "refuse_unsupported",
    "with_store",
]
