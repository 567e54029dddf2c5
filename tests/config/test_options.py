"""The arguments of calls are the settings' fields."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_type_hints

import pytest

from ragkv import DecodeConfig, RagKV, ReuseConfig
from ragkv.config.options import DecodeOptions, ReuseOptions


@pytest.mark.parametrize(
    ("options", "settings"), [(DecodeOptions, DecodeConfig), (ReuseOptions, ReuseConfig)]
)
def test_options_are_the_settings_fields(options: Any, settings: Any) -> None:
    known = get_type_hints(settings)
    mine = {each.name: known[each.name] for each in fields(settings)}
    assert get_type_hints(options) == mine


def test_an_engine_has_few_public_members() -> None:
    assert len([name for name in dir(RagKV) if not name.startswith("_")]) == 18
