"""Small tensors: a second thread only waits, and on a busy machine it waits long."""

import pytest
import torch


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
