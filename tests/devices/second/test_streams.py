"""An engine on a device other than the CPU: no race, no needless waiting."""

from contextlib import contextmanager

import pytest
import second_device
from tiny import some_chunks

from ragkv.config import StoreConfig
from ragkv.ingest.corpus import Corpus
from ragkv.model.streams import SideStream, side_stream
from ragkv.splice.on_device import put_on_device

CHUNKS = some_chunks(3)
PROMPT = [{"role": "user", "content": "\n\n".join(CHUNKS) + "\n\nWhat does it say?"}]


@pytest.mark.parametrize("family", ["llama", "mistral-window", "gemma2", "gpt-oss"])
def test_nothing_waits_while_a_pass_is_handed_over(make_engine, family):
    """The host waits for scores, to choose by them, and for the first token: for nothing else."""
    engine = make_engine(family, device="second", store=StoreConfig(":memory:", device_bytes=0))
    engine.precompute(CHUNKS)
    engine.prefill(PROMPT)
    engine.wait()
    waited: list[list[str]] = []

    def before(*_):
        second_device.waits.clear()

    def after(*_):
        waited.append(list(second_device.waits))

    hooks = [
        engine.loaded.model.register_forward_pre_hook(before),
        engine.loaded.model.register_forward_hook(after, always_call=True),
    ]
    for method in ("query", "epic", "reuse"):
        engine.prefill(PROMPT, method=method, recompute_ratio=0.3)
        engine.wait()  # what the background waits for is not the pass's
    for hook in hooks:
        hook.remove()
    assert waited == [[]] * 4  # query has a pass to choose by


@pytest.mark.parametrize(
    ("store", "is_resident"),
    [({"device_bytes": 0}, False), ({}, True)],
    ids=["from-host", "from-device"],
)
def test_later_layers_are_copied_while_earlier_ones_are_computed(
    make_engine, monkeypatch, store, *, is_resident
):
    """Those on the device already are placed at once: there is nothing to copy."""
    engine = make_engine(device="second", store=StoreConfig(":memory:", **store))
    engine.precompute(CHUNKS)
    engine.prefill(PROMPT)
    given: list[tuple[int, int]] = []

    def noted(*args):
        own = side_stream(engine.loaded.device)._own
        computing = second_device.current_stream()
        given.append((computing.known[computing.number], own.known[computing.number]))
        put_on_device(*args)

    monkeypatch.setattr("ragkv.splice.place.put_on_device", noted)
    engine.prefill(PROMPT, method="epic", recompute_ratio=0.3)
    computed, waited_for = zip(*given, strict=True)
    assert len(set(computed)) == len(computed)
    assert (len(computed) == 1) == is_resident
    assert len(set(waited_for)) == 1


def test_layers_that_are_not_waited_for_are_seen(make_engine, monkeypatch):
    """The test's own test: without the one line that joins the streams, there is a race."""
    engine = make_engine(device="second", store=StoreConfig(":memory:", device_bytes=0))
    engine.precompute(CHUNKS)
    engine.prefill(PROMPT)
    beside = SideStream.on_side_stream

    @contextmanager
    def forgetful(self):
        current = second_device.current_stream()
        known = dict(current.known)
        with beside(self):
            yield
        current.known = known

    monkeypatch.setattr(SideStream, "on_side_stream", forgetful)
    with pytest.raises(second_device.RaceError):
        engine.prefill(PROMPT)


def test_what_is_timed_has_been_computed(make_engine, monkeypatch):
    """The rate at which chunks are computed decides whether they are loaded."""
    waited: list[list[str]] = []
    monkeypatch.setattr(Corpus, "record_speed", lambda *_: waited.append(list(second_device.waits)))
    engine = make_engine(device="second")
    second_device.waits.clear()
    engine.precompute(CHUNKS[:1])
    assert "streams.py:wait_for" in waited[0]
