"""RagKVLLM as a dict, and pickled: its settings, without the model."""

from __future__ import annotations

from typing import Any, Self

from llama_index.core.bridge.pydantic import BaseModel, PrivateAttr
from llama_index.core.llms.llm import LLM
from llama_index.core.schema import BaseComponent

from ragkv.errors import ConfigError


class Serialisation(LLM):
    """The part of RagKVLLM that writes and reads its settings."""

    _left_out: list[str] = PrivateAttr(default_factory=list)

    def __repr_args__(self) -> Any:
        """Leave out the functions: bound to this object, they would show it again."""
        functions = ("messages_to_prompt", "completion_to_prompt")
        return [item for item in super().__repr_args__() if item[0] not in functions]

    def to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """Return the plain settings and, as ``left_out``, the names of those that are not."""
        return {**super().to_dict(**kwargs), "left_out": list(self._left_out)}

    @classmethod
    def from_dict(cls, data: dict[str, Any], **kwargs: Any) -> Self:
        """Make the LLM again; all that ``to_dict`` left out must be given among ``kwargs``."""
        settings = dict(data)
        if missing := [name for name in settings.pop("left_out", ()) if name not in kwargs]:
            again = ", ".join(f"{name}=..." for name in missing)
            raise ConfigError(
                f"to_dict() does not write this LLM's {', '.join(missing)}: give them again, "
                f"RagKVLLM.from_dict(data, {again})"
            )
        return super().from_dict(settings, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """Return the settings; the model itself is loaded again on first use."""
        return BaseModel.__getstate__(self)

    def __setstate__(self, state: dict[Any, Any]) -> None:
        BaseModel.__setstate__(self, state)


class OverLLM(BaseComponent):
    """A component that has an LLM, which its ``to_dict`` does not write."""

    @classmethod
    def from_dict(cls, data: dict[str, Any], **kwargs: Any) -> Self:
        """Make the component again with ``llm=...``.

        Raises
        ------
        ConfigError
            Without an ``llm``.
        """
        if "llm" not in kwargs:
            raise ConfigError("to_dict() does not write the LLM: from_dict(data, llm=...)")
        return super().from_dict({key: data[key] for key in data if key != "run"}, **kwargs)
