"""Measured prefill costs, kept with a store: one JSON file for each model and machine."""

from __future__ import annotations

import json
import logging
import math
from contextlib import suppress
from pathlib import Path

import torch

from ragkv.config import MEMORY, StoreConfig
from ragkv.errors import ConfigError
from ragkv.model.fingerprint import digest_of
from ragkv.model.loaded import ReusableModel
from ragkv.model.machine import device_name
from ragkv.store.backends import folder_of
from ragkv.store.backends.files import write_temporary
from ragkv.store.tiers.costs import CostTable

_log = logging.getLogger(__name__)
FORMAT = 1


class CostsFile:
    """A model's costs in ``costs/`` in the store's folder, which its namespaces share.

    Stores in memory or on a server have none.
    """

    def __init__(self, config: StoreConfig, loaded: ReusableModel) -> None:
        self._of = {
            "format": FORMAT,
            "fingerprint": loaded.fingerprint.digest,
            "device": device_name(loaded.device),
            "torch": torch.__version__,
        }
        self._writable = not config.read_only
        root = None if config.path == MEMORY else folder_of(config.path)
        self._path: Path | None = None
        if root is not None:
            name = f"{digest_of(self._of)}.json"
            self._path = root.expanduser().absolute() / "costs" / name

    def read(self) -> CostTable | None:
        """Return the costs of this model on this machine; None where there are none."""
        if self._path is None:
            return None
        with suppress(OSError, ValueError, TypeError, KeyError, RecursionError, ConfigError):
            found = json.loads(self._path.read_text(encoding="utf-8"))
            table = CostTable.from_dict(found.pop("costs"))
            seconds = [value for row in table.seconds for value in row]
            if found == self._of and all(0 < value < math.inf for value in seconds):
                return table
        return None

    def write(self, costs: CostTable) -> None:
        """Keep the costs, unless the store is read-only; what fails is logged."""
        if self._path is None or not self._writable:
            return
        data = json.dumps({**self._of, "costs": costs.to_dict()}, indent=1).encode()
        try:
            write_temporary(self._path.parent, [data]).replace(self._path)
        except OSError as error:
            _log.warning("the measured costs were not kept: %s", error)
