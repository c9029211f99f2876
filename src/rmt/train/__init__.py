"""Training: the paper's recipe, one loop, checkpoints that can be trusted."""

from rmt.train.optimizer import build_optimizer, clip_gradients, schedule

__all__ = ["build_optimizer", "clip_gradients", "schedule"]
