"""``ragkv store``: inspect a store, verify it, collect garbage, copy it."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from ragkv.cli.console import out, say_json
from ragkv.cli.options import AsJson, Namespace, StorePath
from ragkv.report.words import count

if TYPE_CHECKING:
    from ragkv.store.chunk_store import ChunkStore

store_app = typer.Typer(
    no_args_is_help=True, help="Inspect a store, verify it, collect garbage, copy it."
)


@store_app.command()
def stats(
    store: StorePath = None,
    namespace: Namespace = "default",
    as_json: AsJson = False,
) -> None:
    """Count chunks, documents and bytes, for each model."""
    from ragkv.store import operate

    with closing(_open(store, namespace, reading=True)) as opened:
        found = operate.stats(opened)
    if as_json:
        shown = asdict(found) | {"kinds": [kind._asdict() for kind in found.kinds]}
        say_json(shown)
        return
    table = Table("model and sink", "dtype", "codec", "entries", "MB")
    for kind in found.kinds:
        table.add_row(
            kind.fingerprint, kind.dtype, kind.codec, str(kind.entries), _megabytes(kind.nbytes)
        )
    out.print(table)
    _say(
        f"{count(found.texts, 'chunk')} of {count(found.documents, 'document')}: "
        f"{count(found.entries, 'entry')}, {_megabytes(found.nbytes)} MB; {found.expired} expired."
    )


@store_app.command()
def verify(
    store: StorePath = None,
    namespace: Namespace = "default",
    heal: Annotated[
        bool, typer.Option("--heal", help="Delete damaged entries; precompute restores them.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Verify all checksums; exit code 1 if damage remains."""
    from ragkv.store import operate

    with closing(_open(store, namespace, reading=not heal)) as opened:
        found = operate.verify(opened, heal=heal)
    if as_json:
        problems = [problem._asdict() for problem in found.problems]
        say_json(asdict(found) | {"problems": problems, "sound": found.sound, **found.counts})
    else:
        table = Table("what", "where", "detail")
        for problem in found.problems:
            table.add_row(problem.kind, escape(problem.key), escape(problem.detail))
        if found.problems:
            out.print(table)
        counts = ", ".join(f"{number} {kind}" for kind, number in found.counts.items())
        _say(
            f"{count(found.values, 'value')}, {_megabytes(found.nbytes)} MB read: "
            f"{counts or 'all intact'}; {found.healed} removed."
        )
    if not found.sound:
        raise typer.Exit(1)


@store_app.command()
def gc(
    store: StorePath = None,
    namespace: Namespace = "default",
    as_json: AsJson = False,
) -> None:
    """Delete expired chunks and the remains of interrupted writers."""
    with closing(_open(store, namespace)) as opened:
        removed = opened.gc()
    _report({"removed": removed}, f"{count(removed, 'chunk')} removed.", as_json)


@store_app.command("copy")
def copy_command(
    source: Annotated[str, typer.Argument(metavar="FROM", help="Folder or URL of a store.")],
    target: Annotated[str, typer.Argument(metavar="TO", help="Folder or URL; made if missing.")],
    namespace: Namespace = "default",
    as_json: AsJson = False,
) -> None:
    """Add a store's intact entries to another store; existing ones stay."""
    from ragkv.store.operate import copy_store

    with (
        closing(_open(source, namespace, reading=True)) as opened,
        closing(_open(target, namespace, new=True)) as other,
    ):
        done = copy_store(opened, other)
    _report(
        asdict(done),
        f"{count(done.entries, 'entry')}, {_megabytes(done.nbytes)} MB; {done.existing} there "
        f"already; skipped: {done.damaged} damaged, {done.expired} expired.",
        as_json,
    )


def _open(
    store: str | None, namespace: str, *, reading: bool = False, new: bool = False
) -> ChunkStore:
    """Open a store without tiers; ``new`` creates a missing one.

    With ``reading``, nothing is changed, except that opening a writable folder cleans up after a
    crash; a folder that is not writable is opened read-only.
    """
    from ragkv.config import StoreConfig
    from ragkv.errors import StoreError
    from ragkv.store import open_chunk_store
    from ragkv.store.backends import folder_of, namespace_folder

    root = folder_of(store)
    folder = None if root is None else namespace_folder(root, namespace)
    if folder is not None and not (new or folder.is_dir()):
        raise StoreError(f"there is no store at {root} with the namespace {namespace!r}")
    mends = folder is not None and os.access(folder, os.W_OK)
    config = StoreConfig(store, read_only=reading and not mends)
    return open_chunk_store(config, namespace)


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f}"


def _say(text: str) -> None:
    out.print(text, highlight=False)


def _report(found: dict[str, Any], text: str, as_json: bool) -> None:
    if as_json:
        say_json(found)
    else:
        _say(text)
