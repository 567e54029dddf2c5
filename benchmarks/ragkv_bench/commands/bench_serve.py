"""``ragkv bench serve``: the same questions to any OpenAI-compatible endpoint."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

from ragkv.cli.console import err, out
from ragkv.errors import ConfigError
from ragkv_bench.commands import options
from ragkv_bench.results import Found

if TYPE_CHECKING:
    from ragkv_bench.speed.load.workload import Workload, WorkloadPlan

_ZIPF = "zipf"


def bench_serve_command(
    *,
    url: Annotated[
        str, typer.Option(help="The endpoint, with or without /v1.")
    ] = "http://127.0.0.1:8000",
    trace: Annotated[
        str, typer.Option(help="zipf draws one; or a file that --save-trace wrote.")
    ] = _ZIPF,
    data: Annotated[
        list[Path] | None,
        typer.Option(
            help="Questions and chunks: JSONL, see docs/evaluation.md; repeatable.",
            show_default="Python's language reference",
        ),
    ] = None,
    clients: Annotated[int, typer.Option(help="So many, each asking when it was answered.")] = 8,
    requests: Annotated[int, typer.Option(help="Requests, warm-up included.")] = 100,
    documents: Annotated[int, typer.Option(help="Documents that prompts draw from.")] = 50,
    chunks_per_prompt: Annotated[int, typer.Option(help="Chunks of a prompt, shuffled.")] = 6,
    chunk_tokens: Annotated[
        int, typer.Option(help="Longest chunk, at 4 characters a token.")
    ] = 320,
    answer_tokens: Annotated[int, typer.Option(help="Tokens of an answer.")] = 64,
    turns: Annotated[
        float, typer.Option(help="Share of the conversations that have 2 to 6 turns.")
    ] = 0.3,
    alpha: Annotated[float, typer.Option(help="Zipf's exponent over documents.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Draws the trace.")] = 0,
    warm_up: Annotated[int, typer.Option(help="So many requests first, not counted.")] = 2,
    name: Annotated[
        str | None, typer.Option(help="What tables call it.", show_default="the URL")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="The model's name there.", show_default="the first it lists")
    ] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="Its key.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds that a request may be silent.")] = 600.0,
    save_trace: Annotated[Path | None, typer.Option(help="Write the trace here.")] = None,
    json_path: options.JsonPath = None,
    beside: Annotated[
        list[Path] | None,
        typer.Option(help="Results of other engines that the table shows, too; repeatable."),
    ] = None,
) -> None:
    """Measure an OpenAI-compatible server under load: latencies, tokens a second, reuse."""
    options.check_folders(json_path, save_trace)
    others = [_read(path) for path in beside or ()]
    from ragkv_bench.speed.load.result import load_table
    from ragkv_bench.speed.load.run import bench_serve
    from ragkv_bench.speed.load.workload import WorkloadPlan

    plan = WorkloadPlan(requests, documents, chunks_per_prompt, turns, alpha, seed)
    workload = _workload(trace, data, chunk_tokens, plan)
    if save_trace is not None:
        workload.save(save_trace)
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True) as progress:
        bar = progress.add_task("Asking", total=workload.requests)
        result = asyncio.run(
            bench_serve(
                url,
                workload,
                clients=clients,
                answer_tokens=answer_tokens,
                name=name,
                model=model,
                api_key=api_key,
                timeout_s=timeout,
                warm_up=warm_up,
                on_answer=lambda _: progress.advance(bar),
            )
        )
    options.finish(result, [load_table([*others, result])], json_path)
    for each in (*others, result):
        _explain(each)


def _workload(
    trace: str, data: list[Path] | None, chunk_tokens: int, plan: WorkloadPlan
) -> Workload:
    from ragkv_bench.data.examples import read_data
    from ragkv_bench.speed.load import workload

    if trace != _ZIPF:
        if data:
            raise ConfigError("--data changes nothing where --trace names a file: omit one")
        return workload.Workload.load(trace)
    if data:
        examples = [example for path in data for example in read_data(path).examples]
        found = workload.documents_of(examples, chunk_tokens)
    else:
        found = workload.language_reference(chunk_tokens, max(1, plan.chunks_per_prompt // 2))
    return workload.draw_workload(plan, found)


def _read(path: Path) -> Found:
    """Return what the command wrote; ConfigError for anything else."""
    try:
        found: Found = json.loads(path.read_text(encoding="utf-8-sig"))
        if not found["rows"][0]["turns"]:
            raise KeyError("turns")
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{path} is not by `ragkv bench serve`: {error!r}") from error
    return found


def _explain(result: Found) -> None:
    row, sentences = result["rows"][0], [*result["setup"].get("notes", ())]
    if result["precompute_s"] is not None:
        sentences.insert(0, f"precomputed in {result['precompute_s']:.1f} s")
    if row["errors"]:
        sentences.append(f"errors: {row['errors_by_kind']}")
    if row["sources"]:
        shares = (f"{name} {share:.0%}" for name, share in row["sources"].items())
        sentences.append(f"prompt tokens: {', '.join(shares)}")
    if sentences:
        out.print(f"{result['name']}: {'; '.join(sentences)}.", markup=False, highlight=False)
