"""Chat templates that write the day's date: chunks serve on other days, too."""

import copy
from collections.abc import Callable
from datetime import datetime

import pytest
from tiny import CHAT_TEMPLATE, some_chunks, tiny_model, tiny_tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from ragkv import RagKV
from ragkv.prompt.render import chat_head, template_head, undated

DATED = (
    "{{ bos_token }}<|im_start|>system\nKnowledge until 2023.\nToday Date: "
    "{{ strftime_now('%d %b %Y') }}\n\n"
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}{% endif %}<|im_end|>\n"
    + CHAT_TEMPLATE.removeprefix("{{ bos_token }}")
)
HEAD = "<|bos|><|im_start|>system\nKnowledge until 2023.\nToday Date:"
CHUNKS = some_chunks(3)
PROMPT = [{"role": "user", "content": "\n\n".join(CHUNKS) + "\n\nWhat does it say?"}]


@pytest.fixture
def day(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that sets the day of November that templates see."""

    def set_day(number: int) -> None:
        class Clock(datetime):
            @classmethod
            def now(cls, tz: object = None) -> datetime:
                return cls(2026, 11, number)

        monkeypatch.setattr(chat_template_utils, "datetime", Clock)

    return set_day


def dated_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = DATED
    return tokenizer


def test_heads_end_before_the_date():
    tokenizer = dated_tokenizer()
    assert chat_head(tokenizer) == HEAD
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "{context}"},
    ]
    assert template_head(messages, tokenizer) == HEAD
    assert undated(f"{HEAD} 21 Nov 2026\n\nBe brief.", tokenizer) == HEAD
    for other in ("", "Context information is below.\n", "<|bos|>Knowledge until 2023."):
        assert undated(other, tokenizer) == other
        assert undated(other, tiny_tokenizer()) == other


@pytest.mark.parametrize("sink", ["auto", f"{HEAD} 21 Nov 2026\n\n<|im_end|>\n<|im_start|>user\n"])
def test_chunks_of_yesterday_serve_today(day, sink):
    with RagKV(tiny_model(), dated_tokenizer(), store=":memory:") as engine:
        day(21)
        engine.precompute(CHUNKS, sink=sink)
        day(22)
        now = sink.replace("21 Nov", "22 Nov")
        assert all(engine.contains(chunk, sink=now) for chunk in CHUNKS)
        report = engine.prefill(PROMPT, sink=now).report
    assert not report.misses
    assert not report.warnings
    assert report.tokens.reused > 100
    assert report.tokens.sink > 10
