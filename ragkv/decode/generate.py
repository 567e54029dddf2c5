"""Draw an answer by transformers' ``generate``, with ragkv's loop for models with reuse.

``generate`` prepares logits processors and stopping criteria; the loop's steps repair the cache and
verify drafts. Models without reuse use transformers' own loop.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from ragkv.answer.completion import FinishReason, TokenLogprobs
from ragkv.config import DecodeConfig
from ragkv.config.decode import SchemaOrCall
from ragkv.config.generation import SAMPLING
from ragkv.decode.constraint import SchemaConstraint
from ragkv.decode.draft import LONGEST, Drafts
from ragkv.decode.listener import Listener
from ragkv.decode.loop import Loop, SeededSampling
from ragkv.decode.steps import Steps
from ragkv.errors import ConfigError
from ragkv.model.architecture import config_of
from ragkv.model.calls import require_used
from ragkv.model.loaded import LoadedModel

_RESET_FIELDS = (
    "stop_strings",  # StopTexts finds them
    "cache_implementation",  # ragkv gives the cache
    "prompt_lookup_num_tokens",  # Drafts has them
    "assistant_early_exit",
    "use_mtp",
    "penalty_alpha",  # other ways of decoding than greedy and sampling
    "dola_layers",
    "constraints",
    "force_words_ids",
    "token_healing",  # another prompt than the cache's
)
_STOP_MARGIN = 8
"""Tokens before a stop text that can affect its decoding, or decode to nothing."""


def stops_of(loaded: LoadedModel, config: DecodeConfig) -> tuple[str, ...]:
    """Return the texts that end an answer: the request's, and those of the model's config."""
    own = getattr(loaded.model.generation_config, "stop_strings", None) or ()
    own = (own,) if isinstance(own, str) else own
    return tuple(dict.fromkeys([*config.stops, *own]))


class StopTexts:
    """Detects one of the texts at the end of the answer.

    transformers' own criterion also matches the prompt, and prepares the whole vocabulary for every
    call.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, texts: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._texts = texts
        # a token is a byte of text at least
        self._tail = max((len(text.encode()) for text in texts), default=0) + _STOP_MARGIN

    def reached(self, answer: torch.Tensor) -> bool:
        """Whether the last token of ``answer`` ``[tokens]`` completes a stop text.

        A special token counts both as its name and as an empty text.
        """
        if not self._texts:
            return False
        tail = answer[-self._tail :].tolist()
        read = [
            str(self._tokenizer.decode(tail, skip_special_tokens=skip)) for skip in (True, False)
        ]
        return any(stop in text for text in read for stop in self._texts)


@dataclass(frozen=True, slots=True)
class Drawn:
    """An answer's tokens and its counts.

    Attributes
    ----------
    token_ids
        End-of-sequence included.
    first_token_at, last_token_at
        The clock at the first and at the last token.
    steps
        The model's calls after the first token.
    drafted, accepted
        Numbers of drafted and accepted tokens.
    blocks, blocks_read
        Numbers of the context's blocks that sparse attention could read, and that it read.
    finish_reason
        ``"stop"``: an end-of-sequence token, a stop token, a stop text or the listener's end;
        ``"length"``: the most tokens allowed; ``"cancelled"``.
    logprobs
        The tokens' log-probabilities, if requested.
    """

    token_ids: list[int]
    first_token_at: float
    last_token_at: float
    steps: int
    drafted: int = 0
    accepted: int = 0
    blocks: int = 0
    blocks_read: int = 0
    finish_reason: FinishReason = "length"
    logprobs: tuple[TokenLogprobs, ...] = ()


def _sample(
    streamer: BaseStreamer,
    seeded: SeededSampling,
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    **given: Any,
) -> torch.Tensor:
    """Sample as transformers does, with ``seeded`` as the last processor.

    Processors given to ``generate`` would run before temperature, top-k and top-p.
    """
    given["streamer"] = streamer  # transformers does not forward it
    processors = LogitsProcessorList([*logits_processor, seeded])
    out: torch.Tensor = model._sample(  # noqa: SLF001  what its generate calls
        input_ids, logits_processor=processors, **given
    )
    return out


def draw(
    loaded: LoadedModel,
    ids: npt.NDArray[np.int32],
    steps: Steps | None,
    config: DecodeConfig,
    *,
    listener: Listener | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> Drawn:
    """Generate after ``ids`` ``[tokens]``.

    Parameters
    ----------
    steps
        Computes the prompt and the tokens; None uses transformers' own loop.
    listener
        Receives the tokens.
    cancelled
        Called after every token; True ends the generation.
    """
    # an encoder-decoder answers behind a start token
    begin = 1 if loaded.model.config.is_encoder_decoder else len(ids)
    config = within_max_length(loaded, config, begin)
    prompt = torch.from_numpy(ids.astype(np.int64)).to(loaded.device)[None]
    listener = listener or Listener()
    texts = StopTexts(loaded.tokenizer, stops_of(loaded, config))
    ended: list[FinishReason] = []
    constraint: SchemaConstraint | None = None

    def stop(input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        complete = constraint is not None and constraint.is_complete(input_ids)
        if complete or listener.ends() or texts.reached(input_ids[0, begin:]):
            ended.append("stop")
        elif cancelled():
            ended.append("cancelled")
        return torch.full((input_ids.shape[0],), bool(ended), device=input_ids.device)

    generate: Any = loaded.model.generate
    seeded = None
    if config.seed is not None and config.temperature > 0:
        seeded = SeededSampling(config.seed)
    drafts = Drafts(LONGEST if config.drafts else 0)
    loop: Any = partial(_sample, listener, seeded) if seeded is not None else None
    if steps is not None:
        loop = Loop(steps, drafts, listener, seeded)
    settings = generation_config(loaded, config)
    processors = LogitsProcessorList([] if listener.scores is None else [listener.scores])
    if config.json_schema is not None:
        constraint = SchemaConstraint(
            config.json_schema,
            loaded.tokenizer,
            vocabulary=config_of(loaded.model).vocab_size,
            ends=tuple(settings.eos_token_id or ()),
            begin=begin,
            unless=config.call_marks if isinstance(config, SchemaOrCall) else (),
        )
        processors.append(constraint)
    out = generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        generation_config=settings,
        logits_processor=processors,
        stopping_criteria=StoppingCriteriaList([stop]),
        **_reset_fields(loaded),
        streamer=listener,
        custom_generate=loop,
    )
    if isinstance(loop, Loop):
        require_used(loop.begun, 1, "calls of ragkv's loop")
    elif seeded is not None:
        require_used(min(seeded.tokens, 1), 1, "calls of ragkv's sampling")
    tokens = out[0, begin:].tolist()
    now = time.perf_counter()
    sparse = None if steps is None else steps.sparse
    if tokens[-1:] and tokens[-1] in (settings.eos_token_id or ()):
        ended = ["stop"]
    return Drawn(
        tokens,
        listener.first_at or now,
        listener.last_at or now,
        loop.count if isinstance(loop, Loop) else len(tokens) - 1,
        drafts.proposed,
        drafts.accepted,
        0 if sparse is None else sparse.blocks,
        0 if sparse is None else sparse.read,
        ended[0] if ended else "length",
        tuple(listener.progress.logprobs),
    )


def within_max_length(loaded: LoadedModel, config: DecodeConfig, tokens: int) -> DecodeConfig:
    """Return ``config`` with ``max_new_tokens`` that fit ``max_length`` and the model's positions.

    ``tokens`` are before the answer; its last token takes no position, since no step computes it.
    """
    if loaded.positions is not None:
        most = max(1, loaded.positions - tokens + 1)
        config = replace(config, max_new_tokens=min(config.max_new_tokens, most))
    given = config.generation or {}
    known = config_of(loaded.model).vocab_size
    if any(token >= known for word in given.get("bad_words_ids", ()) for token in word):
        raise ConfigError(f"bad_words_ids: token ids must be less than {known}")
    if "max_length" not in given:
        return config
    most = max(1, min(config.max_new_tokens, given["max_length"] - tokens))
    rest = {name: given[name] for name in given if name != "max_length"}
    return replace(config, max_new_tokens=most, generation=rest)


def _reset_fields(loaded: LoadedModel) -> dict[str, None]:
    """Return the fields of the model's generation configuration that a request must reset.

    transformers fills fields that are None in a request's configuration from the model's.
    """
    own = loaded.model.generation_config
    return {name: None for name in _RESET_FIELDS if getattr(own, name, None) is not None}


def generation_config(loaded: LoadedModel, config: DecodeConfig) -> GenerationConfig:
    """Return the model's generation configuration with the request's settings."""
    base: Any = copy.deepcopy(loaded.model.generation_config)
    sampling = config.temperature > 0
    base.update(
        max_new_tokens=config.max_new_tokens,
        max_length=None,
        do_sample=sampling,
        temperature=float(config.temperature) if sampling else None,
        top_p=float(config.top_p) if sampling else None,
        top_k=config.top_k if sampling else None,
        **dict.fromkeys(_RESET_FIELDS),
        num_beams=1,
        num_return_sequences=1,
        use_cache=True,
        return_dict_in_generate=False,
        **{
            name: value
            for name, value in (config.generation or {}).items()
            if sampling or name not in SAMPLING
        },
    )
    eos = base.eos_token_id
    ends = eos if isinstance(eos, list) else [eos] if eos is not None else []
    if config.ignore_eos and ends:  # an unused id, since transformers would replace None
        ends = [config_of(loaded.model).vocab_size]
    base.eos_token_id = [*ends, *config.stop_token_ids] or None
    if base.pad_token_id is None and eos is not None:
        base.pad_token_id = eos[0] if isinstance(eos, list) else eos
    config_out: GenerationConfig = base
    return config_out
