"""Steps that commands share: open an engine, retrieve, write the prompt."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ragkv.cli.console import err
from ragkv.report.words import count

if TYPE_CHECKING:
    from ragkv import RagKV, ReuseConfig, StoreConfig


def _readable(text: str) -> str:
    """Return an argument as UTF-8 where the locale does not name the terminal's encoding."""
    return os.fsencode(text).decode("utf-8", "replace") if _LONE.search(text) else text


_LONE = re.compile("[\ud800-\udfff]")
CONTEXT = re.compile(r"\{context(?:_str)?\}")
"""The field of a system prompt that is a template."""
Question = Annotated[
    str, typer.Argument(help="The question.", show_default=False, callback=_readable)
]
From = Annotated[
    list[Path],
    typer.Option("--path", help="File or folder to answer from; repeatable.", show_default=False),
]


def open_engine(
    model: str | None,
    *,
    store: str | StoreConfig | None,
    namespace: str,
    codec: str = "raw",
    reuse: ReuseConfig | None = None,
    system_prompt: str | None = None,
    quiet: bool = False,
    **arguments: Any,
) -> RagKV:
    """Load the model, with a status line.

    Parameters
    ----------
    system_prompt
        System message at the beginning of all prompts; chunks are encoded behind it.
    quiet
        Print nothing.
    **arguments
        More arguments of RagKV.

    Raises
    ------
    RagKVError
        The model cannot be found or is not supported, or the store cannot be opened.
    """
    start = time.perf_counter()
    name = model or "the embedded SmolLM2-135M-Instruct (converted on first use)"
    with nullcontext() if quiet else err.status(f"Loading {name} …"):
        from ragkv import RagKV, ReuseConfig, StoreConfig

        _quiet()
        if not isinstance(store, StoreConfig):
            store = StoreConfig(store, codec=codec)
        kv = RagKV(
            model,
            store=store,
            namespace=namespace,
            reuse=reuse or ReuseConfig(),
            **arguments,
        )
    if system_prompt is not None:
        kv.reuse = kv.reuse.override(sink=sink_behind(kv, system_prompt))
    if not quiet:
        err.print(f"Loaded {kv.info.name} in {time.perf_counter() - start:.1f} s.", highlight=False)
    return kv


def sink_behind(kv: RagKV, system_prompt: str) -> str:
    """Return the text before the context in prompts with this system message.

    The context is in the user's message, or in place of ``{context}`` in the system message.
    """
    before, *rest = CONTEXT.split(system_prompt, maxsplit=1)
    if not kv.tokenizer.chat_template:
        return before
    literal = before.replace("{", "{{").replace("}", "}}")
    return kv.sink_from([{"role": "system", "content": literal + "{context}" * len(rest)}])


def _quiet() -> None:
    """Silence the progress bars and notes of transformers."""
    from transformers.utils import logging as notes

    notes.disable_progress_bar()  # type: ignore[no-untyped-call]
    notes.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.getLogger("sentence_transformers").setLevel(logging.WARNING)


def reuse_config(method: str | None, recompute_ratio: float | Literal["auto"]) -> ReuseConfig:
    """Return the options as a ReuseConfig."""
    from ragkv import ReuseConfig

    chosen = {} if method is None else {"method": method}
    return ReuseConfig(recompute_ratio=recompute_ratio).override(**chosen)


def retrieve(
    kv: RagKV, question: str, texts: Mapping[Path, str], *, chunk_tokens: int, top_k: int
) -> list[str]:
    """Return the chunks of ``texts`` most similar to the question, the most similar first."""
    from ragkv.cli.retrieval import Embedder, kept_embeddings
    from ragkv.cli.texts import split_texts

    files = split_texts(texts, kv.tokenizer, chunk_tokens)
    chunks = [chunk for found in files.values() for chunk in found]
    with err.status(f"Searching {count(len(chunks), 'chunk')} …"):
        return Embedder(kept_embeddings()).top(question, chunks, top_k)


def messages(
    question: str, chunks: Sequence[str], system_prompt: str | None = None
) -> list[dict[str, str]]:
    """Return the prompt as chat messages.

    The context directly follows the system prompt, so the prompt's head is the sink of
    `ragkv precompute`.
    """
    if system_prompt is not None and CONTEXT.search(system_prompt):
        filled = CONTEXT.sub(lambda _: "\n\n".join(chunks), system_prompt)
        return [{"role": "system", "content": filled}, {"role": "user", "content": question}]
    text = "\n\n".join([*chunks, f"Answer from the text above. Question: {question}"])
    system = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    return [*system, {"role": "user", "content": text}]
