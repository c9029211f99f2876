"""`rmt compare`: residual streams side by side."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rmt.commands.base import ArgumentParser, Formatter, add_settings, console, print_json, resolve_settings
from rmt.errors import InputError

DESCRIPTION = """Train models that differ in their residual stream on the same tokens, and compare their losses.

  rmt compare --streams matrix,vector,hyper --preset rmt-tiny --data tokens --out runs/compare
  rmt compare --streams all --seeds 3 --lr 1e-2,2e-2 --preset rmt-tiny --data tokens --out runs/all
  rmt compare --streams matrix,vector --match params --preset rmt-tiny --data tokens --out runs/fair

--match dims keeps all dimensions (the paper's mirrored models); params, flops and time give every stream the vector
stream's cost by changing its feed-forward neurons. With several learning rates each stream tries them all and keeps
its best. Interrupted, it goes on where it stopped when started again, and repeats no finished run."""


def parser() -> ArgumentParser:
    usage = "rmt compare --streams A,B,... --preset NAME --data DIR --out DIR [--section.key VALUE ...]"
    result = ArgumentParser(prog="rmt compare", usage=usage, description=DESCRIPTION, formatter_class=Formatter)
    result.add_argument("--streams", default="matrix,vector", help="names with commas, or all (default: matrix,vector)")
    result.add_argument("--preset", help="dimensions and recipe to start from")
    result.add_argument("--data", metavar="DIR", help="token dataset made by `rmt data prepare`")
    result.add_argument("--out", metavar="DIR", help="folder for the runs and the page")
    result.add_argument("--seeds", type=int, default=3, help="runs per stream (default: 3)")
    result.add_argument("--match", default="dims", help="dims, params, flops or time (default: dims)")
    result.add_argument("--lr", help="learning rates to try for each stream, with commas (default: train.lr)")
    result.add_argument("--workers", type=int, help="runs at a time (default: one per core)")
    result.add_argument("--quiet", action="store_true", help="show no progress")
    result.add_argument("--json", action="store_true", help="print the results as JSON")
    add_settings(result, "model", "train")
    return result


def run(args: Any) -> None:
    from rmt.experiments.compare import Comparison
    from rmt.streams import STREAMS

    for name in ("data", "out"):
        if getattr(args, name) is None:
            raise InputError(f"compare: give --{name} DIR.")
    if args.preset is None and args.config is None:
        raise InputError("compare: which dimensions? Give --preset NAME or --config FILE.yaml.")
    settings = resolve_settings(args, args.preset)
    out = Path(args.out)
    comparison = Comparison(
        streams=list(STREAMS) if args.streams == "all" else args.streams.split(","),
        base=settings.model,
        train=settings.train,
        data=Path(args.data),
        out=out,
        seeds=args.seeds,
        match=args.match,
        learning_rates=learning_rates(args.lr),
    )
    run_comparison(comparison, console, workers=args.workers, quiet=args.quiet, as_json=args.json)


def run_comparison(comparison: Any, console: Console, *, workers: int | None, quiet: bool, as_json: bool) -> None:
    """Run what is not finished, write the page and the figures, print the results."""
    from rmt.experiments.compare import compare, results
    from rmt.report.curves import comparison_figure
    from rmt.report.page import write_report

    runs = compare(comparison, console, workers=workers, quiet=quiet or as_json)
    rows = results(runs)
    page = write_report(runs, comparison.out / "report.html", title="Residual streams compared", table=readable(rows))
    figures = comparison_figure(runs, comparison.out / "loss")
    if as_json:
        print_json({"page": str(page), "figures": [str(path) for path in figures], "results": rows})
        return
    print_rows(readable(rows))
    for path in (page, *figures):
        console.print(f"wrote {path}", markup=False, soft_wrap=True)


def learning_rates(text: str | None) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise InputError(f"--lr {text}: write numbers with commas, for example 5e-3,1e-2.") from None


def readable(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The table for people."""

    def loss(row: dict[str, Any], price: str) -> str:
        mean, spread = row[f"loss_at_equal_{price}"], row[f"spread_at_equal_{price}"]
        return f"{mean:.4f}" if spread is None else f"{mean:.4f} ± {spread:.4f}"

    return [
        {
            "stream": row["stream"],
            "parameters": f"{row['parameters']:,}",
            "MFLOPs/token": f"{row['flops_per_token'] / 1e6:.2f}",
            "lr": f"{row['lr']:g}",
            "s/step": f"{row['seconds_per_step']:.3f}",
            "loss, equal tokens": loss(row, "tokens"),
            "equal FLOPs": loss(row, "flops"),
            "equal seconds": loss(row, "seconds"),
            "paper": "" if row["paper_loss"] is None else f"{row['paper_loss']:.4f}",
        }
        for row in rows
    ]


def print_rows(rows: list[dict[str, Any]]) -> None:
    table = Table(box=None, pad_edge=False)
    for index, name in enumerate(rows[0]):
        table.add_column(name, justify="right" if index else "left")
    for row in rows:
        table.add_row(*row.values())
    console.print(table)
