"""RagKVPromptHelper: packs retrieved chunks whole, so that all of them can be reused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

from llama_index.core.indices.prompt_helper import DEFAULT_PADDING, PromptHelper
from llama_index.core.llms.llm import LLM
from llama_index.core.prompts import BasePromptTemplate

if TYPE_CHECKING:
    from llama_index.llms.ragkv.base import RagKVLLM

_SEPARATOR = "\n\n"


class RagKVPromptHelper(PromptHelper):
    """LlamaIndex's prompt helper, cutting between chunks instead of inside them.

    If the retrieved chunks overflow the context window, LlamaIndex's helper joins them and
    splits the text again by its own chunk size; chunks at the cuts then differ from the
    precomputed ones. This one fills each piece with whole chunks. It cuts only a chunk that is
    larger than the window; the chunk's beginning can still be reused.

    Use it as ``Settings.prompt_helper = RagKVPromptHelper.from_llm(llm)``, or as the
    ``prompt_helper`` of ``get_response_synthesizer``; ``as_query_engine`` takes one and drops
    it (llama-index-core 0.14). It serves the modes compact, compact_accumulate and
    tree_summarize.
    """

    @classmethod
    def from_llm(cls, llm: RagKVLLM, **kwargs: Any) -> Self:
        """Make a helper that counts with the model's own tokenizer (no download)."""
        metadata = llm.metadata
        return cls(  # type: ignore[call-arg]
            context_window=metadata.context_window,
            num_output=metadata.num_output,
            tokenizer=llm.kv.tokenize,
            **kwargs,
        )

    @classmethod
    def class_name(cls) -> str:
        """Return the name that LlamaIndex writes into serialised pipelines."""
        return "RagKVPromptHelper"

    def repack(
        self,
        prompt: BasePromptTemplate,
        text_chunks: Sequence[str],
        padding: int = DEFAULT_PADDING,
        llm: LLM | None = None,
        tools: list[Any] | None = None,
    ) -> list[str]:
        """Join whole chunks with a blank line into as few pieces as fit the window."""
        splitter = self.get_text_splitter_given_prompt(
            prompt, padding=padding, llm=llm, tools=tools
        )
        count = self._token_counter.get_string_tokens
        between = count(_SEPARATOR)
        pieces: list[str] = []
        room = 0
        for text in filter(None, (chunk.strip() for chunk in text_chunks)):
            need = count(text)
            parts = [text] if need <= splitter.chunk_size else splitter.split_text(text)
            for part in parts:
                need = need if part is text else count(part)
                if pieces and between + need <= room:
                    pieces[-1] += _SEPARATOR + part
                    room -= between + need
                else:
                    pieces.append(part)
                    room = splitter.chunk_size - need
        return pieces or [""]
