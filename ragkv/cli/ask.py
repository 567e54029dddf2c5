"""``ragkv ask``: answer one question from a folder of texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ragkv.cli.console import err, out
from ragkv.cli.opening import open_engine
from ragkv.cli.options import (
    AnswerTokens,
    AsJson,
    ChunkTokens,
    Method,
    ModelName,
    Namespace,
    Ratio,
    StorePath,
    TopK,
)

if TYPE_CHECKING:
    from ragkv import ReuseReport


def ask(
    question: Annotated[str, typer.Argument(help="What to answer.", show_default=False)],
    path: Annotated[
        list[Path],
        typer.Option(help="File or folder to answer from; may be repeated.", show_default=False),
    ],
    top_k: TopK = 6,
    chunk_tokens: ChunkTokens = 400,
    max_new_tokens: AnswerTokens = 128,
    recompute_ratio: Ratio = 0.2,
    method: Method = None,
    model: ModelName = None,
    store: StorePath = None,
    namespace: Namespace = "default",
    as_json: AsJson = False,
) -> None:
    """Retrieve from PATH and answer; chunks that `precompute` stored are reused."""
    from ragkv import ReuseConfig
    from ragkv.cli.retrieval import Embedder
    from ragkv.cli.texts import read_chunks

    chosen = {} if method is None else {"method": method}
    reuse = ReuseConfig(recompute_ratio=recompute_ratio).override(**chosen)
    with open_engine(model, store=store, namespace=namespace, reuse=reuse) as kv:
        chunks = read_chunks(path, kv.tokenizer, chunk_tokens)
        with err.status(f"Looking through {len(chunks)} chunks …"):
            found = Embedder().top(question, chunks, top_k)
        kv.prefetch(found)
        # The context comes first: the head of the prompt is then the sink "auto", that of
        # `ragkv precompute`.
        text = "\n\n".join([*found, f"Answer from the text above. Question: {question}"])
        stream = kv.stream([{"role": "user", "content": text}], max_new_tokens=max_new_tokens)
        for piece in stream:
            if not as_json:
                out.print(piece, end="", markup=False, highlight=False, soft_wrap=True)
    completion = stream.completion
    if as_json:
        answer = {"question": question, "answer": completion.text, "chunks": found}
        out.print_json(json.dumps({**answer, "report": completion.report.to_dict()}))
        return
    out.print(f"\n\n{account(completion.report)}", style="dim", highlight=False)


def account(report: ReuseReport) -> str:
    """Say in one paragraph when the first token came and where the prompt's tokens came from."""
    steps = ", ".join(f"{name} {seconds:.2f}" for name, seconds in report.steps.items())
    missed = f"; {len(report.misses)} chunks not stored yet" if report.misses else ""
    return (
        f"First token after {report.ttft_s:.2f} s ({steps}). Of {report.prompt_tokens} prompt "
        f"tokens {report.sink_tokens} sink, {report.reused_tokens} reused, "
        f"{report.recomputed_tokens} recomputed, {report.fresh_tokens} fresh{missed}."
    )
