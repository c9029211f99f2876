"""A result as tables for a terminal: the targets, each with its tick, and below them every row that was measured."""

from typing import Any

from rich.console import Console
from rich.table import Table

TITLES = {
    "stack": "layers, forward and backward",
    "step": "whole training step",
    "decode": "decoding, per token",
    "loss": "last linear layer and loss, forward and backward",
    "keydim": "whole training step by key_dim",
}
TICKS = {True: "✓", False: "✗", None: "-"}


def show(result: dict[str, Any], console: Console) -> None:
    shape, machine = result["shape"], result["environment"]["machine"]
    rounds = f"{result['threads']} threads, {result['rounds']} rounds, {result['clock']} time"
    console.print(
        f"[bold]{shape['name']}[/bold]: {shape['layers']} layers, key_dim {shape['key_dim']}, head_dim "
        f"{shape['head_dim']}, {shape['heads']} heads, ff_dim {shape['ff_dim']}, {shape['batch']} x {shape['context']} "
        f"tokens; {machine['processor']}, {rounds}",
        soft_wrap=True,
    )
    for part in TITLES:
        if part in result:
            print_titled(TITLES[part], timing_table(part, result), console)
    if "memory" in result:
        print_titled("highest memory of a training step, MiB", memory_table(result), console)
    print_titled("asked and measured", target_table(result), console)
    if any(target["met"] is None for target in result["targets"]):
        console.print("A dash: not measured in this run, or asked of another shape, or of all its layers.")


def print_titled(title: str, table: Table, console: Console) -> None:
    console.print(f"\n[bold]{title}[/bold]")
    console.print(table)


def new_table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column(columns[0], min_width=18)
    for column in columns[1:]:
        table.add_column(column, justify="right")
    return table


def timing_table(part: str, result: dict[str, Any]) -> Table:
    rows = result[part]["rows"]
    bases = list(next(iter(rows.values()))["ratios"])
    shares = result[part].get("share_of_gemm_peak", {})
    each = result[part].get("new_tokens", 1)
    extra = ["of peak"] if shares else []
    table = new_table("", "ms", *(f"/ {base}" for base in bases), *extra, "quiet")
    for name, row in rows.items():
        ratios = [spread(row["ratios"][base]) if base != name else "1" for base in bases]
        share = [f"{shares[name]['median']:.0%}"] if shares else []
        quiet = f"{row['quiet_rounds']}/{row['rounds']}"
        table.add_row(name, f"{1e3 * row['seconds']['median'] / each:,.1f}", *ratios, *share, quiet)
    return table


def memory_table(result: dict[str, Any]) -> Table:
    rows = result["memory"]["rows"]
    base = rows.get("stock", {}).get("measured")
    table = new_table("", "measured", "/ stock", "predicted", "predicted / measured")
    for name, row in rows.items():
        against = f"{row['measured'] / base:.3f}" if base else "-"
        predicted = [mebibytes(row["predicted"]), f"{row['predicted / measured']:.3f}"] if "predicted" in row else []
        table.add_row(name, mebibytes(row["measured"]), against, *(predicted or ["-", "-"]))
    return table


def target_table(result: dict[str, Any], ticks: dict[bool | None, str] = TICKS) -> Table:
    table = new_table("figure", "of", "asked", "measured", "")
    for target in result["targets"]:
        form = target["form"]
        sign = "≥" if target["at_least"] else "≤"
        value = "-" if target["value"] is None else figure(target["value"], form)
        asked = f"{sign} {figure(target['bound'], form)}"
        table.add_row(target["figure"], target["asked_of"], asked, value, ticks[target["met"]])
    return table


def figure(value: float, form: str) -> str:
    return {"ratio": f"{value:.3f}", "percent": f"{value:.1%}", "more": f"{value:+.1%}", "times": f"{value:.2f} x"}[
        form
    ]


def spread(value: dict[str, float]) -> str:
    """The median, and half the distance between the quartiles."""
    return f"{value['median']:.3f} ± {(value['high'] - value['low']) / 2:.3f}"


def mebibytes(count: int) -> str:
    return f"{count / 2**20:,.0f}"
