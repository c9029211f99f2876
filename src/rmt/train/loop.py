"""The training loop: data in order, one step after another, evaluation, samples, checkpoints, an orderly end.

`train` is the whole of `rmt train`. It resolves where to start (from nothing, or from the newest undamaged
checkpoint), then `Trainer.repeat` goes batch -> step -> log -> evaluate -> save. A batch is a pure function of the
step, so there is no loader state to save: a run that is stopped and resumed gives the same bytes as one that was not.
Under torchrun every process runs this loop on its part of each batch, and process 0 alone writes (see
`rmt.train.distributed`).
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from rmt.config import ModelConfig, TrainConfig
from rmt.data import Order, Prefetcher, TokenDataset, document_ids
from rmt.errors import InputError, RunFailed
from rmt.evaluate.loss import Stopped, split_loss
from rmt.model import build
from rmt.sampling import sample
from rmt.theory.accounting import count
from rmt.train import checkpoint, heap
from rmt.train.distributed import ALONE, World, gathered, joined
from rmt.train.faults import NOT_FINITE, broken_parameters
from rmt.train.interrupt import Interrupt
from rmt.train.log import Mirror
from rmt.train.peak import matmul_peak
from rmt.train.run import Onlooker, RunConfig, RunDirectory, environment, read_log
from rmt.train.start import check_fit, check_resumable, deterministic, find_device, full_disk_explained
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
    with Interrupt() as interrupt, deterministic(train_config), joined(find_device(device)) as (world, where):
        dataset = TokenDataset.open(data)
        config = RunConfig(model_config, train_config, {"path": str(data), "fingerprint": dataset.fingerprint})
        check_fit(model_config, train_config, dataset, world)
        run = world.first_does(lambda: RunDirectory(Path(out))) or Onlooker(Path(out))
        with run, full_disk_explained(run.path), heap.kept(where):
            again = resume or world.largest(world.restarts) > 0  # each node's torchrun counts for itself
            world.first_does(lambda: check_resumable(run, config, again))
            shown = view if view is not None and world.first else SilentView()
            return Trainer(config, dataset, run, where, shown, interrupt, world).run_all()


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
        world: World = ALONE,
    ) -> None:
        self.config, self.dataset, self.directory = config, dataset, run
        self.device, self.view, self.interrupt, self.world = device, view, interrupt, world
        self.model_config, self.train = config.model, config.train
        self.steps = self.train.total_steps(self.model_config.context)
        self.batch_tokens = self.train.batch_size * self.model_config.context
        self.model = build(self.model_config, seed=self.train.seed, device=device)
        self.stepper = Stepper(self.model, self.train, self.steps, world)
        self.saver = checkpoint.Saver(run.checkpoints, self.train.keep)
        self.order = Order(
            fingerprint=dataset.fingerprint,
            windows=dataset.windows("train", self.model_config.context),
            batch_size=self.train.batch_size,
            seed=self.train.seed,
        )
        self.step = 0
        self.saved: int | None = None  # the step of the newest checkpoint
        self.signal = 0  # the signal that all processes have agreed to stop for
        self.seconds = 0.0
        self.last: StepResult | None = None
        self.dev_ce: float | None = None
        self.best_dev_ce: float | None = None
        self.evaluation_due = False  # a signal came before the evaluation of this step was over
        self.has_dev = dataset.tokens("dev") > self.model_config.context

    def run_all(self) -> Result:
        """From the first or the resumed step to the last, or to `stop_at`, or to a signal."""
        self.restore()
        self.begin()
        end = min(self.steps, self.train.stop_at or self.steps)
        self.view.start(self.step, self.steps, self.directory.path.name)
        with contextlib.ExitStack() as stack:
            stack.callback(self.mirror.close)
            stack.callback(self.saver.wait)
            stack.callback(self.view.close)
            self.repeat(end)
        self.world.wait()  # nobody leaves, and so alarms torchrun, before the last checkpoint is on disk
        return self.finish()

    def restore(self) -> None:
        snapshot = self.world.first_does(self.find_checkpoint)
        if self.world.share(snapshot is not None):
            state = checkpoint.restore(snapshot, self.model, self.stepper.optimizer, self.world)
            self.step = self.saved = state["step"]
            self.best_dev_ce, self.dev_ce = state["best_dev_ce"], state["dev_ce"]
            self.evaluation_due = state.get("evaluation_due", False)  # an imported model was never interrupted
            self.stepper.guard.restore(state.get("guard", {}))
            if self.world.first:  # a kill may have come between the checkpoint and its pointers
                self.saver.mark(self.step, state.get("best", False))
        else:
            checkpoint.seed_everything(self.train.seed)
        self.directory.rewind(self.step)
        if timings := read_log(self.directory.path, "timing"):
            self.seconds = timings[-1]["seconds"]

    def find_checkpoint(self) -> checkpoint.Snapshot | None:
        checkpoint.clean(self.directory.checkpoints)
        snapshot, problems = checkpoint.newest(self.directory.checkpoints)
        for problem in problems:
            self.view.note(f"{problem} An earlier checkpoint is used.")
        if snapshot is None and problems:
            raise InputError(f"{self.directory.path} has no usable checkpoint: {problems[0]}")
        if snapshot is not None:
            checkpoint.check_fits(snapshot, self.model)
        return snapshot

    def begin(self) -> None:
        self.directory.write("config.yaml", self.config.to_yaml())
        about = {**environment(self.device), "processes": self.world.size}
        self.directory.write("environment.json", json.dumps(about, indent=1))
        self.peak = matmul_peak(self.device, self.train.precision) * self.world.size if self.world.first else None
        self.flops_per_token = count(self.model_config).flops.training_per_token
        self.mirror = Mirror(
            self.directory.path,
            tensorboard=self.train.tensorboard and self.world.first,
            wandb=self.train.wandb if self.world.first else None,
            config={"model": self.model_config.to_dict(), "train": self.train.to_dict()},
            step=self.step,
        )

    def repeat(self, end: int) -> None:
        """Up to step `end`, or until a signal came to one of the processes; then a checkpoint."""
        if self.evaluation_due and not self.must_stop():
            self.evaluate()
        if self.step < end:
            self.steps_until(end)
        self.save()

    def steps_until(self, end: int) -> None:
        with Prefetcher(
            self.dataset,
            self.order,
            split="train",
            context=self.model_config.context,
            start=self.step,
            rows=self.world.rows(self.train.batch_size),
        ) as batches:
            for index, _, tokens in batches:
                if index >= end or self.must_stop():
                    return
                self.one_step(index, tokens)
                if self.every(self.train.eval_every, EVALUATIONS) or self.step >= self.steps:
                    self.evaluate()
                if self.every(self.train.checkpoint_every, CHECKPOINTS):
                    self.save()
                if self.every(self.train.sample_every, SAMPLES):
                    self.write_sample()

    def must_stop(self) -> bool:
        """Whether a signal came, to whichever process. A failed write in the background also ends the run here."""
        self.saver.check()
        self.signal = self.world.largest(self.interrupt.requested or 0)
        return self.signal > 0

    def one_step(self, index: int, tokens_BN: object) -> None:
        began = time.perf_counter()
        tokens = torch.from_numpy(tokens_BN)
        ids, targets = tokens[:, :-1], tokens[:, 1:]
        documents = None
        if self.train.document_mask:
            documents = torch.from_numpy(document_ids(ids.numpy(), self.dataset.eot))
        result = self.stepper.step(index, ids, targets, documents)
        if result.refused is not None:
            self.refuse(index, result)
        self.step = index + 1
        self.last = result
        spent = time.perf_counter() - began
        self.seconds += spent
        self.log(result, spent)

    def refuse(self, index: int, result: StepResult) -> None:
        """The weights were not changed: keep a record, then go on, or save and stop."""
        guard = self.stepper.guard
        record = {
            "reason": result.refused,
            **{"loss": result.loss, "ce": result.ce, "grad_norm": result.grad_norm, "lr": result.lr},
            "windows": self.order.window_ids(index).tolist(),
            "not_finite": broken_parameters(self.model, self.world),
            "data": {"fingerprint": self.dataset.fingerprint, "context": self.model_config.context},
        }
        path = self.directory.fault(index + 1, record)
        numbers = f"the loss is {result.loss}, the gradient norm {result.grad_norm}"
        problem = f"step {index + 1}: {numbers} ({result.refused})"
        stop = result.refused == NOT_FINITE and self.train.on_nan == "stop"
        if not stop and guard.in_a_row < self.train.skip_limit:
            self.view.note(f"{problem}; skipped, see {path}.")
            return
        why = "" if stop else f", nor were they in the {guard.in_a_row - 1} steps before (train.skip_limit)"
        guard.in_a_row = 0  # whoever resumes has decided to go on
        self.save()  # of the step before
        raise RunFailed(
            f"{problem}; the weights were not changed{why}, and all is saved. {path} tells more. Go on without this "
            "batch (--resume --train.on_nan skip), or start a new run with a smaller train.lr."
        )

    def log(self, result: StepResult, spent: float) -> None:
        tokens = self.step * self.batch_tokens
        speed = self.batch_tokens / spent
        record = {"loss": result.loss, "ce": result.ce, "lr": result.lr, "grad_norm": result.grad_norm}
        refused = {} if result.refused is None else {"refused": result.refused}
        self.directory.log("metrics", {"step": self.step, "tokens": tokens, **record, **refused})
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
        try:
            found = split_loss(
                self.model,
                self.dataset,
                "dev",
                tokens=self.train.eval_tokens,
                batch_size=self.train.micro_batch or min(self.train.batch_size, 16),
                document_mask=self.train.document_mask,
                world=self.world,
                stop=lambda: self.interrupt.requested is not None,
            )
        except Stopped:
            self.evaluation_due = True
            return
        self.evaluation_due = False
        self.dev_ce = found.ce
        record = {"dev_ce": found.ce, "dev_accuracy": found.accuracy, "dev_tokens": found.tokens}
        self.directory.log("metrics", {"step": self.step, "tokens": self.step * self.batch_tokens, **record})
        self.mirror.write(self.step, {"dev/ce": found.ce, "dev/accuracy": found.accuracy})

    def save(self) -> None:
        is_best = self.dev_ce is not None and (self.best_dev_ce is None or self.dev_ce < self.best_dev_ce)
        if is_best:
            self.best_dev_ce = self.dev_ce
        if self.saved == self.step:
            if self.world.first:
                self.saver.mark(self.step, is_best)
            return
        state = {
            "tokens": self.step * self.batch_tokens,
            "dev_ce": self.dev_ce,
            "best_dev_ce": self.best_dev_ce,
            "best": is_best,
            "evaluation_due": self.evaluation_due,
            "guard": self.stepper.guard.state(),
            "fingerprint": self.dataset.fingerprint,
            "model": self.model_config.to_dict(),
            "train": self.train.to_dict(),
        }
        snapshot = checkpoint.take_snapshot(self.step, self.model, self.stepper.optimizer, state, self.world)
        if snapshot is not None:
            self.saver.save(snapshot, is_best)
        self.saved = self.step

    def write_sample(self) -> None:
        if self.last is None or not self.last.updated:
            return
        with gathered(self.model):
            if self.world.first:
                prompt = torch.tensor([[self.dataset.eot]], device=self.device)
                eot, seed = self.dataset.eot, self.train.seed
                ids = sample(self.model, prompt, SAMPLE_TOKENS, temperature=0.8, top_k=50, stop=eot, seed=seed)
                self.directory.sample(self.step, self.dataset.tokenizer().decode(ids[0, 1:].tolist()))

    def finish(self) -> Result:
        finished = self.step >= self.steps and not self.evaluation_due
        if finished and self.world.first:
            from rmt.report.curves import loss_curve

            loss_curve(self.directory.path)
        return Result(
            path=self.directory.path,
            step=self.step,
            tokens=self.step * self.batch_tokens,
            ce=self.last.ce if self.last else None,
            dev_ce=self.dev_ce,
            seconds=self.seconds,
            finished=finished,
            interrupted=self.signal if self.signal and not finished else None,
        )
