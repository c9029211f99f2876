"""`rmt moments`: how variance moves through storage and retrieval, by theory, by measurement, by the paper."""

from typing import Any

from rich.table import Table

from rmt.commands.base import ArgumentParser, Formatter, console, print_json

DESCRIPTION = """\
How variance moves through the operations that read and write the residual stream, with Xavier initial values: the
closed form, a Monte-Carlo measurement of the real modules forward and backward, and the paper's Table 2. 1 is ideal.

examples:
  rmt moments                                   GPT2-medium, the paper's table
  rmt moments --key-dim 16 --heads 16           as many keys as vectors: the matrix stream is then ideal
  rmt moments --samples 0 --json                theory only, for machines
"""

SHORT = {"attention": "attn", "feed_forward": "FF"}


def parser() -> ArgumentParser:
    parser = ArgumentParser(prog="rmt moments", description=DESCRIPTION, formatter_class=Formatter)
    parser.add_argument("--key-dim", type=int, default=64, help="rows of the memory")
    parser.add_argument("--heads", type=int, default=16, help="vectors that a core writes or reads")
    parser.add_argument("--head-dim", type=int, default=64, help="dimension of each; width = heads * head dim")
    parser.add_argument("--ff-dim", type=int, default=4096, help="feed-forward neurons")
    parser.add_argument("--samples", type=int, default=200_000, help="outputs measured per operation; 0: theory only")
    parser.add_argument("--input-mean", type=float, default=0.0, help="mean of the random inputs (variance 1)")
    parser.add_argument("--seed", type=int, default=0, help="of the measurement")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def run(args: Any) -> int:
    from rmt.theory.moments import moments

    result = moments(
        args.key_dim,
        args.heads,
        args.head_dim,
        args.ff_dim,
        samples=args.samples,
        input_mean=args.input_mean,
        seed=args.seed,
    )
    if args.json:
        print_json(result.to_dict())
    else:
        print_table(result)
    return 0


def print_table(result: Any) -> None:
    from rmt.theory.moments import TABLE_1

    dims = ", ".join(f"{name} {value}" for name, value in result.dims.items())
    console.print("[bold]variance out / variance in, forward/backward[/bold]")
    console.print(dims)
    table = Table(box=None, padding=(0, 1, 0, 0))
    for name in ("operation", "weights", "fan in > out", "theory", "measured", "paper", ""):
        table.add_column(name, no_wrap=True)
    for row in result.rows:
        table.add_row(
            f"{SHORT[row.layer]} {row.operation}",
            f"{row.stream} {row.weights}",
            f"{row.fan_in} > {row.fan_out}",
            pair(row.forward, row.backward),
            pair(row.measured_forward, row.measured_backward),
            pair(row.paper_forward, row.paper_backward),
            "[red]wrong[/red]" if row.paper_is_wrong else "",
        )
    console.print(table)
    if any(row.paper_is_wrong for row in result.rows):
        console.print("Where the paper is wrong: docs/errata.md, number 7.")
    console.print("\n[bold]closed forms[/bold] ")
    console.print("s: variance of the weights; v, m: variance and mean of what comes in")
    forms = Table(box=None, padding=(0, 1, 0, 0))
    for name in ("operation", "mean", "variance", "gradient's mean", "gradient's variance"):
        forms.add_column(name)
    for name, expressions in TABLE_1.items():
        forms.add_row(name, *expressions)
    console.print(forms)


def pair(forward: float | None, backward: float | None) -> str:
    return "-" if forward is None or backward is None else f"{forward:.2f}/{backward:.2f}"
