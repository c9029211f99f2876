"""`rmt demo`: the main job on an embedded corpus."""

from pathlib import Path
from typing import Any

from rmt.commands.base import ArgumentParser, Formatter, console, print_json

DESCRIPTION = """Train a small RMT and the transformer that mirrors it on the same text, and compare them.

  rmt demo                    # about five minutes on two cores
  rmt demo --minutes 1        # a quick look
  rmt demo --out demo2 --seed 1

Needs no network: the corpus comes with the `demo` extra. Writes a page, figures and two ordinary run directories
below --out. Interrupted, it goes on where it stopped when started again."""


def parser() -> ArgumentParser:
    result = ArgumentParser(prog="rmt demo", description=DESCRIPTION, formatter_class=Formatter)
    result.add_argument("--minutes", type=float, default=5.0, help="training time (default: 5)")
    result.add_argument("--out", metavar="DIR", default="demo", help="where to write (default: demo)")
    result.add_argument("--seed", type=int, default=0, help="of initial values and data order (default: 0)")
    result.add_argument("--quiet", action="store_true", help="show no progress")
    result.add_argument("--json", action="store_true", help="print the table as JSON")
    return result


def run(args: Any) -> None:
    from rmt.experiments.demo import demo
    from rmt.report.runs import print_table

    quiet = args.quiet or args.json
    out = Path(args.out)
    result = demo(out, args.minutes, console_for(quiet), seed=args.seed, quiet=quiet)
    if args.json:
        print_json({"page": str(result.page), "figures": [str(path) for path in result.figures], "table": result.table})
        return
    print_table(result.table, console)
    console.print(f"Page:    {result.page}", soft_wrap=True)
    console.print(f"Figures: {', '.join(str(path) for path in result.figures)}", soft_wrap=True)
    console.print(f"Runs:    {', '.join(str(path) for path in result.runs)}", soft_wrap=True)


def console_for(quiet: bool) -> Any:
    from rich.console import Console

    return Console(quiet=True) if quiet else console
