"""A model inside a wrapper of torch's or PEFT's is taken out, or refused in one line."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import some_chunks, tiny_model, tiny_tokenizer
from torch import nn

from ragkv import RagKV
from ragkv.errors import ConfigError, RagKVError, UnsupportedModelError

PROMPT = "\n\n".join(some_chunks(2))


class Adapted(nn.Module):
    """As PEFT wraps a model."""

    def __init__(self, inner: nn.Module, **config: object) -> None:
        super().__init__()
        self.base_model, self.active_peft_config = inner, SimpleNamespace(**config)

    def get_base_model(self) -> nn.Module:
        return self.base_model


def adapted(inner: nn.Module) -> Adapted:
    return Adapted(inner, is_prompt_learning=False)


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "compiled": torch.compile,
    "adapted": adapted,
    "parallel": nn.DataParallel,
    "adapted and compiled": lambda model: torch.compile(adapted(model)),
    "parallel and adapted": lambda model: nn.DataParallel(adapted(model)),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch.compile's imports
@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapped_model_answers_as_the_one_inside(name):
    model = tiny_model()
    given = WRAPPERS[name](model)
    with RagKV(given, tiny_tokenizer(), store=":memory:", dtype="bfloat16") as kv:
        assert kv.loaded.model is model
        assert model.dtype == torch.bfloat16
        assert kv.generate(PROMPT, max_new_tokens=2).token_ids


@pytest.mark.parametrize("on_unsupported", ["raise", "full"])
def test_virtual_tokens_are_refused(on_unsupported):
    model = Adapted(tiny_model(), is_prompt_learning=True)
    with pytest.raises(UnsupportedModelError, match="virtual tokens"):
        RagKV(model, tiny_tokenizer(), store=":memory:", on_unsupported=on_unsupported)


@pytest.mark.parametrize(
    "model",
    [nn.Sequential(tiny_model(layers=1)), SimpleNamespace(model=tiny_model(layers=1)), 3],
    ids=["sequence", "pipeline", "number"],
)
def test_what_is_no_model_is_refused_in_one_line(model):
    with pytest.raises(ConfigError, match="give the transformers model in it") as refused:
        RagKV(model, tiny_tokenizer(), store=":memory:")
    assert type(model).__name__ in str(refused.value)
    with pytest.raises(RagKVError) as no_tokenizer:
        RagKV(tiny_model(layers=1), model, store=":memory:")
    assert all(len(str(each.value)) < 200 for each in (refused, no_tokenizer))
