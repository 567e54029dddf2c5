"""Kernels run in Triton's interpreter (TRITON_INTERPRET=1, on the CPU), or on a GPU.

tests/kernels/test_kernels.py starts them in the interpreter, in a process of their own: Triton reads
the variable when it is imported. Anywhere else they carry the marker ``gpu``.
"""

import importlib.util
import os
from pathlib import Path

import numpy as np
import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items) -> None:
    if not INTERPRETED:
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels run; the test is skipped where they cannot."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    if INTERPRETED:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU or TRITON_INTERPRET=1")
    return torch.device("cuda")


@pytest.fixture(params=["twin", "triton"])
def side(request, device) -> str:
    """Both sides of every kernel are held against the same slow reference."""
    return request.param


@pytest.fixture(autouse=True, scope="session")
def _bfloat16_products() -> None:
    """Triton 3.9's interpreter multiplies bfloat16's bit patterns as integers: widen them."""
    if not INTERPRETED or importlib.util.find_spec("triton") is None:
        return
    from triton import language
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    before = InterpreterBuilder.create_dot

    def widened(handle):
        if handle.dtype.scalar != language.bfloat16:
            return handle
        bits = handle.data.astype(np.uint32) << 16
        return TensorHandle(bits.view(np.float32), language.float32)

    def create_dot(self, a, b, *rest):
        return before(self, widened(a), widened(b), *rest)

    InterpreterBuilder.create_dot = create_dot
