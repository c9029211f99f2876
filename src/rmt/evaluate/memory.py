"""How many sequences a forward pass may hold."""

import psutil
import torch

from rmt.config import ModelConfig

SHARE = 0.25  # of the free memory
MOST = 64


def batch_that_fits(config: ModelConfig, device: torch.device) -> int:
    """Sequences of a full context whose logits, their softmax and a copy take a quarter of the free memory."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
    else:
        free = psutil.virtual_memory().available
    numbers = 3 * config.vocab_size + 8 * config.model_dim + 2 * config.stream_size + 2 * config.ff_dim
    return max(1, min(MOST, int(SHARE * free / (4 * numbers * config.context))))
