"""``ragkv explain``: answer one question and show where the prompt's tokens came from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ragkv.cli.console import err, out
from ragkv.cli.options import (
    AnswerTokens,
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


def explain(
    question: Question,
    path: From,
    out_path: Annotated[Path, typer.Option("--out", help="Where to write the page.")] = Path(
        "ragkv-explain.html"
    ),
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
) -> None:
    """Answer as `ask` does and write a page that shows where every prompt token came from.

    Retrieved chunks that are not stored yet are stored first. The answer is printed, too; then the
    same prompt is prefilled in full, once, to compare the times.
    """
    from ragkv.cli.texts import read_system_prompt, read_texts
    from ragkv.errors import ConfigError

    check_folders(out_path)
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
        chunks = retrieve(kv, question, texts, chunk_tokens=chunk_tokens, top_k=top_k)
        with err.status(f"Answering from {len(chunks)} chunks …"):
            kv.precompute(chunks)
            prompt = messages(question, chunks, system_prompt)
            answer = kv.generate(prompt, max_new_tokens=max_new_tokens)
        out.print(answer.text.strip(), markup=False, highlight=False, soft_wrap=True)
        with err.status("Measuring a full prefill of the same prompt …"):
            full = kv.prefill(prompt, method="full").report.ttft_s
        about = {"question": question, "model": kv.info.name, "answer": answer.text}
        page = answer.report.to_html(**about, full_prefill_s=full)
    try:
        out_path.write_text(page, encoding="utf-8", newline="")
    except OSError as error:
        raise ConfigError(f"the page cannot be written to {out_path}: {error}") from error
    told = f"\n{answer.report}\nA full prefill of the same prompt: {full:.3f} s."
    out.print(told, style="dim", markup=False, highlight=False, soft_wrap=True)
    out.print(f"Wrote {out_path}.", markup=False, highlight=False, soft_wrap=True)
