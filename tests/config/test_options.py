"""The arguments of calls are the settings' fields."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_type_hints

import pytest

from ragkv import DecodeConfig, RagKV, ReuseConfig
from ragkv.config.options import DecodeOptions, ReuseOptions


@pytest.mark.parametrize(
    ("options", "settings", "others"),
    [
        (DecodeOptions, DecodeConfig, set()),
        (ReuseOptions, ReuseConfig, {"seed"}),  # in a call it is sampling's
    ],
)
def test_options_are_the_settings_fields(options: Any, settings: Any, others: set[str]) -> None:
    known = get_type_hints(settings)
    mine = {each.name: known[each.name] for each in fields(settings) if each.name not in others}
    assert get_type_hints(options) == mine


def test_an_engine_has_few_public_members() -> None:
    assert len([name for name in dir(RagKV) if not name.startswith("_")]) <= 19
