"""Loads micro-batches ahead of the step in threads. The batches are the same as without."""

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ThreadLoader:
    """`workers` threads, each `prefetch` micro-batches ahead. Without workers: one thread, or with `threads` False nothing."""

    workers: int
    prefetch: int
    threads: bool = True

    def each(self, load: Callable[[int], Any], firsts: Iterator[int]) -> Iterator[Any]:
        if self.workers and self.threads:
            return _in_pool(load, firsts, self.workers, max(1, self.prefetch))
        return self._here(load(first) for first in firsts)

    def stream(self, read: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        return self._here(read())

    def _here(self, items: Iterator[Any]) -> Iterator[Any]:
        return in_thread(items, self.prefetch) if self.threads and self.prefetch else items


def _in_pool(load: Callable[[int], Any], firsts: Iterator[int], workers: int, ahead: int) -> Iterator[Any]:
    """The loaded micro-batches in order."""
    pool = ThreadPoolExecutor(workers, thread_name_prefix="fullshard-data")
    waiting: deque[Future[Any]] = deque()
    try:
        for first in firsts:
            waiting.append(pool.submit(load, first))
            if len(waiting) > workers * ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def in_thread(items: Iterator[Any], ahead: int, prepare: Callable[[Any], Any] = lambda item: item) -> Iterator[Any]:
    """The items, made and prepared in a thread, at most `ahead` of them waiting."""
    ready: queue.Queue[tuple[str, Any]] = queue.Queue(ahead)
    stop = threading.Event()

    def put(kind: str, value: Any) -> None:
        while not stop.is_set():
            try:
                return ready.put((kind, value), timeout=0.1)
            except queue.Full:
                continue

    def work() -> None:
        try:
            for item in items:
                put("item", prepare(item))
                if stop.is_set():
                    return
            put("end", None)
        except BaseException as error:
            put("error", error)

    threading.Thread(target=work, name="fullshard-data", daemon=True).start()
    try:
        while True:
            kind, value = ready.get()
            if kind == "end":
                return
            if kind == "error":
                raise value
            yield value
    finally:
        stop.set()
