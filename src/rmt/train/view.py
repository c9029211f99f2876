"""What a person sees while a model trains: a live bar on a terminal, plain lines elsewhere, nothing when asked."""

import time
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

LINES_PER_RUN = 20
SECONDS_BETWEEN_LINES = 30.0


@dataclass
class Status:
    """The numbers of the moment."""

    step: int
    ce: float
    lr: float
    tokens_per_second: float
    peak_share: float | None
    dev_ce: float | None = None

    def __str__(self) -> str:
        parts = [f"loss {self.ce:.4f}"]
        if self.dev_ce is not None:
            parts.append(f"dev {self.dev_ce:.4f}")
        parts.append(f"lr {self.lr:.2e}")
        parts.append(f"{short(self.tokens_per_second)} tokens/s")
        if self.peak_share is not None:
            parts.append(f"{self.peak_share:.0%} of peak")
        return "  ".join(parts)


class View(Protocol):
    def start(self, done: int, total: int, title: str) -> None: ...
    def update(self, status: Status) -> None: ...
    def note(self, text: str) -> None: ...
    def close(self) -> None: ...


class SilentView:
    def start(self, done: int, total: int, title: str) -> None: ...
    def update(self, status: Status) -> None: ...
    def note(self, text: str) -> None: ...
    def close(self) -> None: ...


class PlainView:
    """A line now and then, for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def start(self, done: int, total: int, title: str) -> None:
        self.total, self.title = total, title
        self.began, self.first, self.printed = time.monotonic(), done, time.monotonic()
        self.note(f"{title}: {total} steps" + (f", resuming after step {done}" if done else ""))

    def update(self, status: Status) -> None:
        now = time.monotonic()
        due = status.step % max(1, self.total // LINES_PER_RUN) == 0 or status.step == self.total
        if not due and now - self.printed < SECONDS_BETWEEN_LINES:
            return
        self.printed = now
        left = (self.total - status.step) * (now - self.began) / max(1, status.step - self.first)
        self.note(f"{self.title}: step {status.step}/{self.total}  {status}  {duration(left)} left")

    def note(self, text: str) -> None:
        self.console.print(text, soft_wrap=True, markup=False)

    def close(self) -> None: ...


class LiveView:
    """One bar that stays in place."""

    def __init__(self, console: Console) -> None:
        self.progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
        )

    def start(self, done: int, total: int, title: str) -> None:
        self.task = self.progress.add_task(title, total=total, completed=done, status="starting")
        self.progress.start()

    def update(self, status: Status) -> None:
        self.progress.update(self.task, completed=status.step, status=str(status))

    def note(self, text: str) -> None:
        self.progress.console.print(text, markup=False)

    def close(self) -> None:
        self.progress.stop()


def view_for(console: Console, quiet: bool = False) -> View:
    if quiet:
        return SilentView()
    return LiveView(console) if console.is_terminal else PlainView(console)


def short(number: float) -> str:
    """1234567 -> 1.23M."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def duration(seconds: float) -> str:
    """4000 -> 1:06:40."""
    minutes, second = divmod(int(seconds + 0.5), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
