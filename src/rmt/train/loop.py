"""The training loop: data in order, one step after another, evaluation, samples, checkpoints, an orderly end.

`train` is the whole of `rmt train`. It resolves where to start (from nothing, or from the newest undamaged
checkpoint), then `Trainer.run` repeats: batch -> step -> log -> evaluate -> save. A batch is a pure function of the
step, so there is no loader state to save: a run that is stopped and resumed gives the same bytes as one that was not.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from rmt.config import ModelConfig, TrainConfig
from rmt.data import Order, Prefetcher, TokenDataset, document_ids
from rmt.errors import InputError, RunFailed
from rmt.evaluate.loss import split_loss
from rmt.model import build
from rmt.sampling import sample
from rmt.theory.accounting import count
from rmt.train import checkpoint
from rmt.train.interrupt import Interrupt
from rmt.train.log import Mirror
from rmt.train.peak import matmul_peak
from rmt.train.run import RunConfig, RunDirectory, environment, read_log, write_text
from rmt.train.step import Stepper, StepResult
from rmt.train.view import SilentView, Status, View

EVALUATIONS, CHECKPOINTS, SAMPLES = 20, 10, 4  # per run, where the configuration does not say how often
EVALUATION_SHARE = 0.1  # of the training FLOPs, at most, unless the configuration says how often
SAMPLE_TOKENS = 120


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    path: Path
    step: int
    tokens: int
    ce: float | None
    dev_ce: float | None
    seconds: float
    finished: bool
    interrupted: int | None = None  # the signal's number


def train(
    model_config: ModelConfig,
    train_config: TrainConfig,
    data: str | Path,
    out: str | Path,
    *,
    resume: bool = False,
    device: str | torch.device | None = None,
    view: View | None = None,
) -> Result:
    """Train a model and leave a run directory.

    Args:
        model_config: the network.
        train_config: the recipe.
        data: a token dataset made by `rmt data prepare`.
        out: the run directory, new or (with `resume`) that of an earlier run.
        resume: go on from the newest checkpoint in `out`, or start if there is none.
        device: default: a GPU if there is one, else the CPU.
        view: what is shown meanwhile (default: nothing).
    """
    dataset = TokenDataset.open(data)
    config = RunConfig(model_config, train_config, {"path": str(data), "fingerprint": dataset.fingerprint})
    check_fit(model_config, train_config, dataset)
    with Interrupt() as interrupt, deterministic(train_config), RunDirectory(Path(out)) as run:
        check_resumable(run, config, resume)
        trainer = Trainer(config, dataset, run, find_device(device), view or SilentView(), interrupt)
        return trainer.run_all()


def check_fit(model: ModelConfig, train: TrainConfig, dataset: TokenDataset) -> None:
    if dataset.vocab_size > model.vocab_size:
        raise InputError(
            f"the data has a vocabulary of {dataset.vocab_size}, the model of {model.vocab_size}: "
            f"set model.vocab_size to {dataset.vocab_size}, or prepare the data with a smaller tokenizer."
        )
    dataset.windows("train", model.context)  # refuses a corpus shorter than one window
    steps = train.total_steps(model.context)
    if train.stop_at is not None and train.stop_at > steps:
        raise InputError(f"train.stop_at = {train.stop_at} lies behind the last step, {steps}: make it smaller.")


def check_resumable(run: RunDirectory, config: RunConfig, resume: bool) -> None:
    if not run.config_file.exists():
        return
    if not resume:
        raise InputError(f"{run.path} holds a run already: add --resume to go on with it, or choose another --out.")
    differences = config.differences(RunConfig.load(run.config_file))
    if differences:
        raise InputError(
            f"{run.path} was started with other settings ({'; '.join(differences)}): "
            "resume with the same, or start a new run."
        )


def find_device(device: str | torch.device | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@contextlib.contextmanager
def deterministic(train: TrainConfig) -> Iterator[None]:
    """Same inputs, same bits, where the configuration asks for it; the former settings come back afterwards."""
    before = torch.are_deterministic_algorithms_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    if train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


class Trainer:
    """One run in progress."""

    def __init__(
        self,
        config: RunConfig,
        dataset: TokenDataset,
        run: RunDirectory,
        device: torch.device,
        view: View,
        interrupt: Interrupt,
    ) -> None:
        self.config, self.dataset, self.directory = config, dataset, run
        self.device, self.view, self.interrupt = device, view, interrupt
        self.model_config, self.train = config.model, config.train
        self.steps = self.train.total_steps(self.model_config.context)
        self.batch_tokens = self.train.batch_size * self.model_config.context
        self.model = build(self.model_config, seed=self.train.seed, device=device)
        self.stepper = Stepper(self.model, self.train, self.steps)
        self.saver = checkpoint.Saver(run.checkpoints, self.train.keep)
        self.step = 0
        self.seconds = 0.0
        self.last: StepResult | None = None
        self.dev_ce: float | None = None
        self.best_dev_ce: float | None = None
        self.has_dev = dataset.tokens("dev") > self.model_config.context
        self.eval_every = self.train.eval_every or self.cheap_interval()

    def run_all(self) -> Result:
        """From the first or the resumed step to the last, or to `stop_at`, or to a signal."""
        self.restore()
        self.begin()
        end = min(self.steps, self.train.stop_at or self.steps)
        self.view.start(self.step, self.steps, self.directory.path.name)
        try:
            self.repeat(end)
        finally:
            self.view.close()
            self.saver.wait()
            self.mirror.close()
        return self.finish()

    def restore(self) -> None:
        checkpoint.clean(self.directory.checkpoints)
        snapshot, problems = checkpoint.newest(self.directory.checkpoints)
        for problem in problems:
            self.view.note(f"{problem} An earlier checkpoint is used.")
        if snapshot is None and problems:
            raise InputError(f"{self.directory.path} has no usable checkpoint: {problems[0]}")
        if snapshot is None:
            checkpoint.seed_everything(self.train.seed)
        else:
            checkpoint.restore(snapshot, self.model, self.stepper.optimizer)
            self.step = snapshot.step
            self.best_dev_ce, self.dev_ce = snapshot.state["best_dev_ce"], snapshot.state["dev_ce"]
        self.directory.rewind(self.step)
        if timings := read_log(self.directory.path, "timing"):
            self.seconds = timings[-1]["seconds"]

    def begin(self) -> None:
        self.config.save(self.directory.config_file)
        write_text(self.directory.path / "environment.json", json.dumps(environment(self.device), indent=1))
        self.peak = matmul_peak(self.device, self.train.precision)
        self.flops_per_token = count(self.model_config).flops.training_per_token
        self.mirror = Mirror(
            self.directory.path,
            tensorboard=self.train.tensorboard,
            wandb=self.train.wandb,
            config={"model": self.model_config.to_dict(), "train": self.train.to_dict()},
            step=self.step,
        )

    def repeat(self, end: int) -> None:
        order = Order(
            fingerprint=self.dataset.fingerprint,
            windows=self.dataset.windows("train", self.model_config.context),
            batch_size=self.train.batch_size,
            seed=self.train.seed,
        )
        if self.step >= end:
            return
        with Prefetcher(
            self.dataset, order, split="train", context=self.model_config.context, start=self.step
        ) as batches:
            for index, _, tokens in batches:
                self.one_step(index, tokens)
                last = self.step >= end or self.interrupt.requested is not None
                evaluated = self.every(self.eval_every, EVALUATIONS) or self.step >= self.steps
                if evaluated:
                    self.evaluate()
                if last or self.every(self.train.checkpoint_every, CHECKPOINTS):
                    self.save()
                if self.every(self.train.sample_every, SAMPLES):
                    self.write_sample()
                if last:
                    return

    def one_step(self, index: int, tokens_BN: object) -> None:
        began = time.perf_counter()
        tokens = torch.from_numpy(tokens_BN)
        ids, targets = tokens[:, :-1], tokens[:, 1:]
        documents = None
        if self.train.document_mask:
            documents = torch.from_numpy(document_ids(ids.numpy(), self.dataset.eot))
        result = self.stepper.step(index, ids, targets, documents)
        self.step = index + 1
        self.last = result
        if not result.updated:
            self.refuse_update(result)
        spent = time.perf_counter() - began
        self.seconds += spent
        self.log(result, spent)

    def refuse_update(self, result: StepResult) -> None:
        problem = f"step {self.step}: the loss is {result.loss}, the gradient norm {result.grad_norm}"
        if self.train.on_nan == "stop":
            raise RunFailed(
                f"{problem}; the weights were not changed. Resume with a smaller train.lr from an earlier checkpoint "
                "in a new run, or set train.on_nan skip."
            )
        self.view.note(f"{problem}; skipped.")

    def log(self, result: StepResult, spent: float) -> None:
        tokens = self.step * self.batch_tokens
        speed = self.batch_tokens / spent
        record = {"loss": result.loss, "ce": result.ce, "lr": result.lr, "grad_norm": result.grad_norm}
        self.directory.log("metrics", {"step": self.step, "tokens": tokens, **record})
        share = speed * self.flops_per_token / self.peak if self.peak else None
        timing = {"step": self.step, "seconds": self.seconds, "tokens_per_second": speed, "peak_share": share}
        self.directory.log("timing", timing)
        self.mirror.write(self.step, {f"train/{name}": value for name, value in record.items()})
        self.mirror.write(self.step, {"speed/tokens_per_second": speed})
        self.view.update(Status(self.step, result.ce, result.lr, speed, share, self.dev_ce))

    def cheap_interval(self) -> int:
        """Steps between evaluations that keep them below `EVALUATION_SHARE`; a forward pass is a third of a step."""
        tokens = min(self.train.eval_tokens, self.dataset.tokens("dev"))
        return max(1, self.steps // EVALUATIONS, math.ceil(tokens / (3 * EVALUATION_SHARE * self.batch_tokens)))

    def every(self, interval: int | None, default_count: int) -> bool:
        if interval == 0:
            return False
        return self.step % (interval or max(1, self.steps // default_count)) == 0

    def evaluate(self) -> None:
        if not self.has_dev:
            return
        found = split_loss(
            self.model,
            self.dataset,
            "dev",
            tokens=self.train.eval_tokens,
            batch_size=self.train.micro_batch or min(self.train.batch_size, 16),
            document_mask=self.train.document_mask,
        )
        self.dev_ce = found.ce
        record = {"dev_ce": found.ce, "dev_accuracy": found.accuracy, "dev_tokens": found.tokens}
        self.directory.log("metrics", {"step": self.step, "tokens": self.step * self.batch_tokens, **record})
        self.mirror.write(self.step, {"dev/ce": found.ce, "dev/accuracy": found.accuracy})

    def save(self) -> None:
        is_best = self.dev_ce is not None and (self.best_dev_ce is None or self.dev_ce < self.best_dev_ce)
        if is_best:
            self.best_dev_ce = self.dev_ce
        state = {
            "tokens": self.step * self.batch_tokens,
            "dev_ce": self.dev_ce,
            "best_dev_ce": self.best_dev_ce,
            "fingerprint": self.dataset.fingerprint,
            "model": self.model_config.to_dict(),
            "train": self.train.to_dict(),
        }
        self.saver.save(checkpoint.take_snapshot(self.step, self.model, self.stepper.optimizer, state), is_best)

    def write_sample(self) -> None:
        if self.last is None or not self.last.finite:
            return
        prompt = torch.tensor([[self.dataset.eot]], device=self.device)
        ids = sample(
            self.model, prompt, SAMPLE_TOKENS, temperature=0.8, top_k=50, stop=self.dataset.eot, seed=self.train.seed
        )
        self.directory.sample(self.step, self.dataset.tokenizer().decode(ids[0, 1:].tolist()))

    def finish(self) -> Result:
        if self.step >= self.steps:
            from rmt.report.curves import loss_curve

            loss_curve(self.directory.path)
        signal = self.interrupt.requested
        return Result(
            path=self.directory.path,
            step=self.step,
            tokens=self.step * self.batch_tokens,
            ce=self.last.ce if self.last else None,
            dev_ce=self.dev_ce,
            seconds=self.seconds,
            finished=self.step >= self.steps,
            interrupted=int(signal) if signal is not None else None,
        )
