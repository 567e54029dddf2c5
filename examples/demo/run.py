"""The demo from corpus to figures, step by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from answer import AnswerPair, DemoFigures, RagPipeline
from corpus import TOPICS, corpus_chunks
from questions import SYSTEM, USER, WARM_UP, chosen_questions
from show import show_figures, show_pair

from ragkv.cli.console import err, out
from ragkv.cli.retrieval import Embedder
from ragkv.select import get_method

if TYPE_CHECKING:
    from ragkv import PrecomputeReport, RagKV

FRAMEWORKS = ("llama-index", "langchain")


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """What the demo runs over; the defaults fit two CPU cores and eight minutes."""

    frameworks: tuple[str, ...] = FRAMEWORKS
    topics: int | None = None
    questions: int | None = None
    chunk_tokens: int = 400
    top_k: int = 6
    answer_tokens: int = 20


@dataclass(frozen=True, slots=True)
class DemoResult:
    """Every framework's figures, and what ingestion did."""

    model: str
    chunks: int
    questions: int
    precompute: PrecomputeReport
    frameworks: Mapping[str, DemoFigures]

    def to_dict(self) -> dict[str, Any]:
        """Return the figures, ready for JSON."""
        return {
            "model": self.model,
            "chunks": self.chunks,
            "questions": self.questions,
            "precompute_s": self.precompute.seconds,
            "frameworks": {name: each.to_dict() for name, each in self.frameworks.items()},
        }


def run_demo(kv: RagKV, settings: DemoSettings) -> DemoResult:
    """Ingest, then let each framework answer every question twice; print what comes."""
    topics = TOPICS[: settings.topics]
    chunks = corpus_chunks(topics, kv.tokenizer, settings.chunk_tokens)
    questions = chosen_questions(topics, settings.questions)
    err.print(f"{len(chunks)} chunks of {len(topics)} topics of the Python language reference.")
    precompute = _precompute(kv, chunks)
    with err.status("Embedding chunks and questions with all-MiniLM-L6-v2 …"):
        embedder = Embedder()
        embedder.embed([*chunks, *questions])
    frameworks: dict[str, DemoFigures] = {}
    for name in settings.frameworks:
        with err.status(f"{name}: setting up the pipeline …"):
            pipeline = _pipeline(name, kv, chunks, embedder, settings)
        frameworks[name] = _answer(name, pipeline, questions, get_method(kv.reuse.method).name)
        show_figures(name, frameworks[name])
    return DemoResult(kv.info.name, len(chunks), len(questions), precompute, frameworks)


def _precompute(kv: RagKV, chunks: Sequence[str]) -> PrecomputeReport:
    """Ingest with a progress bar; the frameworks' own ingestion then finds everything there."""
    sink = kv.sink_from([{"role": "system", "content": SYSTEM}, {"role": "user", "content": USER}])
    err.print("Precomputing: every chunk's cache, once.")
    report = kv.precompute(chunks, show_progress=True, sink=sink)
    err.print(
        f"{report.new} chunks computed ({report.tokens} tokens, {report.bytes / 1e9:.2f} GB, "
        f"{report.seconds:.1f} s), {report.existing} were there already."
        if report.new
        else f"All {report.existing} chunks were there already: nothing to compute."
    )
    return report


def _answer(name: str, pipeline: RagPipeline, questions: Sequence[str], method: str) -> DemoFigures:
    pairs: list[AnswerPair] = []
    out.rule(f"{name}: every question by full prefill and by ragkv")
    with err.status(f"{name}: warming up …") as status:
        pipeline.ask(WARM_UP, method)  # what is made on first use; not counted
        for number, question in enumerate(questions, 1):
            status.update(f"{name}: question {number} of {len(questions)} …")
            full = pipeline.ask(question, "full")
            pairs.append(AnswerPair(question, full, pipeline.ask(question, method)))
            show_pair(number, pairs[-1])
    return DemoFigures(pairs)


def _pipeline(
    name: str, kv: RagKV, chunks: Sequence[str], embedder: Embedder, settings: DemoSettings
) -> RagPipeline:
    sizes = {"top_k": settings.top_k, "answer_tokens": settings.answer_tokens}
    if name == "llama-index":
        from in_llama_index import LlamaIndexPipeline

        return LlamaIndexPipeline(kv, chunks, embedder, **sizes)
    from in_langchain import LangChainPipeline

    return LangChainPipeline(kv, chunks, embedder, **sizes)
