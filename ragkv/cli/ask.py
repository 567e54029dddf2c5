"""``ragkv ask``: answer one question from a folder of texts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ragkv.cli.console import err, out, say_json
from ragkv.cli.options import (
    AnswerTokens,
    AsJson,
    ChunkTokens,
    Codec,
    Device,
    DType,
    Method,
    ModelName,
    Namespace,
    Ratio,
    SinkFrom,
    StorePath,
    TopK,
    check_folders,
)
from ragkv.cli.session import From, Question, messages, open_engine, retrieve, reuse_config


def ask(
    question: Question,
    path: From,
    top_k: TopK = 6,
    chunk_tokens: ChunkTokens = 400,
    max_new_tokens: AnswerTokens = 128,
    recompute_ratio: Ratio = 0.2,
    method: Method = None,
    model: ModelName = None,
    device: Device = None,
    dtype: DType = None,
    store: StorePath = None,
    namespace: Namespace = "default",
    codec: Codec = "raw",
    sink_from: SinkFrom = None,
    page: Annotated[
        Path | None,
        typer.Option(
            help="Write a page that shows the source of every prompt token. Retrieved chunks are "
            "stored first, and a full prefill of the same prompt is timed afterwards.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Retrieve from PATH and answer; chunks that `precompute` stored are reused."""
    from ragkv.cli.texts import read_system_prompt, read_texts
    from ragkv.errors import ConfigError

    check_folders(page)
    reuse = reuse_config(method, recompute_ratio)
    texts, system_prompt = read_texts(path), read_system_prompt(sink_from)
    with open_engine(
        model,
        device=device,
        dtype=dtype,
        store=store,
        namespace=namespace,
        codec=codec,
        reuse=reuse,
        system_prompt=system_prompt,
    ) as kv:
        found = retrieve(kv, question, texts, chunk_tokens=chunk_tokens, top_k=top_k)
        (kv.precompute if page else kv.prefetch)(found)
        prompt = messages(question, found, system_prompt)
        stream = kv.stream(prompt, max_new_tokens=max_new_tokens)
        for piece in stream:
            if not as_json:
                out.print(piece, end="", markup=False, highlight=False, soft_wrap=True)
        completion = stream.completion
        full = None
        if page:
            with err.status("Measuring a full prefill of the same prompt …"):
                full = kv.prefill(prompt, method="full").report.ttft_s
            from ragkv.report.page.page import page as draw

            about = {"question": question, "model": kv.info.name, "answer": completion.text}
            drawn = draw(completion.report, **about, full_prefill_s=full)
            try:
                page.write_text(drawn, encoding="utf-8", newline="")
            except OSError as error:
                raise ConfigError(f"the page cannot be written to {page}: {error}") from error
    if as_json:
        answer = {"question": question, "answer": completion.text, "chunks": found}
        say_json({**answer, "report": completion.report.to_dict()})
        return
    footer = f"\n\n{completion.report}"
    if page:
        footer += f"\nA full prefill of the same prompt: {full:.3f} s.\nWrote {page}."
    out.print(footer, style="dim", markup=False, highlight=False, soft_wrap=True)
