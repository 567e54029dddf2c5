"""Tests on a device beside the CPU: a GPU, or one written in Python that stands for it.

tests/test_second_device.py starts them in processes of their own, as that device cannot be taken
back. Anywhere else they are left out.
"""

from __future__ import annotations

import os

DEVICE = os.environ.get("RAGKV_SECOND_DEVICE")

if DEVICE == "second":
    import second_device

    _kept = second_device.install()
elif DEVICE:
    collect_ignore_glob = ["test_streams.py"]
else:
    collect_ignore_glob = ["test_*.py"]
