"""Copies of the metrics for other viewers: TensorBoard, and Weights & Biases where it is installed and asked for."""

import importlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rmt.errors import InputError

Writer = Callable[[int, dict[str, float]], None]


class Mirror:
    """Sends each record to every viewer that the run asked for."""

    def __init__(self, run: Path, *, tensorboard: bool, wandb: str | None, config: dict[str, Any], step: int) -> None:
        self._writers: list[Writer] = []
        self._closers: list[Callable[[], Any]] = []
        if tensorboard:
            self._add_tensorboard(run, step)
        if wandb is not None:
            self._add_wandb(run, wandb, config)

    def write(self, step: int, values: dict[str, float]) -> None:
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        for writer in self._writers:
            writer(step, finite)

    def close(self) -> None:
        for close in self._closers:
            close()

    def _add_tensorboard(self, run: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        events = SummaryWriter(str(run), purge_step=step + 1 if step else None)

        def write(step: int, values: dict[str, float]) -> None:
            for name, value in values.items():
                events.add_scalar(name, value, step)

        self._writers.append(write)
        self._closers.append(events.close)

    def _add_wandb(self, run: Path, project: str, config: dict[str, Any]) -> None:
        try:
            wandb: Any = importlib.import_module("wandb")
        except ImportError:
            raise InputError("train.wandb is set but wandb is not installed: `pip install wandb`.") from None
        session = wandb.init(project=project, dir=str(run), id=run.name, resume="allow", config=config)
        self._writers.append(lambda step, values: session.log(dict(values), step=step))
        self._closers.append(session.finish)
