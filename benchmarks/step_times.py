"""Seconds of one training step of every model among some runs, measured side by side.

    python benchmarks/step_times.py results/variants results/residual_size --json results/step_times.json

Runs of an experiment share a machine with each other and with whatever else it does, so their own clocks cannot be
compared. Here all models take their steps in turns, in one process with one thread, and its CPU time is counted.
"""

import argparse
import json
from pathlib import Path

import torch

from rmt.bench.harness import interleave
from rmt.bench.step import MIDDLE, batch_of
from rmt.config import TrainConfig
from rmt.model import build
from rmt.report.runs import find_runs
from rmt.train.run import RunConfig
from rmt.train.step import Stepper


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="run directories, or folders of them")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="where to keep the result")
    args = parser.parse_args()
    torch.set_num_threads(1)
    models = distinct_models(args.runs)
    functions = {str(index): step_of(model, batch) for index, (model, batch) in enumerate(models)}
    timing = interleave(functions, args.rounds, clock="cpu", say=print)
    rows = [
        {"model": model.to_dict(), "batch_size": batch, "seconds_per_step": round(timing.seconds(str(index)).median, 5)}
        for index, (model, batch) in enumerate(models)
    ]
    text = json.dumps({"command": "python benchmarks/step_times.py", "rounds": args.rounds, "models": rows}, indent=1)
    if args.json:
        args.json.write_text(text + "\n", encoding="utf-8")
    else:
        print(text)


def distinct_models(paths: list[Path]) -> list[tuple]:
    found = {}
    for run in find_runs(paths):
        config = RunConfig.load(run / "config.yaml")
        found[repr((config.model, config.train.batch_size))] = (config.model, config.train.batch_size)
    return list(found.values())


def step_of(model, batch):
    ids_BT, targets_BT = batch_of(model, batch)
    stepper = Stepper(build(model), TrainConfig(steps=1000, batch_size=batch, lr=1e-4), 1000)
    return lambda: stepper.step(MIDDLE, ids_BT, targets_BT)


if __name__ == "__main__":
    main()
