"""The tests on a device beside the CPU, which stands for a GPU, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils import backend_registration

HERE = Path(__file__).parent


@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason=f"torch {torch.__version__} takes no device that is written in Python",
)
def test_the_engine_on_a_second_device():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "on_second")],
        env={**os.environ, "RAGKV_SECOND_DEVICE": "1"},
        cwd=HERE.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]
