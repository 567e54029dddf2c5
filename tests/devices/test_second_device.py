"""The tests on a device beside the CPU, a GPU or what stands for one, in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils import backend_registration

HERE = Path(__file__).parent
FILES = (HERE / "second", HERE.parent / "faults" / "test_out_of_memory.py")


def run_on(device: str, which: str = "not slow") -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", which, *FILES],
        env={**os.environ, "RAGKV_SECOND_DEVICE": device},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]


@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason=f"torch {torch.__version__} takes no device that is written in Python",
)
@pytest.mark.parametrize(
    "which",
    ["not slow", pytest.param("slow", marks=[pytest.mark.slow, pytest.mark.timeout(5400)])],
)
def test_the_engine_on_a_second_device(which):
    run_on("second", which)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_engine_on_a_gpu():
    run_on("cuda")
