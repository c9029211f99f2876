"""`rmt sweep`: the paper's experiments as declared comparisons, at its scale or at one that a CPU can run."""

from pathlib import Path
from typing import Any

from rmt.commands.base import ArgumentParser, Formatter, console, print_json
from rmt.errors import InputError, suggest

EXPERIMENTS = ("variants",)
SCALES = ("tiny", "paper")
DESCRIPTION = """Run one of the paper's experiments.

  rmt sweep variants --data tokens --out runs/variants                     # tiny: minutes on a CPU
  rmt sweep variants --scale paper --data owt --out runs/variants --dry-run

variants: the RMT, the transformer and the paper's three rivals at equal dimensions and tokens (section 4.3). For other
streams, learning rates or ways to match them use `rmt compare`. Interrupted, it goes on where it stopped."""


def parser() -> ArgumentParser:
    result = ArgumentParser(prog="rmt sweep", description=DESCRIPTION, formatter_class=Formatter)
    result.add_argument("experiment", help="variants")
    result.add_argument("--scale", default="tiny", help="tiny or paper (default: tiny)")
    result.add_argument("--data", metavar="DIR", help="token dataset made by `rmt data prepare`")
    result.add_argument("--out", metavar="DIR", help="folder for the runs and the page")
    result.add_argument("--seeds", type=int, default=1, help="runs per model (default: 1)")
    result.add_argument("--workers", type=int, help="runs at a time (default: one per core)")
    result.add_argument("--dry-run", action="store_true", help="list the runs and what they cost, and stop")
    result.add_argument("--quiet", action="store_true", help="show no progress")
    result.add_argument("--json", action="store_true", help="print the results as JSON")
    return result


def run(args: Any) -> None:
    from rmt.commands.compare import print_rows, run_comparison
    from rmt.experiments.variants import variants

    for name, value, options in (("experiment", args.experiment, EXPERIMENTS), ("--scale", args.scale, SCALES)):
        if value not in options:
            raise InputError(f"sweep: there is no {name} {value!r}. {suggest(value, options)}")
    comparison = variants(args.scale, Path(args.data or "."), Path(args.out or "."), args.seeds)
    if args.dry_run:
        rows = prices(comparison)
        return print_json(rows) if args.json else print_rows(readable(rows))
    for name in ("data", "out"):
        if getattr(args, name) is None:
            raise InputError(f"sweep: give --{name} DIR.")
    return run_comparison(comparison, console, workers=args.workers, quiet=args.quiet, as_json=args.json)


def prices(comparison: Any) -> list[dict[str, Any]]:
    """What each run of a comparison costs."""
    from rmt.experiments.match import match_models
    from rmt.theory.accounting import count

    models = match_models(comparison.base, comparison.streams, comparison.match, comparison.train)
    tokens = (
        comparison.train.total_steps(comparison.base.context) * comparison.train.batch_size * comparison.base.context
    )
    return [
        {
            "stream": stream,
            "parameters": int(count(model).params),
            "tokens": tokens,
            "flops": count(model).flops.training(tokens),
            "seeds": comparison.seeds,
        }
        for stream, model in models.items()
    ]


def readable(rows: list[dict[str, Any]]) -> list[dict[str, str]]:
    return [
        {
            "stream": row["stream"],
            "parameters": f"{row['parameters']:,}",
            "tokens": f"{row['tokens']:,}",
            "training FLOPs": f"{row['flops']:.3g}",
            "runs": str(row["seeds"]),
        }
        for row in rows
    ]
