"""Tests of the operations run with every uninitialised number set to NaN: PyTorch's own, and the C++ scratch memory."""

import pytest
import torch

from rmt.ops import cross_entropy, feed_forward
from rmt.ops.boundary import native as native_boundary
from rmt.ops.native import attention as native_attention
from rmt.ops.native import build

LOADED = (
    build._load,
    native_boundary.library,
    native_attention.library,
    cross_entropy._library,
    feed_forward._library,
)


def forget_library():
    for loaded in LOADED:
        loaded.cache_clear()


@pytest.fixture(scope="session", autouse=True)
def _poisoned_library():
    plain = build.FLAGS
    build.FLAGS = (*plain, "-DRMT_POISON")
    forget_library()
    yield
    build.FLAGS = plain
    forget_library()


@pytest.fixture(autouse=True)
def _poisoned_memory():
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """An empty cache for compiled libraries, and nothing loaded."""
    monkeypatch.setenv("RMT_CACHE", str(tmp_path / "cache"))
    forget_library()
    yield tmp_path / "cache"
    forget_library()


@pytest.fixture
def native():
    if build.problem():
        pytest.skip(build.problem())
