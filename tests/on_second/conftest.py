"""Tests on a device beside the CPU, which stands for a GPU.

tests/test_second_device.py starts them in a process of their own: a device cannot be taken
back. Anywhere else they are left out.
"""

from __future__ import annotations

import os

if os.environ.get("RAGKV_SECOND_DEVICE") == "1":
    import second_device

    _kept = second_device.install()
else:
    collect_ignore_glob = ["test_*.py"]
