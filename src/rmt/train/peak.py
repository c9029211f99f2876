"""How fast this machine multiplies matrices: the yardstick for the speed of training."""

import time

import torch

from rmt.train.step import autocast

SIZES = {"cpu": 1024, "cuda": 8192, "mps": 2048}
ROUNDS = 5


def matmul_peak(device: torch.device, precision: str = "float32") -> float:
    """FLOP/s of the best of a few square matrix multiplications, in the precision that training uses."""
    size = SIZES.get(device.type, 1024)
    with autocast(device, precision), torch.no_grad():
        a, b = (torch.ones(size, size, device=device) for _ in range(2))
        _ = a @ b
        best = float("inf")
        for _ in range(ROUNDS):
            wait(device)
            began = time.perf_counter()
            _ = a @ b
            wait(device)
            best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
