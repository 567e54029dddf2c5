"""Each setting is defined once, by a dataclass field: what repeats it is compared with the field."""

import inspect
import re
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from ragkv import DecodeConfig, RagKV, ReuseConfig, SparseDecoding, StoreConfig
from ragkv.cli.ask import ask
from ragkv.cli.precompute import precompute
from ragkv.cli.serve import serve
from ragkv.config.reuse import DecodeOptions, ReuseOptions
from ragkv.serve.config import ServeConfig
from ragkv.serve.fields import ChatFields, CompletionFields, ReuseFields

PAGE = (Path(__file__).parents[2] / "docs" / "settings.md").read_text("utf-8")
CLASSES = (RagKV, ReuseConfig, DecodeConfig, SparseDecoding, StoreConfig, ServeConfig)
OPTIONS = {"model_name": "served_model_name", "keys": "api_key_file", "cors_origins": "cors_origin"}
"""Options of ``ragkv serve`` with other names than the settings."""


def arguments(function: Callable[..., Any]) -> dict[str, Any]:
    return {each.name: each.default for each in inspect.signature(function).parameters.values()}


def settings(kind: type[Any]) -> dict[str, Any]:
    """Return the settings of a class, with their defaults."""
    if kind is RagKV:
        return arguments(RagKV)
    return {each.name: {} if each.default is MISSING else each.default for each in fields(kind)}


OF_CALLS = settings(DecodeConfig) | settings(ReuseConfig)
OF_ENGINES = settings(ReuseConfig) | settings(StoreConfig) | settings(ServeConfig) | settings(RagKV)


@pytest.mark.parametrize("kind", CLASSES)
def test_docstring_and_page_have_each_setting_with_its_default(kind):
    own = settings(kind)
    documented = re.findall(r"^    (\w[\w, ]*)$", kind.__doc__ or "", re.MULTILINE)
    assert own.keys() <= {name for line in documented for name in line.split(", ")}
    section = PAGE.partition(f": `{kind.__name__}`\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"`(\w+)` \(", section)) == own.keys()
    for name, default in own.items():
        shown = repr(default).replace("'", '"')
        shown = "ReuseConfig()" if default == ReuseConfig() else shown
        assert f"`{name}` ({shown}" in section


def test_keyword_arguments_have_the_types_of_the_settings():
    for options, kind in ((DecodeOptions, DecodeConfig), (ReuseOptions, ReuseConfig)):
        hints = get_type_hints(kind)
        assert get_type_hints(options) == {name: hints[name] for name in settings(kind)}


@pytest.mark.parametrize("body", [ChatFields, CompletionFields, ReuseFields])
def test_fields_of_requests_have_the_defaults_of_the_settings(body):
    by_openai = {"stop": [], "stop_token_ids": [], "logprobs": False}
    for name in body.model_fields.keys() & OF_CALLS.keys():
        default = body.model_fields[name].default
        assert default in (None, OF_CALLS[name], by_openai.get(name)), name


@pytest.mark.parametrize("command", [ask, precompute, serve])
def test_options_have_the_defaults_of_the_settings(command):
    for name, default in arguments(command).items():
        assert default in (None, inspect.Parameter.empty, OF_ENGINES.get(name, default)), name
    if command is serve:
        assert {OPTIONS.get(name, name) for name in settings(ServeConfig)} <= arguments(
            serve
        ).keys()


def test_an_engine_has_few_public_members():
    assert len([name for name in dir(RagKV) if not name.startswith("_")]) == 18
