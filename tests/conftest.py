"""What all tests share: deterministic seeds, one thread per worker, and the golden vectors where they are at hand."""

from pathlib import Path

import pytest
import torch

SHARED = Path(__file__).resolve().parents[2] / "shared"

torch.set_num_threads(1)  # tiny tensors gain nothing from more, and tests run side by side


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def shared() -> Path:
    """Folder with golden vectors and corpora, beside the repository."""
    if not SHARED.exists():
        pytest.skip("the folder with golden vectors and corpora is not here")
    return SHARED
