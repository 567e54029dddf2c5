"""A process that has computed forks: its child computes, or gets a typed error; it never hangs."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from fresh import output_of

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    script = Path(__file__).parents[1] / "support" / "forks.py"
    found: dict[str, Any] = json.loads(output_of(str(script), tmp_path_factory.mktemp("model")))
    return found


@pytest.mark.parametrize(
    "case",
    [
        "after_products",
        "after_answers",
        "in_a_pool",
        "loaded_in_the_fork",
        "while_healing",
        "while_another_thread_holds_the_model",
    ],
)
def test_a_fork_computes(forks, case):
    assert forks[case] == forks["expected"]


def test_a_fork_is_told_to_make_its_own_engine(forks):
    assert "make one in each process, after the fork" in forks["the_same_engine"]


def test_a_fork_has_connections_of_its_own(forks):
    assert forks["a_client"] == "Hello"
