"""A RAG pipeline in both frameworks, by full prefill and by ragkv: ``make demo``."""

from __future__ import annotations

import json
import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ragkv.cli.console import err
from ragkv.cli.options import (
    AnswerTokens,
    ChunkTokens,
    Method,
    ModelName,
    Ratio,
    StorePath,
    TopK,
)
from ragkv.cli.session import open_engine
from ragkv.errors import RagKVError


class Framework(StrEnum):
    """The frameworks that the demo can run."""

    LLAMA_INDEX = "llama-index"
    LANGCHAIN = "langchain"
    BOTH = "both"


app = typer.Typer(add_completion=False)


@app.command()
def demo(
    *,
    framework: Annotated[Framework, typer.Option(help="Whose pipeline.")] = Framework.BOTH,
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
    from run import FRAMEWORKS, DemoSettings, run_demo
    from show import show_summary

    from ragkv import ReuseConfig, StoreConfig

    settings = DemoSettings(
        frameworks=FRAMEWORKS if framework is Framework.BOTH else (framework.value,),
        topics=topics,
        questions=questions,
        chunk_tokens=chunk_tokens,
        top_k=top_k,
        answer_tokens=max_new_tokens,
    )
    chosen = {} if method is None else {"method": method}
    reuse = ReuseConfig(recompute_ratio=recompute_ratio).override(**chosen)
    # chunks are what is shown: no prompt may continue the one that warmed the model up
    where = StoreConfig(store, history_bytes=0)
    with open_engine(model, store=where, namespace="demo", reuse=reuse) as kv:
        result = run_demo(kv, settings)
    show_summary(result)
    err.print(f"All in all {time.perf_counter() - start:.0f} s.", highlight=False)
    if json_path is not None:
        json_path.write_text(json.dumps(result.to_dict(), indent=2) + "\n", encoding="utf-8")
        err.print(f"Figures written to {json_path}.", highlight=False)


if __name__ == "__main__":
    try:
        app()
    except (RagKVError, OSError) as error:
        err.print(f"Error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)
