"""``ragkv bench speculate``: its options."""

from __future__ import annotations

from typing import Annotated

import typer

from ragkv.cli.console import out
from ragkv.cli.options import ModelName
from ragkv_bench.commands import options
from ragkv_bench.commands.bench import (
    ChunkTokens,
    JsonPath,
    RandomWeights,
    Seed,
    check_model,
    engine_of,
    numbers,
)


def bench_speculate_command(
    *,
    model: ModelName = None,
    retrieval: Annotated[
        str,
        typer.Option(help="Comma-separated retrievers: seconds from their first list to the last."),
    ] = "0.5,0.02",
    changed: Annotated[
        float, typer.Option(help="Share of the questions whose result is not the first list.")
    ] = 0.25,
    requests: Annotated[int, typer.Option(help="Questions of each retriever.")] = 12,
    documents: Annotated[int, typer.Option(help="Documents that prompts draw from.")] = 12,
    chunks_per_prompt: Annotated[int, typer.Option(help="Chunks of a prompt, shuffled.")] = 6,
    chunk_tokens: ChunkTokens = 320,
    ratio: Annotated[float, typer.Option(help="Share of the cached tokens to recompute.")] = 0.2,
    method: Annotated[str, typer.Option(help="How they are chosen.")] = "query",
    json_path: JsonPath = None,
    random_weights: RandomWeights = None,
    device: options.Device = None,
    dtype: options.DType = None,
    seed: Seed = 0,
) -> None:
    """Measure time to first token from the question on, computing ahead while retrieval goes on."""
    from ragkv_bench.speed.speculate import SpeculatePlan, bench_speculate
    from ragkv_bench.speed.table import speculate_table

    options.check_folders(json_path)
    check_model(model, random_weights)
    plan = SpeculatePlan(
        retrieval_s=numbers("--retrieval", retrieval, float),
        changed=changed,
        requests=requests,
        documents=documents,
        chunks_per_prompt=chunks_per_prompt,
        chunk_tokens=chunk_tokens,
        method=method,
        ratio=ratio,
        seed=seed,
    )
    with engine_of(model, random_weights, device, dtype, seed) as kv:
        found = bench_speculate(kv.loaded, plan, show_progress=True)
    if json_path is not None:
        found.save(json_path)
    out.print(speculate_table(found))
