"""Following a store costs what has changed, not what is there."""

from contextlib import closing
from typing import NoReturn

from disk_store import DiskStore
from store_entries import FINGERPRINT, make_entry, put_texts

from ragkv.store.backends.index import Index


class Unread(dict[str, str]):
    """Texts that may be looked up, but not gone through."""

    def _refuse(self, *_: object) -> NoReturn:
        raise AssertionError("all texts are read")

    __iter__ = __or__ = __ror__ = keys = items = values = _refuse


def test_a_poll_reads_none_of_the_texts_that_are_known(store):
    put_texts(store, "abc")
    newest, added, _ = store.changes(0)
    assert added == ["a", "b", "c"]
    store._seen = Unread(store._seen)
    assert store.changes(newest) == (newest, [], [])
    store.put(make_entry("d"), FINGERPRINT)
    store.delete("a")
    assert store.changes(newest)[1:] == (["d"], ["a"])


def test_many_changes_are_read_in_few_queries(tmp_path, monkeypatch):
    with closing(DiskStore(tmp_path)) as store:
        for number in range(60):
            store.catalog.add(f"text {number}" + "long " * 2000 * (number % 2))
        queries = []
        query = Index._query
        monkeypatch.setattr(
            Index, "_query", lambda self, *given: queries.append(given) or query(self, *given)
        )
        added = store.changes(0).added
    assert [len(text) > 4096 for text in added] == [False, True] * 30
    assert len(queries) < 40  # those in files take one each


def test_a_long_text_is_one_change(store):
    store.put(make_entry("long " * 2000), FINGERPRINT)
    store.put(make_entry("long " * 2000), FINGERPRINT)
    assert store.changes(0).newest == 1
