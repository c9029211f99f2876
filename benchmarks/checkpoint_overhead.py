"""What a checkpoint costs the step during which it is taken and written in the background.

    python benchmarks/checkpoint_overhead.py [--preset rmt-46m] [--batch N] [--rounds 5] [--threads N] [--json FILE]

Steps with and without a save take turns. A step with a save pays for the copy in memory and for what the writer takes
from the processor and the interpreter; the write of one checkpoint is waited for, untimed, before the next step. The
cost of a save is a fixed number of seconds, so its share of a step depends on the batch; the default is the recipe's,
in micro-batches of 8.

`cost` is the median ratio of the clock's times, minus one, and means something on a quiet machine only. `cpu_cost` is
the processor time of a whole save over that of a step of the recipe's batch: what the save costs at most, where no core
is ever idle. Measure it with --threads 1 (waiting threads burn time); it hardly depends on what else the machine does.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch

import rmt
from rmt.bench.harness import Sample, measure, seconds_of
from rmt.train import checkpoint
from rmt.train.step import Stepper

MICRO_BATCH = 8


def overhead(preset: str, batch: int | None, rounds: int, folder: Path) -> dict:
    recipe = rmt.recipe(preset)
    batch = batch or recipe.batch_size
    config, train = rmt.preset(preset), recipe.replace(batch_size=batch, micro_batch=min(batch, MICRO_BATCH))
    stepper = Stepper(rmt.build(config), train, steps=10_000)
    saver = checkpoint.Saver(folder, keep=1)
    rows = torch.randint(0, config.vocab_size, (batch, config.context + 1))
    index, copies, processor = 0, [], {"step": [], "step with a save": []}

    def step() -> None:
        nonlocal index
        stepper.step(index, rows[:, :-1], rows[:, 1:])
        index += 1

    def step_with_save() -> None:
        began = time.perf_counter()
        snapshot = checkpoint.take_snapshot(index, stepper.model, stepper.optimizer, {})
        copies.append(time.perf_counter() - began)
        assert snapshot is not None
        saver.save(snapshot)
        step()

    samples: dict[str, list[Sample]] = {"step": [], "step with a save": []}
    functions = {"step": step, "step with a save": step_with_save}
    for turn in range(rounds + 1):
        names = list(functions) if turn % 2 else list(reversed(functions))
        for name in names:
            began = time.process_time()
            sample = measure(functions[name])
            saver.wait()
            if turn:  # the first round warms up
                samples[name].append(sample)
                processor[name].append(time.process_time() - began)
    seconds = {name: seconds_of(found).median for name, found in samples.items()}
    ratios = [b.seconds / a.seconds for a, b in zip(*samples.values(), strict=True)]
    plain, saving = (statistics.median(found) for found in processor.values())
    newest = checkpoint.listing(folder)[-1]
    return {
        "preset": preset,
        "batch": batch,
        "threads": torch.get_num_threads(),
        "checkpoint_bytes": sum(file.stat().st_size for file in newest.iterdir()),
        "seconds": seconds,
        "copy_seconds": statistics.median(copies),
        "cost": statistics.median(ratios) - 1,
        "cpu_seconds": {"step": plain, "save": saving - plain},
        "cpu_cost": (saving - plain) / (plain * recipe.batch_size / batch),
        "ratios": [round(ratio, 4) for ratio in ratios],
        "other_processes_share": round(statistics.median(s.others for found in samples.values() for s in found), 3),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="rmt-46m")
    parser.add_argument("--batch", type=int, help="sequences per step (default: the recipe's)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, help="of torch (default: all cores)")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as name:
        result = overhead(arguments.preset, arguments.batch, arguments.rounds, Path(name))
    print(json.dumps(result, indent=1))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(result, indent=1) + "\n")
