"""``ragkv precompute``: compute the caches of all chunks in files and folders."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

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
from ragkv.config import MEMORY, ReuseConfig, StoreConfig
from ragkv.config.extensions import extension
from ragkv.errors import ConfigError, StoreError
from ragkv.report.words import count

if TYPE_CHECKING:
    from ragkv import RagKV
    from ragkv.ingest.documents import Document
    from ragkv.workers.worker import Row


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
        str, typer.Option(help="Beginning of every prompt; auto takes the chat template's.")
    ] = "auto",
    sink_from: SinkFrom = None,
    workers: Annotated[
        int,
        typer.Option(min=1, help="Number of processes or actors; each loads the model."),
    ] = 1,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Use actors of a Ray cluster: auto or ray://host:10001; local starts a cluster.",
            show_default=False,
        ),
    ] = None,
    neighbours: Annotated[
        bool,
        typer.Option(
            "--neighbours",
            help="Also compute each chunk behind the chunks before it (with workers: of its file): "
            "answers are nearer to a full prefill's, for three times the time and twice the space.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compute the caches of all chunks under PATHS; stored chunks are skipped.

    Chunks of the same model and size that a changed file no longer contains are removed.
    """
    from ragkv.cli.texts import read_system_prompt, read_texts
    from ragkv.ingest.documents import Document, grouped, precompute_documents
    from ragkv.workers.worker import IngestWorker, for_workers, store_in_processes, total

    if sink_from is not None and sink != "auto":
        raise ConfigError("--sink and --sink-from: give one of them")
    texts, system_prompt = read_texts(paths), read_system_prompt(sink_from)
    if store == MEMORY:
        raise ConfigError(
            f"a store in memory is lost when the command ends: give a folder, not {MEMORY}"
        )
    files = [Document([text], str(file)) for file, text in texts.items()]
    cut = partial(cut_file, chunk_tokens=chunk_tokens)
    engine: dict[str, Any] = {"device": device, "dtype": dtype, "system_prompt": system_prompt}
    engine |= {"namespace": namespace, "reuse": ReuseConfig(sink=sink)}
    where = StoreConfig(store, codec=codec)
    failed: list[Row] = []
    if workers == 1 and ray is None:
        with open_engine(model, store=where, **engine) as kv:
            parts = [cut(kv, each) for each in files]
            chunks = sum(len(each.texts) for each in parts)
            err.print(
                f"{count(chunks, 'chunk')} of at most {count(chunk_tokens, 'token')}.",
                highlight=False,
            )
            try:
                report = precompute_documents(kv.precompute, grouped(parts), neighbours=neighbours)
            except KeyboardInterrupt:
                unique = {text.strip() for each in parts for text in each.texts}
                _stop(sum(map(kv.contains, unique)), len(unique), "chunks")
    else:
        opened = partial(open_engine, model, store=for_workers(where), quiet=True, **engine)
        store_in = store_in_processes
        if ray is not None:
            gpus = 1 if (device or "").startswith("cuda") else None
            store_on_ray = extension("ray", "ragkv-ray")
            store_in = partial(store_on_ray, address=ray, num_gpus=gpus)
        began = time.perf_counter()
        worker = partial(IngestWorker, opened, cut, neighbours=neighbours)
        rows = _rows(store_in(worker, files, workers), files)
        report = total(rows, time.perf_counter() - began)
        failed = [row for row in rows if row["status"] == "failed"]
    if as_json:
        say_json(report.to_dict())
    else:
        out.print(
            f"{report.new} new, {report.existing} already stored, {report.skipped} too short, "
            f"{report.too_long} too long for the model, {report.unknown_token} with unknown "
            f"tokens, {report.removed} removed, {count(report.versions, 'version')}; "
            f"{count(report.tokens, 'token')}, {report.bytes / 1e6:.1f} MB "
            f"in {report.seconds:.1f} s.",
            highlight=False,
        )
    if failed:
        raise StoreError(
            f"not stored: {len(failed)} of {count(len(files), 'file')}, e.g. "
            f"{failed[0]['document']}: {failed[0]['reason']}"
        )


def _rows(batches: Iterator[list[Row]], files: Sequence[Document]) -> list[Row]:
    """Return the workers' results, and show the progress."""
    from ragkv.report.ingestion_progress import IngestionProgress

    rows: list[Row] = []
    sizes = {each.name: len(each.texts[0]) for each in files}
    try:
        with IngestionProgress(list(sizes.values()), show=None, unit="file") as progress:
            for done in batches:
                rows += done
                for row in done:
                    progress.stored(sizes[row["document"]])
                progress.say_left()
    except KeyboardInterrupt:
        _stop(sum(row["status"] != "failed" for row in rows), len(files), "files")
    return rows


def _stop(stored: int, total: int, unit: str) -> NoReturn:
    """End after Ctrl-C."""
    err.print(
        f"Interrupted: {stored} of {total} {unit} are stored; the same command continues.",
        highlight=False,
    )
    raise typer.Exit(130)


def cut_file(kv: RagKV, file: Document, chunk_tokens: int) -> Document:
    """Split a file into chunks.

    The document's name includes the chunk size and the model, so ingesting a changed file again
    replaces only its own chunks.
    """
    from ragkv.cli.texts import split_text

    chunks = split_text(file.texts[0], kv.tokenizer, chunk_tokens)
    cut = f"{chunk_tokens} tokens for {kv.info.fingerprint}"
    return replace(file, texts=chunks, name=f"{file.name}, {cut}")
