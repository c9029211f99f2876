"""Batches that are ready before the step needs them: one background thread reads ahead, in order, a few deep."""

import queue
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

from rmt.data.dataset import Int64, TokenDataset
from rmt.data.order import Order

Batch = tuple[int, Int64, Int64]
CHECK_EVERY = 0.1  # seconds after which a waiting thread looks whether it should stop


class Prefetcher:
    """Iterates (step, window ids [rows], tokens [rows, context + 1]) from step `start` on, without end.

    `rows` picks this process's part of every batch (`slice(8, 16)`); `None` is the whole batch. An error while reading
    is raised in the consumer, at the step it belongs to. Use it in a `with` block, or call `close()`.
    """

    def __init__(
        self,
        dataset: TokenDataset,
        order: Order,
        *,
        split: str = "train",
        context: int,
        start: int = 0,
        rows: slice | None = None,
        depth: int = 4,
    ) -> None:
        self._dataset, self._order, self._split, self._context = dataset, order, split, context
        self._rows = rows if rows is not None else slice(None)
        self._ready: queue.Queue[Any] = queue.Queue(maxsize=max(1, depth))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read_ahead, args=(start,), name="rmt-prefetch", daemon=True)
        self._thread.start()

    def batch(self, step: int) -> Batch:
        """What the iterator yields for a step; a pure function, usable without the thread."""
        ids = self._order.window_ids(step)[self._rows]
        return step, ids, self._dataset.window_batch(self._split, self._context, ids)

    def _read_ahead(self, step: int) -> None:
        while not self._stop.is_set():
            try:
                item: Batch | BaseException = self.batch(step)
            except BaseException as error:  # the consumer raises it
                item = error
            self._put(item)
            if isinstance(item, BaseException):
                return
            step += 1

    def _put(self, item: Any) -> None:
        while not self._stop.is_set():
            try:
                return self._ready.put(item, timeout=CHECK_EVERY)
            except queue.Full:
                continue

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        while not self._stop.is_set():
            try:
                item = self._ready.get(timeout=CHECK_EVERY)
            except queue.Empty:
                continue
            if isinstance(item, BaseException):
                self.close()
                raise item
            return item
        raise StopIteration

    def close(self) -> None:
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
