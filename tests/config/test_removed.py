"""Settings that are no more: every class of settings says what to do instead."""

from __future__ import annotations

import pytest

from ragkv import ReuseConfig, StoreConfig
from ragkv.config import DecodeConfig
from ragkv.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "given", "instead"),
    [
        (DecodeConfig, {"cache_implementation": "static"}, "ragkv's own cache: omit it"),
        (ReuseConfig, {"remember_turns": True}, "put new documents after the conversation"),
        (ReuseConfig, {"repair_ahead": True}, "omit it"),
        (ReuseConfig, {"auto": None}, "recompute_ratio='auto'"),
        (ReuseConfig, {"grouping": None}, "a Method with the grouping"),
        (ReuseConfig, {"load": "always"}, "omit it"),
        (ReuseConfig, {"contextual_versions": True}, "history=False"),
        (DecodeConfig, {"prompt_lookup_num_tokens": 3}, "drafts=True or drafts=False"),
        (StoreConfig, {"encrypt": True}, "encrypt the disk below the store"),
        (StoreConfig, {"costs": None}, "FLOPs of computing them"),
        (StoreConfig, {"policy": "lru"}, "omit it"),
        (StoreConfig, {"evict": True}, "set disk_bytes"),
        (StoreConfig, {"prefix_bytes": 0}, "history_bytes bounds"),
        (StoreConfig, {"version_bytes": 0}, "history_bytes bounds"),
    ],
)
def test_a_removed_setting(settings, given, instead):
    with pytest.raises(ConfigError, match=f"is no setting of ragkv any more: .*{instead}"):
        settings(**given)


def test_other_unknown_names_are_pythons_own_error():
    with pytest.raises(TypeError, match="no_such"):
        DecodeConfig(no_such=1)
