"""`ragkv check --quality`, and what an engine says of an unknown model when it is loaded."""

import logging
from collections.abc import Callable

import pytest
from tiny import SIZE, random_model, tiny_tokenizer
from transformers import StableLmConfig

from ragkv import RagKV, ReuseConfig
from ragkv.engine import quality
from ragkv.engine.quality import Probes, Quality, is_copied, measure
from ragkv.errors import ConfigError


@pytest.mark.parametrize(("layers", "ratio"), [(1, 0.2), (1, "auto"), (2, 0.4)])
def test_a_model_that_repair_garbles_is_told_apart(make_engine, monkeypatch, layers, ratio):
    """The keys and values of a first layer know no context: with one layer, chunks' are exact."""
    monkeypatch.setattr(quality, "_SIZES", ((3, 10),))
    found = measure(make_engine(layers=layers).loaded, ratio)
    assert all(each.examples == 8 for each in found)
    if layers == 1:
        assert [(each.ratio, each.agreement, each.holds) for each in found] == [(ratio, 1.0, True)]
    else:
        assert not found[0].holds
        tried = [ratio, *(larger for larger in quality.LARGER if larger > ratio)]
        assert [each.ratio for each in found] == tried[: len(found)]
        assert found[-1].holds or len(found) == len(tried)
        assert found[-1].agreement > found[0].agreement + 0.1


def test_what_is_right_is_counted(make_engine, monkeypatch):
    probes = Probes(make_engine(layers=1).loaded, quick=True)
    (first, second, third), ids = probes._probes, probes._tokenizer
    texts = [f" {first[1]}", f" {second[1]} and more", "no idea"]
    probes._full = [(ids(text)["input_ids"], text != "no idea") for text in texts]
    said = iter([f" {first[1]}", f" {second[1][:12]}", f" {third[1]}"])

    def answer(probe, _):
        text = next(said)
        return ids(text)["input_ids"], is_copied(text, probe[1])

    monkeypatch.setattr(probes, "_answer", answer)
    found = probes.at(ReuseConfig())
    assert (found.full_copies, found.copies, found.kept_copies) == (2, 2, 1)


@pytest.mark.parametrize(
    ("full", "kept", "agreement", "holds"),
    [
        (8, 8, 1.0, True),
        (8, 7, 0.6, True),
        (8, 6, 1.0, False),
        (8, 8, 0.5, False),
        (4, 3, 0.8, True),
        (4, 2, 0.8, False),
        (3, 0, 0.8, True),  # three of eight tell nothing
        (0, 0, 0.5, False),
    ],
)
def test_bounds_allow_for_few_examples(full, kept, agreement, holds):
    found = Quality(0.2, 8, full, kept, kept, agreement)
    assert found.holds == holds
    assert found.kept == (None if full < 4 else kept / full)


def test_probes_fit_a_model_of_few_positions(make_engine):
    engine = make_engine(layers=1)
    for positions in (1000, 400):
        engine.loaded.model.config.max_position_embeddings = positions
        probes = Probes(engine.loaded, quick=positions == 400)
        assert probes.at(ReuseConfig()).agreement == 1.0
        assert max(len(probes._ids(prompt)) for prompt, *_ in probes._probes) < positions
    engine.loaded.model.config.max_position_embeddings = 50
    with pytest.raises(ConfigError, match="the model has 50"):
        measure(engine.loaded, 0.2)


# ---- when a model is loaded


@pytest.fixture
def warnings(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], list[str]]:
    monkeypatch.setattr(quality, "_PROBED", set())
    caplog.set_level(logging.WARNING, logger="ragkv.engine.quality")
    return lambda: [record.getMessage() for record in caplog.records]


def load(layers: int = 4, **settings: object) -> None:
    """Load a model of a family that is not in the test suite's matrix."""
    model = random_model(StableLmConfig(**SIZE | {"num_hidden_layers": layers}))
    RagKV(model, tiny_tokenizer(), store=":memory:", reuse=ReuseConfig(**settings)).close()


def test_an_unknown_model_that_reuse_garbles_is_named_once(warnings):
    load()
    load()
    (said,) = warnings()
    assert "at a ratio of 0.2" in said
    assert "ragkv check --quality --model StableLmForCausalLM" in said


@pytest.mark.parametrize(
    ("layers", "settings"),
    [(1, {}), (4, {"method": "full"}), (4, {"recompute_ratio": 1.0}), (4, {"method": "cacheclip"})],
)
def test_others_are_not(warnings, layers, settings):
    load(layers, **settings)
    assert not warnings()


def test_a_model_is_loaded_though_it_cannot_be_probed(warnings, monkeypatch):
    monkeypatch.setattr(Probes, "at", lambda *_: 1 / 0)
    load()
    assert not warnings()
