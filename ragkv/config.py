"""The settings: frozen dataclasses, validated when they are made."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol, Self, runtime_checkable

from ragkv.errors import ConfigError, MissingDependencyError

MEMORY = ":memory:"
"""Store location in memory alone, with nothing on disk."""

CODECS = ("raw", "int8", "int4", "raw+zstd", "int8+zstd", "int4+zstd")
"""How entries can be stored, see docs/store-format.md."""

LEAST_TEMPERATURE = 1e-20
"""Scores divided by less may be infinite in float32."""

MOST_LOGPROBS = 20
"""Most probable tokens that are recorded for each token, as in OpenAI's API."""

PROFILE_FORMAT = 1
"""Version of the profiles that ``ragkv calibrate`` writes."""


def _check_number(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{name} must be a number between {low:g} and {high:g}, not {value!r}")
    if not low <= value <= high:
        raise ConfigError(f"{name} must lie between {low:g} and {high:g}, not {value!r}")


def _check_whole(name: str, value: object, low: float, high: float) -> None:
    _check_number(name, value, low, high)
    if not isinstance(value, int):
        raise ConfigError(f"{name} must be a whole number, not {value!r}")


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be True or False, not {value!r}")


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, not {value!r}")


def _check_codec(codec: object) -> None:
    _check_choice("codec", codec, CODECS)
    if str(codec).endswith("+zstd") and find_spec("zstandard") is None:
        raise MissingDependencyError(f"codec {codec} needs zstandard: pip install 'ragkv[zstd]'")


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise ConfigError(f"{name} must be a string, not {type(value).__name__}")


@dataclass(frozen=True, slots=True)
class Grouping:
    """Recompute whole windows, at any offset, instead of scattered tokens (CacheClip, section 3).

    Parameters
    ----------
    window
        Length of a window in prompt tokens.
    threshold
        With ``mode="threshold"``: a window is recomputed whole if *more than* this many of its
        tokens were chosen, and otherwise only as a part of others.
    mode
        ``"threshold"`` as in the paper: the highest scores are chosen, as many as their windows
        fit the recompute ratio. ``"fill"``: windows are ranked by their mean score and taken
        until the budget is spent exactly.
    """

    window: int = 8
    threshold: int = 5
    mode: Literal["threshold", "fill"] = "threshold"

    def __post_init__(self) -> None:
        _check_whole("grouping window", self.window, 1, 4096)
        _check_whole("grouping threshold", self.threshold, 0, self.window - 1)
        _check_choice("grouping mode", self.mode, ("threshold", "fill"))


@runtime_checkable
class Named(Protocol):
    """A method made of pieces: a :class:`ragkv.select.Method`."""

    @property
    def name(self) -> str:
        """What reports call it."""
        ...


@dataclass(frozen=True, slots=True)
class AutoRatio:
    """How ``recompute_ratio="auto"`` chooses, request by request.

    The smallest set of tokens with ``target`` of the query's attention to the cached tokens,
    but at least ``floor`` and at most ``ceiling`` of them.
    """

    target: float = 0.8
    floor: float = 0.05
    ceiling: float = 0.4

    def __post_init__(self) -> None:
        _check_number("auto target", self.target, 0.0, 1.0)
        _check_number("auto floor", self.floor, 0.0, 1.0)
        _check_number("auto ceiling", self.ceiling, self.floor, 1.0)


@dataclass(frozen=True, slots=True)
class ReuseConfig:
    """How cached chunks are reused and how much of them is recomputed.

    Parameters
    ----------
    method
        Name of a method, see :func:`ragkv.select.method_names`; or a
        :class:`ragkv.select.Method` of your own.
    recompute_ratio
        Share of the cached chunk tokens that is recomputed, from 0 (plain reuse) to 1 (exactly
        full prefill). Uncached tokens are always computed and do not count. ``"auto"`` chooses
        for each request.
    auto
        How ``"auto"`` chooses.
    sink
        The text that chunks are encoded behind. ``"auto"`` is what the chat
        template puts before the first user text. The closer to the real
        prompt's head, the better.
    grouping
        Overrides the method's grouping; ``None`` keeps it.
    auxiliary_model
        Model that scores tokens for ``cacheclip``: a hub name or a folder.
        ``None`` is the embedded default, SmolLM2-135M-Instruct.
    on_miss
        ``"store"`` encodes named chunks that were not stored, after the answer; ``"skip"``
        does not.
    load
        ``"auto"`` computes a chunk where loading it would take longer, by the speeds measured in
        this process; the report counts it as a miss, ``slower``. Chunks in memory are always
        loaded. ``"always"`` loads everything.
    repair_ahead
        Whether the decoding steps also recompute the tokens that the answer is about to copy
        (``query`` alone does). Answers come closer to full prefill (KL 0.022 instead of 0.025
        at a ratio of 0.2), and a step takes 1.15 to 1.5 times as long on a CPU.
    remember_turns
        Encode a chat's question and answer after it was given: later prompts find them as chunks.
    turns_expire_in
        Seconds that a turn is remembered after a prompt has last contained it.
    seed
        Seed of the ``random`` method.
    calibrated_for
        Fingerprint of the model that the ratio was calibrated for; other models are refused.
        ``None`` accepts all.
    """

    method: str | Named = "query"
    recompute_ratio: float | Literal["auto"] = 0.2
    auto: AutoRatio = AutoRatio()
    sink: str = "auto"
    grouping: Grouping | None = None
    auxiliary_model: str | None = None
    on_miss: Literal["store", "skip"] = "store"
    load: Literal["auto", "always"] = "auto"
    repair_ahead: bool = False
    remember_turns: bool = False
    turns_expire_in: float = 3600.0
    seed: int = 0
    calibrated_for: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.method, str | Named):
            raise ConfigError(f"method must be a name or a Method, not {self.method!r}")
        if self.recompute_ratio != "auto":
            _check_number("recompute_ratio (or 'auto')", self.recompute_ratio, 0.0, 1.0)
        if not isinstance(self.auto, AutoRatio):
            raise ConfigError(f"auto must be an AutoRatio, not {self.auto!r}")
        _check_text("sink", self.sink)
        if self.grouping is not None and not isinstance(self.grouping, Grouping):
            raise ConfigError(f"grouping must be a Grouping or None, not {self.grouping!r}")
        if self.auxiliary_model is not None:
            _check_text("auxiliary_model", self.auxiliary_model)
        _check_choice("on_miss", self.on_miss, ("store", "skip"))
        _check_choice("load", self.load, ("auto", "always"))
        for name in ("repair_ahead", "remember_turns"):
            _check_bool(name, getattr(self, name))
        _check_number("turns_expire_in", self.turns_expire_in, 1.0, 2**53)
        _check_whole("seed", self.seed, 0, 2**63 - 1)
        if self.calibrated_for is not None:
            _check_text("calibrated_for", self.calibrated_for)

    @classmethod
    def from_profile(cls, path: str | Path, **overrides: Any) -> Self:
        """Return the settings of a profile that ``ragkv calibrate`` wrote.

        They are for the profile's model alone; ``calibrated_for=None`` lifts that.
        ``overrides`` are other fields.

        Raises
        ------
        ConfigError
            The file cannot be read, is not such a profile, or an override is wrong.
        """
        try:
            config = cls(**_profile_fields(json.loads(Path(path).read_text(encoding="utf-8"))))
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(f"{path} is not a profile by `ragkv calibrate`: {error}") from error
        return config.override(**overrides)

    def override(self, **changes: Any) -> Self:
        """Return a copy with the given fields changed; unknown names raise ConfigError."""
        known = {field.name for field in fields(self)}
        unknown = sorted(set(changes) - known)
        if unknown:
            raise ConfigError(
                f"unknown reuse setting {', '.join(unknown)}: no argument has that name; "
                f"reuse settings are {', '.join(sorted(known))}, and others of a "
                f"call {', '.join(field.name for field in fields(DecodeConfig))}"
            )
        return replace(self, **changes)


def _profile_fields(profile: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of ReuseConfig that a profile sets."""
    if profile["format"] != PROFILE_FORMAT:
        raise ConfigError(
            f"a profile of format {profile['format']!r}, and this ragkv reads {PROFILE_FORMAT}: "
            "calibrate again"
        )
    _check_text("fingerprint", profile["fingerprint"])
    grouping = profile["grouping"]
    return {
        "method": profile["method"],
        "recompute_ratio": profile["recompute_ratio"],
        "grouping": None if grouping is None else Grouping(**grouping),
        "auxiliary_model": profile["auxiliary_model"],
        "calibrated_for": profile["fingerprint"],
    }


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Where chunk caches are stored.

    Parameters
    ----------
    path
        Folder of the store, or ``":memory:"``. ``None`` is the user's cache folder.
    memory_bytes
        Budget of the memory tier in front of the disk, in bytes.
    disk_bytes
        Budget of the disk tier in bytes; ``None`` means no limit.
    device_bytes
        Budget of the tier on the model's device, in bytes. ``None`` is 1 GiB, and no such tier
        for a model on the CPU.
    policy
        Which entry a full tier evicts first, see
        :func:`ragkv.store.tiers.policies.policy_names`.
    costs
        Seconds of computing ``(cached, new)`` tokens, for cost-aware policies: a
        :class:`ragkv.store.tiers.costs.CostTable`. ``None`` measures them once (docs/tiers.md).
    evict
        Evict on disk, too: when ``disk_bytes`` are used up, the chunks of least worth are
        deleted for new ones. False keeps acknowledged chunks and raises StoreFullError.
    read_only
        Serve from the store without writing to it.
    codec
        How entries are stored: ``raw`` bit by bit, ``int8`` or ``int4`` in a half or a quarter
        of 16-bit numbers; each with ``+zstd`` compressed as well. Entries of other codecs are
        not used.
    encrypt
        Encrypt everything at rest, with the key in the environment variable
        ``RAGKV_STORE_KEY``; ``ragkv store key`` makes one.
    """

    path: str | Path | None = None
    memory_bytes: int = 2 << 30
    disk_bytes: int | None = None
    read_only: bool = False
    device_bytes: int | None = None
    policy: str = "pgdsf"
    costs: Callable[[int, int], float] | None = None
    evict: bool = False
    codec: str = "raw"
    encrypt: bool = False

    def __post_init__(self) -> None:
        wrong = self.path is not None and not isinstance(self.path, str | Path)
        if wrong or "\0" in str(self.path):
            raise ConfigError(f"store path must be a folder or ':memory:', not {self.path!r}")
        _check_number("memory_bytes", self.memory_bytes, 0, 2**60)
        if self.disk_bytes is not None:
            _check_number("disk_bytes", self.disk_bytes, 1, 2**60)
        if self.device_bytes is not None:
            _check_number("device_bytes", self.device_bytes, 0, 2**60)
        for name in ("read_only", "evict", "encrypt"):
            _check_bool(name, getattr(self, name))
        _check_text("policy", self.policy)
        if self.costs is not None and not callable(self.costs):
            raise ConfigError(f"costs must be a CostTable or a function, not {self.costs!r}")
        if self.encrypt and self.path == MEMORY:
            raise ConfigError("a store in memory is never at rest: omit encrypt=True")
        if self.evict and (self.disk_bytes is None or self.read_only):
            raise ConfigError("evict=True needs disk_bytes, and a store that may be written")
        _check_codec(self.codec)
        if self.path == MEMORY and self.codec != "raw":
            raise ConfigError(
                f"codec {self.codec} with {MEMORY}: entries in memory are not encoded; give a "
                "folder or a server, or omit the codec"
            )


@dataclass(frozen=True, slots=True)
class BatchConfig:
    """How one model serves many callers at once. Engines over one model share it.

    Parameters
    ----------
    max_running
        Answers that run at once; further requests wait.
    kv_bytes
        Budget of their keys and values, in bytes: a request that does not fit beside those that
        run waits. ``None`` is a quarter of the memory of the model's device.
    max_step_ms
        About how long an answer's next token waits for the prompts of others, in milliseconds:
        longer by one layer of a prompt, and by the step itself.
    max_overtaken
        Waiting requests are served by the share of their prompt that is cached, the highest
        first; none is overtaken more often than this (RAGCache, section 5.3).
    """

    max_running: int = 16
    kv_bytes: int | None = None
    max_step_ms: float = 200.0
    max_overtaken: int = 8

    def __post_init__(self) -> None:
        _check_whole("max_running", self.max_running, 1, 4096)
        if self.kv_bytes is not None:
            _check_number("kv_bytes", self.kv_bytes, 1, 2**60)
        _check_number("max_step_ms", self.max_step_ms, 0, 3_600_000)
        _check_whole("max_overtaken", self.max_overtaken, 0, 2**31)


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """How tokens are drawn; handed to transformers' ``generate``.

    Parameters
    ----------
    max_new_tokens
        At most this many tokens are generated.
    temperature
        0 is greedy decoding.
    top_p
        Nucleus sampling: smallest set of tokens with this probability mass.
    stop
        Texts at which generation ends; the answer does not contain them.
    seed
        Makes sampling repeatable; ``None`` draws from torch's global state.
    top_k
        Sample among this many most probable tokens; 0 is all.
    stop_token_ids
        Tokens that end the answer, in addition to the model's end-of-sequence tokens.
    prompt_lookup_num_tokens
        Longest draft of prompt lookup decoding, in tokens: what stood behind an earlier
        occurrence of the last tokens is verified in the step that computes them. Drafts change
        the speed of an answer, not its tokens. ``None`` is ragkv's choice, 0 none. Without
        effect on a static cache.
    cache_implementation
        ``"static"`` decodes over a cache of fixed shape, whose steps transformers compiles: on
        a GPU, into CUDA graphs. It is a second KV of up to twice the longest prompt and answer,
        and copies are not repaired. ``None`` decodes over the prompt's buffer.
    ignore_eos
        Whether the answer goes on past the model's end-of-sequence tokens.
    logprobs
        Record each token's log-probability, and those of this many most probable ones, by the
        model's own scores, before temperature. ``None`` records nothing.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    stop: str | Sequence[str] = ()
    seed: int | None = None
    top_k: int = 0
    stop_token_ids: Sequence[int] = ()
    prompt_lookup_num_tokens: int | None = None
    cache_implementation: Literal["static"] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        _check_whole("max_new_tokens", self.max_new_tokens, 1, 2**31)
        _check_number("temperature", self.temperature, 0.0, 100.0)
        if 0 < self.temperature < LEAST_TEMPERATURE:
            raise ConfigError(f"temperature {self.temperature:g} divides by next to 0; 0 is greedy")
        _check_number("top_p", self.top_p, 0.0, 1.0)
        if not isinstance(self.stop, Sequence) or not all(
            isinstance(text, str) and text and _is_readable(text) for text in self.stops
        ):
            raise ConfigError(f"stop must be non-empty strings, not {self.stop!r}")
        if self.seed is not None:
            _check_whole("seed", self.seed, 0, 2**63 - 1)
        _check_whole("top_k", self.top_k, 0, 2**31)
        wrong = isinstance(self.stop_token_ids, str | bytes)
        if wrong or not isinstance(self.stop_token_ids, Iterable):
            raise ConfigError(f"stop_token_ids must be a list, not {self.stop_token_ids!r}")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for token in self.stop_token_ids:
            _check_whole("a stop token", token, 0, 2**31)
        if self.prompt_lookup_num_tokens is not None:
            _check_whole("prompt_lookup_num_tokens", self.prompt_lookup_num_tokens, 0, 2**31)
        if not isinstance(self.ignore_eos, bool):
            raise ConfigError(f"ignore_eos must be True or False, not {self.ignore_eos!r}")
        if self.logprobs is not None:
            _check_whole("logprobs", self.logprobs, 0, MOST_LOGPROBS)
        if self.cache_implementation not in (None, "static"):
            raise ConfigError(
                f"cache_implementation must be 'static' or None, not {self.cache_implementation!r}"
            )

    @property
    def stops(self) -> tuple[str, ...]:
        """``stop`` as a tuple, whichever way it was given."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


def _is_readable(text: str) -> bool:
    """Whether a text has no lone surrogate, which no tokenizer can produce."""
    with suppress(UnicodeEncodeError):
        return bool(text.encode())
    return False
