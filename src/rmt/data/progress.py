"""How `prepare` shows that it works: a bar with MB/s and tokens/s on a terminal, a line now and then elsewhere."""

import sys
import time
from types import TracebackType
from typing import Protocol, Self

LINE_EVERY = 10.0  # seconds between lines when standard error is not a terminal


class Meter(Protocol):
    """Told what happens; draws it or not."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def say(self, message: str) -> None: ...
    def advance(self, position: int, text_bytes: int, tokens: int) -> None: ...


class Silent:
    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def say(self, message: str) -> None:
        pass

    def advance(self, position: int, text_bytes: int, tokens: int) -> None:
        pass


class Lines(Silent):
    """Plain lines for logs and pipes."""

    def __init__(self, total: int | None) -> None:
        self.total, self.text_bytes, self.tokens = total, 0, 0
        self.started = self.last_line = 0.0

    def __enter__(self) -> Self:
        self.started = self.last_line = time.monotonic()
        return self

    def say(self, message: str) -> None:
        print(message, file=sys.stderr, flush=True)

    def advance(self, position: int, text_bytes: int, tokens: int) -> None:
        self.text_bytes, self.tokens = self.text_bytes + text_bytes, self.tokens + tokens
        now = time.monotonic()
        if now - self.last_line >= LINE_EVERY:
            self.last_line = now
            share = f"{position / self.total:4.0%}  " if self.total else ""
            self.say(f"{share}{rates(self.text_bytes, self.tokens, now - self.started)}")


class Bar(Silent):
    """A progress bar over the bytes of the sources."""

    def __init__(self, total: int | None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self.text_bytes, self.tokens, self.started = 0, 0, 0.0
        columns = (BarColumn(), TextColumn("{task.percentage:3.0f}%"), TextColumn("{task.description}"))
        self.progress = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
        self.task = self.progress.add_task("reading", total=total)

    def __enter__(self) -> Self:
        self.started = time.monotonic()
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()

    def say(self, message: str) -> None:
        self.progress.console.print(message, markup=False, highlight=False)

    def advance(self, position: int, text_bytes: int, tokens: int) -> None:
        self.text_bytes, self.tokens = self.text_bytes + text_bytes, self.tokens + tokens
        what = rates(self.text_bytes, self.tokens, time.monotonic() - self.started)
        self.progress.update(self.task, completed=position, description=what)


def rates(text_bytes: int, tokens: int, seconds: float) -> str:
    seconds = max(seconds, 1e-9)
    return (
        f"{text_bytes / 1e6:,.1f} MB  {tokens:,} tokens  "
        f"{text_bytes / 1e6 / seconds:.1f} MB/s  {tokens / seconds:,.0f} tokens/s"
    )


def meter(show: bool, total: int | None) -> Meter:
    if not show:
        return Silent()
    return Bar(total) if sys.stderr.isatty() else Lines(total)
