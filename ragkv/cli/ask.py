"""``ragkv ask``: answer one question from a folder of texts."""

from __future__ import annotations

from ragkv.cli.console import out, say_json
from ragkv.cli.options import (
    AnswerTokens,
    AsJson,
    ChunkTokens,
    Codec,
    Device,
    DType,
    Method,
    ModelName,
    Namespace,
    Ratio,
    SinkFrom,
    StorePath,
    TopK,
)
from ragkv.cli.session import From, Question, messages, open_engine, retrieve, reuse_config


def ask(
    question: Question,
    path: From,
    top_k: TopK = 6,
    chunk_tokens: ChunkTokens = 400,
    max_new_tokens: AnswerTokens = 128,
    recompute_ratio: Ratio = 0.2,
    method: Method = None,
    model: ModelName = None,
    device: Device = None,
    dtype: DType = None,
    store: StorePath = None,
    namespace: Namespace = "default",
    codec: Codec = "raw",
    sink_from: SinkFrom = None,
    as_json: AsJson = False,
) -> None:
    """Retrieve from PATH and answer; chunks that `precompute` stored are reused."""
    from ragkv.cli.texts import read_system_prompt, read_texts

    reuse = reuse_config(method, recompute_ratio)
    texts, system_prompt = read_texts(path), read_system_prompt(sink_from)
    with open_engine(
        model,
        device=device,
        dtype=dtype,
        store=store,
        namespace=namespace,
        codec=codec,
        reuse=reuse,
        system_prompt=system_prompt,
    ) as kv:
        found = retrieve(kv, question, texts, chunk_tokens=chunk_tokens, top_k=top_k)
        kv.prefetch(found)
        stream = kv.stream(messages(question, found, system_prompt), max_new_tokens=max_new_tokens)
        for piece in stream:
            if not as_json:
                out.print(piece, end="", markup=False, highlight=False, soft_wrap=True)
    completion = stream.completion
    if as_json:
        answer = {"question": question, "answer": completion.text, "chunks": found}
        say_json({**answer, "report": completion.report.to_dict()})
        return
    out.print(
        f"\n\n{completion.report}", style="dim", markup=False, highlight=False, soft_wrap=True
    )
