"""What all tests share: deterministic seeds, one thread per worker, and the golden vectors where they are at hand."""

import os
from pathlib import Path

import pytest
import torch

SHARED = Path(__file__).resolve().parents[2] / "shared"

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def shared() -> Path:
    """Folder with golden vectors and corpora, beside the repository."""
    if not SHARED.exists():
        pytest.skip("the folder with golden vectors and corpora is not here")
    return SHARED
