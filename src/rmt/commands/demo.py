"""`rmt demo`: the main job on an embedded corpus."""

from pathlib import Path
from typing import Any

from rich.console import Console

from rmt.commands.base import ArgumentParser, Formatter, console

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
    from rmt.commands.report import publish
    from rmt.experiments.demo import demo

    quiet = args.quiet or args.json
    out = Path(args.out)
    runs = demo(out, args.minutes, Console(quiet=True) if quiet else console, seed=args.seed, quiet=quiet)
    publish(runs, out / "report.html", "RMT and transformer on the same tokens", figures=out, as_json=args.json)
