"""The commands, on a tiny model saved to a folder."""

import json
from importlib.metadata import version
from pathlib import Path

import pytest
from click.testing import Result
from fresh import output_of
from tiny import saved, some_chunks, tiny_tokenizer
from transformers import AutoModelForCausalLM, GPT2Config
from typer.testing import CliRunner

from ragkv.cli.main import app
from ragkv.cli.texts import read_system_prompt, read_texts, split_text
from ragkv.engine.quality import Quality
from ragkv.errors import ConfigError


@pytest.fixture
def texts(tmp_path) -> Path:
    folder = tmp_path / "texts"
    (folder / "below").mkdir(parents=True)
    first, second, third = some_chunks(3, words=60)
    (folder / "a.txt").write_text(first, encoding="utf-8")
    (folder / "below" / "b.md").write_text(f"{second}\n\n{third}\n", encoding="utf-8")
    (folder / "c.bin").write_bytes(b"\x00" * 64)
    return folder


def run(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def run_json(*args: object) -> dict:
    result = run(*args, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_help_is_light_and_lists_the_commands():
    code = (
        "import sys\nfrom ragkv.cli.main import app\n"
        "heavy = {'torch', 'transformers', 'numpy', 'langchain_core', 'llama_index'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\napp(['--help'])"
    )
    shown = output_of(code)
    assert all(name in shown for name in ("precompute", "ask", "serve", "check"))


def test_precompute_stores_once(model, texts, tmp_path):
    args = ("precompute", texts, "--model", model, "--store", tmp_path / "s", "--chunk-tokens", 100)
    first, second = run_json(*args), run_json(*args)
    assert first["new"] > 2
    assert first["tokens"] > 0
    assert (second["new"], second["existing"], second["tokens"]) == (0, first["new"], 0)
    assert run_json(*args, "--namespace", "other")["new"] == first["new"]
    shown = run(*args)
    assert f"0 new, {first['new']} already stored" in shown.stdout


def test_ask_reuses_what_precompute_stored(model, texts, tmp_path):
    shared = ("--model", model, "--store", tmp_path / "s", "--chunk-tokens", 100)
    assert run("precompute", texts, *shared).exit_code == 0
    asked = ("ask", "What is assigned?", "--path", texts, *shared, "--max-new-tokens", 4)
    answer = run_json(*asked, "--top-k", 2)
    report = answer["report"]
    assert len(answer["chunks"]) == 2
    assert report["tokens"]["reused"] > report["tokens"]["recomputed"] > 0
    assert not report["misses"]
    streamed = run(*asked)
    assert "First token after" in streamed.stdout
    assert " recomputed, " in " ".join(streamed.stdout.split())


def test_the_dtype_and_the_device_can_be_said(model, texts, tmp_path):
    same = ["--model", model, "--store", tmp_path / "store", "--device", "cpu"]
    run_json("precompute", texts, "--chunk-tokens", "150", *same, "--dtype", "bfloat16")
    asking = ["ask", "What?", "--path", texts, "--chunk-tokens", "150", "--max-new-tokens", "1"]
    assert run_json(*asking, *same, "--dtype", "bfloat16")["report"]["tokens"]["reused"]
    assert not run_json(*asking, *same, "--dtype", "float32")["report"]["tokens"]["reused"]
    assert "dtype must be one that" in run(*asking, *same, "--dtype", "none").stderr
    checked = run("check", "--model", model, "--device", "nowhere")
    assert checked.exit_code == 2
    assert "device must be one that torch can use" in checked.stderr


def test_another_model_or_size_replaces_nothing(model, texts, tmp_path):
    """All projects share the default store: a changed file replaces only its own chunks."""
    other = saved(tmp_path / "elsewhere" / "tiny-model", seed=1)
    shared = [texts, "--store", tmp_path / "shared"]
    for changed in (
        ["--model", model],
        ["--model", other],
        ["--model", model, "--chunk-tokens", 60],
    ):
        done = run_json("precompute", *shared, *changed)
        assert done["new"] > 0
        assert done["removed"] == 0
    (texts / "a.txt").write_text(some_chunks(4, words=60)[3])
    done = run_json("precompute", *shared, "--model", model)
    assert done["removed"] == 0, "the other model's file still has it"
    assert run_json("precompute", *shared, "--model", other)["removed"] == 1


def test_ask_stores_what_it_missed(model, texts, tmp_path):
    asked = ("ask", "What is assigned?", "--path", texts, "--model", model, "--max-new-tokens", 2)
    reports = [run_json(*asked, "--store", tmp_path / "s")["report"] for _ in range(2)]
    assert reports[0]["tokens"]["reused"] == 0
    assert reports[1]["tokens"]["reused"] > 0


@pytest.mark.parametrize("method", ["full", "reuse"])
def test_ask_takes_a_method(model, texts, method):
    asked = ("ask", "What?", "--path", texts, "--model", model, "--max-new-tokens", 1)
    report = run_json(*asked, "--store", ":memory:", "--method", method)["report"]
    assert report["method"] == method


def test_check_says_what_holds(model):
    found = run_json("check", "--model", model)
    assert found["holds"]
    assert all(row["holds"] for row in found["checks"])
    assert "yes" in run("check", "--model", model).stdout


def test_check_fails_where_something_does_not_hold(model, monkeypatch):
    from ragkv.engine import verify as check

    rows = [
        check.CheckRow("this", holds=True, detail="[fine]"),
        check.CheckRow("that", False, "no"),
    ]
    monkeypatch.setattr(check, "check_model", lambda kv: rows)
    result = run("check", "--model", model)
    assert result.exit_code == 1
    assert "[fine]" in result.stdout
    assert "Quality was not measured" in run("check", "--model", model, "--quality").stdout


@pytest.mark.parametrize(
    ("copied", "ratios", "says"),
    [
        (8, [0.2], "keeps its answers"),
        (2, [0.2, 0.3, 0.5], "only the agreement counts. / needs a ratio of 0.5."),
        (8, [0.5, 0.7], 'needs full prefill (method="full").'),
    ],
)
def test_check_says_which_ratio_a_model_needs(model, monkeypatch, copied, ratios, says):
    def measured(loaded, ratio):
        assert ratio == ratios[0]
        held = [each == ratios[-1] != 0.7 for each in ratios]
        return [
            Quality(each, 8, copied, copied, copied, 0.9 if holds else 0.1)
            for each, holds in zip(ratios, held, strict=True)
        ]

    monkeypatch.setattr("ragkv.engine.quality.measure", measured)
    assert run("check", "--model", model, "--ratio", 0.3).exit_code == 2
    asked = ("check", "--model", model, "--quality")
    if ratios[0] != 0.2:
        asked += ("--ratio", ratios[0])
    result = run(*asked)
    shown = " ".join(result.stdout.split())
    assert f"8 prompts; full attention copies {copied} records." in shown
    assert all(part in shown for part in says.split(" / "))
    found = json.loads(run(*asked, "--json").stdout)
    holds = len(ratios) == 1
    assert found["holds"] == holds == (result.exit_code == 0)
    kept = None if copied < 4 else 1.0
    assert [(row["ratio"], row["kept"]) for row in found["quality"]] == [(r, kept) for r in ratios]


def test_check_names_what_makes_a_model_unsupported(tmp_path):
    config = GPT2Config(n_layer=1, n_head=2, n_embd=32, vocab_size=600)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    result = run("check", "--model", tmp_path)
    assert result.exit_code == 1
    assert " no " in result.stdout
    asked = run("check", "--model", tmp_path, "--quality")
    assert asked.exit_code == 1
    assert "Quality was not measured" in asked.stdout


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("precompute", "no/such/folder"), "no such file or folder: no/such/folder"),
        (("ask", "What?", "--path", "no/such/folder"), "no such file or folder"),
        (("ask", "What?", "--path", ".", "--method", "magic"), "no method 'magic'"),
        (("ask", "What?", "--path", ".", "--model", "nothing here"), "nothing here"),
    ],
)
def test_errors_are_one_line(model, args, says):
    given = args if "--model" in args else (*args, "--model", model)
    result = run(*given, "--store", ":memory:")
    assert result.exit_code == 2
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("Error: ")
    assert says in last
    assert "Traceback" not in result.output


def test_ratio_out_of_range_is_refused(texts):
    assert run("ask", "What?", "--path", texts, "--recompute-ratio", 1.5).exit_code == 2
    assert run("ask", "What?", "--path", texts, "--recompute-ratio", "much").exit_code == 2


def test_split_keeps_every_word_and_the_limit():
    text = "\n\n".join(some_chunks(4, words=90)) + "\n" + "x" * 900
    tokenizer = tiny_tokenizer()
    chunks = split_text(text, tokenizer, 64)
    assert "".join("".join(chunks).split()) == "".join(text.split())
    assert all(chunk == chunk.strip() and chunk in text for chunk in chunks)
    assert max(len(tokenizer(chunk).input_ids) for chunk in chunks) <= 64 + 1  # stripping may split


def test_split_ends_at_blank_lines():
    first, second = some_chunks(2, words=30)
    chunks = split_text(
        f"{first}\n\n{second}", tiny_tokenizer(), len(tiny_tokenizer()(first).input_ids) + 9
    )
    assert chunks[0] == first
    assert split_text(" \n ", tiny_tokenizer(), 64) == []


def test_reading_takes_texts_alone_in_order(texts):
    below = texts / "below"
    (below / "c.TXT").write_text("Words.")
    found = read_texts([texts])
    assert list(found) == [texts / "a.txt", below / "b.md", below / "c.TXT"]
    assert found[texts / "a.txt"] == some_chunks(1, words=60)[0]


@pytest.mark.parametrize("content", [b"%PDF-1.7\xe2\xe3\xcf", b"caf\xe9", "a".encode("utf-16")])
def test_a_file_that_is_no_text_is_refused_by_name_and_left_out_of_a_folder(texts, content, capsys):
    wrong = texts / "wrong.md"
    wrong.write_bytes(content)
    with pytest.raises(ConfigError, match=r"wrong\.md is not UTF-8 text"):
        read_texts([wrong])
    assert wrong not in read_texts([texts])
    assert "wrong.md is not UTF-8 text" in capsys.readouterr().err
    (texts / "only").mkdir()
    wrong.rename(texts / "only" / "wrong.md")
    (texts / "empty").mkdir()
    for name in ("only", "empty"):
        with pytest.raises(ConfigError, match="no text found"):
            read_texts([texts / name])


def test_a_byte_order_mark_is_no_part_of_a_text(texts):
    file = texts / "marked.md"
    file.write_bytes("The first words.\r\nMore.".encode("utf-8-sig"))
    assert read_texts([file])[file.resolve()] == "The first words.\nMore."
    assert read_system_prompt(file) == "The first words.\nMore."


@pytest.mark.parametrize("command", ["precompute", "ask"])
def test_what_there_is_to_read_is_found_out_before_a_model_is_loaded(command, tmp_path):
    scan = tmp_path / "scan.pdf"
    scan.write_bytes(b"%PDF\0")
    for path, said in ((tmp_path / "none", "no such file"), (scan, "not UTF-8 text")):
        where = (path,) if command == "precompute" else ("What?", "--path", path)
        result = run(command, *where, "--model", tmp_path / "no model")
        assert result.exit_code == 2
        assert said in result.stderr
        assert "no model" not in result.stderr


def test_a_store_that_would_end_with_the_command_is_refused(model, texts):
    result = run("precompute", texts, "--model", model, "--store", ":memory:")
    assert result.exit_code == 2
    assert "is lost when the command ends" in result.stderr


def test_the_version_is_said():
    assert run("--version").stdout == f"ragkv {version('ragkv')}\n"
