"""`make gpu` measures what it says, on a small model on a CPU."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

from tiny import tiny_tokenizer

HERE = Path(__file__).parents[2]


def test_the_script_measures_each_length(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("gpu", HERE / "gpu.py")
    gpu = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gpu)
    tiny_tokenizer().save_pretrained(tmp_path)
    monkeypatch.setattr(gpu, "default_model_folder", lambda: tmp_path)
    monkeypatch.setattr(gpu, "ANSWER_TOKENS", 3)
    out = tmp_path / "gpu.json"
    lengths = ["--tokens", "400,600", "--chunk-tokens", "100", "--prompts", "4"]
    found = gpu.main(["--shape", "tiny", "--device", "cpu", *lengths, "--json", str(out)])
    assert json.loads(out.read_text()) == found
    assert [row["tokens"] for row in found["rows"]] == [400, 600]
    for row in found["rows"]:
        assert row["plain_ms"] > 0
        assert row["ragkv"].keys() == {"0.0", "0.1", "0.2"}
        assert all(each["ms"] > 0 and "find" in each["parts"] for each in row["ragkv"].values())
        assert row["answer_s"].keys() == {"ragkv", "transformers"}
