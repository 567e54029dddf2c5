"""``ragkv precompute``: compute the cache of every chunk of some folders."""

from __future__ import annotations

from typing import Annotated

import typer

from ragkv.cli.console import err, out, say_json
from ragkv.cli.options import (
    AsJson,
    ChunkTokens,
    Codec,
    Device,
    DType,
    ModelName,
    Namespace,
    Paths,
    SinkFrom,
    StorePath,
)
from ragkv.cli.session import open_engine
from ragkv.config import MEMORY
from ragkv.errors import ConfigError


def precompute(
    paths: Paths,
    chunk_tokens: ChunkTokens = 400,
    model: ModelName = None,
    device: Device = None,
    dtype: DType = None,
    store: StorePath = None,
    namespace: Namespace = "default",
    codec: Codec = "raw",
    sink: Annotated[
        str, typer.Option(help="Text that every prompt begins with; auto: the chat template's.")
    ] = "auto",
    sink_from: SinkFrom = None,
    as_json: AsJson = False,
) -> None:
    """Compute the cache of every chunk under PATHS; stored chunks are skipped.

    Of a file that was changed, the chunks that it no longer has are removed: those of the same
    model and size.
    """
    from ragkv.cli.texts import read_system_prompt, read_texts, split_texts
    from ragkv.engine.documents import Documents, precompute_documents

    if sink_from is not None and sink != "auto":
        raise ConfigError("--sink and --sink-from: give one of them")
    texts, system_prompt = read_texts(paths), read_system_prompt(sink_from)
    if store == MEMORY:
        raise ConfigError(
            f"a store in memory ends with the command: give precompute a folder, not {MEMORY}"
        )
    with open_engine(
        model,
        device=device,
        dtype=dtype,
        store=store,
        namespace=namespace,
        codec=codec,
        system_prompt=system_prompt,
    ) as kv:
        sink = kv.reuse.sink if system_prompt else sink
        files = split_texts(texts, kv.tokenizer, chunk_tokens)
        chunks = sum(map(len, files.values()))
        err.print(f"{chunks} chunks of at most {chunk_tokens} tokens.", highlight=False)
        # each file's former chunks are removed: those of this model, cut like these
        cut = f"{chunk_tokens} tokens for {kv.info.fingerprint}"
        documents: Documents = {(f"{file}, {cut}", None): found for file, found in files.items()}
        report = precompute_documents(kv.precompute, documents, sink=sink)
    if as_json:
        say_json(report.to_dict())
        return
    out.print(
        f"{report.new} new, {report.existing} already there, {report.skipped} too short, "
        f"{report.too_long} too long for the model, {report.removed} removed; "
        f"{report.tokens} tokens, {report.bytes / 1e6:.1f} MB in {report.seconds:.1f} s.",
        highlight=False,
    )
