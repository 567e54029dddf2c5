"""The speed of ingestion, against the model's own prefill of the same tokens."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ragkv import RagKV
from ragkv.chunk.encode import in_batches, padded_ids
from ragkv.config import StoreConfig
from ragkv.errors import ConfigError
from ragkv.model.loaded import LoadedModel
from ragkv.prompt.tokens import Tokens
from ragkv_bench.speed.machine import device_name
from ragkv_bench.speed.timing import ratio_of, synchronise, timed
from ragkv_bench.speed.traces import Text, tokens_of

_SINK = "Answer from these passages."


def bench_ingest(
    loaded: LoadedModel,
    *,
    chunks: int = 32,
    chunk_tokens: int = 512,
    rounds: int = 5,
    codec: str = "raw",
    folder: str | Path | None = None,
) -> dict[str, Any]:
    """Time ``precompute`` from texts to synced files against the model's forward pass.

    The plain prefill has the same token ids in the same batches, keeps their keys and
    values and computes the logits of the last row alone. One round more warms up. Returns medians
    over rounds: tokens a second of the model alone and from texts to the store, and the ``share``
    that the second is of the first within a round.

    A folder for the store is made in ``folder`` and removed; None is where temporary files go.

    Raises
    ------
    ConfigError
        A number is not positive, there is no such folder, or the text has not so many tokens.
    """
    if min(chunks, chunk_tokens, rounds) < 1:
        raise ConfigError("chunks, chunk_tokens and rounds must be at least 1")
    if folder is not None and not Path(folder).is_dir():
        raise ConfigError(f"there is no folder {folder}")
    texts, _ = Text(loaded.tokenizer).pieces(chunks, chunk_tokens)
    tokenized = [(one, tokens_of(one, loaded.tokenizer)) for one in texts]
    times = []
    with (
        tempfile.TemporaryDirectory(dir=folder, prefix="ragkv-ingest-") as place,
        RagKV(loaded, store=StoreConfig(place, codec=codec)) as kv,
    ):
        sink = kv.sink_from(_SINK)
        for _ in range(rounds + 1):
            prefill_s, _ = timed(loaded.device, lambda: _prefill(loaded, tokenized))
            report = kv.precompute(texts, sink=sink)
            times.append((prefill_s, report.seconds))
            for one in texts:
                kv.forget(one)
    _, *counted = times
    share, quartiles = ratio_of(counted)
    prefill, ingest = (statistics.median(each) for each in zip(*counted, strict=True))
    return {
        "model": loaded.name,
        "device": device_name(loaded.device),
        "codec": codec,
        "chunks": chunks,
        "tokens": report.tokens,
        "rounds": rounds,
        "prefill_tokens_s": report.tokens / prefill,
        "ingest_tokens_s": report.tokens / ingest,
        "share": share,
        "quartiles": quartiles,
        "bytes_per_token": report.bytes / report.tokens,
    }


@torch.no_grad()
def _prefill(loaded: LoadedModel, chunks: Sequence[tuple[str, Tokens]]) -> None:
    for batch in in_batches(chunks, loaded.device):
        ids = padded_ids(batch, loaded.device)
        loaded.model(input_ids=ids, use_cache=True, logits_to_keep=1)
    synchronise(loaded.device)
