"""Tuning the auxiliary model: its target, its forward pass, and what training changes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import some_chunks, tiny_model, tiny_tokenizer
from typer.testing import CliRunner

from ragkv import RagKV
from ragkv.cli.main import app
from ragkv.errors import ConfigError, PromptTooLongError
from ragkv.model.load import load_model
from ragkv.model.loaded import LoadedModel
from ragkv.select.auxiliary import Auxiliary, map_scores
from ragkv_bench.data.examples import Chunk, DataSet, Example, write_data
from ragkv_bench.data.tasks import chunk_texts, prompt
from ragkv_bench.tune.features import Features, Tail
from ragkv_bench.tune.run import targets_of, tune
from ragkv_bench.tune.target import Target, look, read_question
from ragkv_bench.tune.train import TuneSettings, divergence, jaccard, measure, split, train

Make = Callable[..., RagKV]


def examples(count: int = 4) -> tuple[Example, ...]:
    """Examples over three chunks each, titles among them, none alike."""
    texts = some_chunks(3 * count, 24)
    return tuple(
        Example(
            f"e{i}",
            f"What does part {i} say?",
            ("nothing",),
            tuple(Chunk(text, f"Part {i}") for text in texts[3 * i : 3 * i + 3]),
            "singlehop_qa",
        )
        for i in range(count)
    )


def loaded(family: str = "llama", seed: int = 0, attention: str = "sdpa") -> LoadedModel:
    return load_model(tiny_model(family, attention, seed), tiny_tokenizer())


def targets(count: int = 4) -> list[Target]:
    return targets_of(DataSet("d", examples(count)), loaded("qwen2", seed=5))


def tail_and_features(family: str, layers: int, count: int = 2) -> tuple[Tail, list[Features]]:
    tail = Tail(loaded(family, seed=1), layers)
    return tail, [tail.features(target) for target in targets(count)]


@pytest.mark.parametrize("family", ["qwen2", "llama-yarn", "gemma3"])
def test_the_target_is_the_primarys_eager_attention(family: str) -> None:
    model = loaded(family)
    question = read_question(examples(1)[0], model)
    target = look(question, model)
    eager = tiny_model(family, "eager")
    with torch.no_grad():
        ids = torch.from_numpy(question.tokens.ids.astype(np.int64))[None]
        weights = eager(ids, output_attentions=True).attentions[-1][0]
    expected = weights[:, question.first :].mean(dim=(0, 1)).numpy()
    text = tiny_tokenizer().decode(question.tokens.ids)
    assert text.endswith(question.query)
    for span, scores, offsets in zip(question.spans, target.scores, target.offsets, strict=True):
        assert text[span.start : span.end] == span.text
        own = [
            at
            for at, (start, end) in enumerate(question.tokens.offsets)
            if end > span.start and start < span.end
        ]
        np.testing.assert_allclose(scores, expected[own], atol=1e-6)
        assert (offsets[0, 0], offsets[-1, 1]) == (0, len(span.text))


def test_a_primary_whose_last_layer_has_a_window_is_looked_at_below_it() -> None:
    model = loaded("gemma3")
    architecture = model.architecture
    assert architecture is not None
    windows = (48, None, 48, 48)
    changed = replace(model, architecture=replace(architecture, windows=windows))
    question = read_question(examples(1)[0], changed)
    target = look(question, changed)
    with torch.no_grad():
        ids = torch.from_numpy(question.tokens.ids.astype(np.int64))[None]
        weights = tiny_model("gemma3", "eager")(ids, output_attentions=True).attentions[1][0]
    expected = weights[:, question.first :].mean(dim=(0, 1)).numpy()
    first = int(np.searchsorted(question.tokens.offsets[:, 1], question.spans[0].start, "right"))
    got = target.scores[0]
    np.testing.assert_allclose(got, expected[first : first + len(got)], atol=1e-6)


def asked_of_the_auxiliary(engine: RagKV, example: Example, name: str) -> tuple[list[str], str]:
    """Return what the rule hands to ``Auxiliary.score`` for this example."""
    asked: list[tuple[list[str], str]] = []
    real = Auxiliary.score

    def spy(self, texts, query):
        asked.append((list(texts), query))
        return real(self, texts, query)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Auxiliary, "score", spy)
        settings = {"method": "cacheclip", "auxiliary_model": name}
        engine.precompute(chunk_texts(example), **settings)
        engine.prefill(prompt(example), **settings)
    return asked[0]


@pytest.mark.parametrize("layers", [1, 2, 4])
@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "gemma3", "mistral-window"])
def test_the_trainable_forward_is_the_auxiliarys_score(
    make_engine: Make, family: str, layers: int
) -> None:
    engine = make_engine(family)
    example = examples(1)[0]
    texts, query = asked_of_the_auxiliary(engine, example, engine.info.name)
    target = look(read_question(example, engine.loaded), engine.loaded)
    assert [span.text for span in target.question.spans] == texts
    assert target.question.query == query
    config = engine.reuse.override(auxiliary_model=engine.info.name)
    expected = engine._reuse.auxiliaries.scorer(config).score(texts, query)

    tail = Tail(load_model(tiny_model(family), tiny_tokenizer()), layers)
    features = tail.features(target)
    scores = tail.scores(features).numpy()
    np.testing.assert_allclose(scores, np.concatenate([s for s, _ in expected]), atol=1e-5)
    mapped = [
        map_scores(wanted, offsets, own)
        for wanted, offsets, (_, own) in zip(target.scores, target.offsets, expected, strict=True)
    ]
    wanted = np.concatenate(mapped)
    np.testing.assert_allclose(features.target.numpy(), wanted / wanted.sum(), rtol=1e-5)


def test_without_a_chat_template_chunks_stand_behind_nothing_or_bos(make_engine: Make) -> None:
    engine = make_engine()
    engine.tokenizer.chat_template, before = None, engine.tokenizer.chat_template
    try:
        example = examples(1)[0]
        target = look(read_question(example, engine.loaded), engine.loaded)
        config = engine.reuse.override(auxiliary_model=engine.info.name)
        texts = [span.text for span in target.question.spans]
        expected = engine._reuse.auxiliaries.scorer(config).score(texts, target.question.query)
        tail = Tail(load_model(tiny_model(), engine.tokenizer), 2)
        scores = tail.scores(tail.features(target)).numpy()
    finally:
        engine.tokenizer.chat_template = before
    np.testing.assert_allclose(scores, np.concatenate([s for s, _ in expected]), atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "gemma3"])
def test_only_what_the_scores_depend_on_is_trained(family: str) -> None:
    tail, features = tail_and_features(family, layers=2)
    model = tail._loaded.model
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    epochs = train(tail, features, features, TuneSettings(epochs=2, lr=1e-3))
    assert epochs[-1].heldout.kl < epochs[0].heldout.kl
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    changed = {n for n, w in model.state_dict().items() if not torch.equal(w, before[n])}
    assert changed == trained
    assert {name for name in trained if ".layers.2." in name} == {
        name for name in before if ".layers.2." in name
    }
    last = {name.split(".layers.3.")[1] for name in trained if ".layers.2." not in name}
    projections = {
        "phi3": {"self_attn.qkv_proj.weight"},
        "llama": {"self_attn.q_proj.weight", "self_attn.k_proj.weight"},
    }
    normed = projections["llama"] | {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}
    assert last == {"input_layernorm.weight"} | projections.get(family, normed)
    if family == "phi3":
        (name,) = (each for each in before if each.endswith("3.self_attn.qkv_proj.weight"))
        values = slice(6 * 16, None)
        assert torch.equal(model.state_dict()[name][values], before[name][values])


def test_training_lowers_the_divergence() -> None:
    tail, features = tail_and_features("llama", layers=2, count=4)
    before = measure(tail, features[:3])
    epochs = train(tail, features[:3], features[3:], TuneSettings(epochs=8, lr=3e-3, patience=8))
    assert epochs[0].training == before
    assert epochs[-1].training.kl < 0.7 * before.kl
    assert epochs[-1].training.jaccard > before.jaccard


def test_the_weights_that_do_best_held_out_are_kept() -> None:
    tail, features = tail_and_features("llama", layers=2, count=2)
    # Far too large a rate: nothing gets better, and the old weights come back.
    before = {n: w.clone() for n, w in tail._loaded.model.state_dict().items()}
    settings = TuneSettings(epochs=9, lr=3.0, patience=2)
    epochs = train(tail, features[:1], features[1:], settings)
    assert [epoch.number for epoch in epochs] == [0, 1, 2]
    assert all(torch.equal(w, before[n]) for n, w in tail._loaded.model.state_dict().items())


def test_tuning_is_reproducible_and_its_report_adds_up() -> None:
    asked = targets(5)
    settings = TuneSettings(epochs=3, lr=1e-3, holdout=0.4)
    first, second = (
        tune(asked, loaded("llama", seed=1), settings, primary="p", data="d") for _ in range(2)
    )
    assert first == second
    assert (first.trained_on, first.held_out) == (3, 2)
    best = first.epochs[first.best_epoch]
    assert best.heldout.kl == min(epoch.heldout.kl for epoch in first.epochs)


def test_divergence_and_overlap_of_known_distributions() -> None:
    target = torch.tensor([0.5, 0.25, 0.25, 0.0, 0.0])
    scores = torch.tensor([0.02, 0.02, 0.02, 0.02, 0.02])
    expected = 0.5 * np.log(0.5 / 0.2) + 2 * 0.25 * np.log(0.25 / 0.2)
    assert float(divergence(scores, target)) == pytest.approx(expected, rel=1e-5)
    assert float(divergence(target * 0.3, target)) == pytest.approx(0, abs=1e-6)
    a, b = torch.arange(10.0), torch.arange(10.0).flip(0)
    assert jaccard(a, a) == 1
    assert jaccard(a, b) == 0
    assert jaccard(a, b, share=0.6) == pytest.approx(2 / 10)


def saved(tmp_path: Path, name: str, seed: int) -> str:
    folder = str(tmp_path / name)
    tiny_model("llama", seed=seed).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["tune-auxiliary", *map(str, arguments)])
    assert result.exit_code in {0, 2}, result.output
    return " ".join(result.output.split())


def test_from_data_to_a_model_folder(tmp_path: Path, make_engine: Make) -> None:
    primary, auxiliary = saved(tmp_path, "primary", 5), saved(tmp_path, "auxiliary", 1)
    data, out, figures = tmp_path / "d.jsonl", tmp_path / "tuned", tmp_path / "t.json"
    write_data(data, examples(6))
    output = run("--data", data, "--primary", primary, "--auxiliary", auxiliary, "--out", out,
                 "--skip", 1, "--holdout", 0.4, "--epochs", 4, "--lr", 0.001, "--json", figures)  # fmt: skip
    for words in ("3 examples trained on", "2 held out", "KL held out", f"Saved: {out}"):
        assert words in output
    result = json.loads(figures.read_text())
    first, *later = result["epochs"]
    assert later[-1]["training"]["kl"] < first["training"]["kl"]
    assert len(later) >= result["best_epoch"] > 0

    # The folder is an auxiliary model; entries of the untuned one are not reused.
    old, new = (load_model(str(each), None).fingerprint for each in (auxiliary, out))
    assert old is not None
    assert new == replace(old, weights=new.weights)
    assert new != old
    engine = make_engine()
    example = examples(1)[0]
    texts, settings = chunk_texts(example), {"method": "cacheclip"}
    engine.precompute(texts, **settings, auxiliary_model=auxiliary)
    config = engine.reuse.override(auxiliary_model=str(out))
    corpus, sink = engine._reuse.auxiliaries.corpus(config)
    assert not any(corpus.contains(text, sink) for text in texts)
    report = engine.prefill(prompt(example), **settings, auxiliary_model=str(out)).report
    assert report.effective_ratio < 1
    assert all(corpus.contains(text, sink) for text in texts)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--data": "missing.jsonl"}, "cannot be read"),
        ({"--limit": 1}, "leaves none to"),
        ({"--skip": 2}, "skip must be at least 0 and less than the 2 examples of d, not 2"),
        ({"--holdout": 0}, "holdout must lie between 0 and 1"),
        ({"--layers": 9}, "layers must lie between 1 and 4, not 9"),
        ({"--epochs": 0}, "epochs must be at least 1"),
        ({"--lr": 0}, "lr must be above 0"),
        ({"--out": "full"}, "is there already"),
        ({"--json": "nowhere/t.json"}, "there is no folder"),
        ({"--primary": "./nothing"}, "There is no folder nothing"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, object], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_data("d.jsonl", examples(2))
    model = saved(tmp_path, "model", 1)
    Path("full").mkdir()
    Path("full/file").touch()
    options: dict[str, object] = {
        "--data": "d.jsonl", "--primary": model, "--auxiliary": model, "--out": "out",
        "--holdout": 0.5, **change,
    }  # fmt: skip
    output = run(*[part for option in options.items() for part in option])
    assert "Error: " in output
    assert message in output
    assert not Path("out").exists()


def test_examples_that_cannot_be_used_are_named() -> None:
    (example,) = examples(1)
    model = loaded()
    short = replace(example, id="short", chunks=(Chunk("too short"),))
    with pytest.raises(ConfigError, match="example short: no chunk is long enough"):
        read_question(short, model)
    long = replace(example, id="long", question="why " * 4096)
    with pytest.raises(PromptTooLongError, match=r"example long: .* has 4096 positions"):
        read_question(long, model)
    with pytest.raises(ConfigError, match="leaves none to hold out"):
        split([1, 2], TuneSettings(holdout=0.1))
    with pytest.raises(ConfigError, match="leaves none to train on"):
        split([1, 2], TuneSettings(holdout=0.9))


def test_a_query_that_sees_no_chunk_is_no_target() -> None:
    (target,) = targets(1)
    blind = replace(target, scores=tuple(np.zeros_like(each) for each in target.scores))
    with pytest.raises(ConfigError, match="attends to none of the chunks"):
        Tail(loaded(), 2).features(blind)
