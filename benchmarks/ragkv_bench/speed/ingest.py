"""The speed of ingestion, against the model's own prefill of the same tokens."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence

import torch
from rich.table import Table

from ragkv import RagKV
from ragkv.chunk.encode import in_batches, padded_ids
from ragkv.errors import ConfigError
from ragkv.model.loaded import LoadedModel
from ragkv.prompt.tokens import Tokens
from ragkv_bench.results import Found, grey, of, table
from ragkv_bench.speed.machine import device_name, title_of
from ragkv_bench.speed.timing import ratio_of, synchronise, timed
from ragkv_bench.speed.traces import Text, tokens_of

_SINK = "Answer from these passages."
_CAPTION = (
    "Medians over {rounds} rounds, in turn. share: of the model's plain prefill rate; "
    "grey: quartiles."
)


def bench_ingest(
    loaded: LoadedModel,
    *,
    chunks: int = 32,
    chunk_tokens: int = 512,
    rounds: int = 5,
) -> Found:
    """Time ``precompute`` from texts to synced files against the model's forward pass.

    The plain prefill has the same token ids in the same batches, keeps their keys and
    values and computes the logits of the last row alone. One round more warms up. Returns medians
    over rounds: tokens a second of the model alone and from texts to the store, and the ``share``
    that the second is of the first within a round.

    Raises ConfigError: a number is not positive, or the text has not so many tokens.
    """
    if min(chunks, chunk_tokens, rounds) < 1:
        raise ConfigError("chunks, chunk_tokens and rounds must be at least 1")
    text = Text(loaded.tokenizer, chunk_tokens)
    texts = [text.piece(number) for number in range(chunks)]
    tokenized = [(one, tokens_of(one, loaded.tokenizer)) for one in texts]
    times = []
    with (
        tempfile.TemporaryDirectory(prefix="ragkv-ingest-") as place,
        RagKV(loaded, store=place) as kv,
    ):
        sink = kv.sink_from(_SINK)
        for _ in range(rounds + 1):
            prefill_s, _ = timed(loaded.device, lambda: _prefill(loaded, tokenized))
            report = kv.precompute(texts, sink=sink)
            times.append((prefill_s, report.seconds))
            for one in texts:
                kv.forget(one)
    _, *counted = times
    columns = list(zip(*counted, strict=True))
    share, quartiles = ratio_of(*columns)
    prefill, ingest = map(statistics.median, columns)
    return {
        "model": loaded.name,
        "device": device_name(loaded.device),
        "chunks": chunks,
        "tokens": report.tokens,
        "rounds": rounds,
        "prefill_tokens_s": report.tokens / prefill,
        "ingest_tokens_s": report.tokens / ingest,
        "share": share,
        "quartiles": quartiles,
        "bytes_per_token": report.bytes / report.tokens,
    }


def tables(found: Found) -> list[Table]:
    """Return the one table."""
    title = f"{title_of(found)}, {found['chunks']} chunks, {found['tokens']:,} tokens"
    columns = {
        "prefill tokens/s": of("prefill_tokens_s", ",.0f"),
        "ingest tokens/s": of("ingest_tokens_s", ",.0f"),
        "share": of("share", ".0%"),
        "": lambda row: grey(row["quartiles"], ".0%"),
        "bytes/token": of("bytes_per_token", ",.0f"),
    }
    return [table(title, _CAPTION.format(rounds=found["rounds"]), [found], columns, words=0)]


@torch.no_grad()
def _prefill(loaded: LoadedModel, chunks: Sequence[tuple[str, Tokens]]) -> None:
    for batch in in_batches(chunks, loaded.device):
        ids = padded_ids(batch, loaded.device)
        loaded.model(input_ids=ids, use_cache=True, logits_to_keep=1)
    synchronise(loaded.device)
