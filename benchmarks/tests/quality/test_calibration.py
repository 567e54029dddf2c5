"""Calibration: the bound and its guard, the fixed sequence, profiles, the command."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
from evaluations import make_record, short_answers, small_data, stop_after  # noqa: F401  a fixture
from rich.console import Console
from tiny import tiny_model, tiny_tokenizer
from typer.testing import CliRunner

import ragkv.cli.main
from ragkv import RagKV, ReuseConfig
from ragkv.errors import ConfigError
from ragkv.select import get_method
from ragkv.select.method import Spread
from ragkv_bench.data.examples import write_data
from ragkv_bench.quality.calibration import (
    RATIOS,
    Calibration,
    NotShownError,
    Trial,
    bound,
    calibrate,
    judge,
)


def _records(agreements, *, scores=None, full=None):
    """Records of one ratio, 0.2, and of full attention."""
    scores = scores if scores is not None else [1.0] * len(agreements)
    full = full if full is not None else [1.0] * len(agreements)
    given = {"share_recomputed": 0.2, "ttft_s": 0.5}
    out = []
    for i, (agreement, score, of) in enumerate(zip(agreements, scores, full, strict=True)):
        out.append(make_record(str(i), "full", 1.0, score=of))
        out.append(make_record(str(i), "m", agreement=agreement, score=score, **given))
    return out


def _judge(records, target=0.95, **changes):
    return judge(records, 0.2, **{"measure": "agreement", "target": target, **changes})


def test_the_bound_is_the_normal_one_for_many_examples():
    values = np.clip(np.random.default_rng(0).normal(0.9, 0.03, size=2000), 0, 1)
    mean, low, examples = bound(_records(values), "agreement")
    with_one = np.append(values, 0.0)
    normal = with_one.mean() - 1.645 * with_one.std() / math.sqrt(2001)
    assert low == pytest.approx(normal, abs=2e-4)
    assert (mean, examples) == (pytest.approx(values.mean()), 2000)


def test_examples_that_all_agree_show_no_more_than_the_rule_of_three():
    for count in (10, 60, 300):
        mean, low, _ = bound(_records([1.0] * count), "agreement")
        assert mean == 1
        assert low == pytest.approx(1 - 3 / (count + 1), abs=1e-9)


@pytest.mark.parametrize(
    ("count", "target", "bad", "loss"), [(20, 0.95, 0.08, 0.625), (40, 0.9, 0.4, 0.25)]
)
def test_a_ratio_that_just_misses_is_promised_in_less_than_5_percent(count, target, bad, loss):
    """Skewed losses whose true mean is the target itself."""
    assert 1 - bad * loss == pytest.approx(target)
    draw = np.random.default_rng(0)
    promised = plain = 0
    for seed in range(200):
        values = 1 - loss * (draw.random(count) < bad)
        promised += bound(_records(values), "agreement", seed=seed)[1] >= target
        plain += values.mean() - 1.645 * values.std() / math.sqrt(count) >= target
    assert promised <= 10
    assert plain > promised  # the textbook interval errs more often


def test_the_bound_is_paired_and_retention_asks_only_what_full_attention_answers():
    full = [1.0, 0.5, 0.0, 0.8] * 50
    mean, low, examples = bound(_records([0.1] * 200, scores=full, full=full), "retention")
    assert (mean, examples) == (1, 150)  # the third of four is not answered
    assert low == pytest.approx(1 - 3 / 151, abs=2e-3)
    half = [score / 2 for score in full]
    assert bound(_records([1.0] * 200, scores=half, full=full), "retention")[0] == 0.5
    with pytest.raises(ConfigError, match="answers none"):
        bound(_records([1.0], full=[0.0]), "retention")


def test_verdicts():
    good, short, bad = [1.0] * 100, [1.0] * 20, [0.9] * 100
    assert _judge(_records(good)).verdict == "holds"
    assert _judge(_records(short)).verdict == "likely"
    missed = _judge(_records(bad))
    assert (missed.verdict, missed.mean) == ("no", pytest.approx(0.9))
    behind = _judge(_records(good), above=False)  # a higher ratio is in the way
    assert behind.verdict == "likely"
    assert (behind.share_recomputed, behind.speedup) == (pytest.approx(0.2), 4)


def _calibrate(monkeypatch, kv, curve, **changes):
    """Calibrate where the ratio alone decides the agreement; return it and what was tried."""
    seen = []

    def measured(kv, data, settings, file, **kwargs):
        _, (_, ratio) = settings
        seen.append(ratio)
        return _records([curve[ratio]] * 200)

    monkeypatch.setattr("ragkv_bench.quality.calibration.measurements", measured)
    return calibrate(kv, small_data(1), **changes), seen


def test_ratios_fall_until_the_mean_misses(make_engine, monkeypatch):
    curve = {0.7: 1.0, 0.5: 1.0, 0.3: 0.985, 0.2: 0.96, 0.15: 0.951, 0.1: 0.8, 0.05: 1.0, 0.0: 1.0}
    assert tuple(curve) == RATIOS
    found, seen = _calibrate(monkeypatch, make_engine(), curve, ratios=sorted(curve))
    assert seen == [0.7, 0.5, 0.3, 0.2, 0.15, 0.1]
    assert [t.verdict for t in found.trials] == ["holds"] * 3 + ["likely"] * 2 + ["no"]
    assert found.chosen().ratio == 0.3
    assert found.chosen(accept_likely=True).ratio == 0.15
    found, seen = _calibrate(monkeypatch, make_engine(), curve | {0.5: 0.96}, ratios=[1, 0.5, 0.3])
    assert seen == [0.5, 0.3]  # 1 is exact
    assert [t.verdict for t in found.trials] == ["likely", "likely"]  # 0.3 alone would hold


def test_what_is_not_shown_is_not_promised(make_engine, monkeypatch, tmp_path):
    found, _ = _calibrate(monkeypatch, make_engine(), {0.7: 0.96, 0.5: 0.9}, ratios=[0.7, 0.5])
    with pytest.raises(NotShownError, match=r"at 0.7 it is 96.0% over 200 examples.*Give more"):
        found.save(tmp_path / "p.json")
    assert not (tmp_path / "p.json").exists()
    found.save(tmp_path / "p.json", accept_likely=True)
    saved = json.loads((tmp_path / "p.json").read_text())
    assert (saved["recompute_ratio"], saved["verdict"]) == (0.7, "likely")
    assert saved["shown"][0] < 0.95 <= saved["shown"][1]
    found, _ = _calibrate(monkeypatch, make_engine(), {0.7: 0.9}, ratios=[0.7])
    with pytest.raises(NotShownError, match="Lower the target"):
        found.chosen(accept_likely=True)


def test_bad_questions_are_refused_before_anything_runs(make_engine, monkeypatch):
    kv = make_engine()
    monkeypatch.setattr(kv, "prefill", None)
    for changes, words in (
        ({"target": 1.0}, "target must lie between"),
        ({"measure": "kl"}, "measure must be agreement or retention"),
        ({"method": "reuse"}, "chooses no tokens"),
        ({"ratios": [0.5, "auto"]}, "for each request"),
        ({"ratios": [1.5]}, "recompute_ratio"),
        ({"ratios": [1]}, "at least one ratio below 1"),
    ):
        with pytest.raises(ConfigError, match=words):
            calibrate(kv, small_data(1), **changes)


def test_a_calibration_is_made_of_resumable_measurements(make_engine, tmp_path, monkeypatch):
    kv, path = make_engine(), tmp_path / "r.jsonl"
    arguments = {"method": "epic", "target": 0.05, "ratios": [0.5, 0.2], "records": path}
    with monkeypatch.context() as patch:
        stop_after(patch, 5)
        with pytest.raises(KeyboardInterrupt):
            calibrate(kv, small_data(), **arguments)
    seen = stop_after(monkeypatch, None)
    found = calibrate(kv, small_data(), **arguments)
    assert seen == [("x_1", "epic")]  # full attention and ratio 0.5 are there already
    assert [trial.ratio for trial in found.trials] == [0.5, 0.2]
    assert [round(trial.share_recomputed, 1) for trial in found.trials] == [0.5, 0.2]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for trial in found.trials:
        own = [line for line in lines if line["ratio"] == trial.ratio]
        assert trial.mean == pytest.approx(np.mean([line["agreement"] for line in own]))
        assert trial.examples == len(own) == 2


def _calibration(kv, verdict="holds", **reuse):
    trial = Trial(0.3, 0.99, 0.97, 80, verdict, 0.3, 2.0)
    digest = kv.loaded.fingerprint.digest
    return Calibration(
        kv.info.name, digest, ReuseConfig(**reuse), "agreement", 0.95, "mine", (trial,)
    )


def test_a_profile_gives_back_what_was_measured_for_its_model_alone(make_engine, tmp_path):
    kv, path = make_engine(), tmp_path / "p.json"
    reuse = {"method": "cacheclip", "auxiliary_model": "small"}
    found = _calibration(kv, **reuse)
    found.save(path)
    saved = json.loads(path.read_text())
    assert {k: saved[k] for k in ("format", "model", "method", "recompute_ratio", "target")} == {
        "format": 2, "model": kv.info.name, "method": "cacheclip", "recompute_ratio": 0.3,
        "target": 0.95,
    }  # fmt: skip
    assert (saved["shown"], saved["examples"], saved["data"]) == ([0.97, 0.99], 80, "mine")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", saved["date"])
    config = ReuseConfig.from_profile(path)
    assert config == ReuseConfig(
        **reuse, recompute_ratio=0.3, calibrated_for=kv.loaded.fingerprint.digest
    )
    assert ReuseConfig.from_profile(path, on_miss="skip").on_miss == "skip"
    make_engine(reuse=config)
    with pytest.raises(ConfigError, match="calibrated for another model"):
        make_engine("qwen2", reuse=config)
    other = make_engine("qwen2", reuse=ReuseConfig.from_profile(path, calibrated_for=None))
    with pytest.raises(ConfigError, match="calibrated for another model"):
        other.generate("Words", calibrated_for=config.calibrated_for)


def test_a_method_made_of_pieces_is_calibrated_but_no_profile_can_name_it(make_engine, tmp_path):
    own = replace(get_method("epic"), name="mine", spread=Spread(0.1, 4.0))
    found = _calibration(make_engine(), method=own)
    assert "mine to keep" in str(found.table().title)
    with pytest.raises(ConfigError, match="a profile only names its method"):
        found.save(tmp_path / "p.json")


def test_bad_profiles_are_named(make_engine, tmp_path):
    path = tmp_path / "p.json"
    with pytest.raises(ConfigError, match=r"p\.json cannot be read"):
        ReuseConfig.from_profile(path)
    _calibration(make_engine()).save(path)
    good = json.loads(path.read_text())
    for changes, words in (
        ({"format": 1}, "format 1, this ragkv reads 2"),
        ({"recompute_ratio": 1.5}, "between 0 and 1"),
        ({"fingerprint": None}, "fingerprint must be a string"),
    ):
        path.write_text(json.dumps(good | changes))
        with pytest.raises(ConfigError, match=rf"p\.json.*{words}"):
            ReuseConfig.from_profile(path)
    for text in ("[]", "{", "{}", "\udcff", "[" * 100_000):
        path.write_text(text, errors="surrogateescape")
        with pytest.raises(ConfigError, match=r"p\.json is not a profile"):
            ReuseConfig.from_profile(path)
    path.write_bytes(json.dumps(good).encode("utf-16"))
    with pytest.raises(ConfigError, match=r"p\.json is not a profile"):
        ReuseConfig.from_profile(path)
    path.write_bytes(json.dumps(good).encode("utf-8-sig"))  # by an editor on Windows
    assert ReuseConfig.from_profile(path).recompute_ratio == good["recompute_ratio"]
    with pytest.raises(ConfigError, match="cannot be written"):
        _calibration(make_engine()).save(tmp_path / "no" / "p.json")


def test_the_table_fits_80_columns(make_engine, capsys):
    found = _calibration(make_engine(), "likely")
    Console(width=80, force_terminal=False).print(found.table())
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert "on mine, 80 examples query to keep agreement at 95.0%" in " ".join(shown.split())
    assert re.search(r"0\.3 +99\.0% +97\.0% +likely +30% +2\.0x", shown)


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Run ``ragkv calibrate`` on two examples and a tiny model."""
    monkeypatch.setattr(
        "ragkv.RagKV", lambda model, **kwargs: RagKV(tiny_model(), tiny_tokenizer(), **kwargs)
    )
    write_data(tmp_path / "d.jsonl", small_data(2).examples)

    def run(*arguments):
        fixed = ["calibrate", "--data", tmp_path / "d.jsonl", "--method", "epic"]
        return CliRunner().invoke(ragkv.cli.main.app, [str(a) for a in (*fixed, *arguments)])

    return run


def test_the_command_writes_a_profile_or_says_why_not(run, tmp_path):
    out = tmp_path / "p.json"
    short = run("--ratio", "0.9,0.8", "--target", 0.9, "--out", out)
    assert short.exit_code == 2
    assert "on d, 2 examples" in " ".join(short.output.split())
    assert "is shown to keep agreement at 90.0%" in short.output
    assert not out.exists()
    assert (tmp_path / "p.rows.jsonl").exists()
    found = run("--ratio", "0.9,0.8", "--target", 0.4, "--out", out, "--accept-likely")
    assert found.exit_code == 0, found.output
    assert "recompute_ratio=0.8 is likely" in " ".join(found.output.split())
    assert ReuseConfig.from_profile(out).recompute_ratio == 0.8
    assert (ReuseConfig.from_profile(out).method, "Profile: " in found.output) == ("epic", True)


def test_the_command_refuses_and_is_interrupted_in_words(run, tmp_path, monkeypatch):
    assert "there is no folder" in run("--out", tmp_path / "no" / "p.json").output
    assert "measure must be" in run("--measure", "kl").output
    assert "for each request" in run("--ratio", "auto").output

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("ragkv_bench.quality.calibration.calibrate", interrupt)
    stopped = run("--out", tmp_path / "p.json")
    assert (stopped.exit_code, "goes on from here" in stopped.output) == (130, True)
