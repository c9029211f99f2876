"""`rmt report`: figures and one self-contained HTML page from runs."""

from pathlib import Path
from typing import Any

from rich.table import Table

from rmt.commands.base import ArgumentParser, Formatter, console, print_json

DESCRIPTION = """\
One HTML page about one or more runs, finished or in progress: what came out, in words and in a table; loss against
tokens, FLOPs and time; samples; configuration; environment. The page needs no network. Runs that differ only by seed
become one curve with its spread.

  rmt report runs/rmt runs/transformer
  rmt report runs/sweep --out sweep.html --figures figures
  rmt report runs/sweep --compact results/sweep          also keep the runs, a few kilobytes each, to commit
"""

MOST_COLUMNS = 4
IN_SHORT = ("model", "parameters", "dev loss", "train loss", "tokens", "ms per step")


def parser() -> ArgumentParser:
    parser = ArgumentParser(prog="rmt report", description=DESCRIPTION, formatter_class=Formatter)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run directory, or a folder of them")
    parser.add_argument("--out", type=str, default="report.html", help="the page")
    parser.add_argument("--title", type=str, default=None, help="its heading (default: the runs' names)")
    parser.add_argument("--figures", type=str, default=None, metavar="DIR", help="also write the curves as PNG and SVG")
    parser.add_argument("--compact", type=str, default=None, metavar="DIR", help="also copy the runs without weights")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    return parser


def run(args: Any) -> None:
    from rmt.report.runs import find_runs

    paths = find_runs([Path(path) for path in args.runs])
    title = args.title or " and ".join(dict.fromkeys(Path(path).resolve().name for path in args.runs))
    figures = Path(args.figures) if args.figures else None
    publish(paths, Path(args.out), title, figures=figures, as_json=args.json)
    if args.compact:
        from rmt.report.compact import compact

        for path in args.runs:
            compact(Path(path), Path(args.compact) if len(args.runs) == 1 else Path(args.compact) / Path(path).name)


def publish(runs: list[Path], page: Path, title: str, *, figures: Path | None, as_json: bool) -> None:
    """Write the page and the figures about some runs, and print what they say."""
    from rmt.report.curves import comparison_figure
    from rmt.report.page import write_report
    from rmt.report.runs import group_runs, load_runs
    from rmt.report.summary import cells, group_row, headline, run_row

    groups = group_runs(load_runs(runs))
    written = [write_report(runs, page, title=title)]
    written += comparison_figure(runs, figures / "loss") if figures else []
    if as_json:
        answer = {"page": str(written[0]), "figures": [str(path) for path in written[1:]], "headline": headline(groups)}
        models = [group_row(group) for group in groups]
        print_json(answer | {"models": models, "runs": [run_row(one) for group in groups for one in group.runs]})
        return
    console.print(" ".join(headline(groups)), markup=False)
    print_cells(cells([group_row(group) for group in groups]))
    for path in written:
        console.print(f"wrote {path}", markup=False, soft_wrap=True)


def print_cells(rows: list[dict[str, str]]) -> None:
    """Everything, models as columns, while that fits; of more models, one line each with what matters most."""
    if len(rows) <= MOST_COLUMNS:
        lines = [[name, *(row[name] for row in rows)] for name in rows[0]]
    else:
        lines = [list(IN_SHORT), *([row[name] for name in IN_SHORT] for row in rows)]
    table = Table(box=None, pad_edge=False)
    for index, name in enumerate(lines[0]):
        table.add_column(name, justify="right" if index else "left")
    for line in lines[1:]:
        table.add_row(*line)
    console.print(table, markup=False)
