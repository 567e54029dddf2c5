"""A folder that an earlier ragkv wrote, carried over to the layout of this one."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from ragkv.errors import StoreError
from ragkv.store.backends.files import store_errors, sync_folder
from ragkv.store.backends.index import Index
from ragkv.store.chunk_store import ChunkStore
from ragkv.store.entry.format import decode
from ragkv.store.entry.header import RefusedEntryError, read_header
from ragkv.store.operate.migrate import migrate

logger = logging.getLogger(__name__)

_ASIDE = ".layout-1"


@dataclass(slots=True)
class Migrated:
    """Entries carried over, and damaged ones that were left behind."""

    entries: int = 0
    damaged: int = 0


def migrate_folder(folder: Path, open_new: Callable[[], ChunkStore]) -> Migrated:
    """Carry a namespace's folder of layout 1 over to the layout that is written now.

    The folder is renamed; then each of its entries, which prove their own bytes, is put
    into the new store and removed only after that. Interrupted at any moment, it goes on
    when it is called again. Where there is nothing to carry over, nothing is done.

    Parameters
    ----------
    folder
        The namespace's folder.
    open_new
        Opens the new store in that place; called after the old folder is out of its way.

    Raises
    ------
    StoreError
        The folder cannot be read, or the new store not written.
    """
    aside = folder.with_name(folder.name + _ASIDE)
    done = Migrated()
    with store_errors(folder):
        if is_first_layout(folder):
            if aside.exists():
                raise StoreError(f"{aside} and {folder} are both of layout 1: remove one of them")
            folder.rename(aside)
            sync_folder(folder.parent)
        if aside.is_dir():
            with closing(open_new()) as store:
                for path in sorted(aside.glob("kv/*/*.safetensors")):
                    carried = _carry(path, store)
                    done.entries += carried
                    done.damaged += not carried
                    path.unlink()
            shutil.rmtree(aside)
    return done


def is_first_layout(folder: Path) -> bool:
    """Whether an index of layout 1 lies in a namespace's folder, which may be written to."""
    if not (folder / "index").is_dir():
        return False
    with closing(Index(folder / "index")) as index:  # rolls back what a crash left
        owner = index.get("store")
    return owner is not None and owner.startswith(b"{")  # later ones begin otherwise


def _carry(path: Path, store: ChunkStore) -> bool:
    """Put one file's entry; False where it is damaged."""
    try:
        data = migrate(path.read_bytes())
        header, _ = read_header(memoryview(data))
    except RefusedEntryError as refused:
        logger.warning("not carried over: %s: %s (%s)", path, refused, refused.reason)
        return False
    lookup = decode(data, header.text, header.fingerprint, copy=True, place=path)
    if lookup.entry is None:
        return False
    store.put(lookup.entry, header.fingerprint)
    return True
