"""The paper's optimizer: AdamW with per-parameter learning rates, its schedule, and gradient clipping.

One update is w -= schedule(t) * (lr * lr_scale * adam + weight_decay * w): the decay follows the schedule but is not
multiplied by the learning rate, and norms, embeddings and unembeddings do not decay. PyTorch's AdamW multiplies its
decay by the learning rate, so each group is given weight_decay / (lr * lr_scale).
"""

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from rmt.config import ModelConfig, TrainConfig
from rmt.theory.mup import lr_scale, roles_of
from rmt.train.distributed import is_sliced, joint_norm, own


def build_optimizer(model: nn.Module, train: TrainConfig) -> torch.optim.AdamW:
    """AdamW over all parameters of a language model, each in exactly one group.

    Every group carries `peak_lr`; `set_learning_rate` multiplies it by the schedule before each step.
    """
    config: ModelConfig = model.config  # type: ignore[assignment]
    groups: dict[tuple[float, bool], list[Tensor]] = defaultdict(list)
    names = dict(model.named_parameters())
    for name, role in roles_of(model).items():
        groups[lr_scale(config, role), role.decays].append(names.pop(name))
    assert not names, f"parameters in no group: {sorted(names)}"
    settings = [
        {
            "params": parameters,
            "lr": train.lr * scale,
            "peak_lr": train.lr * scale,
            "weight_decay": train.weight_decay / (train.lr * scale) if decays else 0.0,
        }
        for (scale, decays), parameters in sorted(groups.items(), key=lambda item: item[0])
    ]
    fused = all(p.dtype.is_floating_point and p.device.type in ("cpu", "cuda", "mps") for p in model.parameters())
    return torch.optim.AdamW(settings, betas=(train.beta1, train.beta2), eps=train.eps, fused=fused)


def schedule(step: int, steps: int, warmup: float = 0.05, final: float = 0.1) -> float:
    """The learning rate of `step` (from 0) as a share of the peak: linear warm-up, then a cosine to `final`."""
    warmup_steps = round(warmup * steps)
    if step < warmup_steps:
        return step / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, steps - warmup_steps))
    return final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2


def set_learning_rate(optimizer: torch.optim.Optimizer, share: float) -> None:
    """Set every group's learning rate to `share` of its peak."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * share


@torch.no_grad()
def clip_gradients(parameters: Iterable[Tensor], limit: float) -> Tensor:
    """Scale all gradients so that their joint norm is at most `limit` (no epsilon); returns the norm before.

    Gradients may be sliced over several processes; the norm is that of the whole.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    held = [own(gradient) for gradient in gradients]
    norm = nn.utils.get_total_norm(held)
    if is_sliced(gradients[0]):
        norm = joint_norm(norm)
    if norm.device.type == "cpu" and not norm > limit:  # elsewhere the question would wait for the device
        return norm
    # A norm that is not finite leaves the gradients as they are: they show where it came from.
    torch._foreach_mul_(held, torch.where(norm.isfinite(), (limit / norm).clamp(max=1.0), 1.0))
    return norm
