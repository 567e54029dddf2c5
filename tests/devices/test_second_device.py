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
ENGINE, STREAMS, OUT_OF_MEMORY = "test_engine.py", "test_streams.py", "test_out_of_memory.py"

needs_a_second_device = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason=f"torch {torch.__version__} takes no device that is written in Python",
)


def run_on(device: str, file: str, which: str = "not slow") -> None:
    """Run a file's tests there. Each has its own time limit in that process."""
    options = ["-q", "-p", "no:cacheprovider", "-m", which, "-k", file]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *FILES],
        env={**os.environ, "RAGKV_SECOND_DEVICE": device},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]


@needs_a_second_device
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("file", [ENGINE, STREAMS, OUT_OF_MEMORY])
def test_the_engine_on_a_second_device(file):
    run_on("second", file)


@needs_a_second_device
@pytest.mark.slow
@pytest.mark.timeout(5400)
@pytest.mark.parametrize("file", [ENGINE, OUT_OF_MEMORY])
def test_the_slow_ones_on_a_second_device(file):
    """Among others, memory runs out at each allocation."""
    run_on("second", file, "slow")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("file", [ENGINE, OUT_OF_MEMORY])
def test_the_engine_on_a_gpu(file):
    run_on("cuda", file)
