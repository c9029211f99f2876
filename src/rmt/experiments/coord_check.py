"""The coordinate check of muP: do the numbers inside the model keep their size when the model grows?

Models of several widths, each under muP and under the standard parametrisation (LeCun initial values, one learning
rate for all), take a few optimizer steps on one batch. Before and after, the mean absolute value of what every core
reads and writes, of the attention logits, of the stream and of the logits is recorded, and how far each has moved. A
slope is that of the logarithm against the logarithm of the width: 0 is flat, 1 doubles with the width. Under muP the
slopes should be near 0, or below it for what averages out; without muP the updates grow with the width.

Axes: B batch, T tokens, H query heads, G key/value heads, V head_dim.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rmt.config import ModelConfig, TrainConfig
from rmt.errors import InputError, suggest
from rmt.experiments.transfer import widen
from rmt.experiments.tune import own_base
from rmt.model import LanguageModel, build
from rmt.streams import STREAMS
from rmt.train.run import write_text
from rmt.train.step import Stepper

#: Narrow enough that eight times as wide is quick on a CPU.
BASE_MODEL = ModelConfig(layers=2, heads=4, head_dim=16, key_dim=16, ff_dim=256, vocab_size=256, context=32, init="mup")
BASE_TRAIN = TrainConfig(batch_size=8, lr=1e-2, warmup=0.0, final_lr=1.0, weight_decay=0.0)

INITS = ("mup", "lecun")
MOMENTS = ("start", "end", "change")  # before the first step, after the last, and the distance between the two


@dataclass(frozen=True)
class Check:
    """What is measured.

    Args:
        streams: residual streams.
        model: the base model; its own dimensions become the base of muTransfer.
        train: batch size and learning rate.
        widths: factors of the base model.
        steps: optimizer steps between the two measurements.
        seeds: models and batches over which the sizes are averaged.
    """

    streams: Sequence[str] = ("matrix", "vector")
    model: ModelConfig = BASE_MODEL
    train: TrainConfig = BASE_TRAIN
    widths: Sequence[int] = (1, 2, 4, 8)
    steps: int = 4
    seeds: int = 3

    def __post_init__(self) -> None:
        for name in self.streams:
            if name not in STREAMS:
                raise InputError(f"there is no stream {name!r}. {suggest(name, STREAMS)}")
        if len(set(self.widths)) < 2 or min(self.widths) < 1:
            raise InputError("--widths: give at least two whole factors of the base model, for example 1,2,4,8.")
        for name in ("steps", "seeds"):
            if getattr(self, name) < 1:
                raise InputError(f"--{name} {getattr(self, name)}: at least one is needed.")

    def model_of(self, stream: str, init: str, width: int) -> ModelConfig:
        base = self.model.replace(stream=stream, init=init)
        return widen(base.replace(mup=own_base(base)), width)


def coord_check(check: Check) -> list[dict[str, Any]]:
    """A row per stream, parametrisation and quantity: its mean absolute value at each width, and the slopes."""
    rows = []
    for stream in check.streams:
        for init in INITS:
            found = {
                width: [measure(check, stream, init, width, seed) for seed in range(check.seeds)]
                for width in check.widths
            }
            for name in found[check.widths[0]][0]:
                row: dict[str, Any] = {"stream": stream, "init": init, "quantity": name}
                for index, moment in enumerate(MOMENTS):
                    sizes = [float(np.mean([one[name][index] for one in found[width]])) for width in check.widths]
                    row[moment] = dict(zip(map(str, check.widths), sizes, strict=True))
                    row[f"{moment}_slope"] = slope(check.widths, sizes)
                rows.append(row)
    return rows


def slope(widths: Sequence[int], sizes: Sequence[float]) -> float | None:
    """Of log size against log width; None where something is zero (as logits are before the first step)."""
    if min(sizes) <= 0 or not np.isfinite(sizes).all():
        return None
    return float(np.polyfit(np.log(widths), np.log(sizes), 1)[0])


def measure(check: Check, stream: str, init: str, width: int, seed: int) -> dict[str, tuple[float, float, float]]:
    """Sizes before and after the steps, and of the change, of one model."""
    config = check.model_of(stream, init, width)
    tokens = torch.Generator().manual_seed(seed)
    shape = (check.train.batch_size, config.context + 1)
    batch = torch.randint(config.vocab_size, shape, generator=tokens)
    ids, targets = batch[:, :-1], batch[:, 1:]
    model = build(config, seed=seed, device="cpu")
    stepper = Stepper(model, check.train.replace(steps=check.steps, ops="plain"), check.steps)
    before = record(model, ids)
    for index in range(check.steps):
        stepper.step(index, ids, targets)
    after = record(model, ids)
    sizes = {}
    for name, old in before.items():
        change = [new_one - old_one for new_one, old_one in zip(after[name], old, strict=True)]
        sizes[name] = (size(old), size(after[name]), size(change))
    return sizes


@torch.no_grad()
def record(model: LanguageModel, ids: Tensor) -> dict[str, list[Tensor]]:
    """What goes through the model on a batch, a tensor per layer."""
    found: dict[str, list[Tensor]] = {}

    def keep(name: str, *tensors: Tensor) -> None:
        found.setdefault(name, []).append(torch.cat([tensor.flatten() for tensor in tensors]))

    def attention(core: Any, given: tuple, heads_BTHV: Tensor) -> None:
        q_BTHV, k_BTGV, v_BTGV = given[0]
        keep("attention reads", q_BTHV, k_BTGV, v_BTGV)
        keep("attention logits", attention_logits(q_BTHV, k_BTGV) * core.scale)
        keep("attention writes", heads_BTHV)

    def feed_forward(core: Any, given: tuple, y_BTD: Tensor) -> None:
        keep("feed-forward reads", given[0])
        keep("feed-forward writes", y_BTD)

    def stream(boundary: Any, given: tuple, result: tuple) -> None:
        keep("stream", *tensors_in(result[0]))

    hooks = [core.register_forward_hook(attention) for core in model.attention]
    hooks += [core.register_forward_hook(feed_forward) for core in model.feed_forward]
    hooks += [boundary.register_forward_hook(stream) for boundary in model.stream]
    try:
        output = model(ids)
    finally:
        for hook in hooks:
            hook.remove()
    keep("unembedding reads", output.hidden_BTD)
    keep("logits", output.logits)
    return found


def attention_logits(q_BTHV: Tensor, k_BTGV: Tensor) -> Tensor:
    """q k^T of every query with the keys it sees, as one vector."""
    k_BTHV = k_BTGV.repeat_interleave(q_BTHV.shape[2] // k_BTGV.shape[2], dim=2)
    logits_BHTT = torch.einsum("bthv,bshv->bhts", q_BTHV, k_BTHV)
    sees_TT = torch.ones(logits_BHTT.shape[-2:], dtype=torch.bool).tril()
    return logits_BHTT[..., sees_TT]


def tensors_in(state: Any) -> list[Tensor]:
    """The tensors of a stream's state, whatever it is made of."""
    if isinstance(state, Tensor):
        return [state]
    parts = state.values() if isinstance(state, dict) else state if isinstance(state, tuple | list) else ()
    return [tensor for part in parts for tensor in tensors_in(part)]


def size(tensors: Sequence[Tensor]) -> float:
    """Mean absolute value, averaged over layers."""
    return float(np.mean([tensor.abs().mean().item() for tensor in tensors]))


def write_check(check: Check, rows: Sequence[dict[str, Any]], out: Path) -> list[Path]:
    """Write the numbers and the figure; returns the files."""
    from rmt.report.tuning import coordinates_figure

    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write {out}: {error.strerror}. Choose another --out.") from None
    settings = {"steps": check.steps, "seeds": check.seeds, "lr": check.train.lr, "base": check.model.to_dict()}
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    write_text(out / "coordinates.json", f'{json.dumps(settings, indent=1)[:-2]},\n "rows": [\n{lines}\n ]\n}}\n')
    return [out / "coordinates.json", *coordinates_figure(rows, check.steps, out / "coordinates")]
