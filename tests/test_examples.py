"""The examples run as a user runs them, and do what they say."""

import math
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
MATRIX_STREAM = ROOT / "examples" / "matrix_stream_in_your_model.py"


@pytest.fixture
def _one_thread():
    """Small tensors: on a busy machine a second thread only waits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_one_thread")
def test_a_matrix_stream_around_foreign_layers_learns():
    losses = runpy.run_path(str(MATRIX_STREAM))["train"](steps=40)
    assert losses[0] > 0.8 * math.log(12)
    assert losses[-1] < 0.3 * losses[0]


def test_the_example_runs_as_a_script_and_prints_the_loss():
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(MATRIX_STREAM)], capture_output=True, text=True, env=environment, timeout=120, check=True
    )
    assert done.stderr == ""
    assert "step 59  loss" in done.stdout
