"""`rmt sweep`: the paper's experiments, declared once, at its scale or at one that a CPU can run."""

import sys
from pathlib import Path
from typing import Any

import yaml

from rmt.commands.base import (
    SECTIONS,
    ArgumentParser,
    Formatter,
    add_settings,
    console,
    convert,
    lay_over,
    print_json,
    read_settings_file,
)
from rmt.errors import InputError, suggest

SCALES = ("tiny", "paper")
DESCRIPTION = """Run one of the paper's experiments.

  rmt sweep residual-size --data tokens --out runs/size --seeds 3          # tiny: minutes on a CPU
  rmt sweep residual-size --key-dims 4,16,64 --lr 1e-2,2e-2 --data tokens --out runs/size
  rmt sweep scaling-laws --tokens-per-parameter 10,20,40 --data tokens --out runs/laws
  rmt sweep scaling-laws --scale paper --dry-run                           # the paper's eight runs and their price
  rmt sweep variants --data tokens --out runs/variants

residual-size   one model, residual streams of several sizes, nothing else changed (section 4.4, figure 6)
scaling-laws    a ladder of mirrored pairs, each trained for 20 tokens per non-embedding parameter; fitted laws, and
                what the RMT saves at equal loss (section 4.2, table 3)
variants        the RMT, the transformer and the paper's three rivals at equal dimensions and tokens (section 4.3); for
                other streams or ways to match them use `rmt compare`

Settings such as --train.steps 400 or --model.norm rmsnorm hold for all models alike. Interrupted, a sweep goes on where
it stopped and repeats no finished run. The same command may be given twice, on one machine or on several with a shared
folder: the two share the runs. docs/experiments.md has the whole story, from the data to the devices."""


def parser() -> ArgumentParser:
    usage = "rmt sweep residual-size|scaling-laws|variants [--scale paper] --data DIR --out DIR [--section.key VALUE]"
    result = ArgumentParser(prog="rmt sweep", usage=usage, description=DESCRIPTION, formatter_class=Formatter)
    result.add_argument("experiment", help="residual-size, scaling-laws or variants")
    result.add_argument("--scale", default="tiny", help="tiny or paper (default: tiny)")
    result.add_argument("--data", metavar="DIR", help="token dataset made by `rmt data prepare`")
    result.add_argument("--out", metavar="DIR", help="folder for the runs and the page")
    result.add_argument("--seeds", type=int, default=1, help="runs per model (default: 1)")
    result.add_argument("--lr", help="learning rates, with commas: the first seed tries them all for every model")
    result.add_argument("--key-dims", metavar="A,B,...", help="residual-size: the sizes (stream = key_dim * head_dim)")
    result.add_argument("--no-transformer", action="store_true", help="residual-size: without the mirrored transformer")
    result.add_argument("--tokens-per-parameter", metavar="A,B", help="scaling-laws: one or several (default: 20)")
    result.add_argument("--rungs", metavar="1,2,...", help="scaling-laws: some rungs of the ladder only")
    result.add_argument(
        "--tuned", metavar="matrix=F,vector=F", help="scaling-laws: muTransfer settings, best.yaml of `rmt tune`"
    )
    result.add_argument("--workers", type=int, help="runs at a time (default: one per GPU, or else per core)")
    result.add_argument("--processes", type=int, default=1, help="processes (and GPUs) of each run, through torchrun")
    result.add_argument("--dry-run", action="store_true", help="list the runs and what they cost, and stop")
    result.add_argument("--gpu", help="GPU for the dry run's times (default: H100 SXM at the paper's scale)")
    result.add_argument("--quiet", action="store_true", help="show no progress")
    result.add_argument("--json", action="store_true", help="print the results as JSON")
    add_settings(result, "model", "train")
    return result


def run(args: Any) -> None:
    for name, value, options in (("experiment", args.experiment, EXPERIMENTS), ("--scale", args.scale, SCALES)):
        if value not in options:
            raise InputError(f"sweep: there is no {name} {value!r}. {suggest(value, options)}")
    if not args.dry_run and not args.print_config:
        for name in ("data", "out"):
            if getattr(args, name) is None:
                raise InputError(f"sweep: give --{name} DIR.")
    return EXPERIMENTS[args.experiment](args)


def residual_size(args: Any) -> None:
    from rmt.experiments import residual_size as experiment
    from rmt.experiments.sweep import run_sweep
    from rmt.experiments.variants import settings

    model, train = override(args, *settings(args.scale))
    key_dims = numbers(args.key_dims, "--key-dims", int) or experiment.KEY_DIMS[args.scale]
    members = experiment.declare(model, train, key_dims, transformer=not args.no_transformer)
    if args.dry_run:
        return dry_run(args, members)
    effort = effort_of(args)
    rows = run_sweep(members, effort, console)
    result = experiment.analyse(rows, args.scale)
    files = experiment.write(result, rows, effort.out)
    return show(args, result, [experiment.readable(result)], files)


def scaling_laws(args: Any) -> None:
    from rmt.experiments import scaling_laws as experiment
    from rmt.experiments.ladder import about_extended, with_settings
    from rmt.experiments.sweep import run_sweep

    members = with_settings(ladder_of(args), tuned_of(args), lambda *pair: override(args, *pair))
    if args.dry_run:
        return dry_run(args, members, about_extended(members))
    effort = effort_of(args)
    rows = run_sweep(members, effort, console)
    result = experiment.analyse(rows, args.scale)
    files = experiment.write(result, rows, effort.out)
    tables = [experiment.readable(result), experiment.readable_savings(result), experiment.readable_laws(result)]
    return show(args, result, tables, files)


def ladder_of(args: Any) -> Any:
    """The declared ladder, or the rungs and ratios that were asked for."""
    from dataclasses import replace

    from rmt.experiments.ladder import ladder

    found = ladder(args.scale)
    if ratios := numbers(args.tokens_per_parameter, "--tokens-per-parameter", float):
        found = replace(found, ratios=ratios)
    if chosen := numbers(args.rungs, "--rungs", int):
        if not set(chosen) <= set(range(1, len(found.rungs) + 1)):
            raise InputError(f"--rungs {args.rungs}: the ladder has the rungs 1 to {len(found.rungs)}.")
        found = replace(found, rungs=tuple(found.rungs[index - 1] for index in chosen))
    return found


def tuned_of(args: Any) -> dict[str, dict[str, Any]]:
    """Stream -> the settings that `rmt tune` wrote for it."""
    found = {}
    for part in args.tuned.split(",") if args.tuned else ():
        stream, equals, file = part.partition("=")
        if not equals or stream not in ("matrix", "vector"):
            raise InputError(f"--tuned {args.tuned}: write matrix=FILE.yaml,vector=FILE.yaml.")
        found[stream] = read_settings_file(Path(file))
    if found and len(found) < 2:
        raise InputError(f"--tuned {args.tuned}: give a file for each of the streams matrix and vector.")
    return found


def variants(args: Any) -> None:
    from rmt.commands.compare import run_comparison
    from rmt.experiments.compare import Comparison
    from rmt.experiments.match import match_models
    from rmt.experiments.sweep import Member
    from rmt.experiments.variants import STREAMS_OF_THE_PAPER, settings

    model, train = override(args, *settings(args.scale))
    if args.dry_run:
        models = match_models(model, STREAMS_OF_THE_PAPER, "dims", train)
        return dry_run(args, [Member(stream, matched, train) for stream, matched in models.items()])
    rates = numbers(args.lr, "--lr", float)
    data, out = Path(args.data), Path(args.out)
    comparison = Comparison(STREAMS_OF_THE_PAPER, model, train, data, out, seeds=args.seeds, learning_rates=rates)
    return run_comparison(comparison, console, workers=args.workers, quiet=args.quiet, as_json=args.json)


EXPERIMENTS = {"residual-size": residual_size, "scaling-laws": scaling_laws, "variants": variants}


def override(args: Any, model: Any, train: Any) -> tuple[Any, Any]:
    """The experiment's settings under those of --config and of the flags."""
    values = {"model": model.to_dict(), "train": train.to_dict()}
    file = read_settings_file(Path(args.config)) if args.config else {}
    for layer in (file, args.as_dict()):
        for section, kind in SECTIONS.items():
            lay_over(values[section], convert(kind, layer.get(section) or {}, section))
    if args.print_config:
        print(yaml.safe_dump(values, sort_keys=False))
        sys.exit(0)
    return SECTIONS["model"].from_dict(values["model"]), SECTIONS["train"].from_dict(values["train"])


def numbers(text: str | None, option: str, kind: type) -> tuple[Any, ...]:
    try:
        return tuple(kind(part) for part in text.split(",")) if text else ()
    except ValueError:
        example = "4,8,16" if kind is int else "5e-3,1e-2"
        raise InputError(f"{option} {text}: write numbers with commas, for example {example}.") from None


def effort_of(args: Any) -> Any:
    from rmt.experiments.sweep import Effort

    return Effort(
        data=Path(args.data),
        out=Path(args.out),
        seeds=args.seeds,
        learning_rates=numbers(args.lr, "--lr", float),
        workers=args.workers,
        processes=args.processes,
        quiet=args.quiet or args.json,
    )


def dry_run(args: Any, members: Any, note: str = "") -> None:
    from rmt.experiments.pool import cores
    from rmt.experiments.prices import CPU, Machine, prices, readable, summary

    name = args.gpu or ("H100 SXM" if args.scale == "paper" else CPU)
    machine = Machine(name, cores() if name == CPU else 1)
    rates = len(numbers(args.lr, "--lr", float)) or 1
    found = prices(members, machine, args.seeds, rates)
    if args.json:
        return print_json(found)
    print_table(readable(found))
    return console.print(f"{note} {summary(found)}".strip(), soft_wrap=True)


def show(args: Any, result: dict[str, Any], tables: list[list[dict[str, str]]], files: list[Path]) -> None:
    if args.json:
        return print_json({"files": [str(path) for path in files], **result})
    for table in tables:
        if table:
            print_table(table)
            console.print()
    console.print(result["statement"], markup=False, soft_wrap=True)
    for path in files:
        console.print(f"wrote {path}", markup=False, soft_wrap=True)
    return None


def print_table(rows: list[dict[str, str]]) -> None:
    """Aligned and never cut, also where the terminal is narrow: whoever asks for numbers wants all their digits."""
    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for first, *rest in lines:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))]
        console.print("  ".join(cells).rstrip(), markup=False, soft_wrap=True)
