"""What LlamaIndex asks of every LLM package."""

from __future__ import annotations

import importlib
import tomllib
from pathlib import Path

from llama_index.core.base.llms.base import BaseLLM
from llama_index.llms.ragkv import RagKVLLM

PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def test_class():
    assert BaseLLM in RagKVLLM.__mro__
    assert RagKVLLM.class_name() == "RagKV_LLM"


def test_llamahub_finds_the_classes_that_the_package_names():
    hub = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["tool"]["llamahub"]
    package = importlib.import_module(hub["import_path"])
    assert all(name in package.__all__ for name in hub["class_authors"])
