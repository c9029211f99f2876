"""What a person sees while a search runs: trials done, the best loss, the time left."""

from __future__ import annotations

import time
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from rmt.train.view import duration

LINES = 20  # at most about so many, where there is no terminal


class Board:
    """A bar on a terminal, a line now and then elsewhere, nothing when quiet. Use as a context manager."""

    def __init__(self, console: Console, title: str, quiet: bool) -> None:
        self.console, self.title, self.quiet = console, title, quiet
        self.began: float | None = None
        self.first = self.shown = 0
        self.bar: Progress | None = None
        if console.is_terminal and not quiet:
            fields = (TextColumn("{task.fields[status]}"), TimeElapsedColumn())
            columns = (TextColumn("[bold]{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), *fields)
            self.bar = Progress(*columns, console=console)
            self.task = self.bar.add_task(title, total=None, status="starting")

    def __enter__(self) -> Self:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def show(self, done: int, total: int, best: float | None) -> None:
        now = time.monotonic()
        if self.began is None:
            self.began, self.first, self.shown = now, done, done
        status = "no loss yet" if best is None else f"best {best:.4f}"
        if done > self.first:
            left = (now - self.began) / (done - self.first) * (total - done)
            status += f"  {duration(left)} left"
        if self.bar is not None:
            self.bar.update(self.task, completed=done, total=total, status=status)
        elif not self.quiet and done > self.shown and (done == total or done - self.shown >= total / LINES):
            self.shown = done
            self.console.print(f"{self.title}: trial {done}/{total}  {status}", soft_wrap=True, markup=False)
