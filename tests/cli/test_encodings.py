"""The commands where stdout and stderr cannot write every character."""

import io
import json
import os
import subprocess
import sys

import pytest

from ragkv.cli.main import app


@pytest.fixture
def run(monkeypatch):
    def run(encoding: str, *args: object) -> tuple[int, str, str]:
        written = [io.BytesIO(), io.BytesIO()]
        streams = [io.TextIOWrapper(each, encoding, errors="strict") for each in written]
        monkeypatch.setattr(sys, "stdout", streams[0])
        monkeypatch.setattr(sys, "stderr", streams[1])
        with pytest.raises(SystemExit) as ended:
            app([str(each) for each in args])
        for each in streams:
            each.flush()
        out, err = (each.getvalue().decode(encoding) for each in written)
        return int(ended.value.code or 0), out, err

    return run


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_every_command_ends(encoding, model, run, tmp_path):
    text = tmp_path / "Ünïcode \u2013 文.txt"
    text.write_text("A plain text — “quoted” — about the 天気 in the north. " * 20, "utf-8")
    shared = ("--model", model, "--store", tmp_path / "store")
    asked = ("何 \u2013 ☃?", "--path", text, *shared, "--max-new-tokens", 30)
    page = tmp_path / "Ω page.html"
    for command in (
        ("precompute", text, *shared),
        ("ask", *asked),
        ("ask", *asked, "--json"),
        ("ask", *asked, "--page", page),
        ("store", "stats", "--store", tmp_path / "store"),
        ("check", "--model", model),
    ):
        code, out, err = run(encoding, *command)
        assert code == 0, (command, out, err)
    assert page.exists()


@pytest.mark.parametrize("typed", ["W\u00f6 \u6587?", "W?"])
def test_a_question_is_read_in_the_c_locale(typed, model, run, tmp_path):
    """Python reads the bytes of an argument as ASCII there, and keeps the others as surrogates."""
    text = tmp_path / "a.txt"
    text.write_text("A plain text. " * 30, "utf-8")
    argument = typed.encode().decode("ascii", "surrogateescape")
    given = ("--path", text, "--model", model, "--store", tmp_path / "s", "--max-new-tokens", 1)
    code, out, err = run("ascii", "ask", argument, *given, "--json")
    assert code == 0, err
    assert json.loads(out)["question"] == typed


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_errors_with_such_characters_are_said(encoding, run, tmp_path):
    missing = tmp_path / "文 \u2013 ∅"
    code, _, err = run(encoding, "precompute", missing)
    assert code == 2
    assert "no such file or folder" in err


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "ascii:strict"])
def test_help_of_a_process(encoding):
    """Typer's own boxes: they are written before any command runs."""
    code = "from ragkv.cli.main import app\napp(['ask', '--help'])"
    env = {**os.environ, "PYTHONIOENCODING": encoding, "LC_ALL": "C", "PYTHONUTF8": "0"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    assert b"--path" in done.stdout


@pytest.mark.parametrize("notebook", [True, False])
def test_a_notebook_s_cell_is_no_terminal(notebook):
    """Jupyter asks for colours, and shows every state of a line that is drawn again."""
    code = "from ragkv.cli.console import err\nerr.print('[red]missing')"
    env = {**os.environ, "FORCE_COLOR": "1", **({"JPY_PARENT_PID": "1"} if notebook else {})}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=env, check=True)
    assert (b"\x1b[" in done.stderr) is not notebook
