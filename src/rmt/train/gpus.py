"""What the paper's models would cost on common GPUs, on paper: no GPU is needed, and none was used.

    python -m rmt.train.gpus            # the tables of docs/scaling.md

Time is the exact number of training FLOPs (`rmt count`) over a share of the GPU's peak, plus, for the matrix stream,
the time its memory needs to pass through the GPU's memory six times per boundary (read and written in the forward pass;
stream and gradient read and written in the backward pass). Memory is that of `rmt count`: float32 weights, gradients
and moments, and activations of one micro-batch in float32 (bfloat16 needs less).
"""

from __future__ import annotations

from dataclasses import dataclass

from rmt.config import PAPER_PRESETS, ModelConfig, preset, recipe
from rmt.theory.accounting import count

SHARES = (0.4, 0.2)  # of the peak: what good and ordinary training code reaches with models of this size
USABLE = 0.9  # of the memory
PASSES = 6


@dataclass(frozen=True)
class GPU:
    """Vendor's figures: dense bfloat16 matrix products with float32 sums, memory bandwidth, memory."""

    name: str
    flops: float
    bandwidth: float
    memory: float


GPUS = (
    GPU("RTX 3090", 71e12, 936e9, 24e9),
    GPU("RTX 4090", 165e12, 1008e9, 24e9),
    GPU("A100 80 GB", 312e12, 2039e9, 80e9),
    GPU("H100 SXM", 989e12, 3350e9, 80e9),
)


def hours(name: str, gpu: GPU, share: float, gpus: int = 1) -> float:
    """Of the whole run of a preset."""
    model, train = preset(name), recipe(name)
    tokens = train.total_steps(model.context) * train.batch_size * model.context
    arithmetic = count(model).flops.training(tokens) / (share * gpu.flops)
    return (arithmetic + tokens * stream_traffic(model) / gpu.bandwidth) / gpus / 3600


def stream_traffic(model: ModelConfig) -> int:
    """Bytes per token that the matrix stream moves in a training step; the vector stream's are part of the share."""
    boundaries = 2 * model.layers + 1
    return PASSES * boundaries * 4 * model.stream_size if model.stream == "matrix" else 0


def training_bytes(name: str, micro_batch: int, processes: int = 1) -> int:
    """Per GPU. With fsdp: whole weights, a slice of weights, gradients and moments, one micro-batch's activations."""
    parts = count(preset(name), batch=micro_batch).memory.training.parts
    state = parts["weights"] + parts["gradients"] + parts["optimizer"]
    rest = sum(parts.values()) - state
    return rest + (state if processes == 1 else parts["weights"] + state // processes)


def largest_micro_batch(name: str, memory: float, processes: int = 1) -> int:
    """The largest power of two, up to the batch, whose training step fits; 0 if not even one sequence does."""
    size = recipe(name).batch_size
    while size and training_bytes(name, size, processes) > USABLE * memory:
        size //= 2
    return size


def span(found: list[float]) -> str:
    """[0.26, 0.5] -> 16-30 min; [7.3, 14.1] -> 7.3-14 h."""
    unit, scale = ("min", 60) if max(found) < 1 else ("h", 1)
    return "-".join(f"{scale * value:.{1 if scale * value < 9.95 else 0}f}" for value in found) + f" {unit}"


def tables() -> str:
    times = ["| model | parameters | tokens | FLOPs | " + " | ".join(gpu.name for gpu in GPUS) + " |"]
    times.append("|---|" + "---:|" * (3 + len(GPUS)))
    sizes = ["| model | weights, gradients, moments | per sequence | micro-batch on 24 GB | on 80 GB |"]
    sizes.append("|---|" + "---:|" * 4)
    for name in PAPER_PRESETS:
        model, train = preset(name), recipe(name)
        counted = count(model)
        tokens = train.total_steps(model.context) * train.batch_size * model.context
        spans = [span([hours(name, gpu, share) for share in SHARES]) for gpu in GPUS]
        cells = [name, f"{int(counted.params) / 1e6:.0f}M", f"{tokens:.2g}", f"{counted.flops.training(tokens):.2g}"]
        times.append(f"| {' | '.join([*cells, *spans])} |")
        two, three = training_bytes(name, 2), training_bytes(name, 3)  # with these a chunk of logits is full
        parts = counted.memory.training.parts
        state = parts["weights"] + parts["gradients"] + parts["optimizer"]
        fits = [str(largest_micro_batch(name, memory)) for memory in (24e9, 80e9)]
        sizes.append(f"| {' | '.join([name, f'{state / 1e9:.2f} GB', f'{(three - two) / 1e9:.2f} GB', *fits])} |")
    return "\n".join([*times, "", *sizes])


if __name__ == "__main__":
    print(tables())
