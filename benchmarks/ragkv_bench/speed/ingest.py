"""The speed of ingestion, against the model's own prefill of the same tokens."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ragkv import RagKV
from ragkv.chunk.encode import in_batches, padded_ids
from ragkv.config import StoreConfig
from ragkv.errors import ConfigError
from ragkv.model.loaded import LoadedModel
from ragkv.model.machine import device_name
from ragkv.prompt.render import Rendered
from ragkv.prompt.tokens import Tokens, tokenize
from ragkv_bench.results import Saved
from ragkv_bench.speed.costs import synchronise
from ragkv_bench.speed.traces import Text
from ragkv_bench.speed.ttft import middle

_SINK = "Answer from these passages."


@dataclass(frozen=True, slots=True)
class Ingestion(Saved):
    """Medians over rounds, each a plain prefill and an ingestion in turn.

    Attributes
    ----------
    chunks, tokens
        Ingested in each round, and their tokens together.
    prefill_tokens_s, ingest_tokens_s
        Tokens a second: of the model alone, and from texts to the store.
    share, quartiles
        Of the two within a round, ingestion over prefill.
    bytes_per_token
        Bytes written for each token.
    """

    device: str
    codec: str
    chunks: int
    tokens: int
    rounds: int
    prefill_tokens_s: float
    ingest_tokens_s: float
    share: float
    quartiles: tuple[float, float]
    bytes_per_token: float


def bench_ingest(
    loaded: LoadedModel,
    *,
    chunks: int = 32,
    chunk_tokens: int = 512,
    rounds: int = 5,
    codec: str = "raw",
    folder: str | Path | None = None,
) -> Ingestion:
    """Time ``precompute`` from texts to synced files against the model's forward pass.

    The plain prefill has the same token ids in the same batches, keeps their keys and
    values and computes the logits of the last row alone. One round more warms up.

    Parameters
    ----------
    chunks, chunk_tokens
        How many texts are ingested, and how many tokens each has.
    folder
        Where a folder for the store is made and removed; None is where temporary files go.

    Raises
    ------
    ConfigError
        A number is not positive, there is no such folder, or the text has not so many tokens.
    """
    if min(chunks, chunk_tokens, rounds) < 1:
        raise ConfigError("chunks, chunk_tokens and rounds must be at least 1")
    if folder is not None and not Path(folder).is_dir():
        raise ConfigError(f"there is no folder {folder}")
    text = Text(loaded.tokenizer)
    texts: list[str] = []
    end = 0
    while len(texts) < chunks:
        piece, end = text.cut(end, chunk_tokens)
        texts.append(piece)
    prefill_s, ingest_s = [], []
    with (
        tempfile.TemporaryDirectory(dir=folder, prefix="ragkv-ingest-") as place,
        RagKV(loaded, store=StoreConfig(place, codec=codec)) as kv,
    ):
        tokenized = [
            (one, tokenize(Rendered(one, add_special_tokens=False), loaded.tokenizer))
            for one in texts
        ]
        sink = kv.sink_from(_SINK)
        for round_ in range(rounds + 1):
            prefill = _seconds(lambda: _prefill(loaded, tokenized), loaded.device)
            report = kv.precompute(texts, sink=sink)
            if round_:
                prefill_s.append(prefill)
                ingest_s.append(report.seconds)
            for one in texts:
                kv.forget(one)
    shares = [model / whole for model, whole in zip(prefill_s, ingest_s, strict=True)]
    share, quartiles = middle(shares)
    return Ingestion(
        loaded.name,
        device_name(loaded.device),
        codec,
        chunks,
        report.tokens,
        rounds,
        prefill_tokens_s=report.tokens / statistics.median(prefill_s),
        ingest_tokens_s=report.tokens / statistics.median(ingest_s),
        share=share,
        quartiles=quartiles,
        bytes_per_token=report.bytes / report.tokens,
    )


@torch.no_grad()
def _prefill(loaded: LoadedModel, chunks: Sequence[tuple[str, Tokens]]) -> None:
    for batch in in_batches(chunks, loaded.device):
        ids = padded_ids(batch, loaded.device)
        loaded.model(input_ids=ids, use_cache=True, logits_to_keep=1)


def _seconds(work: Callable[[], None], device: torch.device) -> float:
    began = time.perf_counter()
    work()
    synchronise(device)
    return time.perf_counter() - began
