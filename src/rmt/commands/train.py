"""`rmt train`: one run, from a token dataset to a run directory."""

from pathlib import Path
from typing import Any

from rich.table import Table

from rmt.commands.base import ArgumentParser, Formatter, add_settings, console, print_json, resolve_settings
from rmt.errors import InputError
from rmt.train.run import RunConfig

DESCRIPTION = """Train a model on a token dataset.

  rmt data prepare mytext/ --tokenizer train:4096 --out tokens
  rmt train --preset rmt-tiny --data tokens --out runs/first
  rmt train --preset rmt-134m --data owt --out runs/rmt --model.key_dim 64 --train.lr 6e-3
  rmt train --out runs/first --resume                  # go on after an interruption
  rmt train --preset rmt-134m --data owt --dry-run     # what would it cost here?

Settings come from the preset, then from --config FILE.yaml, then from flags such as --model.key_dim 64.
SIGTERM or Ctrl-C ends the run after the current step with a checkpoint (exit status 143 or 130); a second one ends
it at once. A run that is resumed gives the same bytes as one that was never stopped.

  torchrun --nproc-per-node 8 -m rmt.cli train ...     # the same command on several processes: docs/scaling.md"""


def parser() -> ArgumentParser:
    usage = "rmt train --preset NAME --data DIR --out RUN [--section.key VALUE ...]"
    result = ArgumentParser(prog="rmt train", usage=usage, description=DESCRIPTION, formatter_class=Formatter)
    result.add_argument("--preset", help="a model of the paper, or rmt-tiny / transformer-tiny (see `rmt count`)")
    result.add_argument("--data", metavar="DIR", help="token dataset made by `rmt data prepare`")
    result.add_argument("--out", metavar="RUN", help="run directory to write")
    result.add_argument("--resume", action="store_true", help="go on with the run in --out (start it if there is none)")
    result.add_argument("--device", help="cpu, cuda, cuda:1, mps (default: a GPU if there is one)")
    result.add_argument("--dry-run", action="store_true", help="print cost and expected time, and write nothing")
    result.add_argument("--quiet", action="store_true", help="show no progress")
    result.add_argument("--json", action="store_true", help="print the result as JSON")
    add_settings(result, "model", "train")
    return result


def run(args: Any) -> int | None:
    config, data = resolve(args)
    if args.dry_run:
        return dry_run(config, data, args)
    if args.out is None:
        raise InputError("train: where should the run be written? Give --out RUN.")
    from rmt.train.distributed import is_first
    from rmt.train.loop import train
    from rmt.train.view import view_for

    view = view_for(console, quiet=args.quiet or args.json)
    result = train(config.model, config.train, data, args.out, resume=args.resume, device=args.device, view=view)
    if args.json and is_first():
        print_json({**vars(result), "path": str(result.path)})
    elif not args.quiet and is_first():
        dev = f", dev loss {result.dev_ce:.4f}" if result.dev_ce is not None else ""
        console.print(f"{result.path}: step {result.step}{dev}, {result.seconds:.0f} s of training.")
        if not result.finished:
            console.print(f"Go on with: rmt train --out {result.path} --resume", soft_wrap=True)
    return 128 + result.interrupted if result.interrupted else 0


def resolve(args: Any) -> tuple[RunConfig, str]:
    """Model, recipe and data of the command line; on resume, of the run itself under what the command line adds."""
    if args.resume and args.out is not None and (Path(args.out) / "config.yaml").exists():
        before = RunConfig.load(Path(args.out) / "config.yaml")
        if args.config is None and args.preset is None:
            args.config = str(Path(args.out) / "config.yaml")
        data = args.data or before.data["path"]
    else:
        if args.preset is None and args.config is None:
            raise InputError("train: which model? Give --preset NAME or --config FILE.yaml.")
        data = args.data
    settings = resolve_settings(args, args.preset)
    if data is None:
        raise InputError("train: which data? Give --data DIR, made by `rmt data prepare`.")
    return RunConfig(settings.model, settings.train, {"path": str(data), "fingerprint": ""}), str(data)


def dry_run(config: RunConfig, data: str, args: Any) -> int:
    from rmt.train.estimate import estimate
    from rmt.train.view import duration, short

    found = estimate(config.model, config.train, data, device=args.device)
    if args.json:
        print_json(found)
        return 0
    table = Table(title=f"{config.model.stream} stream, {config.model.layers} layers", show_header=False)
    table.add_row("parameters", f"{found.params:,}")
    table.add_row("steps", f"{found.steps:,} of {config.train.batch_size} x {config.model.context} tokens")
    table.add_row("tokens", f"{found.tokens:,} ({found.epochs:.2f} x the data)")
    table.add_row("training FLOPs", f"{found.flops:.3g} ({short(found.flops / found.tokens)} per token)")
    table.add_row("memory", f"about {found.memory / 2**30:.2f} GiB (weights, gradients, moments, activations)")
    table.add_row("step", f"{found.seconds_per_step:.3f} s here, {found.peak_share:.0%} of the matmul peak")
    table.add_row("whole run", f"about {duration(found.seconds)} here")
    console.print(table)
    console.print("Nothing was written.")
    return 0
