"""A RAG pipeline in both frameworks, by full prefill and by ragkv: ``make demo``."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from figures import Pair, figures_of, show_pairs, show_summary
from texts import QUESTIONS, SYSTEM, TOPICS, USER, WARM_UP, corpus_chunks

from ragkv.cli.console import err, out
from ragkv.cli.options import AnswerTokens, ChunkTokens, Method, ModelName, Ratio, StorePath, TopK
from ragkv.cli.session import open_engine, reuse_config
from ragkv.errors import RagKVError

if TYPE_CHECKING:
    from ragkv import RagKV

app = typer.Typer(add_completion=False)


@app.command()
def demo(
    *,
    framework: Annotated[
        Literal["llama-index", "langchain", "both"], typer.Option(help="Whose pipeline.")
    ] = "both",
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the figures to this file.", dir_okay=False)
    ] = None,
    topics: Annotated[
        int | None, typer.Option(min=1, help="Use only the first N topics.", show_default="all")
    ] = None,
    questions: Annotated[
        int | None, typer.Option(min=1, help="Ask only the first N.", show_default="all")
    ] = None,
    top_k: TopK = 6,
    chunk_tokens: ChunkTokens = 400,
    max_new_tokens: AnswerTokens = 20,
    recompute_ratio: Ratio = 0.2,
    method: Method = None,
    model: ModelName = None,
    store: StorePath = None,
) -> None:
    """Answer questions on the Python language reference, by full prefill and by ragkv."""
    start = time.perf_counter()
    from ragkv import StoreConfig
    from ragkv.cli.retrieval import Embedder

    # chunks are what is shown: no prompt may continue the one that warmed the model up
    where = StoreConfig(store, history_bytes=0)
    reuse = reuse_config(method, recompute_ratio)
    with open_engine(model, store=where, namespace="demo", reuse=reuse) as kv:
        chosen = TOPICS[:topics]
        chunks = corpus_chunks(chosen, kv.tokenizer, chunk_tokens)
        selected = [question for topic, question in QUESTIONS if topic in chosen][:questions]
        err.print(f"{len(chunks)} chunks of {len(chosen)} topics of the Python language reference.")
        seconds = _precompute(kv, chunks)
        with err.status("Embedding chunks and questions with all-MiniLM-L6-v2 …"):
            embedder = Embedder()
            embedder.embed([*chunks, *selected])
        frameworks = {}
        for each in ("llama-index", "langchain") if framework == "both" else (framework,):
            with err.status(f"{each}: setting up the pipeline …"):
                made = import_module(f"in_{each.replace('-', '_')}")
                ask = made.pipeline(kv, chunks, embedder, top_k, max_new_tokens)
            pairs = _answer(each, kv, ask, selected)
            show_pairs(each, pairs)
            frameworks[each] = figures_of(pairs)
        name = kv.info.name
    show_summary(f"{name}, {len(chunks)} chunks: medians", frameworks)
    err.print(f"All in all {time.perf_counter() - start:.0f} s.", highlight=False)
    if json_path is not None:
        found = {
            "model": name,
            "chunks": len(chunks),
            "questions": len(selected),
            "precompute_s": seconds,
            "frameworks": frameworks,
        }
        json_path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        err.print(f"Figures written to {json_path}.", highlight=False)


def _precompute(kv: RagKV, chunks: Sequence[str]) -> float:
    """Ingest with a progress bar; the frameworks' own ingestion then finds everything there."""
    sink = kv.sink_from([{"role": "system", "content": SYSTEM}, {"role": "user", "content": USER}])
    err.print("Precomputing: every chunk's cache, once.")
    report = kv.precompute(chunks, show_progress=True, sink=sink)
    err.print(
        f"{report.new} chunks computed ({report.tokens} tokens, {report.bytes / 1e9:.2f} GB, "
        f"{report.seconds:.1f} s), {report.existing} were there already."
        if report.new
        else f"All {report.existing} chunks were there already: nothing to compute."
    )
    return report.seconds


def _answer(name: str, kv: RagKV, ask: Callable[..., Any], questions: Sequence[str]) -> list[Pair]:
    """Answer every question by full prefill and by ragkv in turn."""

    def answer(question: str, method: Any) -> dict[str, Any]:
        given = ask(question, method)
        ids = kv.tokenizer.encode(given["text"], add_special_tokens=False)
        return given | {"token_ids": ids}

    method, pairs = kv.reuse.method, []
    out.rule(f"{name}: every question by full prefill and by ragkv")
    with err.status(f"{name}: warming up …") as status:
        answer(WARM_UP, method)  # what is made on first use; not counted
        for number, question in enumerate(questions, 1):
            status.update(f"{name}: question {number} of {len(questions)} …")
            full = answer(question, "full")
            pairs.append(Pair(question, full, answer(question, method)))
            pairs[-1].show(number)
    return pairs


if __name__ == "__main__":
    try:
        app()
    except (RagKVError, OSError) as error:
        err.print(f"Error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)
