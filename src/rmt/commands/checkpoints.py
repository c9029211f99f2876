"""`rmt checkpoints`: what a run has saved, and whether every byte of it is still as it was written."""

from pathlib import Path
from typing import Any

from rich.table import Table

from rmt.commands.base import ArgumentParser, Formatter, console, print_json
from rmt.errors import InputError

DESCRIPTION = """\
List the checkpoints of a run and check every file of each against its sha256. Exit status 1 if one is damaged.

  rmt checkpoints runs/first

A damaged checkpoint does no harm: `rmt train --resume` names it and takes the one before. It may be deleted."""


def parser() -> ArgumentParser:
    parser = ArgumentParser(prog="rmt checkpoints", description=DESCRIPTION, formatter_class=Formatter)
    parser.add_argument("run", metavar="RUN", help="a run directory")
    parser.add_argument("--json", action="store_true", help="print the list as JSON")
    return parser


def run(args: Any) -> int:
    from rmt.train import checkpoint

    folder = Path(args.run) / "checkpoints"
    paths = checkpoint.listing(folder)
    if not paths:
        raise InputError(f"{args.run} holds no checkpoints: give the directory of a run.")
    rows = [describe(path) for path in paths]
    for pointer in ("latest", "best"):
        target = checkpoint.pointed(folder, pointer)
        for row in rows:
            row[pointer] = target is not None and row["name"] == target.name
    if args.json:
        print_json(rows)
    else:
        print_rows(rows)
    return 1 if any(row["problem"] for row in rows) else 0


def describe(path: Path) -> dict[str, Any]:
    from rmt.train import checkpoint

    row: dict[str, Any] = {"name": path.name, "step": None, "tokens": None, "dev_ce": None, "problem": None}
    row["bytes"] = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
    try:
        checkpoint.verify(path)
        state = checkpoint.read_state(path)
        row.update({key: state.get(key) for key in ("step", "tokens", "dev_ce")})
    except InputError as error:
        row["problem"] = str(error)
    return row


def print_rows(rows: list[dict[str, Any]]) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("checkpoint")
    for name in ("tokens", "dev loss", "MB"):
        table.add_column(name, justify="right")
    table.add_column("state")
    for row in rows:
        marks = [name for name in ("latest", "best") if row[name]]
        state = "damaged" if row["problem"] else ", ".join(["whole", *marks])
        tokens = f"{row['tokens']:,}" if row["tokens"] is not None else ""
        dev = f"{row['dev_ce']:.4f}" if row["dev_ce"] is not None else ""
        table.add_row(row["name"], tokens, dev, f"{row['bytes'] / 1e6:.1f}", state)
    console.print(table)
    for row in rows:
        if row["problem"]:
            console.print(row["problem"], soft_wrap=True, markup=False)
