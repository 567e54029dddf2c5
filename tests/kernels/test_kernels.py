"""The kernels' tests in Triton's interpreter, and what holds where Triton cannot run."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import ragkv_kernels
import torch
from ragkv_kernels import INT8, dispatch

from ragkv.attend.kernels import suits_kernels
from ragkv.attend.rows import Rows, attend
from ragkv.attend.score_rule import ScoreRule

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PLACES = [ROOT, ROOT / "kernels"]


def python(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(map(str, [*PLACES, *filter(None, [os.environ.get("PYTHONPATH")])]))
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": path, **more},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_kernels_in_the_interpreter():
    folder = str(HERE / "interpreted")
    done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", folder, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]


def test_nothing_needs_triton():
    code = """
import logging, sys
sys.modules["triton"] = None
logging.basicConfig(level=logging.INFO, format="%(message)s")
import torch
import ragkv.attend.attention
assert "ragkv_kernels" not in sys.modules
import ragkv_kernels
query, rows = torch.randn(4, 3, 64), torch.tensor([0, 4, 8])
key, value = torch.randn(2, 2, 9, 64)
for _ in range(2):
    out, lse = ragkv_kernels.attend(query, key, value, rows, window=None, scaling=1.0)
assert torch.equal(out[:2, 0], value[:1, 0].expand(2, -1))
"""
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("attend runs in torch") == 1


def test_encoding_and_restoring_bring_numbers_back():
    torch.manual_seed(0)
    keys, values = torch.randn(2, 2, 70, 64)
    made = ragkv_kernels.encode(keys, values, grid=INT8)
    out, rows = torch.zeros(2, 1, 2, 100, 64), torch.arange(70)
    still = torch.ones(100, 32), torch.zeros(100, 32)
    ragkv_kernels.restore(
        made.data[None], 70, *out, rows=rows, slots=rows + 30, table=still, grid=INT8
    )
    expected = torch.stack([keys, values])[:, None]
    torch.testing.assert_close(out[..., 30:, :], expected, atol=0.03, rtol=0)
    assert not out[..., :30, :].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(4, 3, 32)}, "does not fit"),
        ({"query": torch.zeros(5, 3, 64)}, "cannot share"),
        ({"value": torch.zeros(2, 8, 64)}, "must be like key"),
        ({"positions": torch.zeros(4, dtype=torch.long)}, "positions must be"),
        ({"window": 0}, "window must be"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_what_does_not_fit_is_refused(change, message):
    call = {
        "query": torch.zeros(4, 3, 64),
        "key": torch.zeros(2, 9, 64),
        "value": torch.zeros(2, 9, 64),
        "positions": torch.arange(3),
        "window": None,
        "scaling": 1.0,
    }
    with pytest.raises(ValueError, match=message):
        ragkv_kernels.attend(**{**call, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": torch.zeros(3, 99, dtype=torch.uint8)}, "bytes"),
        ({"data": torch.zeros(2, 99, dtype=torch.uint8)}, "2 layers cannot go to 3"),
        ({"slots": torch.arange(4)}, "5 rows cannot go to 4"),
        ({"table": (torch.ones(9, 40), torch.ones(9, 40))}, "table"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_layers_that_do_not_fit_are_not_restored(change, message):
    call = {
        "data": torch.zeros(3, 99, dtype=torch.uint8),
        "rows": torch.arange(5),
        "slots": torch.arange(5),
        "table": (torch.ones(9, 32), torch.zeros(9, 32)),
    } | change
    with pytest.raises(ValueError, match=message):
        ragkv_kernels.restore(call.pop("data"), 5, *torch.zeros(2, 3, 2, 9, 64), grid=INT8, **call)


@pytest.mark.parametrize(
    "cached",
    [torch.zeros(2, 3, 1, 5, 64), torch.zeros(2, 3, 2, 5, 64).half(), torch.zeros(2, 2, 2, 5, 64)],
    ids=["heads", "dtype", "layers"],
)
def test_layers_of_another_model_are_not_moved(cached):
    rows, table = torch.arange(5), (torch.ones(9, 32), torch.zeros(9, 32))
    buffer = torch.zeros(2, 3, 2, 9, 64)
    with pytest.raises(ValueError, match=r"fit|layers"):
        ragkv_kernels.place(
            [tuple(cached)],
            *buffer,
            counts=[5],
            part_of=rows * 0,
            rows=rows,
            slots=rows,
            table=table,
        )


def test_what_needs_a_gradient_is_left_to_torch(monkeypatch):
    """The auxiliary model is trained through this attention."""
    monkeypatch.setattr(ragkv_kernels, "runs_attend", lambda *_: True)
    still = SimpleNamespace(is_cuda=True, requires_grad=False)
    learning = SimpleNamespace(is_cuda=True, requires_grad=True)
    assert suits_kernels(still, still, still, ScoreRule(1.0))
    assert not suits_kernels(still, learning, still, ScoreRule(1.0))
    with torch.no_grad():
        assert suits_kernels(still, learning, still, ScoreRule(1.0))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_triton_that_cannot_start_leaves_the_work_to_torch(monkeypatch):
    """It needs a C compiler, which few images have."""

    def fails():
        raise RuntimeError("Failed to find C compiler.\nPlease specify one.")

    active = SimpleNamespace(get_current_target=fails)
    monkeypatch.setattr("triton.runtime.driver", SimpleNamespace(active=active))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    problem = dispatch._problem_of_device.__wrapped__(torch.device("cuda"))
    assert problem is not None
    assert "Triton cannot start (Failed to find C compiler.)" in problem
    active.get_current_target = lambda: None
    assert dispatch._problem_of_device.__wrapped__(torch.device("cuda")) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("window", [None, 100])
def test_passes_on_a_gpu_attend_as_on_a_cpu(window):
    torch.manual_seed(0)
    rows = torch.randperm(600)[:200].sort().values
    query = torch.randn(1, 8, 200, 64)
    key, value = torch.randn(2, 1, 2, 600, 64)
    expected = attend(query, key, value, Rows(rows.numpy(), rows), window, ScoreRule(0.125))
    on_gpu = [part.cuda() for part in (query, key, value)]
    ours = attend(*on_gpu, Rows.on("cuda", rows.numpy()), window, ScoreRule(0.125))
    torch.testing.assert_close(ours.cpu(), expected, atol=1e-4, rtol=1e-4)
