"""Asking a run to stop: the first SIGTERM or SIGINT ends it after the current step, with a checkpoint; a second one
ends the process at once."""

import os
import signal
import threading
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interrupt:
    """Use as a context manager around the work; `requested` is the signal that came, or None."""

    def __init__(self) -> None:
        self.requested: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Interrupt":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested is not None:
            os._exit(exit_status(signal.Signals(number)))
        self.requested = signal.Signals(number)


def exit_status(number: signal.Signals) -> int:
    """The shell's convention for a process that a signal ended: 143 for SIGTERM, 130 for SIGINT."""
    return 128 + number
