"""A background thread that runs one task after another beside training."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Literal, TypeVar

T = TypeVar("T")
NICE = 10  # on a contended core this gives about a tenth of the time
Priority = Literal["normal", "nice", "idle"]

TaskQueue = SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]


class Background:
    """Runs submitted tasks in order, in a daemon thread that lives until `close`.

    `priority` decides how much of a contended core the thread gets, and the threads that it starts: `nice` a tenth, `idle`
    almost nothing. `idle` is for machines whose CPU does the training: the thread then uses the time in which ranks wait
    for each other.

    One thread serves all tasks, because starting a thread for each would delay training. It is a daemon so that a process
    can end after a failure without waiting for collectives whose other ranks are gone.
    """

    def __init__(self, name: str, *, priority: Priority = "normal"):
        self._queue: TaskQueue = SimpleQueue()
        threading.Thread(target=_run, args=(self._queue, priority), daemon=True, name=name).start()

    def submit(self, task: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._queue.put((task, future))
        return future

    def close(self) -> None:
        """End the thread after the tasks that were submitted."""
        self._queue.put(None)


def _run(queue: TaskQueue, priority: Priority) -> None:
    with suppress(OSError, AttributeError):  # on Linux, each thread has its own priority
        if priority == "idle":
            os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))
        elif priority == "nice":
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
    while (queued := queue.get()) is not None:
        task, future = queued
        try:
            future.set_result(task())
        except BaseException as error:
            future.set_exception(error)
        del task, future, queued  # while it waits, the thread keeps no memory of the last task alive
