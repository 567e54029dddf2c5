"""The settings of both models: which model answers, and how."""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch
from pydantic import AliasChoices, Field, SecretStr

from langchain_ragkv.call import Call
from langchain_ragkv.engine import ChunkReuse
from langchain_ragkv.keywords import Keywords, read_keywords
from langchain_ragkv.load import model_fields
from ragkv.answer.engine import Engine
from ragkv.config import MOST_LOGPROBS, checked_variables
from ragkv.errors import ConfigError

_DEFAULT_MAX_TOKENS = 256
_LOCAL = ("store", "device", "dtype", "prompt_lookup_num_tokens")
"""Fields that are for a model in this process."""


class AnswerSettings(ChunkReuse):
    """Fields of a model that answers; all of them can be given per call as well."""

    model_id: str | None = None
    """Hub name or folder of the model; None is the embedded default. With ``base_url``, the name
    that the server must have for its model; None is whichever it has."""
    base_url: str | None = Field(default=None, exclude=True)
    """Address of a ``ragkv serve``, such as ``http://gpu:8000``; nothing is loaded here then."""
    api_key: SecretStr | None = Field(default=None, exclude=True, repr=False)
    """Key of a namespace of that server; None is the environment variable ``RAGKV_API_KEY``.
    Without effect on a model in this process, and beside ``kv``."""
    temperature: float | None = Field(default=None, ge=0)
    """None and 0 are greedy decoding."""
    max_tokens: int | None = Field(
        default=None, ge=1, validation_alias=AliasChoices("max_tokens", "max_completion_tokens")
    )
    """At most this many tokens are generated; None is 256."""
    top_p: float | None = Field(default=None, ge=0, le=1)
    """Nucleus sampling; None is 1."""
    top_k: int | None = Field(default=None, ge=0)
    """Sample among this many most probable tokens; None and 0 are all."""
    seed: int | None = Field(default=None, ge=0)
    """Makes sampling repeatable."""
    stop: str | list[str] | None = Field(default=None, alias="stop_sequences")
    """Texts at which an answer ends; it does not contain them."""
    prompt_lookup_num_tokens: int | None = Field(default=None, ge=0)
    """0 switches ragkv's drafts off, by transformers' name for them."""
    generation: dict[str, Any] | None = None
    """More of transformers' settings, such as ``repetition_penalty``: see ragkv's DecodeConfig."""
    logprobs: bool | None = None
    """Whether ``response_metadata["logprobs"]`` has the tokens' log-probabilities, in OpenAI's
    form."""
    top_logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)
    """Of how many most probable tokens, beside each."""
    timeout: float | None = Field(default=None, gt=0)
    """Seconds after which an answer is given up with a TimeoutError, time spent waiting for the
    model included. None is 600 with ``base_url``, and any time without."""
    max_retries: int = Field(default=2, ge=0)
    """How often a request to a server is sent again where no connection comes about or the server
    is busy. A model in this process needs none."""
    streaming: bool = False
    """Whether ``invoke`` streams, for callbacks that want every token."""
    device: str | torch.device | None = Field(default=None, exclude=True)
    """Device of a model loaded here."""
    dtype: str | torch.dtype | None = Field(default=None, exclude=True)
    """Dtype of a model loaded here."""

    _engine_fields: ClassVar[tuple[str, ...]] = ("store", "model_id", "device", "dtype", "base_url")

    @classmethod
    def from_model_id(
        cls,
        model_id: str | None = None,
        task: str | None = None,
        backend: str = "pipeline",
        **kwargs: Any,
    ) -> Self:
        """Load a model and serve it; keywords as in ``HuggingFacePipeline.from_model_id``.

        Parameters
        ----------
        model_id
            Hub name or folder; None is the embedded default.
        task, backend
            ``"text-generation"`` and ``"pipeline"``; there is no other.
        **kwargs
            Fields of this class (``recompute_ratio``, ``method``, ``store``, ``namespace``,
            ``sink_from``, ``temperature``, ...), and ``device``, ``device_map``,
            ``model_kwargs`` and ``pipeline_kwargs`` as there.

        Raises
        ------
        ConfigError
            A setting cannot be kept.
        UnsupportedModelError
            The model's caches cannot be reused exactly.
        """
        return cls(**model_fields(model_id, task, backend, kwargs))

    def _make_engine(self) -> Engine:
        if self.base_url is None:
            return self._engine(self.model_id, device=self.device, dtype=self.dtype)
        given = [name for name in _LOCAL if getattr(self, name) is not None]
        given += ["on_unsupported"] * (self.on_unsupported != "raise")
        if given:
            raise ConfigError(
                f"{', '.join(given)}: the model of base_url is the server's, and so is that; omit "
                "it, or omit base_url to load a model here"
            )
        from ragkv.client import TIMEOUT_S, RemoteRagKV

        return RemoteRagKV(
            self.base_url,
            None if self.api_key is None else self.api_key.get_secret_value(),
            timeout=self.timeout or TIMEOUT_S,
            max_retries=self.max_retries,
            model=self.model_id,
        )

    @property
    def model_name(self) -> str:
        """Name of the model that answers."""
        return self._info.name

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {**self._identity, **self._call(None, {}).arguments}

    def _read(self, given: dict[str, Any]) -> tuple[Keywords, dict[str, Any]]:
        usual = {"logprobs": self.logprobs, "top_logprobs": self.top_logprobs}
        return read_keywords({**usual, **given})

    def _call(self, stop: list[str] | None, given: dict[str, Any]) -> Call:
        """One call's settings: the fields, with the call's own on top."""
        keywords, given = self._read(given)
        timeout = given.pop("timeout", self.timeout)
        limit = given.pop("max_tokens", self.max_tokens)
        names = ("temperature", "top_p", "top_k", "seed", "prompt_lookup_num_tokens")
        own = {name: given.pop(name, getattr(self, name)) for name in names}
        if (lookup := own.pop("prompt_lookup_num_tokens")) is not None:
            own["drafts"] = lookup > 0
        texts = (stop, given.pop("stop_sequences", None), self.stop)
        ends = next((each for each in texts if each is not None), ())
        variables = self._variables | checked_variables(given.pop("chat_template_kwargs", None))
        arguments = {
            **({"generation": self.generation} if self.generation else {}),
            **own,
            "temperature": own["temperature"] or 0.0,
            "max_new_tokens": _DEFAULT_MAX_TOKENS if limit is None else limit,
            "top_p": 1.0 if own["top_p"] is None else own["top_p"],
            "top_k": own["top_k"] or 0,
            "json_schema": given.pop("json_schema", None),
            "chat_template_kwargs": variables,
            "stop": (ends,) if isinstance(ends, str) else tuple(ends),
            **self._overrides(given),
        }
        return Call(self.kv, self.model_name, arguments, timeout, self._keep, keywords)
