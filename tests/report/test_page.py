"""The page that shows where a prompt's tokens came from."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html import escape, unescape
from importlib.resources import files

import numpy as np
import pytest
from explain_prompts import CHUNKS, PROMPT, Reader
from tiny import some_chunks
from typer.testing import CliRunner

from ragkv import Completion, RagKV, ReuseReport
from ragkv.cli.main import app
from ragkv.report.account import Miss, PromptTokens
from ragkv.report.page.page import page as draw
from ragkv.report.trace import Trace
from ragkv.report.words import seconds

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)


@pytest.fixture(scope="module")
def answered(engine) -> Completion:
    return engine.generate(PROMPT, method="query", max_new_tokens=3)


@pytest.fixture(scope="module")
def page(answered) -> str:
    return draw(
        answered.report,
        question='What & <i>why</i> "so"?',
        model="tiny/<model>",
        answer="Because <b>.\n\nYes.",
    )


def ascii_report(engine: RagKV, **overrides: object) -> ReuseReport:
    """Return a report of a prompt in which every token has characters of its own."""
    plain = some_chunks(4)
    engine.precompute(plain)
    prompt = [{"role": "user", "content": "\n\n".join(plain) + "\n\nSo?"}]
    return engine.prefill(prompt, **overrides).report


# ---- the page


def test_the_tokens_on_the_page_are_the_prompt(page, answered):
    assert Reader(page).tokens == answered.report.trace.text


def test_nothing_in_the_prompt_becomes_an_element(page):
    read = Reader(page)
    known = {"html", "head", "meta", "title", "style", "body", "main", "header", "h1", "h2", "h3"}
    known |= {"p", "b", "i", "small", "br", "blockquote", "dl", "div", "dt", "dd", "ul", "ol", "li"}
    known |= {"section", "details", "summary", "bdi", "span"}
    assert {tag for tag, _ in read.elements} == known
    assert "<script" not in page
    assert 'What & <i>why</i> "so"?' in read.words
    assert "tiny/<model>" in read.words
    assert "Because <b>.\n\nYes." in read.words


def test_the_page_refers_to_nothing_outside(page):
    assert not [
        found
        for _, found in Reader(page).elements
        if {"src", "href", "srcset", "data", "action", "background"} & set(found)
    ]
    assert not re.search(r"url\(|@import|https?://", page)
    assert "default-src 'none'" in page


def test_there_is_a_mark_for_every_token(engine):
    report = ascii_report(engine, method="query")
    read = Reader(draw(report))
    counts = [read.marks(kind) for kind in "srcf"]
    tokens = report.tokens
    assert counts == [tokens.sink, tokens.reused, tokens.recomputed, tokens.fresh]


def test_tokens_of_a_earlier_prompt_are_marked(engine):
    chat = [{"role": "user", "content": "\n\n".join(some_chunks(4)) + "\n\nSo?"}]
    ascii_report(engine)
    plain = Reader(draw(engine.prefill(chat).report))
    assert [plain.marks(kind) for kind in "xvw"] == [0, 0, 0]
    assert "from an earlier prompt, equal to" not in plain.words
    first = engine.generate(chat, max_new_tokens=3, history=True)
    chat += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "And?"}]
    report = engine.prefill(chat, history=True).report
    read = Reader(draw(report))
    counts = [report.tokens.history_exact, report.tokens.history_repaired]
    assert [read.marks(kind) for kind in "xv"] == counts
    assert sum(counts) > 200
    assert "from history" in read.words
    assert "from an earlier prompt, equal to" in read.words
    assert f"{counts[0]} exact from history" in str(report)


def test_a_character_of_several_tokens_is_one_mark(page, answered):
    titles = [found["title"] for tag, found in Reader(page).elements if "title" in found]
    positions = [int(at) for title in titles for at in re.findall(r"(?:^|; )(\d+) ", title)]
    assert positions == list(range(answered.report.tokens.prompt))
    assert len(titles) < len(positions)
    marked = re.findall(r"<i class=\"[^\"]*\" title=\"[^\"]*\">\U0001f600</i>", page)
    assert len(marked) == 1


def test_figures_on_the_page(page, answered):
    report = answered.report
    words = Reader(page).words.replace("\u00a0", " ")
    assert f"{report.tokens.prompt:,} tokens" in words
    assert f"First token after{seconds(report.ttft_s)}".replace("\u00a0", " ") in words
    assert "requested: 20%" in words
    for step in report.steps:
        assert step.replace("_", " ") in words
    for number, use in enumerate(report.chunks, 1):
        assert f"Chunk {number}" in words
        assert f"{use.end - use.start} tokens" in words
    assert "the query's attention to it" in words
    assert words.count("attention ") > 3


def test_scores_that_are_no_attention_are_called_scores(engine):
    words = Reader(draw(ascii_report(engine, method="epic"))).words
    assert "the score that epic gave it" in words
    assert "by score 4 of 4" in words
    assert "attention" not in words


def test_without_scores_there_are_no_bars(engine):
    page = draw(ascii_report(engine, recompute_ratio=1.0))
    assert "The bar under" not in page
    assert not re.search(r'class="[srcf] l\d', page)


def test_notes_are_on_the_page(engine, answered):
    missed = engine.generate(
        f"{CHUNKS[0]}\n\nSo?", max_new_tokens=1, method="query", recompute_ratio="auto"
    ).report
    report = replace(missed, warnings=("Beware of <this>.",), misses=())
    words = Reader(draw(report)).words
    assert f"Auto {report.choice}" in words
    assert "requested: auto" in words
    assert "Warning Beware of <this>." in words
    report = replace(answered.report, misses=(Miss("a <chunk>", "absent"),))
    words = Reader(draw(report)).words
    assert "Not reused (absent) \u201ca <chunk>\u201d" in words


def test_a_prompt_prefilled_in_full_has_a_page(engine):
    report = ascii_report(engine, method="full")
    read = Reader(draw(report))
    assert read.marks("f") == report.tokens.prompt
    assert "Origin of the tokens" in read.words


def test_a_long_prompt_stays_small(answered):
    report = answered.report
    times = -(-8000 // report.tokens.prompt)
    shift = np.arange(times)[:, None, None] * len(report.trace.text)
    trace = Trace(
        report.trace.text * times,
        (report.trace.offsets[None] + shift).reshape(-1, 2).astype(np.int32),
        np.tile(report.trace.scores, times),
        attention=True,
    )
    long = replace(report, trace=trace, tokens=PromptTokens(report.positions * times))
    assert len(draw(long).encode()) < 1_000_000


# ---- colours


def luminance(colour: str) -> float:
    """Relative luminance as WCAG 2 defines it."""
    parts = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_can_be_read_and_told_apart_by_lightness(scheme):
    style = files("ragkv.report.page").joinpath("page.css").read_text(encoding="utf-8")
    roots = re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    colour = dict(re.findall(r"--([\w-]+): (#\w{6})", roots[scheme == "dark"]))
    for fill in ("paper", "wash", "reused", "sink"):
        assert contrast(colour["ink"], colour[fill]) >= 4.5
    assert contrast(colour["on-recomputed"], colour["recomputed"]) >= 4.5
    assert contrast(colour["soft"], colour["wash"]) >= 4.5
    assert contrast(colour["reused"], colour["recomputed"]) >= 1.4
    assert contrast(colour["bar"], colour["paper"]) >= 3


# ---- in a browser

_MEASURE = """<!doctype html><meta charset="utf-8"><body>{frames}<p id="found"></p><script>
addEventListener("load", () => {{
  const found = [...document.querySelectorAll("iframe")].map((frame) => {{
    const inside = frame.contentDocument, root = inside.documentElement;
    const all = [...inside.querySelectorAll("body *")];
    return {{
      width: frame.contentWindow.innerWidth,
      scroll: root.scrollWidth,
      outside: all.filter((each) => each.getBoundingClientRect().right > root.clientWidth + 1)
        .filter((each) => !each.closest(".head")).map((each) => each.outerHTML.slice(0, 80)),
      text: [...inside.querySelectorAll(".tokens")].map((each) => each.textContent).join(""),
      title: inside.title,
      requests: frame.contentWindow.performance.getEntriesByType("resource").length,
      paper: frame.contentWindow.getComputedStyle(inside.body).backgroundColor,
    }};
  }});
  document.getElementById("found").textContent = JSON.stringify(found);
}});
</script>"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed: apt install chromium")
@pytest.mark.parametrize(("scheme", "paper"), [(1, "rgb(255, 255, 255)"), (0, "rgb(17, 22, 27)")])
def test_in_chromium(page, answered, tmp_path, scheme, paper):
    """At both widths nothing sticks out, no request is made, the text is the prompt's."""
    frames = "".join(
        f'<iframe srcdoc="{escape(page)}" style="width:{width}px;height:900px;border:0"></iframe>'
        for width in (1200, 400)
    )
    wrapper = tmp_path / "measure.html"
    wrapper.write_text(_MEASURE.format(frames=frames), encoding="utf-8", newline="")
    done = subprocess.run(
        [
            CHROMIUM,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--user-data-dir={tmp_path / 'profile'}",
            f"--blink-settings=preferredColorScheme={scheme}",
            "--dump-dom",
            wrapper.as_uri(),
        ],
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=300,
        check=True,
    )
    raw = re.findall(r'<p id="found">(.*?)</p>', done.stdout, re.DOTALL)[0]
    found = json.loads(unescape(raw))
    for measured, width in zip(found, (1200, 400), strict=True):
        assert (measured["width"], measured["scroll"]) == (width, width)
        assert measured["outside"] == []
        assert measured["text"] == answered.report.trace.text
        assert measured["title"].startswith("What & <i>why</i>")
        assert measured["requests"] == 0
        assert measured["paper"] == paper


# ---- the command


class _First:
    """Retrieves the first texts: these tests are not about retrieval."""

    def __init__(self, kept=None):
        pass

    def top(self, question, texts, k):
        return texts[:k]


def test_ask_writes_a_page(auxiliary, tmp_path, monkeypatch):
    monkeypatch.setattr("ragkv.cli.retrieval.Embedder", _First)

    def run(*args):
        return CliRunner().invoke(app, ["ask", "What is assigned?", *map(str, args)])

    text = tmp_path / "text.md"
    text.write_text("\n\n".join(some_chunks(4)), encoding="utf-8")
    shared = ("--path", text, "--model", auxiliary, "--store", ":memory:", "--chunk-tokens", 80)
    page = tmp_path / "page.html"
    done = run(*shared, "--top-k", 3, "--max-new-tokens", 2, "--page", page)
    assert done.exit_code == 0, done.output
    assert f"Wrote {page}." in done.stdout
    assert "First token after" in done.stdout
    assert "A full prefill of the same prompt: " in done.stdout
    read = Reader(page.read_text(encoding="utf-8"))
    assert "What is assigned?" in read.words
    assert "Chunk 3" in read.words
    assert "A full prefill of this prompt" in read.words
    assert read.marks("r") > read.marks("c") > 0
    failed = run(*shared, "--max-new-tokens", 1, "--page", tmp_path / "no" / "page.html")
    assert failed.exit_code == 2
    assert "there is no folder" in failed.stderr
    assert "First token after" not in failed.stdout


# ---- beside a full prefill, and why the first chunk is kept


@pytest.mark.parametrize("took", [0.5, 2.5, 1e-5])
def test_a_full_prefill_stands_beside_the_own_time(answered, took):
    words = Reader(draw(answered.report, full_prefill_s=took)).words
    assert f"A full prefill of this prompt: {seconds(took)}," in words
    assert f"{took / answered.report.ttft_s:.1f} times as long: measured once" in words
    assert "A full prefill of" not in Reader(draw(answered.report)).words


def test_the_first_chunk_is_said_to_be_exact(engine, answered):
    assert "Chunk 1 is exact" in Reader(draw(answered.report)).words
    assert answered.report.tokens.exact > 0
    for settings in ({"recompute_ratio": 1.0}, {"method": "full"}):
        assert "Chunk 1 is exact" not in Reader(draw(ascii_report(engine, **settings))).words
    behind = engine.prefill(f"Some other text first.\n\n{CHUNKS[0]}\n\nWhat?", sink="").report
    assert "Chunk 1 is exact" not in Reader(draw(behind)).words
