"""How much of a training step is not forward, backward or optimizer: data, clipping, logging, the view.

    python benchmarks/trainer_overhead.py [--preset rmt-46m] [--steps 12] [--batch 2] [--json FILE]

Runs the real trainer on random tokens and sums the time inside the model's forward pass, the backward pass and the
optimizer's update; what remains of the loop's wall-clock time is the trainer's own.
"""

import argparse
import json
import random
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console

import rmt
from rmt.data import TokenDataset, prepare
from rmt.train.interrupt import Interrupt
from rmt.train.loop import Trainer, deterministic
from rmt.train.run import RunConfig, RunDirectory
from rmt.train.view import PlainView


class Stopwatch:
    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def running(self):
        began = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - began

    def wrap(self, function):
        def timed(*args, **kwargs):
            with self.running():
                return function(*args, **kwargs)

        return timed


def random_corpus(folder: Path, words: int = 200_000) -> Path:
    rng = random.Random(0)
    text = " ".join("".join(rng.choices("etaoinshr", k=rng.randint(2, 9))) for _ in range(words))
    (folder / "text.txt").write_text(text, encoding="utf-8")
    prepare([folder / "text.txt"], "train:2000", folder / "tokens", dev=0.05)
    return folder / "tokens"


def measure(preset: str, steps: int, batch: int) -> dict:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data = TokenDataset.open(random_corpus(folder))
        train = rmt.recipe(preset).replace(tokens=None, steps=steps, batch_size=batch, sample_every=0)
        train = train.replace(eval_every=10**6, checkpoint_every=10**6)
        config = RunConfig(rmt.preset(preset), train, {"path": str(data.path), "fingerprint": data.fingerprint})
        with Interrupt() as interrupt, deterministic(train), RunDirectory(folder / "run") as run:
            trainer = Trainer(config, data, run, torch.device("cpu"), PlainView(Console()), interrupt)
            trainer.restore()
            trainer.begin()
            trainer.view.start(0, steps, preset)
            trainer.evaluate = trainer.save = lambda: None  # both are asked for apart from the step
            trainer.repeat(2)  # warm-up
            core, backward = Stopwatch(), torch.Tensor.backward
            trainer.stepper.forward = core.wrap(trainer.stepper.forward)
            trainer.stepper.optimizer.step = core.wrap(trainer.stepper.optimizer.step)
            torch.Tensor.backward = core.wrap(backward)
            began = time.perf_counter()
            trainer.repeat(steps)
            total = time.perf_counter() - began
            torch.Tensor.backward = backward
            trainer.mirror.close()
    timed = steps - 2
    return {
        "preset": preset,
        "batch": batch,
        "steps": timed,
        "seconds_per_step": total / timed,
        "core_seconds_per_step": core.seconds / timed,
        "overhead_share": 1 - core.seconds / total,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="rmt-46m")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    result = measure(arguments.preset, arguments.steps, arguments.batch)
    print(json.dumps(result, indent=1))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(result, indent=1) + "\n")
