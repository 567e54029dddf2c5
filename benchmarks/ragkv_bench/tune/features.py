"""The auxiliary model in two parts: frozen layers, computed once, and the last ones."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ragkv.attend.attention import Pass, subset_attention
from ragkv.attend.observe import LayerCall, StopPass, attention_of_last_rows
from ragkv.attend.rows import Rows
from ragkv.errors import ConfigError
from ragkv.model.architecture import backbone_of
from ragkv.model.calls import require_used
from ragkv.model.loaded import ReusableModel
from ragkv.prompt.render import Rendered, chat_head, render_sink
from ragkv.prompt.tokens import IntArray, encode_behind, sink_tokens, tokenize
from ragkv.select.auxiliary import map_scores
from ragkv_bench.tune.target import Target, check_length


@dataclass(frozen=True, slots=True, eq=False)
class Features:
    """One example, ready for training.

    Attributes
    ----------
    hidden
        For each chunk ``[1, tokens, hidden_size]``: input of the first trained layer,
        for sink ++ chunk ++ query; the last ``query_tokens`` rows are the query's.
    chunks
        For each chunk the rows in ``hidden`` that are its own.
    target
        ``[chunk tokens]`` float32, all chunks one behind another; sums to one.
    """

    hidden: tuple[torch.Tensor, ...]
    chunks: tuple[slice, ...]
    query_tokens: int
    target: torch.Tensor


class Tail:
    """The last layers of an auxiliary model, up to the last layer's queries and keys.

    Parameters
    ----------
    loaded
        The auxiliary model. Its parameters are frozen; :meth:`thaw` frees some.
    layers
        How many layers are trained, the last one included.

    Raises ConfigError: the model does not have that many layers.
    """

    def __init__(self, loaded: ReusableModel, layers: int) -> None:
        stack = list(backbone_of(loaded.model).layers)
        if not 1 <= layers <= len(stack):
            raise ConfigError(f"layers must lie between 1 and {len(stack)}, not {layers!r}")
        loaded.model.requires_grad_(requires_grad=False)
        self._loaded = loaded
        self._layers = stack[-layers:]
        self._last = len(stack) - 1
        self._arguments: dict[int, list[dict[str, Any]]] = {}
        tokenizer = loaded.tokenizer
        self._sink = render_sink(chat_head(tokenizer), tokenizer)
        self._sink_ids = sink_tokens(self._sink, tokenizer).ids

    def features(self, target: Target) -> Features:
        """Run the frozen layers over every chunk; map the target onto this model's tokens.

        Tokens are those of :class:`ragkv.select.auxiliary.Auxiliary`: each chunk alone,
        behind the sink and before the query.

        Raises ConfigError: the primary model's query does not attend to the chunks at all;
        PromptTooLongError: a chunk and the query have more tokens than the model has positions.
        """
        question, tokenizer = target.question, self._loaded.tokenizer
        query_ids = tokenize(Rendered(question.query, add_special_tokens=False), tokenizer).ids
        head = len(self._sink_ids)
        hidden, chunks, expected = [], [], []
        for span, scores, offsets in zip(
            question.spans, target.scores, target.offsets, strict=True
        ):
            own = encode_behind(self._sink, self._sink_ids, span.text, tokenizer)
            ids = np.concatenate([self._sink_ids, own.ids, query_ids])
            check_length(len(ids), self._loaded, question.id)
            hidden.append(self._below(ids))
            chunks.append(slice(head, head + len(own)))
            expected.append(map_scores(scores, offsets, own.offsets))
        weights = torch.from_numpy(np.concatenate(expected))
        if not weights.sum() > 0:
            raise ConfigError(f"example {question.id}: the query attends to none of the chunks")
        target_weights = (weights / weights.sum()).to(self._loaded.device)
        return Features(tuple(hidden), tuple(chunks), len(query_ids), target_weights)

    def scores(self, features: Features) -> torch.Tensor:
        """Return ``[chunk tokens]`` float32: what ``Auxiliary.score`` gives, with gradients."""
        return torch.cat(
            [
                self._attention(hidden, features.query_tokens)[rows]
                for hidden, rows in zip(features.hidden, features.chunks, strict=True)
            ]
        )

    def thaw(self, features: Features) -> dict[str, torch.nn.Parameter]:
        """Free the parameters that the scores depend on; return them by name.

        Of the last layer these are the input norm and the query and key projections:
        its values, output and MLP come after the scores.
        """
        inside = {id(weight) for layer in self._layers for weight in layer.parameters()}
        named = {
            name: weight
            for name, weight in self._loaded.model.named_parameters()
            if id(weight) in inside
        }
        for weight in named.values():
            weight.requires_grad_(True)
        seen = self._attention(features.hidden[0], features.query_tokens)
        slopes = torch.autograd.grad(seen.sum(), list(named.values()), allow_unused=True)
        for weight, slope in zip(named.values(), slopes, strict=True):
            weight.requires_grad_(slope is not None)
        return {name: weight for name, weight in named.items() if weight.requires_grad}

    @torch.no_grad()
    def _below(self, ids: IntArray) -> torch.Tensor:
        """Return the trained layers' input; keep what else they are called with.

        That depends on the number of tokens alone: positions, rotary tables, masks.
        """
        calls: list[tuple[tuple[torch.Tensor], dict[str, Any]]] = []

        def keep(_: object, given: tuple[torch.Tensor], more: dict[str, Any]) -> None:
            calls.append((given, more))
            if len(calls) == len(self._layers):
                raise StopPass

        rows = Rows.on(self._loaded.device, np.arange(len(ids)))
        hooks = [layer.register_forward_pre_hook(keep, with_kwargs=True) for layer in self._layers]
        try:
            with suppress(StopPass), subset_attention(self._loaded.model):
                backbone_of(self._loaded.model)(
                    input_ids=torch.from_numpy(ids.astype(np.int64)).to(self._loaded.device)[None],
                    position_ids=rows.positions[None],
                    use_cache=False,
                    ragkv_pass=self._pass(rows),
                )
        finally:
            for hook in hooks:
                hook.remove()
        require_used(len(calls), len(self._layers), "layers that called ragkv's hook")
        self._arguments.setdefault(len(ids), [more for _, more in calls])
        return calls[0][0][0]

    def _pass(self, rows: Rows) -> Pass:
        return Pass(rows, self._loaded.architecture.windows)

    def _attention(self, hidden: torch.Tensor, query_tokens: int) -> torch.Tensor:
        """Run the trained layers; return what the query attends to, ``[tokens]``."""
        seen: list[torch.Tensor] = []

        def observe(call: LayerCall) -> None:
            if call.layer == self._last:
                seen.append(attention_of_last_rows(call, query_tokens))
                raise StopPass

        with suppress(StopPass), subset_attention(self._loaded.model):
            for layer, more in zip(self._layers, self._arguments[hidden.shape[1]], strict=True):
                looked_at = replace(more["ragkv_pass"], observer=observe)
                hidden = layer(hidden, **{**more, "ragkv_pass": looked_at})
        require_used(len(seen), 1, "layers that called ragkv's attention")
        return seen[0]
