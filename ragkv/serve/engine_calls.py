"""What the server asks of an engine, and reads from its reports."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ragkv.engine.engine import RagKV
from ragkv.errors import ConfigError
from ragkv.prompt.chat import TokenIds
from ragkv.prompt.render import Prompt, Rendered, render
from ragkv.prompt.tokens import tokenize
from ragkv.report.account import ReuseReport
from ragkv.select import method_of
from ragkv.serve.fields import ReuseFields
from ragkv.serve.refusal import RefusedError


def cached_tokens(report: ReuseReport) -> int:
    """Return how many prompt tokens were reused, by whatever kind of reuse."""
    return 0 if report.not_loaded else report.cached_tokens


def history_tokens(report: ReuseReport) -> int:
    """Return how many of them earlier prompts left."""
    return 0 if report.not_loaded else report.history_tokens


def tokens_by_source(report: ReuseReport) -> dict[str, int]:
    """Return how many prompt tokens came from where."""
    return {
        "sink": report.sink_tokens,
        "exact": report.former_exact_tokens,
        "repaired": report.former_repaired_tokens,
        "reused": report.reused_tokens,
        "version": report.version_tokens,
        "recomputed": report.recomputed_tokens,
        "fresh": report.fresh_tokens,
    }


def overrides_of(engine: RagKV, fields: ReuseFields) -> dict[str, Any]:
    """Return the settings of reuse that a request gives.

    Raises
    ------
    RefusedError
        One of them is wrong.
    """
    given = fields.settings()
    for name, value in given.items():
        try:
            method_of(engine.reuse.override(**{name: value}))
        except ConfigError as error:
            param = f"ragkv.{name}"
            raise RefusedError(400, str(error), param=param, code="invalid_value") from None
    return given


def text_of_ids(engine: RagKV, ids: Sequence[int]) -> str:
    """Return the text of token ids, special tokens included.

    Raises
    ------
    RefusedError
        One of them is no token's, or there are more than the model has positions.
    """
    known, positions = len(engine.tokenizer), engine.loaded.positions
    if positions is not None and len(ids) > positions:
        raise RefusedError(
            *(400, f"A prompt of {len(ids)} tokens exceeds the model's {positions} positions."),
            param="tokens",
            code="context_length_exceeded",
        )
    if any(token >= known for token in ids):
        raise RefusedError(
            400, f"Token ids must be less than {known}.", param="tokens", code="invalid_value"
        )
    return render(TokenIds(ids), engine.tokenizer).text


def token_ids(
    engine: RagKV, prompt: Prompt, *, add_special_tokens: bool | None = None
) -> list[int]:
    """Return the tokens of a prompt as the engine reads it.

    Parameters
    ----------
    add_special_tokens
        False: without those that the tokenizer adds to a text; True: with them, though a chat
        template has written some.
    """
    tokenizer = engine.tokenizer
    rendered = render(prompt, tokenizer)
    if add_special_tokens is False or (add_special_tokens and not isinstance(prompt, str)):
        rendered = Rendered(rendered.text, add_special_tokens)
    return [int(token) for token in tokenize(rendered, tokenizer).ids]


def warm_up(engine: RagKV) -> None:
    """Warm the engine up; have vLLM answer once, if that decodes: ServerError if not."""
    engine.warm_up()
    if engine.decoder is not None:
        engine.generate("The", max_new_tokens=1)


def most_characters(engine: RagKV) -> int | None:
    """Return how long a text may be to fit the model's positions; None for no limit."""
    positions = engine.loaded.positions
    return None if positions is None else positions * max(map(len, engine.tokenizer.get_vocab()))


def public_name(engine: RagKV) -> str:
    """Return the model's hub name, or the name of its folder without the way to it."""
    name = engine.info.name
    return Path(name).resolve().name if Path(name).is_dir() else name
