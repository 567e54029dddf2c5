"""``ragkv precompute``: compute the cache of every chunk of some folders."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ragkv.cli.console import err, out
from ragkv.cli.opening import open_engine
from ragkv.cli.options import AsJson, ChunkTokens, ModelName, Namespace, Paths, StorePath


def precompute(
    paths: Paths,
    chunk_tokens: ChunkTokens = 400,
    model: ModelName = None,
    store: StorePath = None,
    namespace: Namespace = "default",
    sink: Annotated[
        str, typer.Option(help="Text that every prompt begins with; auto: the chat template's.")
    ] = "auto",
    as_json: AsJson = False,
) -> None:
    """Compute the cache of every chunk under PATHS; what is stored already is skipped."""
    from ragkv.cli.texts import read_chunks

    with open_engine(model, store=store, namespace=namespace) as kv:
        chunks = read_chunks(paths, kv.tokenizer, chunk_tokens)
        err.print(f"{len(chunks)} chunks of at most {chunk_tokens} tokens.", highlight=False)
        report = kv.precompute(chunks, show_progress=True, sink=sink)
    if as_json:
        out.print_json(json.dumps(report.to_dict()))
        return
    out.print(
        f"{report.new} new, {report.existing} already there, {report.skipped} too short; "
        f"{report.tokens} tokens, {report.bytes / 1e6:.1f} MB in {report.seconds:.1f} s.",
        highlight=False,
    )
