"""Tests on a device beside the CPU: a GPU, or one written in Python that stands for it.

tests/devices/test_second_device.py starts them in processes of their own, as that device cannot be taken
back. Anywhere else they are left out.
"""

import os

import pytest
import tiny

DEVICE = os.environ.get("RAGKV_SECOND_DEVICE")

if DEVICE == "second":
    import second_device
    from recording import Recording

    from ragkv.attend.graphs import RECORDERS

    _kept = second_device.install()
    RECORDERS["second"] = Recording
elif DEVICE:
    collect_ignore_glob = ["test_streams.py"]
else:
    collect_ignore_glob = ["test_*.py"]

if DEVICE:  # the other tests' models stay as they are: this file is read beside them, too
    # layers are placed in several groups; heads are of a size that the kernels take
    tiny.SIZE.update(num_hidden_layers=6, head_dim=64)
    tiny.FAMILIES["gemma3"][1]["layer_types"] *= 2
    del tiny.FAMILIES["gemma3"][1]["layer_types"][6:]


@pytest.fixture(autouse=True)
def every_row_sees_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU alone, rows see less in the upper layers: here it computes as the device does."""
    monkeypatch.setattr("ragkv.recompute.repair.SparseRows", lambda *_: None)
