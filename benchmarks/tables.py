"""Puts the results kept in benchmarks/results/ into docs/performance.md: every table of its section "Measured".

    python benchmarks/tables.py            # rewrites the section
    python benchmarks/tables.py --check    # exits with 1 if the page says something else than the results

The tables are those that `rmt bench --from FILE` shows; the medium model's figure comes from its own file.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.table import Table

from rmt.bench.table import TITLES, memory_table, target_table, timing_table

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "performance.md"
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- tables: benchmarks/tables.py -->\n", "<!-- end of tables -->\n"
WORDS = {True: "met", False: "**not met**", None: ""}


def tables() -> str:
    small, medium = (json.loads((RESULTS / name).read_text("utf-8")) for name in ("small.json", "medium.json"))
    small["targets"] = [
        of_medium if of_medium["asked_of"] == "medium" else of_small
        for of_small, of_medium in zip(small["targets"], medium["targets"], strict=True)
    ]
    parts = [("What was asked", target_table(small, WORDS))]
    parts += [(title_of(part, small), timing_table(part, small)) for part in TITLES if part in small]
    parts.append((f"{title_of('step', medium)}, medium", timing_table("step", medium)))
    parts.append(("Highest memory of a training step, MiB", memory_table(small)))
    return "\n".join(f"{title}:\n\n{markdown(table)}" for title, table in parts)


def title_of(part: str, result: dict[str, Any]) -> str:
    how = result[part]["how"]
    title = TITLES[part][0].upper() + TITLES[part][1:]
    return f"{title} ({how['rounds']} rounds, {how['threads']} threads, {how['clock']} time)"


def markdown(table: Table) -> str:
    headers = [str(column.header) or " " for column in table.columns]
    rows = zip(*(column.cells for column in table.columns), strict=True)
    lines = [headers, ["---"] * len(headers), *([str(cell) for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing")
    check = parser.parse_args().check
    page = PAGE.read_text("utf-8")
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    new = f"{before}{BEGIN}\n{tables()}\n{END}{after}"
    if check:
        return int(new != page)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
